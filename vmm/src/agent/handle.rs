//! What the event loop does with the agent: signals and sizes on, and the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use guest_agent::protocol::{Size, ToGuest};
use vmm_sys_util::eventfd::EventFd;

/// What both sides know.
#[derive(Default)]
pub struct Shared {
    /// Whether there is a command to pass signals on to.
    runs: AtomicBool,
    /// Whether it has not taken the last that was to end it.
    waits: AtomicBool,
}

impl Shared {
    /// The command begins.
    pub fn begun(&self) {
        self.runs.store(true, Ordering::Release);
    }

    /// The command was sent a signal.
    pub fn took(&self) {
        self.waits.store(false, Ordering::Release);
    }
}

/// A handle on the agent's thread. When it is dropped, the thread passes on what the guest has said, and ends.
pub struct Handle {
    orders: Sender<ToGuest>,
    wake: EventFd,
    shared: Arc<Shared>,
}

impl Handle {
    pub(super) fn new(wake: EventFd) -> (Self, Receiver<ToGuest>, Arc<Shared>) {
        let (sender, orders) = channel();
        let shared = Arc::<Shared>::default();
        (Self { orders: sender, wake, shared: Arc::clone(&shared) }, orders, shared)
    }

    /// Passes a signal on to the command. Says whether it could: one that has not begun is not waited for, nor is one to end a
    /// command that has not taken the one before.
    pub fn signal(&self, signal: i32) -> bool {
        let Ok(number) = u8::try_from(signal) else { return false };
        let Shared { runs, waits } = &*self.shared;
        let is_to_end = matches!(signal, libc::SIGINT | libc::SIGQUIT);
        runs.load(Ordering::Acquire)
            && !(is_to_end && waits.swap(true, Ordering::AcqRel))
            && self.order(ToGuest::Signal(number))
    }

    /// Tells the command that its terminal has another size.
    pub fn resize(&self, size: Size) {
        self.order(ToGuest::Size(size));
    }

    fn order(&self, message: ToGuest) -> bool {
        let sent = self.orders.send(message).is_ok();
        // An eventfd that nobody has read yet is signalled already.
        let _ = self.wake.write(1);
        sent
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // The thread finds the channel closed.
        drop(std::mem::replace(&mut self.orders, channel().0));
        let _ = self.wake.write(1);
    }
}
