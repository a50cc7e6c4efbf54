//! I/O ports, addresses and interrupt lines of the machine's devices.

use crate::architecture::FirstVirtio;

#[derive(Debug, Clone, Copy)]
pub struct SerialPort {
    /// First I/O port.
    pub base: u16,
    /// Interrupt line (GSI) of the port.
    pub gsi: u32,
}

/// The console: COM1 of a PC.
pub const COM: SerialPort = SerialPort { base: 0x3f8, gsi: 4 };

/// The first virtio device: its registers are in the hole below 4 GiB, and its interrupt line is the first one of KVM's
/// I/O APIC that no legacy device of a PC uses.
pub const VIRTIO: FirstVirtio = FirstVirtio { base: 0xd000_0000, gsi: 16 };

/// I/O ports of the other devices.
pub mod port {
    /// The keyboard controller's command port.
    pub const KEYBOARD: u16 = 0x64;
    /// Debug exit: four ports, so that any width of access reaches it.
    pub const DEBUG_EXIT: u16 = 0xf4;
    /// The firmware configuration device's selector; its data port follows.
    pub const FW_CFG: u16 = 0x510;
    /// ACPI's sleep control register; the status register follows.
    pub const SLEEP: u16 = 0x600;
    /// ACPI's reset register.
    pub const RESET: u16 = 0x602;
}
