//! What can be wrong with the files a user boots, in the user's words.

use std::io;
use std::path::{Path, PathBuf};

/// A file that cannot be booted, and why.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem}", .path.display())]
pub struct LoadError {
    path: PathBuf,
    problem: Problem,
}

/// Why not. Sizes and addresses are as the file has them: nothing here has been checked any further.
#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The file cannot be read.
    #[error("cannot read it: {0}")]
    Read(#[from] io::Error),
    /// A directory, a pipe or a device.
    #[error("not a regular file")]
    NotAFile,
    /// None of the formats that can be booted.
    #[error("not a kernel: {0}")]
    NotAKernel(&'static str),
    /// Another CPU's code.
    #[error("built for {built}, this host is {host}")]
    Architecture {
        /// The file's.
        built: &'static str,
        /// This host's.
        host: &'static str,
    },
    /// A 32-bit Linux.
    #[error("a 32-bit kernel: Tally boots 64-bit Linux only")]
    Not64Bit,
    /// ELF, but of another purpose.
    #[error("{0}, not a kernel")]
    OtherElf(&'static str),
    /// Shorter than it says itself.
    #[error("truncated: its {what} should reach byte {needs}, the file has {has}")]
    Truncated {
        /// What lacks its end.
        what: &'static str,
        /// Where that end would be.
        needs: u64,
        /// The file's length.
        has: u64,
    },
    /// Says things that cannot be true.
    #[error("damaged: {0}")]
    Damaged(&'static str),
    /// Larger than any kernel.
    #[error("too large: {size} bytes of kernel, where at most {limit} are plausible")]
    TooLarge {
        /// What it would take.
        size: u64,
        /// What it may.
        limit: u64,
    },
    /// A bzImage from before 64-bit entry was part of the protocol.
    #[error("boot protocol {}.{:02}: Tally needs 2.12 or later, which is Linux 3.8", .0 >> 8, .0 & 0xff)]
    OldProtocol(u16),
    /// A compression that the kernel build offers and Tally does not.
    #[error("compressed with {0}, which Tally cannot unpack: it can lz4, zstd, xz and gzip")]
    Compression(&'static str),
    /// A compression that nobody knows.
    #[error("damaged: its payload is compressed in no known way")]
    UnknownCompression,
    /// The payload is not what its compression says.
    #[error("damaged: cannot unpack its {how} payload: {error}")]
    Unpack {
        /// The compression.
        how: &'static str,
        /// What its decoder says.
        error: io::Error,
    },
    /// The payload unpacks to something shorter or longer than it should.
    #[error("damaged: its payload does not unpack to the {0} bytes that it announces")]
    UnpackedSize(u64),
    /// A multiboot image that wants what we do not have.
    #[error("requires multiboot features that Tally does not have (header flags {0:#06x})")]
    Features(u32),
    /// A start outside of everything that was loaded.
    #[error("damaged: its entry point {0:#x} is in none of its segments")]
    Entry(u64),
    /// Would overwrite what the machine or Tally keeps there.
    #[error("it loads to {start:#x}..{end:#x}, where the guest has no free memory")]
    Reserved {
        /// The first address.
        start: u64,
        /// One past the last.
        end: u64,
    },
    /// The guest is too small.
    #[error("{what} does not fit: it needs --memory {}M, the guest has {}M", .needs.div_ceil(1 << 20), .has >> 20)]
    Memory {
        /// What does not fit.
        what: &'static str,
        /// The size of memory with which it would.
        needs: u64,
        /// The guest's.
        has: u64,
    },
    /// The guest is too small for what the kernel makes first.
    #[error(
        "too little memory for Linux to begin: with its tables and an unpacked initrd it needs --memory {}M or more, the guest has {}M",
        .needs.div_ceil(1 << 20), .has >> 20
    )]
    Beginning {
        /// The least with which it may have enough.
        needs: u64,
        /// The guest's.
        has: u64,
    },
    /// The guest is large, but has its devices in the way.
    #[error(
        "{what} does not fit: it would end at {end:#x}, and the memory below the devices ends at {hole:#x}"
    )]
    Hole {
        /// What does not fit.
        what: &'static str,
        /// Where it would end.
        end: u64,
        /// Where the hole for devices begins.
        hole: u64,
    },
    /// An initrd that fits, but not where the kernel can reach it.
    #[error(
        "too large an initrd: this kernel takes one that ends below {limit:#x}, and itself ends at {kernel_end:#x}"
    )]
    InitrdTooLarge {
        /// One past the last address that an initrd may have.
        limit: u64,
        /// One past the kernel's last.
        kernel_end: u64,
    },
    /// Bytes that may or may not be an instruction.
    #[error(
        "the bytes 0f 33 at {0:#x} may be an RDPMC instruction or not, and Tally's PMU has to know: \
         --pmu kvm and --pmu none do without"
    )]
    Rdpmc(u64),
    /// Accesses to the PMU that cannot be handed over.
    #[error("{0}: --pmu kvm and --pmu none do without")]
    Retarget(String),
    /// The command line is too long.
    #[error("a command line of {len} bytes: this kernel takes at most {max}")]
    CommandLine {
        /// Its length.
        len: usize,
        /// The most that it may be.
        max: usize,
    },
}

impl Problem {
    /// Says which file has it.
    pub fn with(self, path: &Path) -> LoadError {
        LoadError { path: path.to_owned(), problem: self }
    }
}
