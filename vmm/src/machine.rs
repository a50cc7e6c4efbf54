//! What the machine is made of: which I/O ports and interrupts its devices have. Every other place asks here.

/// One serial port.
#[derive(Debug, Clone, Copy)]
pub struct SerialPort {
    /// Its first I/O port.
    pub base: u16,
    /// The interrupt line that it drives.
    pub gsi: u32,
}

/// The serial ports, each where a PC has it. The first is the console; a command's output and errors come by the others.
pub const COM: [SerialPort; 3] = [
    SerialPort { base: 0x3f8, gsi: 4 },
    SerialPort { base: 0x2f8, gsi: 3 },
    // A PC's third port shares the first one's interrupt; ours does not.
    SerialPort { base: 0x3e8, gsi: 5 },
];

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
    /// The status of the default guest's command.
    pub const COMMAND_STATUS: u16 = 0x608;
}
