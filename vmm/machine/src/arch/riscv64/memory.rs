//! The guest's physical address space. RAM is one range above the devices. The device tree is at the end of RAM.

/// First address of RAM. Kernels are loaded 2 MiB above it.
pub const RAM: u64 = 0x8000_0000;
/// Space for the device tree at the end of RAM. The device tree grows with the number of CPUs.
const DEVICE_TREE: u64 = 512 << 10;

/// Returns the ranges of RAM of this size: first addresses and lengths.
pub fn ranges(size: u64) -> Vec<(u64, u64)> {
    vec![(RAM, size)]
}

/// Returns the end of RAM, one past its last address.
pub fn low_end(size: u64) -> u64 {
    RAM.saturating_add(size)
}

/// Returns the address of the device tree and its maximum length.
pub fn device_tree(size: u64) -> (u64, u64) {
    (low_end(size) - DEVICE_TREE.min(size), DEVICE_TREE)
}
