//! Calls of the SBI's PMU extension without an exit (RISC-V).
//!
//! Most calls of a guest's kernel are about counters that stand still. When it switches tasks, it stops a counter,
//! reads it, resets it, configures it again and starts it. Only the first and the last of these have to do with what
//! the host counts. So each vCPU has a [`Page`] in the guest's memory, on which the VMM leaves what the counters are at
//! the entry. The kernel makes its calls there if they need nothing else, and the VMM applies at the next exit what has
//! become of the counters ([`crate::VirtualPmu::share_sbi_page`]).
//!
//! A call about a counter that runs can also be made on the page, provided that the counter cannot count between the
//! entry and the call. This is so for a counter of user mode while no program runs. The kernel can know that none has
//! run: a program enters the kernel by a trap, and every trap writes its cause to the CSR `scause`. Before each call
//! that exits, the guest's code writes [`NO_TRAP`] to that CSR, which is no cause of a trap here. While the CSR still
//! has this value, there was no trap since the entry. Linux reads the CSR only at the beginning of a trap's handler.
//! After an overflow the CSR has [`OVERFLOW`] at the beginning of the handler: its interrupt is pending, so no program
//! runs before it is taken. So a sample of a program needs no other exit than the one for its overflow, unless the next
//! overflow needs an alarm that is not set ([`Page::no_exit_values`]).
//!
//! The guest's side is a little code that the loader adds to the kernel (the crate `vpmu-retarget` has it). Each call
//! that exits has the page's number in its last argument, which the SBI does not use here ([`Page::announcement`]). The
//! VMM makes a vCPU's page available only after such a call, and as long as both ends of the page are as it left them:
//! a kernel that was loaded later does not use the memory as a page. Nothing that a guest writes on its page can do
//! more than its calls could.

use std::ops::Deref;
use std::sync::atomic::AtomicU64;

/// Number of counters on a page: all that the SBI's masks of a 64-bit processor can have CSRs for.
pub const COUNTERS: usize = 32;
/// Value of [`Page::active`] while calls may be made on the page.
pub const ACTIVE: u64 = 0x6f6e_7061;
/// Value of [`Page::active`] while no call may be made on the page.
pub const IDLE: u64 = 0x6e6f_7431;
/// Value that the guest's code writes to `scause` before each call that exits: the exception "environment call from
/// S-mode", which the hypervisor extension never delivers to a guest.
pub const NO_TRAP: u64 = 9;
/// Value of `scause` at the beginning of the handler of an overflow: the local counter-overflow interrupt.
pub const OVERFLOW: u64 = 1 << 63 | 0xd;
/// The last argument of a call that exits, minus the number of the page.
const ANNOUNCEMENT: u64 = 0x7061_6700;

/// The memory that a guest's kernel shares with the VMM, for one vCPU. The guest's code uses the offsets of these
/// fields.
#[repr(C)]
#[derive(Default)]
pub struct Page {
    /// [`ACTIVE`] or [`IDLE`]; anything else before the first use.
    pub active: AtomicU64,
    /// Nonzero if a call was made on the page.
    pub changed: AtomicU64,
    /// Value of `scause` that shows that no program has run since the entry.
    pub cause: AtomicU64,
    /// Mask of the counters about which calls may be made on the page.
    pub all: AtomicU64,
    /// Mask of the counters that run.
    pub running: AtomicU64,
    /// Mask of the counters that are configured.
    pub used: AtomicU64,
    /// Mask of the counters that may be stopped while they run.
    pub may_stop: AtomicU64,
    /// Mask of the counters that may be started.
    pub may_start: AtomicU64,
    /// Mask of the counters that ran at the entry and have kept their values: they may be started without a value.
    pub may_resume: AtomicU64,
    /// The value of the CSR `scountovf`.
    pub overflows: AtomicU64,
    /// Mask of the counters whose values were set.
    pub written: AtomicU64,
    /// Value of each counter that stands still.
    pub values: [AtomicU64; COUNTERS],
    /// The values with which each counter may be started: this one, and none above the second.
    pub no_exit_values: [[AtomicU64; 2]; COUNTERS],
    /// Flags, event index and event data of each counter's last configuration. The flags are [`NO_CONFIGURATION`] if
    /// the counter cannot be configured on the page.
    pub configurations: [[AtomicU64; 3]; COUNTERS],
    /// [`IDLE`] since the first use. Anything else means that another kernel uses the memory.
    pub tail_guard: AtomicU64,
}

/// A vCPU's page in the guest's memory.
pub struct Shared {
    /// The memory.
    pub memory: Box<dyn Deref<Target = Page>>,
    /// Number of the page.
    pub number: u8,
}

/// Flags in [`Page::configurations`] that no call has.
pub const NO_CONFIGURATION: u64 = u64::MAX;

impl Page {
    /// Distance of two vCPUs' pages: a power of two.
    pub const STRIDE: usize = 2048;

    /// Returns the last argument of the calls of a vCPU that uses the page of this number.
    pub const fn announcement(number: u8) -> u64 {
        ANNOUNCEMENT | number as u64
    }
}

const _: () = assert!(size_of::<Page>() <= Page::STRIDE);
