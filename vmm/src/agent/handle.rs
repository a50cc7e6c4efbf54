//! The event loop's handle on the agent: passes on signals and terminal sizes, and ends the agent's thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use guest_agent::protocol::{Size, ToGuest};
use vmm_sys_util::eventfd::EventFd;

/// State that the event loop and the agent's thread share.
#[derive(Default)]
pub struct Shared {
    /// True if a command runs, to which signals can be passed on.
    runs: AtomicBool,
    /// True if the command was not sent the last SIGINT or SIGQUIT yet.
    waits: AtomicBool,
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

    /// Passes a signal on to the command. Returns false if no command runs yet, or if the command has not been sent the
    /// last signal that should end it: then the signal ends the machine.
    pub fn signal(&self, signal: i32) -> bool {
        let Ok(number) = u8::try_from(signal) else { return false };
        let Shared { runs, waits } = &*self.shared;
        let is_to_end = matches!(signal, libc::SIGINT | libc::SIGQUIT);
        runs.load(Ordering::Acquire)
            && !(is_to_end && waits.swap(true, Ordering::AcqRel))
            && self.order(ToGuest::Signal(number))
    }

    /// Passes the terminal's new size on to the command.
    pub fn resize(&self, size: Size) {
        self.order(ToGuest::Size(size));
    }

    fn order(&self, message: ToGuest) -> bool {
        let sent = self.orders.send(message).is_ok();
        // An error means that the eventfd is signalled already.
        let _ = self.wake.write(1);
        sent
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Closes the channel, which the thread notices.
        drop(std::mem::replace(&mut self.orders, channel().0));
        let _ = self.wake.write(1);
    }
}
