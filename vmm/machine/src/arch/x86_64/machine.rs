//! What the machine is made of: which I/O ports and interrupts its devices have. Every other place asks here.

use crate::architecture::FirstVirtio;

/// One serial port.
#[derive(Debug, Clone, Copy)]
pub struct SerialPort {
    /// Its first I/O port.
    pub base: u16,
    /// The interrupt line that it drives.
    pub gsi: u32,
}

/// The serial port, where a PC has its first: the console.
pub const COM: SerialPort = SerialPort { base: 0x3f8, gsi: 4 };

/// The first virtio device: its registers, in the hole below 4 GiB, and the first of the lines of KVM's I/O APIC that no device of
/// a PC's has.
pub const VIRTIO: FirstVirtio = FirstVirtio { base: 0xd000_0000, gsi: 16 };

/// The other devices' I/O ports.
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
