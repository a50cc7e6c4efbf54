//! A thread's block: the registers of event-based branches, as words of the program's memory.

use std::arch::asm;
use std::cell::Cell;
use std::mem::offset_of;
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU64};

use crate::error::Error;

/// The flag in an event's code: counter mask 255 and edge detect.
pub const FLAG: u64 = 0xff << 24 | 1 << 18;

const MAGIC: u64 = u64::from_le_bytes(*b"TALLYEBB");

/// Branches are enabled (GE of BESCR).
const GLOBAL_ENABLE: u64 = 1 << 63;
/// Branches for counters are enabled (PME).
const PMU_ENABLE: u64 = 1 << 32;
/// A counter has overflowed (PMEO).
const OCCURRED: u64 = 1;
const ENABLED: u64 = GLOBAL_ENABLE | PMU_ENABLE;

/// A page with the block, and what the library keeps beside it.
#[repr(C, align(4096))]
pub struct Page {
    magic: AtomicU64,
    address: AtomicU64,
    thread: AtomicU64,
    control: AtomicU64,
    handler: AtomicU64,
    return_address: AtomicU64,
    reserved: [AtomicU64; 2],
    /// What the thread wants branches for.
    pub slots: [Slot; 8],
    /// The handler of the program, and its argument.
    pub call: [AtomicU64; 2],
    /// Components of the processor's state that are saved before the handler, and the bytes that they need.
    state: [AtomicU64; 2],
}

/// Offset of the return address, for the entry.
pub const RETURN: usize = offset_of!(Page, return_address);
/// Offset of the block's address.
pub const ADDRESS: usize = offset_of!(Page, address);
/// Offset of the components to save; their size is in the next word.
pub const STATE: usize = offset_of!(Page, state);

/// An event for which the thread wants branches.
#[repr(C)]
pub struct Slot {
    /// The event's code, with the flag; 0 if the slot is not used.
    pub event: AtomicU64,
    /// Number of events from an overflow to the next.
    pub period: AtomicU64,
    /// Number of events that are left, as of the last stop or overflow.
    pub left: AtomicU64,
    /// Number of overflows.
    pub overflows: AtomicU64,
}

/// This program has had a block.
static BEGUN: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// The thread's block.
    static MINE: Cell<Option<NonNull<Page>>> = const { Cell::new(None) };
}

/// A mapped page, to which the thread's GS points.
pub struct Mapped(NonNull<Page>);

