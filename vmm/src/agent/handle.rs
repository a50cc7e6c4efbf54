//! What the event loop does with the agent: signals and sizes on, and the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use guest_agent::protocol::{Size, ToGuest};
use vmm_sys_util::eventfd::EventFd;

/// What the thread is asked to do.
pub enum Order {
    /// Tell the agent this.
    Say(ToGuest),
}

/// What both sides know.
#[derive(Default)]
pub struct Shared {
    /// Whether a command runs that has taken all signals so far.
    listens: AtomicBool,
}

impl Shared {
    pub fn listens(&self, listens: bool) {
        self.listens.store(listens, Ordering::Release);
    }
}

/// A handle on the agent's thread. When it is dropped, the thread passes on what the guest has said, and ends.
pub struct Handle {
    orders: Sender<Order>,
    wake: EventFd,
    shared: Arc<Shared>,
}

impl Handle {
    pub(super) fn new(wake: EventFd) -> (Self, Receiver<Order>, Arc<Shared>) {
        let (sender, orders) = channel();
        let shared = Arc::<Shared>::default();
        (Self { orders: sender, wake, shared: Arc::clone(&shared) }, orders, shared)
    }

    /// Passes a signal on to the command. Says whether it could: a command that has not begun, or has not taken the signal
    /// before, is not waited for.
    pub fn signal(&self, signal: i32) -> bool {
        let Ok(number) = u8::try_from(signal) else { return false };
        self.shared.listens.swap(false, Ordering::AcqRel) && self.order(ToGuest::Signal(number))
    }

    /// Tells the command that its terminal has another size.
    pub fn resize(&self, size: Size) {
        self.order(ToGuest::Size(size));
    }

    fn order(&self, message: ToGuest) -> bool {
        let sent = self.orders.send(Order::Say(message)).is_ok();
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
