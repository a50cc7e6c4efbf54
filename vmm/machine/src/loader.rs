//! From a kernel file to a guest that is ready to run: what the file is, and where everything goes.
//!
//! A kernel is read once, whole and unpacked, and then loaded. Between the two its code can still be changed, which is
//! why a packed kernel is unpacked here and not by the stub that it brings along. Which files are kernels is each
//! processor's own ([`Format`]).

pub mod bytes;
pub mod error;
pub mod file;
pub mod foreign;
pub mod unpack;

use std::fmt;
use std::path::{Path, PathBuf};

pub use self::error::LoadError;

use self::file::UserFile;
use crate::arch::loader::{Entry, Format};
use crate::memory::GuestRam;

/// The most bytes of a kernel that Tally reads or unpacks.
///
/// Linux maps itself into 512 MiB (`KERNEL_IMAGE_SIZE`) unless it moves itself about; Debian's takes a tenth of that.
const LARGEST: u64 = 512 << 20;

/// A kernel in Tally's memory, unpacked.
pub struct Kernel {
    /// Its file.
    pub path: PathBuf,
    /// What is loaded of it, and perhaps more.
    pub image: Vec<u8>,
    /// What it is.
    pub format: Format,
}

/// What a kernel is to be booted with.
pub struct Boot<'a> {
    /// Where to load it: fresh memory, all zeroes, so that nobody need clear a kernel's `.bss`.
    pub ram: &'a GuestRam,
    /// The command line. Multiboot images find the kernel's path in front of it, as the multiboot
    /// specification (3.3, "cmdline") and QEMU have it.
    pub command_line: &'a str,
    /// The initrd. For a multiboot image a list `FILE ARGS,FILE ARGS...` of modules, with `,,` for a comma.
    pub initrd: Option<&'a Path>,
    /// An archive that goes in front of Linux' initrd: the kernel unpacks one after the other.
    pub front: &'a [u8],
}

impl Kernel {
    /// Reads a kernel, of whichever format the file turns out to be.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        let mut user = UserFile::open(path)?;
        let (format, image) = Format::read(&mut user.file, user.len).map_err(|problem| problem.with(path))?;
        Ok(Self { path: path.to_owned(), image, format })
    }

    /// Puts the kernel and what it is booted with into the guest's memory.
    pub fn load(&self, boot: &Boot) -> Result<Entry, LoadError> {
        self.format.load(&self.path, &self.image, boot)
    }

    /// Which Linux it is, as `uname -r` says it.
    pub fn release(&self) -> Option<&str> {
        const BANNER: &[u8] = b"Linux version ";
        let at = self.image.windows(BANNER.len()).position(|bytes| bytes == BANNER)? + BANNER.len();
        let release = self.image[at..].split(|&byte| byte == b' ').next()?;
        // It names a folder: what else a file claims is no release.
        let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"._+~-".contains(byte);
        let fits = (1..=64).contains(&release.len()) && release[0] != b'.' && release.iter().all(is_name);
        std::str::from_utf8(release).ok().filter(|_| fits)
    }

    /// Whether it is Linux.
    pub fn is_linux(&self) -> bool {
        self.format.is_linux()
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_linux() { "Linux" } else { "a multiboot image" };
        write!(f, "{}, {kind}", self.path.display())
    }
}

impl Drop for Kernel {
    /// Gives back to the host what reading a kernel took: the allocator keeps what the decompressors freed (with xz
    /// 16 MiB), for a need that will not come again.
    fn drop(&mut self) {
        self.image = Vec::new();
        #[cfg(target_env = "gnu")]
        // SAFETY: it takes no pointer, may be called from any thread, and leaves alone what is allocated.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}
