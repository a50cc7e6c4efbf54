//! The initial state of a vCPU, as Linux' 64-bit boot protocol and the multiboot specification require.

use kvm_bindings::{kvm_fpu, kvm_regs, kvm_segment, kvm_sregs};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::cr;
use super::pmu::Pmu;
use crate::arch::x86_64::cpuid;
use crate::arch::x86_64::loader::Entry;
use crate::arch::x86_64::memory::low;
use crate::arch::x86_64::msr::{self, Written};
use crate::kvm_error::{KvmError, KvmResultExt};

/// Selectors of the flat segments, in the order of the descriptor table. Linux requires `__BOOT_CS` 0x10 and
/// `__BOOT_DS` 0x18.
const CODE_SELECTOR: u16 = 0x10;
const DATA_SELECTOR: u16 = 0x18;
const TASK_SELECTOR: u16 = 0x20;

/// Segment types: execute and read, accessed; read and write, accessed; busy TSS.
const CODE: u8 = 0xb;
const DATA: u8 = 0x3;
const TASK: u8 = 0xb;

/// Sets the MSRs and the local APIC of a vCPU, and on the first vCPU the entry into the kernel. The other vCPUs stay in
/// the state after reset and wait for the kernel to start them (INIT, SIPI). `immunities` are the bits to add to
/// `IA32_ARCH_CAPABILITIES` ([`cpuid::immunities`]).
pub fn prepare(
    vcpu: &VcpuFd,
    first: bool,
    entry: Entry,
    memory: &GuestMemoryMmap,
    pmu: Pmu,
    immunities: Option<u64>,
) -> Result<(), KvmError> {
    set_msrs(vcpu, pmu)?;
    if let Some(immunities) = immunities {
        add_immunities(vcpu, immunities)?;
    }
    set_local_interrupts(vcpu)?;
    if !first {
        return Ok(());
    }
    let fpu = kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() };
    vcpu.set_fpu(&fpu).operation("set the floating-point state")?;
    let mut sregs = vcpu.get_sregs().operation("read the system registers")?;
    set_segments(&mut sregs, memory, matches!(entry, Entry::Long { .. }));
    // Bit 1 of RFLAGS is always set.
    let mut regs = kvm_regs { rflags: 2, ..Default::default() };
    match entry {
        Entry::Long { rip, boot_params } => {
            map_identity(memory);
            sregs.cr3 = low::PAGE_TABLES;
            sregs.cr4 |= cr::CR4_PAE;
            sregs.cr0 = cr::CR0_PE | cr::CR0_ET | cr::CR0_PG;
            sregs.efer |= cr::EFER_LME | cr::EFER_LMA;
            regs.rip = rip;
            regs.rsi = boot_params;
        }
        Entry::Protected { eip, multiboot_info } => {
            sregs.cr0 = cr::CR0_PE | cr::CR0_ET;
            regs.rip = eip.into();
            regs.rax = Entry::MULTIBOOT_MAGIC.into();
            regs.rbx = multiboot_info.into();
        }
    }
    vcpu.set_sregs(&sregs).operation("set the system registers")?;
    vcpu.set_regs(&regs).operation("set the registers")
}

fn set_segments(sregs: &mut kvm_sregs, memory: &GuestMemoryMmap, long: bool) {
    let flat = |selector, type_| kvm_segment {
        selector,
        type_,
        base: 0,
        limit: u32::MAX,
        present: 1,
        s: 1,
        g: 1,
        db: u8::from(!(long && type_ == CODE)),
        l: u8::from(long && type_ == CODE),
        ..Default::default()
    };
    sregs.cs = flat(CODE_SELECTOR, CODE);
    let data = flat(DATA_SELECTOR, DATA);
    (sregs.ds, sregs.es, sregs.fs, sregs.gs, sregs.ss) = (data, data, data, data, data);
    sregs.tr =
        kvm_segment { selector: TASK_SELECTOR, type_: TASK, limit: 0x67, present: 1, ..Default::default() };
    let table = [0, 0, descriptor(&sregs.cs), descriptor(&sregs.ds), descriptor(&sregs.tr)];
    for (at, value) in (low::GDT..).step_by(8).zip(table) {
        put(memory, at, value);
    }
    sregs.gdt.base = low::GDT;
    sregs.gdt.limit = 8 * 5 - 1;
    sregs.idt.limit = 0;
}

/// Returns a segment's entry in the descriptor table (SDM volume 3, section 3.4.5).
fn descriptor(segment: &kvm_segment) -> u64 {
    let limit = u64::from(if segment.g == 1 { segment.limit >> 12 } else { segment.limit });
    let flags = u64::from(segment.type_)
        | u64::from(segment.s) << 4
        | u64::from(segment.present) << 7
        | u64::from(segment.l) << 13
        | u64::from(segment.db) << 14
        | u64::from(segment.g) << 15;
    limit & 0xffff | (limit >> 16) << 48 | flags << 40
}

