//! Where virtio devices are: behind each other, each with an interrupt line of its own.

use devices::virtio::Transport;

/// Where the first is.
#[derive(Debug, Clone, Copy)]
pub struct FirstVirtio {
    /// Its registers.
    pub base: u64,
    /// The interrupt line that it drives.
    pub gsi: u32,
}

impl FirstVirtio {
    /// Returns where a device's registers are.
    pub fn address(self, index: usize) -> u64 {
        self.base + index as u64 * Transport::SIZE
    }

    /// Returns the interrupt line that it drives.
    pub fn line(self, index: usize) -> u32 {
        self.gsi + u32::try_from(index).expect("there are few devices")
    }
}
