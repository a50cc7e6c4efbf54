//! How a guest ends its virtual machine.

/// The way in which a guest ended its virtual machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The guest powered off.
    PowerOff,
    /// The guest requested a reset.
    Reboot,
    /// The guest wrote this byte to the debug-exit port.
    DebugExit(u8),
}
