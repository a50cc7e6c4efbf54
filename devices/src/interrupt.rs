//! How a device interrupts.

use std::io;

use vmm_sys_util::eventfd::EventFd;

/// A device's line to an interrupt controller, which takes note when it is raised: it need not be lowered.
pub trait Interrupt: Send + Sync {
    /// Raises it.
    fn raise(&self) -> io::Result<()>;
}

/// What KVM turns into an interrupt.
impl Interrupt for EventFd {
    fn raise(&self) -> io::Result<()> {
        self.write(1)
    }
}

impl<T: Interrupt + ?Sized> Interrupt for Box<T> {
    fn raise(&self) -> io::Result<()> {
        (**self).raise()
    }
}
