//! What the machine is made of: where its devices are, and which interrupts they have. Every other place asks here.

use crate::architecture::FirstVirtio;

/// A serial port.
#[derive(Debug, Clone, Copy)]
pub struct SerialPort {
    /// Its registers.
    pub base: u64,
    /// The interrupt line that it drives: its source at the interrupt controller.
    pub gsi: u32,
}

/// The serial port: the console.
pub const COM: SerialPort = SerialPort { base: 0x1000_0000, gsi: 1 };

/// Debug exit: a write there ends the machine with a number.
pub const DEBUG_EXIT: u64 = 0x0010_0000;
/// How many bytes it takes, so that any width of access reaches it.
pub const DEBUG_EXIT_LEN: u64 = 8;

/// The interrupt controllers (AIA): the one that devices' lines lead to, and each CPU's, one behind the other.
pub mod aia {
    /// Where lines are made messages.
    pub const APLIC: u64 = 0x0d00_0000;
    /// Where the first CPU takes messages.
    pub const IMSIC: u64 = 0x2800_0000;
    /// How many lines there can be.
    pub const SOURCES: u32 = 32;
}

/// The first virtio device: its registers, and its interrupt line.
pub const VIRTIO: FirstVirtio = FirstVirtio { base: 0x1100_0000, gsi: 2 };
