//! Register accesses without an exit, while all counters are frozen.
//!
//! A guest's driver freezes its counters with one write, accesses many registers, and thaws them with another write.
//! Until the thaw none of these accesses has a visible effect, so none of them has to leave the guest: the guest's
//! kernel reads the registers from a [`Page`] in its memory and writes there what is to be written. The VMM applies
//! these writes at the next exit, at the latest at the thaw ([`crate::VirtualPmu::share_page`]).
//!
//! While the kernel handles an overflow, even the freeze and the thaw need no exit, provided that all counters count
//! user mode only. Such counters stand still until the kernel is done, so it makes no difference when they are stopped,
//! written and started, unless the host has something to do: unless a counter's next overflow needs an alarm that is
//! not set. The page lists for each counter the values that need no new alarm, and the thaw leaves the guest if another
//! value was written. Most periods are as long as the one before, and then a sample is one exit to the VMM, for its
//! interrupt. This relies on what all kernels do. A kernel that froze its counters for an overflow and returned to a
//! program without a thaw would have that program counted until its next exit.
//!
//! The guest's side is a little code that the loader adds to the kernel (the crate `vpmu-retarget` has it). At each
//! freeze that leaves the guest it sets [`Page::freezing`]; a kernel without the code never does, and nothing changes
//! for it. The VMM uses the memory as a shared page once the code has set that word and both ends of the page are as
//! the VMM left them. That is a safeguard against a kernel that was loaded later, not a proof. Nothing that a guest
//! writes on its page can do more than its register writes could.
//!
//! The code notes one more register there, which it also accesses in the ordinary way: the APIC's LVT entry for
//! overflows. So the VMM need not ask KVM for the entry at each overflow ([`crate::Platform::inject`]). Where the
//! delivery of an overflow masks the entry, as on Intel's processors, the mask is on the page as well ([`LvtNote`]):
//! KVM's entry stays open, and the kernel's write that opens it again does not leave the guest.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

/// Maximum number of registers on the page; the status has the slot after them.
pub const MAX_SLOTS: usize = 23;
/// Value of [`Page::freezing`] that the stub writes. An older stub, in the memory of a snapshot, writes another one: it
/// knows nothing of [`Page::lvt_mask`], so its page is not used.
pub const FREEZING: u64 = u64::from_le_bytes(*b"freezing");
/// Value of [`Page::active`] while accesses may be made on the page.
pub const ACTIVE: u64 = u64::from_le_bytes(*b"on page!");
/// Value of [`Page::active`] while accesses may be made from the next freeze on, which itself needs no exit.
pub const OFFERED: u64 = u64::from_le_bytes(*b"offered!");
/// Value of [`Page::active`] after a thaw without an exit.
pub const THAWED: u64 = u64::from_le_bytes(*b"thawed!!");
/// Value of [`Page::active`] while no access may be made on the page.
pub const IDLE: u64 = u64::from_le_bytes(*b"not now!");

/// The memory that a guest's kernel shares with the VMM, for one vCPU. The stub uses the offsets of these fields.
#[repr(C)]
#[derive(Default)]
pub struct Page {
    /// [`ACTIVE`], [`OFFERED`], [`THAWED`] or [`IDLE`]; anything else before the first use.
    pub active: AtomicU64,
    /// Set to [`FREEZING`] by the stub when it is about to freeze all counters by an exit.
    pub freezing: AtomicU64,
    /// A bit for each slot that was written.
    pub dirty: AtomicU64,
    /// Bits written to the register that clears the status.
    pub cleared: AtomicU64,
    /// Value that thaws the counters without an exit when it is written to the control register, or 0.
    pub thaw: AtomicU64,
    /// Nonzero if a write since the freeze requires the thaw to exit.
    pub thaw_must_exit: AtomicU64,
    /// Value that the kernel last wrote to its APIC's LVT entry for overflows; noted before the write.
    pub lvt_entry: AtomicU64,
    /// While the entry is masked here only: the entry without the mask, as KVM has it. Otherwise 0. A kernel that
    /// disables its APIC or stops a CPU masks the entry itself first, as Linux does.
    pub lvt_mask: AtomicU64,
    /// Value last written to each register.
    pub written: [AtomicU64; MAX_SLOTS + 1],
    /// Value that a read of each register returns; the last slot is the status.
    pub shown: [AtomicU64; MAX_SLOTS + 1],
    /// First and last value that can be written to each register without a thaw that exits.
    pub no_exit_range: [[AtomicU64; 2]; MAX_SLOTS],
    /// [`IDLE`] since the first use. Anything else means that another kernel uses the memory.
    pub tail_guard: AtomicU64,
}