/// Writes page tables that map the first GiB to itself, in pages of 2 MiB.
fn map_identity(memory: &GuestMemoryMmap) {
    const PRESENT_WRITABLE: u64 = 3;
    const LARGE: u64 = 1 << 7;
    let (upper, directory) = (low::PAGE_TABLES + 0x1000, low::PAGE_TABLES + 0x2000);
    put(memory, low::PAGE_TABLES, upper | PRESENT_WRITABLE);
    put(memory, upper, directory | PRESENT_WRITABLE);
    for page in 0..512 {
        put(memory, directory + 8 * page, page << 21 | PRESENT_WRITABLE | LARGE);
    }
}

fn put(memory: &GuestMemoryMmap, at: u64, value: u64) {
    memory.write_obj(value, GuestAddress(at)).expect("every guest has a first MiB");
}

fn set_msrs(vcpu: &VcpuFd, pmu: Pmu) -> Result<(), KvmError> {
    const MTRR_DEFAULT_TYPE: u32 = 0x2ff;
    const MTRRS_ON: u64 = 1 << 11;
    const WRITE_BACK: u64 = 6;
    // KVM's initial value of the bit for performance monitoring depends on the host.
    let found = msr::read(vcpu, misc_enable::MSR)?.unwrap_or_default();
    msr::write(vcpu, misc_enable::MSR, misc_enable::value(found, pmu))?;
    msr::write(vcpu, MTRR_DEFAULT_TYPE, MTRRS_ON | WRITE_BACK).map(drop)
}

/// Adds bits to `IA32_ARCH_CAPABILITIES`, for vulnerabilities that the processor does not have.
fn add_immunities(vcpu: &VcpuFd, immunities: u64) -> Result<(), KvmError> {
    let found = msr::read(vcpu, cpuid::ARCH_CAPABILITIES)?.unwrap_or_default();
    match msr::write(vcpu, cpuid::ARCH_CAPABILITIES, found | immunities)? {
        Written::Yes => Ok(()),
        Written::No => Err(KvmError::Lacks("IA32_ARCH_CAPABILITIES, which an Intel guest needs".to_owned())),
    }
}

/// Points the entry of SYSCALL in 32-bit mode (CSTAR) to a SYSRET at this address, so that such a SYSCALL returns at
/// once. The kernel can change the entry.
pub fn ignore_narrow_syscalls(vcpu: &VcpuFd, sysret: u64) -> Result<(), KvmError> {
    /// APM volume 2, section 6.1.1.
    const CSTAR: u32 = 0xc000_0083;
    msr::write(vcpu, CSTAR, sysret).map(drop)
}

/// `IA32_MISC_ENABLE` (SDM volume 4, table 2-2), which also shows whether there are performance monitoring, branch
/// traces and PEBS.
mod misc_enable {
    use crate::arch::x86_64::pmu::Pmu;

    pub const MSR: u32 = 0x1a0;
    const FAST_STRINGS: u64 = 1;
    const MONITORING: u64 = 1 << 7;
    const NO_BRANCH_TRACE: u64 = 1 << 11;
    const NO_PEBS: u64 = 1 << 12;

    pub fn value(found: u64, pmu: Pmu) -> u64 {
        match pmu {
            Pmu::Kvm => found | FAST_STRINGS,
            _ if pmu.is_monitoring() => found | MONITORING | FAST_STRINGS | NO_BRANCH_TRACE | NO_PEBS,
            _ => found & !MONITORING | FAST_STRINGS | NO_BRANCH_TRACE | NO_PEBS,
        }
    }
}

/// Configures LINT0 for interrupts of a PIC (`ExtINT`) and LINT1 for NMIs, as firmware does.
fn set_local_interrupts(vcpu: &VcpuFd) -> Result<(), KvmError> {
    const LVT_LINT0: usize = 0x350;
    const LVT_LINT1: usize = 0x360;
    const EXT_INT: u32 = 7 << 8;
    const NMI: u32 = 4 << 8;
    let mut lapic = vcpu.get_lapic().operation("read the local APIC")?;
    for (register, value) in [(LVT_LINT0, EXT_INT), (LVT_LINT1, NMI)] {
        for (slot, byte) in lapic.regs[register..register + 4].iter_mut().zip(value.to_le_bytes()) {
            *slot = byte.cast_signed();
        }
    }
    vcpu.set_lapic(&lapic).operation("set the local APIC")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_pmu_misc_enable_shows_no_monitoring() {
        assert_eq!(misc_enable::value(1 << 7, Pmu::None), 1 | 1 << 11 | 1 << 12);
        assert_eq!(misc_enable::value(1 << 7 | 1 << 11, Pmu::Kvm), 1 | 1 << 7 | 1 << 11);
    }

    #[test]
    fn flat_segments_have_the_descriptors_of_the_manuals() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let mut sregs = kvm_sregs::default();
        let read = |slot: u64| memory.read_obj::<u64>(GuestAddress(low::GDT + 8 * slot)).unwrap();
        set_segments(&mut sregs, &memory, true);
        assert_eq!([read(2), read(3)], [0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff]);
        set_segments(&mut sregs, &memory, false);
        assert_eq!([read(2), read(3)], [0x00cf_9b00_0000_ffff, 0x00cf_9300_0000_ffff]);
    }
}
