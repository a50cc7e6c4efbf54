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
    #[error("cannot read it: {0}")]
    Read(#[from] io::Error),
    #[error("not a regular file")]
    NotAFile,
    #[error("not a kernel: {0}")]
    NotAKernel(&'static str),
    #[error("built for {built}, this host is {host}")]
    Architecture { built: &'static str, host: &'static str },
    #[error("a 32-bit kernel: Tally boots 64-bit Linux only")]
    Not64Bit,
    #[error("{0}, not a kernel")]
    OtherElf(&'static str),
    #[error("truncated: its {what} should reach byte {needs}, the file has {has}")]
    Truncated {
        what: &'static str,
        /// End of that part according to the headers.
        needs: u64,
        has: u64,
    },
    /// The file contradicts itself.
    #[error("damaged: {0}")]
    Damaged(&'static str),
    #[error("too large: {size} bytes of kernel, where at most {limit} are plausible")]
    TooLarge { size: u64, limit: u64 },
    /// A bzImage whose boot protocol has no 64-bit entry point yet. Contains the protocol's version.
    #[error("boot protocol {}.{:02}: Tally needs 2.12 or later, which is Linux 3.8", .0 >> 8, .0 & 0xff)]
    OldProtocol(u16),
    #[error("compressed with {0}, which Tally cannot unpack: it can lz4, zstd, xz and gzip")]
    Compression(&'static str),
    #[error("damaged: its payload is compressed in no known way")]
    UnknownCompression,
    #[error("damaged: cannot unpack its {how} payload: {error}")]
    Unpack { how: &'static str, error: io::Error },
    #[error("damaged: its payload does not unpack to the {0} bytes that it announces")]
    UnpackedSize(u64),
    /// A multiboot image requires features that Tally does not support. Contains the flags of its header.
    #[error("requires multiboot features that Tally does not have (header flags {0:#06x})")]
    Features(u32),
    #[error("damaged: its entry point {0:#x} is in none of its segments")]
    Entry(u64),
    #[error("it loads to {start:#x}..{end:#x}, where the guest has no free memory")]
    Reserved { start: u64, end: u64 },
    #[error("{what} does not fit: it needs --memory {}M, the guest has {}M", .needs.div_ceil(1 << 20), .has >> 20)]
    Memory {
        /// The file that does not fit.
        what: &'static str,
        /// Size of memory that is enough.
        needs: u64,
        has: u64,
    },
    #[error(
        "too little memory for Linux to begin: with its tables and an unpacked initrd it needs --memory {}M or more, the guest has {}M",
        .needs.div_ceil(1 << 20), .has >> 20
    )]
    Beginning {
        /// Minimum size of memory that may be enough.
        needs: u64,
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
    #[error(
        "the bytes 0f 33 at {0:#x} may be an RDPMC instruction or not, and Tally's PMU has to know: \
         --pmu kvm and --pmu none do without"
    )]
    Rdpmc(u64),
    /// The kernel's accesses to the PMU cannot be changed so that they exit to Tally. Contains the reason.
    #[error("{0}: --pmu kvm and --pmu none do without")]
    Retarget(String),
    #[error("a command line of {len} bytes: this kernel takes at most {max}")]
    CommandLine { len: usize, max: usize },
}

impl Problem {
    /// Adds the path of the file.
    pub fn with(self, path: &Path) -> LoadError {
        LoadError { path: path.to_owned(), problem: self }
    }
}
