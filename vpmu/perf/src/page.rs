//! The page that the kernel shares for each event: it says where on the PMU the event is, so that its own thread can
//! read it without a system call.
//!
//! `perf_event_open(2)` describes it under "MMAP layout", with the loop that is [`Page::read`].

use std::io;
use std::mem::offset_of;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI64, AtomicU16, AtomicU32, AtomicU64, Ordering, fence};

use perf_event_open_sys::bindings::perf_event_mmap_page;

/// The beginning of `perf_event_mmap_page`. The kernel writes to it at any time, so everything is atomic.
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

const SIZE: usize = 4096;
const CAP_USER_RDPMC: u64 = 1 << 2;

/// An event's page, mapped.
pub struct Page(NonNull<Shared>);

/// What an event that is not on the PMU had counted when it left that, and when that was, by its own time.
#[derive(Debug, Clone, Copy)]
pub struct Left {
    /// The count.
    pub count: u64,
    /// For how long it was enabled by then, in nanoseconds.
    pub enabled: u64,
    /// For how long it counted.
    pub running: u64,
}

impl Page {
    /// Maps the page of an event, which then also may be read directly.
    pub fn map(event: &OwnedFd) -> io::Result<Self> {
        // SAFETY: a new mapping, which replaces none.
        let page = unsafe {
            libc::mmap(std::ptr::null_mut(), SIZE, libc::PROT_READ, libc::MAP_SHARED, event.as_raw_fd(), 0)
        };
        if page == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(page.cast()).map(Self).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Which of the hardware's counters the event is on, if it is on one.
    pub fn hardware(&self) -> Option<u32> {
        self.shared().index.load(Ordering::Relaxed).checked_sub(1)
    }

    /// What was left of an event that is not on the PMU.
    pub fn left(&self) -> Option<Left> {
        let shared = self.shared();
        loop {
            let lock = shared.lock.load(Ordering::Acquire);
            if shared.index.load(Ordering::Relaxed) != 0 {
                return None;
            }
            let left = Left {
                count: shared.offset.load(Ordering::Relaxed).cast_unsigned(),
                enabled: shared.time_enabled.load(Ordering::Relaxed),
                running: shared.time_running.load(Ordering::Relaxed),
            };
            fence(Ordering::Acquire);
            if shared.lock.load(Ordering::Relaxed) == lock {
                return Some(left);
            }
        }
    }

    fn shared(&self) -> &Shared {
        // SAFETY: the page is mapped as long as `self` lives, and whoever writes to it does so atomically.
        unsafe { self.0.as_ref() }
    }

    /// The event's count; nothing if it is not on the PMU, or not to be read this way.
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
            let counter = hardware_counter(index)?;
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
        // SAFETY: it was mapped by `map`, with this size, and nothing refers to it any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), SIZE) };
    }
}

#[cfg(target_arch = "x86_64")]
#[expect(clippy::unnecessary_wraps, reason = "other architectures cannot")]
fn hardware_counter(index: u32) -> Option<u64> {
    let (low, high): (u32, u32);
    // SAFETY: reads a counter. The kernel has said that it may be read from user space and that there is one of this index.
    unsafe {
        // Not `nomem`: it must stay between the two looks at the lock.
        std::arch::asm!("rdpmc", in("ecx") index, out("eax") low, out("edx") high,
                        options(nostack, preserves_flags));
    }
    Some(u64::from(high) << 32 | u64::from(low))
}

#[cfg(not(target_arch = "x86_64"))]
fn hardware_counter(_index: u32) -> Option<u64> {
    None
}
