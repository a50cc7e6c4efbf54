//! Errors of kernel and initrd files, with messages for the user.

use std::io;
use std::path::{Path, PathBuf};

/// Why a file cannot be booted.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", .path.display())]
pub struct LoadError {
    path: PathBuf,
    problem: Problem,
}

/// The reason. Sizes and addresses come from the file and are untrusted.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The file cannot be read.
    #[error("cannot read it: {0}")]
    Read(#[from] io::Error),
    /// A directory, a pipe or a device.
    #[error("not a regular file")]
    NotAFile,
    /// The file has none of the formats that can be booted.
    #[error("not a kernel: {0}")]
    NotAKernel(&'static str),
    /// The file contains code for another architecture.
    #[error("built for {built}, this host is {host}")]
    Architecture {
        /// Architecture of the file.
        built: &'static str,
        /// Architecture of this host.
        host: &'static str,
    },
    /// The file is a 32-bit Linux kernel.
    #[error("a 32-bit kernel: Tally boots 64-bit Linux only")]
    Not64Bit,
    /// An ELF file that is not a kernel.
    #[error("{0}, not a kernel")]
    OtherElf(&'static str),
    /// The file is shorter than its headers state.
    #[error("truncated: its {what} should reach byte {needs}, the file has {has}")]
    Truncated {
        /// The truncated part.
        what: &'static str,
        /// End of that part according to the headers.
        needs: u64,
        /// Length of the file.
        has: u64,
    },
    /// The file contradicts itself.
    #[error("damaged: {0}")]
    Damaged(&'static str),
    /// The kernel is larger than any plausible kernel.
    #[error("too large: {size} bytes of kernel, where at most {limit} are plausible")]
    TooLarge {
        /// Size according to the file.
        size: u64,
        /// Maximum size.
        limit: u64,
    },
    /// A bzImage whose boot protocol has no 64-bit entry point yet. Contains the protocol's version.
    #[error("boot protocol {}.{:02}: Tally needs 2.12 or later, which is Linux 3.8", .0 >> 8, .0 & 0xff)]
    OldProtocol(u16),
    /// The payload has a compression that Linux' build offers and Tally does not support.
    #[error("compressed with {0}, which Tally cannot unpack: it can lz4, zstd, xz and gzip")]
    Compression(&'static str),
    /// The payload has none of the compressions that Linux' build offers.
    #[error("damaged: its payload is compressed in no known way")]
    UnknownCompression,
    /// The payload cannot be decompressed.
    #[error("damaged: cannot unpack its {how} payload: {error}")]
    Unpack {
        /// The compression.
        how: &'static str,
        /// The decoder's error.
        error: io::Error,
    },
    /// The payload does not decompress to this size, which it announces.
    #[error("damaged: its payload does not unpack to the {0} bytes that it announces")]
    UnpackedSize(u64),
    /// A multiboot image requires features that Tally does not support. Contains the flags of its header.
    #[error("requires multiboot features that Tally does not have (header flags {0:#06x})")]
    Features(u32),
    /// The entry point is in none of the segments.
    #[error("damaged: its entry point {0:#x} is in none of its segments")]
    Entry(u64),
    /// The kernel would be loaded to addresses that are no RAM or that Tally uses itself.
    #[error("it loads to {start:#x}..{end:#x}, where the guest has no free memory")]
    Reserved {
        /// First address.
        start: u64,
        /// One past the last address.
        end: u64,
    },
    /// The guest has too little memory for a file.
    #[error("{what} does not fit: it needs --memory {}M, the guest has {}M", .needs.div_ceil(1 << 20), .has >> 20)]
    Memory {
        /// The file that does not fit.
        what: &'static str,
        /// Size of memory that is enough.
        needs: u64,
        /// Size of the guest's memory.
        has: u64,
    },
    /// The guest has too little memory for what Linux allocates early during its boot.
    #[error(
        "too little memory for Linux to begin: with its tables and an unpacked initrd it needs --memory {}M or more, the guest has {}M",
        .needs.div_ceil(1 << 20), .has >> 20
    )]
    Beginning {
        /// Minimum size of memory that may be enough.
        needs: u64,
        /// Size of the guest's memory.
        has: u64,
    },
    /// The file does not fit below the hole for devices, although the guest has enough memory.
    #[error(
        "{what} does not fit: it would end at {end:#x}, and the memory below the devices ends at {hole:#x}"
    )]
    Hole {
        /// The file that does not fit.
        what: &'static str,
        /// Address at which it would end.
        end: u64,
        /// First address of the hole for devices.
        hole: u64,
    },
    /// The initrd fits into memory, but not below the address that the kernel can reach.
    #[error(
        "too large an initrd: this kernel takes one that ends below {limit:#x}, and itself ends at {kernel_end:#x}"
    )]
    InitrdTooLarge {
        /// One past the last address that an initrd may occupy.
        limit: u64,
        /// One past the kernel's last address.
        kernel_end: u64,
    },
    /// The bytes at this address may or may not be an RDPMC instruction.
    #[error(
        "the bytes 0f 33 at {0:#x} may be an RDPMC instruction or not, and Tally's PMU has to know: \
         --pmu kvm and --pmu none do without"
    )]
    Rdpmc(u64),
    /// The kernel's accesses to the PMU cannot be changed so that they exit to Tally. Contains the reason.
    #[error("{0}: --pmu kvm and --pmu none do without")]
    Retarget(String),
    /// The command line is too long.
    #[error("a command line of {len} bytes: this kernel takes at most {max}")]
    CommandLine {
        /// Length of the command line.
        len: usize,
        /// Maximum length.
        max: usize,
    },
}

impl Problem {
    /// Adds the path of the file.
    pub fn with(self, path: &Path) -> LoadError {
        LoadError { path: path.to_owned(), problem: self }
    }
}
