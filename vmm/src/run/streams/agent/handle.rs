//! The main thread's handle on the agent: passes on signals and terminal sizes, and ends the agent's thread.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use guest_agent::protocol::{Size, ToGuest};
use vmm_sys_util::eventfd::EventFd;

/// State that the main thread and the agent's share.
#[derive(Default)]
pub struct Shared {
    /// True if a command runs, to which signals can be passed on.
    runs: AtomicBool,
    /// True if the command was not sent the last SIGINT or SIGQUIT yet.
    waits: AtomicBool,
    /// True if the handle was dropped.
    is_over: AtomicBool,
    orders: Mutex<Orders>,
}

/// What the main thread wants the guest to be told. A signal waits once however often it comes, as in a process, and of
/// the sizes only the last is of use. So a guest that reads nothing does not let them pile up.
#[derive(Default)]
pub struct Orders {
    signals: BTreeSet<u8>,
    size: Option<Size>,
}

impl Orders {
    /// Returns true if there is nothing to tell the guest.
    pub fn is_empty(&self) -> bool {
        self.signals.is_empty() && self.size.is_none()
    }

    pub fn messages(&self) -> impl Iterator<Item = ToGuest> {
        let signals = self.signals.iter().map(|signal| ToGuest::Signal(*signal));
        self.size.map(ToGuest::Size).into_iter().chain(signals)
    }
}

impl Shared {
    /// Records that the command starts.
    pub fn command_started(&self) {
        self.runs.store(true, Ordering::Release);
    }

    /// Records that the guest has sent the command a signal.
    pub fn signal_taken(&self) {
        self.waits.store(false, Ordering::Release);
    }

    /// Returns true if the handle was dropped.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Returns what the guest was not told yet.
    pub fn orders(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A handle on the agent's thread. When it is dropped, the thread passes on what the guest has said, and ends.
pub struct Handle {
    wake: EventFd,
    /// Is gone when the thread has ended.
    shared: Weak<Shared>,
}

impl Handle {
    pub(super) fn new(wake: EventFd) -> (Self, Arc<Shared>) {
        let shared = Arc::<Shared>::default();
        (Self { wake, shared: Arc::downgrade(&shared) }, shared)
    }

    /// Passes a signal on to the command. Returns false if no command runs, or if the command has not been sent the
    /// last signal that should end it: then the signal ends the machine.
    pub fn signal(&self, signal: i32) -> bool {
        let (Ok(number), Some(shared)) = (u8::try_from(signal), self.shared.upgrade()) else { return false };
        let is_to_end = matches!(signal, libc::SIGINT | libc::SIGQUIT);
        let passes =
            shared.runs.load(Ordering::Acquire) && !(is_to_end && shared.waits.swap(true, Ordering::AcqRel));
        if passes {
            shared.orders().signals.insert(number);
            self.wake();
        }
        passes
    }

    /// Passes the terminal's new size on to the command.
    pub fn resize(&self, size: Size) {
        if let Some(shared) = self.shared.upgrade() {
            shared.orders().size = Some(size);
            self.wake();
        }
    }

    fn wake(&self) {
        // An error means that the eventfd is signalled already.
        let _ = self.wake.write(1);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.is_over.store(true, Ordering::Release);
            self.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    fn handle() -> (Handle, Arc<Shared>) {
        let (handle, shared) = Handle::new(EventFd::new(EFD_NONBLOCK).unwrap());
        shared.command_started();
        (handle, shared)
    }

    #[test]
    fn what_a_guest_does_not_read_waits_once() {
        let (handle, shared) = handle();
        for number in 0..1000 {
            handle.resize(Size { rows: number, columns: 80 });
            assert!(handle.signal(libc::SIGTERM) && handle.signal(libc::SIGHUP));
        }
        let waiting: Vec<_> = shared.orders().messages().collect();
        let size = ToGuest::Size(Size { rows: 999, columns: 80 });
        assert_eq!(waiting, [size, ToGuest::Signal(1), ToGuest::Signal(15)]);
    }

    #[test]
    fn the_second_interrupt_that_a_guest_does_not_take_is_refused() {
        let (handle, shared) = handle();
        assert!(handle.signal(libc::SIGINT) && !handle.signal(libc::SIGINT));
        shared.signal_taken();
        assert!(handle.signal(libc::SIGINT));
    }

    #[test]
    fn a_signal_is_refused_when_the_thread_has_ended() {
        let (handle, shared) = handle();
        drop(shared);
        assert!(!handle.signal(libc::SIGTERM));
    }
}
