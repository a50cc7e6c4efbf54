//! The memory map and the interrupt lines of the machine. All other modules use these constants.

use crate::architecture::FirstVirtio;

#[derive(Debug, Clone, Copy)]
pub struct SerialPort {
    /// Address of the registers.
    pub base: u64,
    /// Interrupt line, which is the number of the APLIC's source.
    pub gsi: u32,
}

/// The serial port of the console.
pub const COM: SerialPort = SerialPort { base: 0x1000_0000, gsi: 1 };

/// Address of the debug exit. A write to it ends the machine with the number that is written.
pub const DEBUG_EXIT: u64 = 0x0010_0000;
/// Length of the debug exit's register, enough for accesses of any width.
pub const DEBUG_EXIT_LEN: u64 = 8;

/// The interrupt controllers (AIA): the APLIC, to which the devices' lines are connected, and the CPUs' IMSICs.
pub mod aia {
    /// Address of the APLIC.
    pub const APLIC: u64 = 0x0d00_0000;
    /// Address of the first CPU's IMSIC. The others follow.
    pub const IMSIC: u64 = 0x2800_0000;
    /// Number of interrupt sources of the APLIC.
    pub const SOURCES: u32 = 32;
}

/// Interrupt line of the VM generation ID, beyond those of devices.
pub const VMGENID_GSI: u32 = aia::SOURCES - 1;

/// Address and interrupt line of the first virtio device.
pub const VIRTIO: FirstVirtio = FirstVirtio { base: 0x1100_0000, gsi: 2 };
