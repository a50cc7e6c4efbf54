//! The thread that a vCPU runs, for event-based branches ([`vpmu::ebb`]). The thread's base address of GS says where
//! its block is; Linux programs of 64 bits seldom use GS for anything else.
//!
//! A block is found by the page tables that the vCPU uses, with the rights of a program: nothing is read or written
//! that the program could not read and write itself.

use std::sync::atomic::Ordering::Relaxed;

use kvm_bindings::{kvm_regs, kvm_sregs, kvm_vcpu_events};
use kvm_ioctls::{SyncReg, VcpuFd};
use vm_memory::{Bytes, GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};
use vpmu::ebb::{ALIGNMENT, Block, MAGIC, Owner, SIZE, Thread, word};

use crate::arch::x86_64::msr;
use crate::arch::x86_64::paging::Tables;
use crate::arch::x86_64::stored;

/// `IA32_KERNEL_GS_BASE`: in the kernel, the program's base address of GS.
const KERNEL_GS_BASE: u32 = 0xc000_0102;

/// What is known of a vCPU's threads with blocks from one exit to the next.
#[derive(Debug, Default)]
pub struct Watched {
    /// KVM stores the registers at each exit, because a branch is likely.
    is_branch_likely: bool,
    /// Address of the last block that was found.
    last_block: u64,
}

impl Watched {
    /// Has the registers stored at the next exits if a branch is likely there.
    pub fn expect_branch(&mut self, fd: &mut VcpuFd, is_likely: bool) {
        match (std::mem::replace(&mut self.is_branch_likely, is_likely), is_likely) {
            (_, true) => stored::store(fd),
            (true, false) => stored::forget(fd),
            (false, false) => {}
        }
    }
}

/// Where the kernel and its programs have page tables of their own, these are side by side.
const KERNEL_TABLES: u64 = 1 << 12;

/// A thread with a block.
pub struct Branching<'a> {
    owner: Owner,
    block: GuestBlock<'a>,
    highest: u64,
    /// The vCPU's registers, if the thread can be made to go on elsewhere.
    registers: Option<kvm_regs>,
}

impl<'a> Branching<'a> {
    /// Returns the thread that a vCPU runs, if it has a block. `events` returns what is about to be injected.
    pub fn find(
        fd: &mut VcpuFd,
        memory: &'a GuestMemoryMmap,
        watched: &mut Watched,
        events: impl FnOnce(&VcpuFd) -> Option<kvm_vcpu_events>,
    ) -> Option<Self> {
        let sregs = stored::system(fd)?;
        let tables = Tables::of(&sregs, memory)?;
        let is_user = is_user(&sregs);
        let bases = bases(&sregs, || msr::read(fd, KERNEL_GS_BASE).ok().flatten(), watched.last_block)?;
        let (address, block) =
            bases.into_iter().find_map(|base| Some((base, GuestBlock::of(&tables, &sregs, base)?)))?;
        watched.last_block = address;
        let owner = [tables.root() & !KERNEL_TABLES, address, sregs.fs.base];
        let can_branch = is_user && events(fd).is_some_and(|events| has_no_exception(&events));
        let registers = if can_branch { stored::general(fd) } else { None };
        Some(Self { owner, block, highest: tables.highest(), registers })
    }

    /// The thread, for the virtual PMU.
    pub fn thread(&self) -> Thread<'_> {
        let instruction = self.registers.map(|registers| registers.rip);
        Thread { owner: self.owner, block: &self.block, instruction, highest: self.highest }
    }

    /// Makes the thread go on at an address. KVM takes the registers over at the next entry.
    pub fn go_on_at(&self, address: u64, fd: &mut VcpuFd) {
        if let Some(registers) = self.registers {
            fd.sync_regs_mut().regs = kvm_regs { rip: address, ..registers };
            fd.set_sync_dirty_reg(SyncReg::Register);
        }
    }
}

fn is_user(sregs: &kvm_sregs) -> bool {
    sregs.ss.dpl == 3
}

/// Returns the addresses at which the block of the thread with these registers may be, or `None` if it cannot have one.
/// 0 is no such address.
fn bases(
    sregs: &kvm_sregs,
    kernel_gs_base: impl FnOnce() -> Option<u64>,
    last_block: u64,
) -> Option<[u64; 3]> {
    if is_user(sregs) {
        // Programs of 32 bits cannot be branched.
        return (sregs.cs.l == 1).then_some([sregs.gs.base, 0, 0]);
    }
    // A kernel's own threads have this base, and run on the page tables of whatever program was there before. Linux
    // frees pages of that program without waiting for them (lazy TLB mode).
    if sregs.fs.base == 0 {
        return None;
    }
    // In the kernel's first and last instructions, the program's base is in GS. If an NMI comes there, the kernel may
    // have its own in both, and keeps the program's elsewhere.
    Some([kernel_gs_base()?, sregs.gs.base, last_block])
}

/// An exception that is about to be injected belongs to the instruction at which the thread is.
fn has_no_exception(events: &kvm_vcpu_events) -> bool {
    events.exception.injected == 0 && events.exception.pending == 0
}

/// A block in the guest's memory.
struct GuestBlock<'a>(VolatileSlice<'a>);

impl<'a> GuestBlock<'a> {
    /// Returns the block at a virtual address, if one is there and belongs to the thread with these registers.
    fn of(tables: &Tables<'a>, sregs: &kvm_sregs, address: u64) -> Option<Self> {
        if address == 0 || !address.is_multiple_of(ALIGNMENT) {
            return None;
        }
        // Being aligned, the block lies on one page.
        let at = tables.translate_to_write(address)?;
        let block = Self(tables.memory().get_slice(at, SIZE).ok()?);
        let marks = [word::MAGIC, word::ADDRESS, word::THREAD].map(|word| block.load(word));
        (marks == [MAGIC, address, sregs.fs.base]).then_some(block)
    }
}

impl Block for GuestBlock<'_> {
    /// No word is beyond the end.
    fn load(&self, word: usize) -> u64 {
        self.0.load(word * size_of::<u64>(), Relaxed).unwrap_or(0)
    }

    fn store(&self, word: usize, value: u64) {
        let _ = self.0.store(value, word * size_of::<u64>(), Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_segment;

    use super::*;

    #[test]
    fn an_exception_to_come_is_not_moved_to_another_instruction() {
        let mut events = kvm_vcpu_events::default();
        assert!(has_no_exception(&events));
        events.exception.pending = 1;
        assert!(!has_no_exception(&events));
    }

    #[test]
    fn a_thread_of_the_kernel_has_no_block_though_a_program_has_left_one_for_it() {
        let program = kvm_sregs {
            ss: kvm_segment { dpl: 3, ..Default::default() },
            cs: kvm_segment { l: 1, ..Default::default() },
            gs: kvm_segment { base: 0x1000, ..Default::default() },
            ..Default::default()
        };
        let in_kernel = |fs: u64| kvm_sregs {
            ss: kvm_segment::default(),
            fs: kvm_segment { base: fs, ..Default::default() },
            ..program
        };
        let bases = |sregs: kvm_sregs| bases(&sregs, || Some(0x2000), 0x3000);
        assert_eq!(bases(program), Some([0x1000, 0, 0]));
        assert_eq!(bases(in_kernel(0x7000)), Some([0x2000, 0x1000, 0x3000]));
        assert_eq!(bases(in_kernel(0)), None);
        assert_eq!(bases(kvm_sregs { cs: kvm_segment::default(), ..program }), None, "32 bits");
    }
}
