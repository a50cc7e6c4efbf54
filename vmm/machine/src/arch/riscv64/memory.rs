//! The guest's physical address space. RAM is one range behind the devices, and what the kernel is told of the machine is at
//! its end.

/// Where RAM begins. Kernels want to be 2 MiB behind its beginning.
pub const RAM: u64 = 0x8000_0000;
/// What is kept for the device tree at RAM's end: it grows with the number of CPUs.
const DEVICE_TREE: u64 = 512 << 10;

/// Where RAM of that size is: first addresses and lengths.
pub fn ranges(size: u64) -> Vec<(u64, u64)> {
    vec![(RAM, size)]
}

/// One past its last byte.
pub fn low_end(size: u64) -> u64 {
    RAM.saturating_add(size)
}

/// Where the device tree is, and how large it may be.
pub fn device_tree(size: u64) -> (u64, u64) {
    (low_end(size) - DEVICE_TREE.min(size), DEVICE_TREE)
}