impl Page {
    /// Distance of two vCPUs' pages: a whole number of cache lines, and a power of two.
    pub const STRIDE: usize = 1024;
}

const _: () = assert!(size_of::<Page>() <= Page::STRIDE);

/// What a guest's kernel and the VMM keep on a shared page about the APIC's LVT entry for overflows.
#[derive(Clone, Copy)]
pub struct LvtNote<'a> {
    page: &'a Page,
    /// Value that the kernel last wrote. `None` unless it has used the page since the last overflow, which shows that
    /// it is still the kernel with the stub.
    pub written: Option<u64>,
}

impl<'a> LvtNote<'a> {
    pub(crate) fn new(page: &'a Page, is_used: bool) -> Self {
        Self { page, written: is_used.then(|| page.lvt_entry.load(Relaxed)) }
    }

    /// Returns whether the entry is masked on the page: by an overflow, after which the kernel has not written it.
    pub fn is_masked(&self) -> bool {
        let mask = self.page.lvt_mask.load(Relaxed);
        mask != 0 && mask == self.page.lvt_entry.load(Relaxed)
    }

    /// Masks the entry on the page, if the kernel has used the page since the last overflow and has written what KVM
    /// has, which is `entry`. Returns whether it has.
    pub fn mask(&self, entry: u64) -> bool {
        let is_known = self.written == Some(entry) && entry != 0;
        if is_known {
            self.page.lvt_mask.store(entry, Relaxed);
        }
        is_known
    }
}

/// A register that can be accessed on the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// The register's number.
    pub register: u32,
    /// Bits that can be written without a fault and without an immediate effect.
    pub write_mask: u64,
    /// Bits that a read returns after a write.
    pub read_mask: u64,
    /// The counter whose value the register is, if it is a counter's.
    pub counter: Option<usize>,
}

/// Counters by their RDPMC numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// RDPMC number of the first counter.
    pub first: u32,
    /// Number of counters.
    pub count: u32,
    /// Slot of the first counter.
    pub slot: u32,
    /// Distance from one counter's slot to the next.
    pub stride: Stride,
}

/// Distance from one counter's slot to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stride {
    /// Counters have adjacent slots.
    One,
    /// Each counter's select has the slot before it.
    Two,
}

/// The registers of a PMU with a global control register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registers {
    /// Global control: a write of 0 freezes all counters.
    pub control: u32,
    /// Global status.
    pub status: u32,
    /// The register that clears bits of the status.
    pub clear: Slot,
    /// The other registers, in the order in which the VMM applies their writes; consecutive numbers have adjacent
    /// slots.
    pub slots: Vec<Slot>,
    /// Counters by their RDPMC numbers.
    pub counters: Vec<Counters>,
}

impl Registers {
    /// Returns the runs of registers with consecutive numbers: first number, first slot, length.
    pub fn number_ranges(&self) -> Vec<(u32, u32, u32)> {
        let mut runs: Vec<(u32, u32, u32)> = Vec::new();
        for (index, slot) in (0..).zip(&self.slots) {
            match runs.last_mut() {
                Some((first, _, count)) if *first + *count == slot.register => *count += 1,
                _ => runs.push((slot.register, index, 1)),
            }
        }
        runs
    }
}