impl Mapped {
    /// Maps a page for the calling thread, whose branches go to `entry`. A child process finds it empty.
    pub fn new(entry: u64, state: [u64; 2]) -> Result<Self, Error> {
        let has_block = MINE.get().is_some_and(|block| {
            // SAFETY: the page is mapped until `drop` forgets it. A child process finds it empty.
            unsafe { block.as_ref() }.magic.load(Relaxed) == MAGIC
        });
        // A thread inherits GS from the one that has made it, if that has a block.
        if has_block || base_of(ARCH_GET_GS)? != 0 && !BEGUN.load(Relaxed) {
            return Err(Error::Refused("the thread has branches already, or uses GS for something else"));
        }
        let size = size_of::<Page>();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
        // SAFETY: a new mapping anywhere touches no memory of this program.
        let page =
            unsafe { libc::mmap(ptr::null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        let Some(page) = NonNull::new(page.cast::<Page>()).filter(|_| page != libc::MAP_FAILED) else {
            return Err(Error::last("map the block"));
        };
        let this = Self(page);
        // SAFETY: the page is this function's own.
        if unsafe { libc::madvise(page.as_ptr().cast(), size, libc::MADV_WIPEONFORK) } != 0 {
            return Err(Error::last("have the block wiped in children"));
        }
        // A block that was swapped out serves again once the program touches it, so this may fail.
        // SAFETY: the page is mapped.
        unsafe { libc::mlock(page.as_ptr().cast(), size) };
        let block = this.page();
        block.address.store(page.as_ptr().addr() as u64, Relaxed);
        block.thread.store(base_of(ARCH_GET_FS)?, Relaxed);
        block.handler.store(entry, Relaxed);
        for (word, value) in block.state.iter().zip(state) {
            word.store(value, Relaxed);
        }
        block.magic.store(MAGIC, Relaxed);
        BEGUN.store(true, Relaxed);
        set_gs(page.as_ptr().addr() as u64)?;
        MINE.set(Some(page));
        Ok(this)
    }

    /// The page.
    pub fn page(&self) -> &Page {
        // SAFETY: the page is mapped as long as this value lives, and consists of atomic integers, for which all values
        // are valid.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.page().disable();
        let _ = set_gs(0);
        MINE.set(None);
        // SAFETY: the page was mapped by `new`, and nobody refers to it any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<Page>()) };
    }
}

impl Page {
    /// Returns the block of the calling thread.
    ///
    /// # Safety
    /// The thread has one: it is called by the entry.
    pub unsafe fn of_caller() -> &'static Self {
        let address: u64;
        // SAFETY: GS points to the block, whose second word is its address.
        unsafe { asm!("mov {}, gs:[{ADDRESS}]", out(reg) address, ADDRESS = const ADDRESS) };
        let page = ptr::with_exposed_provenance::<Self>(usize::try_from(address).expect("64 bits"));
        // SAFETY: the thread's page is mapped while it has branches.
        unsafe { &*page }
    }

    /// Enables branches.
    pub fn enable(&self) {
        self.control.fetch_or(ENABLED, Release);
    }

    /// Disables branches: an overflow waits.
    pub fn disable(&self) {
        self.control.fetch_and(!ENABLED, Acquire);
    }

    /// Returns whether branches are enabled.
    pub fn is_enabled(&self) -> bool {
        self.control.load(Relaxed) & ENABLED == ENABLED
    }

    /// Returns whether an overflow waits.
    pub fn is_pending(&self) -> bool {
        self.control.load(Relaxed) & OCCURRED != 0
    }

    /// Notes that an overflow is being handled.
    pub fn acknowledge(&self) {
        self.control.fetch_and(!OCCURRED, Relaxed);
    }

    /// Sets the handler of the machine, which may be none.
    pub fn set_handler(&self, entry: u64) {
        self.handler.store(entry, Relaxed);
    }

    /// Returns whether this is the handler of the machine.
    pub fn has_handler(&self, entry: u64) -> bool {
        self.handler.load(Relaxed) == entry
    }

    /// Enables branches, and returns whether the caller has to handle an overflow that came while they were disabled.
    /// They are disabled again then.
    pub fn enable_or_take(&self) -> bool {
        loop {
            self.enable();
            if !self.is_pending() {
                return false;
            }
            let before = self.control.fetch_and(!ENABLED, AcqRel);
            if before & OCCURRED != 0 {
                return true;
            }
            // A branch came in between, and has handled it.
        }
    }
}

/// Codes of `arch_prctl` that return the calling thread's base address of FS and of GS.
const ARCH_GET_FS: i32 = 0x1003;
const ARCH_GET_GS: i32 = 0x1004;

fn base_of(register: i32) -> Result<u64, Error> {
    let mut base = 0_u64;
    // SAFETY: with these codes, the kernel writes 64 bits to `base`.
    match unsafe { libc::syscall(libc::SYS_arch_prctl, register, &raw mut base) } {
        0 => Ok(base),
        _ => Err(Error::last("find the thread's base of FS and GS")),
    }
}

fn set_gs(base: u64) -> Result<(), Error> {
    const ARCH_SET_GS: i32 = 0x1001;
    // SAFETY: no code of Rust's or of the C library's uses GS on x86-64.
    match unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_SET_GS, base) } {
        0 => Ok(()),
        _ => Err(Error::last("set the thread's base of GS")),
    }
}
