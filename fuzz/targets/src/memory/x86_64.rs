//! The registers of vCPUs and what is found by them, on hosts of this architecture.

use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use tally_machine::untrusted::{self, Recorded};
use tally_machine::{Function, MAX_MODULE_NAME, MAX_MODULES, Module, Sample, is_of_name};
use vm_memory::GuestMemoryMmap;

/// A vCPU is in user mode, executes code of 64 bits, and has page tables of five levels.
pub const IS_USER: u8 = 1 << 0;
pub const IS_LONG: u8 = 1 << 1;
pub const HAS_FIVE_LEVELS: u8 = 1 << 2;

/// What an input has of a vCPU: these bits, then the general registers in the order of their numbers, RIP and CR3.
pub const WORDS: usize = 18;
pub const VCPU: usize = 1 + 8 * WORDS;

/// Registers of a vCPU.
#[derive(Debug)]
struct Registers {
    bits: u8,
    words: [u64; WORDS],
}

impl Registers {
    fn read(bytes: &[u8; VCPU]) -> Self {
        let [bits, rest @ ..] = bytes;
        let (words, _) = rest.as_chunks::<8>();
        Self { bits: *bits, words: std::array::from_fn(|number| u64::from_le_bytes(words[number])) }
    }

    /// Returns the registers as KVM has them.
    fn of_kvm(&self) -> (kvm_regs, kvm_sregs) {
        /// Paging is on, in 64-bit mode, and with five levels (SDM volume 3, sections 2.2.1 and 2.5).
        const CR0_PG: u64 = 1 << 31;
        const EFER_LMA: u64 = 1 << 10;
        const CR4_LA57: u64 = 1 << 12;
        let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8, r9, r10, r11, r12, r13, r14, r15, rip, cr3] =
            self.words;
        let has = |bit: u8| self.bits & bit != 0;
        let general = kvm_regs {
            rax,
            rcx,
            rdx,
            rbx,
            rsp,
            rbp,
            rsi,
            rdi,
            r8,
            r9,
            r10,
            r11,
            r12,
            r13,
            r14,
            r15,
            rip,
            rflags: 0,
        };
        let special = kvm_sregs {
            cs: kvm_segment { l: u8::from(has(IS_LONG)), ..Default::default() },
            ss: kvm_segment { dpl: if has(IS_USER) { 3 } else { 0 }, ..Default::default() },
            cr0: CR0_PG,
            cr3,
            cr4: if has(HAS_FIVE_LEVELS) { CR4_LA57 } else { 0 },
            efer: EFER_LMA,
            ..Default::default()
        };
        (general, special)
    }
}

/// Records a machine, and checks what is found.
pub fn record(memory: &GuestMemoryMmap, vcpus: &[[u8; VCPU]]) -> Recorded {
    let vcpus: Vec<_> = vcpus.iter().map(|vcpu| Registers::read(vcpu).of_kvm()).collect();
    let recorded = untrusted::record(memory, &vcpus);
    check_modules(&recorded.modules);
    recorded.samples.iter().for_each(check_sample);
    for Function { start, end, name } in &recorded.functions {
        assert!(start < end && name.chars().all(|c| matches!(c, ' '..='~')), "{name:?}");
    }
    recorded
}

fn check_modules(modules: &[Module]) {
    assert!(modules.len() <= MAX_MODULES, "{}", modules.len());
    for module in modules {
        let name = &module.name;
        assert!((1..=MAX_MODULE_NAME).contains(&name.len()), "{module:?}");
        assert!(name.chars().all(|c| is_of_name(c) || c == '?'), "{module:?}");
        assert!(module.start.checked_add(module.len).is_some(), "{module:?}");
    }
}

fn check_sample(sample: &Sample) {
    /// Maximum number of callers, as for Linux' own `perf`, of mappings in a sample, and of a path's bytes.
    const MAX_CALLERS: usize = 126;
    const MAX_MAPPINGS: usize = 16;
    const MAX_PATH: usize = 4095;
    let Sample { kernel, user, mappings, task, .. } = sample;
    // A program's own instruction is in front of its callers, if the vCPU is in the kernel.
    assert!(kernel.len() <= MAX_CALLERS && user.len() <= MAX_CALLERS + 1, "{sample:?}");
    assert!(!sample.is_user || kernel.is_empty(), "{sample:?}");
    assert!(mappings.len() <= MAX_MAPPINGS, "{sample:?}");
    assert!(mappings.is_empty() || task.is_some(), "{sample:?}");
    let names = mappings.iter().map(|mapping| &mapping.path).chain(task.iter().map(|task| &task.name));
    for name in names {
        assert!(name.chars().all(|c| matches!(c, ' '..='~')), "{name:?}");
    }
    for mapping in mappings {
        let end = mapping.start.checked_add(mapping.len).expect("it is in the address space");
        let addresses = user.iter().chain([&sample.instruction]);
        let in_mapping = |address: &u64| (mapping.start..end).contains(address);
        assert!(addresses.filter(|address| in_mapping(address)).count() > 0, "{mapping:?}");
        assert!(mapping.path.len() <= MAX_PATH, "{mapping:?}");
    }
}
