//! The buses and the few devices that Tally's guests need.
//!
//! A device is registers and nothing more: it knows no KVM and no thread. What a guest does to it may end the
//! machine; it then says so with an [`End`], and whoever runs the vCPU acts on it.

mod bus;
pub mod fs;
mod fw_cfg;
mod interrupt;
mod power;
mod serial;
pub mod virtio;

pub use bus::{Overlap, PortBus, PortDevice};
pub use fw_cfg::FwCfg;
pub use interrupt::Interrupt;
pub use power::{AcpiSleep, DebugExit, ResetOn};
pub use serial::{Serial, SerialError};

/// What a guest may do with something of the host's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Look at it.
    ReadOnly,
    /// Change it as well.
    ReadWrite,
}

/// How a guest asked for its machine to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It switched itself off.
    PowerOff,
    /// It asked for a reset.
    Reboot,
    /// It wrote this byte to the debug-exit port.
    DebugExit(u8),
}
