//! The guest's physical address space. RAM is one range above the devices. At its end are the device tree and the VM
//! generation ID.

/// First address of RAM. Kernels are loaded 2 MiB above it.
pub const RAM: u64 = 0x8000_0000;
/// The last page of RAM: the VM generation ID. The device tree does not name the page as RAM, as Linux maps it as a
/// device's.
const GENERATION_PAGE: u64 = 4 << 10;
/// Space for the device tree before that. The device tree grows with the number of CPUs.
const DEVICE_TREE: u64 = 512 << 10;

/// Returns the ranges of RAM of this size: first addresses and lengths.
pub fn ranges(size: u64) -> Vec<(u64, u64)> {
    vec![(RAM, size)]
}

/// Returns the end of RAM, one past its last address.
pub fn low_end(size: u64) -> u64 {
    RAM.saturating_add(size)
}

/// Returns the size of the part of RAM that the kernel may use as it likes.
pub fn usable(size: u64) -> u64 {
    size.saturating_sub(GENERATION_PAGE)
}

/// Returns the address of the VM generation ID.
pub fn vmgenid(size: u64) -> u64 {
    low_end(usable(size))
}

/// Returns the address of the device tree and its maximum length.
pub fn device_tree(size: u64) -> (u64, u64) {
    let usable = usable(size);
    (low_end(usable) - DEVICE_TREE.min(usable), DEVICE_TREE)
}
