//! The guest's physical address space: where its RAM is, and what Tally puts into it before the guest starts.
//!
//! RAM is one range from 0, interrupted below 4 GiB by the hole in which the interrupt controllers live.

use std::fmt;

use vm_memory::{GuestAddress, GuestMemoryMmap};

/// Where the hole for memory-mapped devices begins; RAM that does not fit below it goes to 4 GiB and up.
const HOLE_START: u64 = 3 << 30;
const HOLE_END: u64 = 4 << 30;
/// The last of conventional memory, where a BIOS keeps its data area.
const EBDA: u64 = 0x9_fc00;
/// From here on RAM is free for kernels and initrds.
pub const HIGH_RAM: u64 = 1 << 20;
/// The smallest guest: room for one MiB of kernel above the first MiB.
const SMALLEST: u64 = 2 << 20;

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
    /// What Tally and Linux share for each vCPU, so that Linux need not leave the guest (see [`vpmu::slate`]).
    pub const SLATES: u64 = 0x3_0000;
    /// The ACPI tables, in the area where a BIOS would have them, with the root pointer first.
    pub const ACPI: u64 = 0xe_0000;
}

/// Memory that cannot be given to a guest.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// Too small for anything.
    #[error("--memory {0}: a guest needs at least 2M")]
    TooSmall(String),
    /// Larger than the host's own.
    #[error("--memory {asked}: this host has only {has} MiB")]
    TooLarge {
        /// What was asked for.
        asked: String,
        /// What the host has, in MiB.
        has: u64,
    },
    /// The host would not map it.
    #[error("--memory {asked}: cannot map the guest's memory: {source}")]
    Map {
        /// What was asked for.
        asked: String,
        /// What the host said.
        source: vm_memory::mmap::FromRangesError,
    },
}

/// A size as users write it: bytes, or a number with K, M or G behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Size {
    text: String,
    /// The size in bytes, a multiple of a page.
    pub bytes: u64,
}

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
            "" => 0,
            "K" | "KB" | "KIB" => 10,
            "M" | "MB" | "MIB" => 20,
            "G" | "GB" | "GIB" => 30,
            unit => return Err(format!("unknown unit `{unit}`: use K, M or G")),
        };
        let number: u64 =
            digits.parse().map_err(|_| "not a size: write for example 512M or 2G".to_owned())?;
        let bytes = number.checked_mul(1 << shift).ok_or("too large a number")?;
        if bytes % 4096 != 0 {
            return Err("not a multiple of 4K".to_owned());
        }
        Ok(Self { text: text.to_owned(), bytes })
    }
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

/// A guest's RAM, mapped into Tally.
#[derive(Debug, Clone)]
pub struct GuestRam {
    /// The mapping.
    pub mapped: GuestMemoryMmap,
    size: u64,
}

impl GuestRam {
    /// Maps RAM of that size; the host gives pages only as the guest touches them.
    pub fn new(size: &Size) -> Result<Self, MemoryError> {
        if size.bytes < SMALLEST {
            return Err(MemoryError::TooSmall(size.text.clone()));
        }
        let has = host_memory();
        if size.bytes > has {
            return Err(MemoryError::TooLarge { asked: size.text.clone(), has: has >> 20 });
        }
        let ranges: Vec<_> = ram_ranges(size.bytes)
            .into_iter()
            .map(|(start, len)| {
                (GuestAddress(start), usize::try_from(len).expect("the host's memory fits its addresses"))
            })
            .collect();
        let mapped = GuestMemoryMmap::from_ranges(&ranges)
            .map_err(|source| MemoryError::Map { asked: size.text.clone(), source })?;
        Ok(Self { mapped, size: size.bytes })
    }

    /// How much there is, in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// One past the last byte of RAM below the hole.
    pub fn low_end(&self) -> u64 {
        self.size.min(HOLE_START)
    }

    /// The memory map that the guest is told, in ascending order.
    pub fn map(&self) -> Vec<Range> {
        let mut map = vec![
            Range { start: 0, len: EBDA, kind: RangeKind::Ram },
            Range { start: EBDA, len: HIGH_RAM - EBDA, kind: RangeKind::Reserved },
            Range { start: HIGH_RAM, len: self.low_end() - HIGH_RAM, kind: RangeKind::Ram },
        ];
        if self.size > HOLE_START {
            map.push(Range { start: HOLE_END, len: self.size - HOLE_START, kind: RangeKind::Ram });
        }
        map
    }
}

impl fmt::Display for GuestRam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB of memory", self.size >> 20)?;
        for (number, (start, len)) in (0..).zip(ram_ranges(self.size)) {
            let before = if number == 0 { " at" } else { " and" };
            write!(f, "{before} {start:#x}-{:#x}", start + len - 1)?;
        }
        Ok(())
    }
}

fn ram_ranges(size: u64) -> Vec<(u64, u64)> {
    let mut ranges = vec![(0, size.min(HOLE_START))];
    if size > HOLE_START {
        ranges.push((HOLE_END, size - HOLE_START));
    }
    ranges
}

fn host_memory() -> u64 {
    // SAFETY: all-zero is a valid `sysinfo`, a plain C structure of integers.
    let mut info: libc::sysinfo = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is a valid place for the structure that the call fills in.
    let failed = unsafe { libc::sysinfo(&raw mut info) } != 0;
    assert!(!failed, "sysinfo() fails only for a bad address");
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(text: &str) -> Size {
        text.parse().unwrap()
    }

    #[test]
    fn sizes_are_read_as_users_write_them() {
        assert_eq!(size("512M").bytes, 512 << 20);
        assert_eq!(size("2G").bytes, 2 << 30);
        assert_eq!(size("131072k").bytes, 128 << 20);
        assert_eq!(size("4096").bytes, 4096);
        for wrong in ["", "M", "12X", "-1M", "1.5G", "4097", "99999999999G"] {
            assert!(wrong.parse::<Size>().is_err(), "{wrong} was taken");
        }
    }

    #[test]
    fn too_little_or_too_much_memory_is_refused_by_name() {
        for text in ["0", "1M"] {
            assert!(GuestRam::new(&size(text)).unwrap_err().to_string().contains(text));
        }
        assert!(GuestRam::new(&size("1000000G")).unwrap_err().to_string().contains("this host has only"));
    }

    #[test]
    fn memory_beyond_the_hole_continues_at_4_gib() {
        let total = |size| ram_ranges(size).iter().map(|r| r.1).sum::<u64>();
        for gib in [1, 3, 4, 8] {
            assert_eq!(total(gib << 30), gib << 30);
        }
        assert_eq!(ram_ranges(3 << 30).len(), 1);
        assert_eq!(ram_ranges(5 << 30)[1], (4 << 30, 2 << 30));
    }

    #[test]
    fn the_map_covers_ram_once_and_in_order() {
        let ram = GuestRam::new(&size("5G")).unwrap();
        let map = ram.map();
        assert!(map.windows(2).all(|w| w[0].start + w[0].len <= w[1].start));
        assert_eq!(map.iter().map(|r| r.len).sum::<u64>(), 5 << 30);
    }
}
