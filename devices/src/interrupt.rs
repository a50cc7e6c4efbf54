//! The interrupt line of a device.

use std::io;

use vmm_sys_util::eventfd::EventFd;

/// An edge-triggered interrupt line. The interrupt controller latches the edge, so the device never lowers the line.
pub trait Interrupt: Send + Sync {
    /// Raises the interrupt.
    fn raise(&self) -> io::Result<()>;
}

/// An eventfd that is registered with KVM as an irqfd.
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
