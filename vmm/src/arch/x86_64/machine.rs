//! What the machine is made of: which I/O ports and interrupts its devices have. Every other place asks here.

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

/// The virtio devices: registers in memory, one behind the other, each with an interrupt line of its own.
pub mod virtio {
    use devices::virtio::Transport;

    /// The most that there can be: KVM's I/O APIC has so many lines that no device of a PC's has.
    pub const MOST: usize = 8;
    /// The first device's registers, in the hole below 4 GiB.
    pub const BASE: u64 = 0xd000_0000;
    const FIRST_GSI: u32 = 16;

    /// Where a device's registers are.
    pub fn address(index: usize) -> u64 {
        BASE + index as u64 * Transport::SIZE
    }

    /// The interrupt line that it drives.
    pub fn gsi(index: usize) -> u32 {
        FIRST_GSI + u32::try_from(index).expect("there are few devices")
    }
}

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
