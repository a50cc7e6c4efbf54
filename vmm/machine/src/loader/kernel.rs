//! A kernel in Tally's memory, and the parameters with which it is booted.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};

use memchr::memmem;

use crate::memory::GuestRam;

/// A kernel in Tally's memory, decompressed.
pub struct Kernel<F> {
    pub path: PathBuf,
    /// The decompressed image. Not all of it has to be loaded.
    pub image: Vec<u8>,
    pub format: F,
    /// Its release, once it was looked for.
    pub release: OnceCell<Option<String>>,
    /// What was changed in the image, for the user.
    pub changes: Vec<String>,
}

/// Parameters with which a kernel is booted.
pub struct Boot<'a> {
    /// The guest's memory. It is all zeroes, so the loader does not clear the kernel's `.bss`.
    pub ram: &'a GuestRam,
    /// The command line. For a multiboot image the loader puts the kernel's path in front of it, as the multiboot
    /// specification (3.3, "cmdline") says and QEMU does.
    pub command_line: &'a str,
    /// The initrd. For a multiboot image this is a list `FILE ARGS,FILE ARGS...` of modules, in which `,,` stands for a
    /// comma.
    pub initrd: Option<&'a Path>,
    /// cpio archive prepended to the initrd: the modules that a user's kernel needs for Tally's devices. Linux unpacks
    /// both, one after the other.
    pub initrd_prefix: &'a [u8],
}

impl<F> Kernel<F> {
    /// Creates a kernel whose image nobody has changed.
    pub fn new(path: &Path, image: Vec<u8>, format: F) -> Self {
        Self { path: path.to_owned(), image, format, release: OnceCell::new(), changes: Vec::new() }
    }

    /// Returns the release of a Linux kernel, as `uname -r` prints it.
    pub fn release(&self) -> Option<&str> {
        self.release.get_or_init(|| self.find_release().map(str::to_owned)).as_deref()
    }

    fn find_release(&self) -> Option<&str> {
        const BANNER: &[u8] = b"Linux version ";
        let at = memmem::find(&self.image, BANNER)? + BANNER.len();
        let release = self.image[at..].split(|&byte| byte == b' ').next()?;
        // The release becomes the name of a directory, so other characters in the untrusted file are refused.
        let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"._+~-".contains(byte);
        let fits = (1..=64).contains(&release.len()) && release[0] != b'.' && release.iter().all(is_name);
        std::str::from_utf8(release).ok().filter(|_| fits)
    }
}

impl<F> Drop for Kernel<F> {
    /// Returns the memory for reading a kernel to the host. The allocator would keep what the decompressors have freed
    /// (16 MiB with xz), although Tally does not need as much again.
    fn drop(&mut self) {
        self.image = Vec::new();
        #[cfg(target_env = "gnu")]
        // SAFETY: `malloc_trim` has no pointer argument, is thread-safe, and does not affect allocated memory.
        unsafe {
            libc::malloc_trim(0);
        }
    }
}
