//! The guest-physical address space. RAM is one range from address 0, interrupted by a hole below 4 GiB for the
//! interrupt controllers and virtio devices.

use vpmu::shared_page::Page;

/// First address of the hole for memory-mapped devices. RAM that does not fit below the hole continues at 4 GiB.
const HOLE_START: u64 = 3 << 30;
const HOLE_END: u64 = 4 << 30;
/// First address of the extended BIOS data area, at the end of conventional memory.
const EBDA: u64 = 0x9_fc00;
/// First address of the RAM that kernels and initrds can use.
pub const HIGH_RAM: u64 = 1 << 20;

/// Addresses in the first MiB at which Tally writes boot data.
pub mod low {
    /// Global descriptor table with the segments that the boot protocols require.
    pub const GDT: u64 = 0x500;
    /// Linux' boot parameters ("zero page").
    pub const ZERO_PAGE: u64 = 0x7000;
    /// Multiboot information structure and the data that it points to. Ends at [`PAGE_TABLES`].
    pub const MULTIBOOT_INFO: u64 = 0x7000;
    /// Identity page tables for the 64-bit entry: one table for each of the three upper levels.
    pub const PAGE_TABLES: u64 = 0x1_0000;
    /// The kernel's command line.
    pub const COMMAND_LINE: u64 = 0x2_0000;
    /// One page for each vCPU that Tally shares with Linux, so that accesses to the PMU need no exit (see
    /// [`vpmu::shared_page`]).
    pub const SHARED_PAGES: u64 = 0x3_0000;
    /// The VM generation ID, in the BIOS area.
    pub const VMGENID: u64 = 0xd_f000;
    /// ACPI tables, in the BIOS area. The root pointer (RSDP) is the first.
    pub const ACPI: u64 = 0xe_0000;
}

/// Virtual address at which Linux maps all memory with four levels of page tables and without KASLR
/// (`__PAGE_OFFSET_BASE_L4`). Only the kernel's own decompressor, which does not run here, switches to five levels.
const DIRECT_MAP: u64 = 0xffff_8880_0000_0000;

/// Returns the physical address of the page that a vCPU shares with Linux.
pub fn shared_page(vcpu: u8) -> u64 {
    low::SHARED_PAGES + Page::STRIDE as u64 * (u64::from(vcpu) + 1)
}

/// Returns Linux' virtual address of a physical address.
pub fn linux_address(physical: u64) -> u64 {
    DIRECT_MAP + physical
}

/// Type of a range in the firmware's memory map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RangeKind {
    /// RAM that the guest may use.
    Ram,
    /// Addresses that the guest must not use as RAM.
    Reserved,
}

/// A range of the memory map.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// Length in bytes.
    pub len: u64,
    /// Type of the range.
    pub kind: RangeKind,
}

/// Returns the ranges of RAM for a guest with `size` bytes: first addresses and lengths.
pub fn ranges(size: u64) -> Vec<(u64, u64)> {
    let mut ranges = vec![(0, low_end(size))];
    if size > HOLE_START {
        ranges.push((HOLE_END, size - HOLE_START));
    }
    ranges
}

/// Returns the end of RAM below the hole.
pub fn low_end(size: u64) -> u64 {
    size.min(HOLE_START)
}

/// Returns the firmware's memory map, in ascending order.
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
