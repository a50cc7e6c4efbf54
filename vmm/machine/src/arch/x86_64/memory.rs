//! The guest's physical address space. RAM is one range from 0, interrupted below 4 GiB by the hole in which the interrupt
//! controllers live.

use vpmu::shared_page::Page;

/// Where the hole for memory-mapped devices begins; RAM that does not fit below it goes to 4 GiB and up.
const HOLE_START: u64 = 3 << 30;
const HOLE_END: u64 = 4 << 30;
/// The last of conventional memory, where a BIOS keeps its data area.
const EBDA: u64 = 0x9_fc00;
/// From here on RAM is free for kernels and initrds.
pub const HIGH_RAM: u64 = 1 << 20;

/// What Tally writes into the guest's first MiB.
pub mod low {
    /// The segment descriptors of the boot protocols.
    pub const GDT: u64 = 0x500;
    /// Linux' boot parameters ("zero page").
    pub const ZERO_PAGE: u64 = 0x7000;
    /// A multiboot information structure and what it points to, up to [`PAGE_TABLES`].
    pub const MULTIBOOT_INFO: u64 = 0x7000;
    /// Identity page tables for 64-bit entry: one table of each of the three upper levels.
    pub const PAGE_TABLES: u64 = 0x1_0000;
    /// The kernel's command line.
    pub const COMMAND_LINE: u64 = 0x2_0000;
    /// What Tally and Linux share for each vCPU, so that Linux need not leave the guest (see [`vpmu::shared_page`]).
    pub const SHARED_PAGES: u64 = 0x3_0000;
    /// The ACPI tables, in the area where a BIOS would have them, with the root pointer first.
    pub const ACPI: u64 = 0xe_0000;
}

/// Where Linux maps all memory with four levels of page tables, unless it moves itself about (`__PAGE_OFFSET_BASE_L4`).
/// Only its own unpacker, which is not used, switches to five.
const DIRECT_MAP: u64 = 0xffff_8880_0000_0000;

/// The physical address of the page that a vCPU shares with Linux.
pub fn shared_page(vcpu: u8) -> u64 {
    low::SHARED_PAGES + Page::STRIDE as u64 * (u64::from(vcpu) + 1)
}

/// Linux' virtual address of guest-physical memory.
pub fn linux_address(physical: u64) -> u64 {
    DIRECT_MAP + physical
}

/// What a range of guest-physical addresses is, as the firmware tells it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeKind {
    /// Free for the guest.
    Ram,
    /// Holds something, or nothing at all.
    Reserved,
}

/// One range of the memory map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// Its first address.
    pub start: u64,
    /// Its length in bytes.
    pub len: u64,
    /// What it is.
    pub kind: RangeKind,
}

/// Where RAM of that size is: first addresses and lengths.
pub fn ranges(size: u64) -> Vec<(u64, u64)> {
    let mut ranges = vec![(0, low_end(size))];
    if size > HOLE_START {
        ranges.push((HOLE_END, size - HOLE_START));
    }
    ranges
}

/// One past the last byte of RAM below the hole.
pub fn low_end(size: u64) -> u64 {
    size.min(HOLE_START)
}

/// The memory map that the guest is told, in ascending order.
pub fn map(size: u64) -> Vec<Range> {
    let mut map = vec![
        Range { start: 0, len: EBDA, kind: RangeKind::Ram },
        Range { start: EBDA, len: HIGH_RAM - EBDA, kind: RangeKind::Reserved },
        Range { start: HIGH_RAM, len: low_end(size) - HIGH_RAM, kind: RangeKind::Ram },
    ];
    if size > HOLE_START {
        map.push(Range { start: HOLE_END, len: size - HOLE_START, kind: RangeKind::Ram });
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_beyond_the_hole_continues_at_4_gib() {
        let total = |size| ranges(size).iter().map(|r| r.1).sum::<u64>();
        for gib in [1, 3, 4, 8] {
            assert_eq!(total(gib << 30), gib << 30);
        }
        assert_eq!(ranges(3 << 30).len(), 1);
        assert_eq!(ranges(5 << 30)[1], (4 << 30, 2 << 30));
    }

    #[test]
    fn the_map_covers_ram_once_and_in_order() {
        let map = map(5 << 30);
        assert!(map.windows(2).all(|w| w[0].start + w[0].len <= w[1].start));
        assert_eq!(map.iter().map(|r| r.len).sum::<u64>(), 5 << 30);
    }
}
