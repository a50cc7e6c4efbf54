//! The guest's memory. The architecture defines its guest-physical addresses
//! ([`crate::arch::Board::ram`]).

mod saved;
mod shared;

use std::fmt;
use std::fs::File;
use std::io;
use std::ops::Range;

pub use saved::{PART, PageMap, extents};
pub use shared::{InGuest, OfAtomics};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Minimum size of a guest's memory: the first MiB, and one MiB above it for a kernel.
const SMALLEST: u64 = 2 << 20;

/// Why a guest cannot have memory of a size.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    #[error("--memory {0}: a guest needs at least 2M")]
    TooSmall(String),
    #[error("--memory {asked}: this host has only {has} MiB")]
    TooLarge {
        asked: String,
        /// Size of the host's memory in MiB.
        has: u64,
    },
    #[error("--memory {asked}: cannot map the guest's memory: {source}")]
    Map { asked: String, source: vm_memory::mmap::FromRangesError },
    #[error("cannot map the saved memory: {0}")]
    Restore(io::Error),
}

/// A size as users write it: a number of bytes, or a number with the unit K, M or G.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Size {
    text: String,
    /// The size in bytes, a multiple of the page size.
    pub bytes: u64,
}

impl Size {
    /// Creates a size of this many bytes.
    pub fn of(bytes: u64) -> Self {
        Self { text: bytes.to_string(), bytes }
    }
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

impl Size {
    /// Checks that a guest can have memory of this size here.
    pub fn check_here(&self) -> Result<(), MemoryError> {
        if self.bytes < SMALLEST {
            return Err(MemoryError::TooSmall(self.text.clone()));
        }
        let has = host_memory();
        if self.bytes > has {
            return Err(MemoryError::TooLarge { asked: self.text.clone(), has: has >> 20 });
        }
        Ok(())
    }

    /// Returns the guest-physical ranges of RAM of this size, if a guest can have as much here.
    fn check(
        &self,
        ranges: impl Fn(u64) -> Vec<(u64, u64)>,
    ) -> Result<Vec<(GuestAddress, usize)>, MemoryError> {
        self.check_here()?;
        let range = |(start, len)| {
            (GuestAddress(start), usize::try_from(len).expect("the host's memory fits its addresses"))
        };
        Ok(ranges(self.bytes).into_iter().map(range).collect())
    }
}

/// A guest's RAM, mapped into Tally.
#[derive(Debug, Clone)]
pub struct GuestRam {
    /// The mapping.
    pub mapped: GuestMemoryMmap,
    size: u64,
    /// What was mapped from a file: offsets in the RAM, in order.
    from_file: Vec<Range<u64>>,
}

impl GuestRam {
    /// Maps RAM of this size. `ranges` returns its guest-physical ranges for a size. The host allocates a page only
    /// when the page is first accessed.
    pub fn new(size: &Size, ranges: impl Fn(u64) -> Vec<(u64, u64)>) -> Result<Self, MemoryError> {
        let ranges = size.check(ranges)?;
        let mapped = GuestMemoryMmap::from_ranges(&ranges)
            .map_err(|source| MemoryError::Map { asked: size.text.clone(), source })?;
        keep_out_of_core_dumps(&mapped);
        Ok(Self { mapped, size: size.bytes, from_file: Vec::new() })
    }

    /// Maps RAM of this size that was saved in a file. Its pages are copied when the guest writes to them.
    pub fn restored(
        size: &Size,
        ranges: impl Fn(u64) -> Vec<(u64, u64)>,
        file: &File,
    ) -> Result<Self, MemoryError> {
        let mut ram = Self::new(size, ranges)?;
        ram.map_from(file).map_err(MemoryError::Restore)?;
        keep_out_of_core_dumps(&ram.mapped);
        Ok(ram)
    }

    /// Returns the addresses in this process of what is mapped from a file.
    pub fn mapped_from_file(&self) -> Vec<Range<usize>> {
        let mut parts = self.from_file.iter().peekable();
        let (mut mapped, mut start) = (Vec::new(), 0);
        for region in self.mapped.iter() {
            let end = start + region.len();
            let address = |at: u64| {
                region.as_ptr() as usize + usize::try_from(at - start).expect("the region is mapped")
            };
            while let Some(part) = parts.next_if(|part| part.start < end) {
                mapped.push(address(part.start)..address(part.end));
            }
            start = end;
        }
        mapped
    }

    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }
}

impl fmt::Display for GuestRam {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB of memory", self.size >> 20)?;
        for (number, region) in (0..).zip(self.mapped.iter()) {
            let before = if number == 0 { " at" } else { " and" };
            write!(f, "{before} {:#x}-{:#x}", region.start_addr().0, region.last_addr().0)?;
        }
        Ok(())
    }
}

/// Keeps the guest's memory out of core dumps: it is not the host's to read, and it is large.
fn keep_out_of_core_dumps(mapped: &GuestMemoryMmap) {
    for region in mapped.iter() {
        let len = usize::try_from(region.len()).expect("it is mapped");
        // An error means that the kernel was built without core dumps.
        // SAFETY: the region is mapped, and the advice changes no content.
        let _ = unsafe { libc::madvise(region.as_ptr().cast(), len, libc::MADV_DONTDUMP) };
    }
}

fn host_memory() -> u64 {
    let info = rustix::system::sysinfo();
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
    fn a_refusal_names_the_size_or_the_hosts_limit() {
        for text in ["0", "1M"] {
            assert!(
                GuestRam::new(&size(text), |size| vec![(0, size)]).unwrap_err().to_string().contains(text)
            );
        }
        assert!(
            GuestRam::new(&size("1000000G"), |size| vec![(0, size)])
                .unwrap_err()
                .to_string()
                .contains("this host has only")
        );
    }
}
