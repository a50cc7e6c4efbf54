//! A kernel that has been read, and what it is to be booted with.

use std::path::{Path, PathBuf};

use crate::memory::GuestRam;

/// A kernel in Tally's memory, unpacked.
pub struct Kernel<F> {
    /// Its file.
    pub path: PathBuf,
    /// What is loaded of it, and perhaps more.
    pub image: Vec<u8>,
    /// What it is.
    pub format: F,
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

impl<F> Kernel<F> {
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
}

impl<F> Drop for Kernel<F> {
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
