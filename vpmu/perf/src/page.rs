//! The page that the kernel maps for each event (`perf_event_mmap_page`). It says which hardware counter the event is
//! on, so that the event's own thread can read it without a system call.
//!
//! `perf_event_open(2)` describes the page under "MMAP layout", with the loop that [`Page::read`] follows.

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI64, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use perf_event_open_sys::bindings::perf_event_mmap_page;

use crate::instruction;
use vpmu::source::Place;

/// The beginning of `perf_event_mmap_page`. The kernel writes to it at any time, so the fields that are read are
/// atomic.
#[repr(C)]
struct Shared {
    versions: [u32; 2],
    lock: AtomicU32,
    index: AtomicU32,
    offset: AtomicI64,
    time_enabled: AtomicU64,
    time_running: AtomicU64,
    capabilities: AtomicU64,
    pmc_width: AtomicU16,
}

const _: () = {
    assert!(offset_of!(Shared, lock) == offset_of!(perf_event_mmap_page, lock));
    assert!(offset_of!(Shared, index) == offset_of!(perf_event_mmap_page, index));
    assert!(offset_of!(Shared, offset) == offset_of!(perf_event_mmap_page, offset));
    assert!(offset_of!(Shared, time_enabled) == offset_of!(perf_event_mmap_page, time_enabled));
    assert!(offset_of!(Shared, time_running) == offset_of!(perf_event_mmap_page, time_running));
    assert!(offset_of!(Shared, capabilities) == offset_of!(perf_event_mmap_page, __bindgen_anon_1));
    assert!(offset_of!(Shared, pmc_width) == offset_of!(perf_event_mmap_page, pmc_width));
};

/// Size of the part of an event's mapping that this crate uses: a page.
const SIZE: usize = 4096;
const CAP_USER_RDPMC: u64 = 1 << 2;

/// The mapped page of an event.
pub struct Page(NonNull<Shared>);

/// State of an event when it was last taken off the PMU.
#[derive(Debug, Clone, Copy)]
pub struct ScheduledOut {
    /// The count.
    pub count: u64,
    /// Time for which the event had been enabled, in nanoseconds.
    pub enabled: u64,
    /// Time for which it had been on the PMU, in nanoseconds.
    pub running: u64,
}

impl Page {
    /// Maps the page of an event. The kernel allows RDPMC of an event only while its page is mapped.
    pub fn map(event: &OwnedFd) -> io::Result<Self> {
        // SAFETY: the kernel chooses the address, so the mapping replaces no other.
        let page = unsafe {
            libc::mmap(std::ptr::null_mut(), SIZE, libc::PROT_READ, libc::MAP_SHARED, event.as_raw_fd(), 0)
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(page.cast()).map(Self).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Returns the number of the hardware counter that the event is on, if it is on one.
    pub fn hardware(&self) -> Option<u32> {
        self.shared().index.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Returns where the event is. The kernel says so only for an event that can be read without a system call.
    pub fn place(&self) -> Place {
        let can_be_read = self.shared().capabilities.load(Ordering::Relaxed) & CAP_USER_RDPMC != 0;
        match self.hardware() {
            Some(number) => Place::Counter(number),
            None if can_be_read => Place::Nowhere,
            None => Place::Unknown,
        }
    }

    /// Returns the state of an event that is not on the PMU. Returns `None` if it is on the PMU.
    pub fn scheduled_out(&self) -> Option<ScheduledOut> {
        let shared = self.shared();
        loop {
            let lock = shared.lock.load(Ordering::Acquire);
            if shared.index.load(Ordering::Relaxed) != 0 {
                return None;
            }
            let state = ScheduledOut {
                count: shared.offset.load(Ordering::Relaxed).cast_unsigned(),
                enabled: shared.time_enabled.load(Ordering::Relaxed),
                running: shared.time_running.load(Ordering::Relaxed),
            };
            fence(Ordering::Acquire);
            if shared.lock.load(Ordering::Relaxed) == lock {
                return Some(state);
            }
        }
    }

    fn shared(&self) -> &Shared {
        // SAFETY: the page is mapped as long as `self` lives, and the kernel writes each of its fields atomically.
        unsafe { self.0.as_ref() }
    }

    /// Reads the event's count without a system call. Returns `None` if the event is not on the PMU, or cannot be read
    /// this way.
    pub fn read(&self) -> Option<u64> {
        let shared = self.shared();
        loop {
            let lock = shared.lock.load(Ordering::Acquire);
            if shared.capabilities.load(Ordering::Relaxed) & CAP_USER_RDPMC == 0 {
                return None;
            }
            let index = shared.index.load(Ordering::Relaxed).checked_sub(1)?;
            let offset = shared.offset.load(Ordering::Relaxed);
            let unused_bits = 64_u32.checked_sub(shared.pmc_width.load(Ordering::Relaxed).into())?;
            let counter = instruction::read(index)?;
            fence(Ordering::Acquire);
            if shared.lock.load(Ordering::Relaxed) == lock {
                let counter = counter.checked_shl(unused_bits)?.cast_signed() >> unused_bits;
                return Some(offset.wrapping_add(counter).cast_unsigned());
            }
        }
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: `map` mapped the page with this size, and no reference to it outlives `self`.
        unsafe { libc::munmap(self.0.as_ptr().cast(), SIZE) };
    }
}
