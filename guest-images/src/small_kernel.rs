//! Compiles a small kernel from the distribution's source, for tests only.
//!
//! Debian's kernels support Xen (`CONFIG_PARAVIRT_XXL`), so they read counters with one out-of-line function. A kernel
//! without Xen support has RDPMC inlined in several places. This is such a kernel; see `small_kernel.config`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cache::{Cache, Key};
use crate::error::{Error, Result};
use crate::kernel_source::KernelSource;
use crate::progress::Progress;
use crate::release::Suite;
use crate::tool;

const CONFIG: &str = include_str!("small_kernel.config");
const SOURCE: &str = "linux-source-6.1";
/// Part of the cache key. Must change when the code here changes what is built.
const RECIPE: &str = "1";

/// The kernel, in two formats.
#[derive(Debug, Clone)]
pub struct SmallKernel {
    /// The bzImage, compressed with gzip, without symbols.
    pub image: PathBuf,
    /// The ELF file, with symbols.
    pub vmlinux: PathBuf,
}

/// Compiles the kernel, unless it is in the cache. This takes some minutes and, temporarily, 1.5 GB of disk space.
pub fn small_kernel(cache: &Cache, progress: &mut Progress) -> Result<SmallKernel> {
    let key = Key::new("small-kernel").with(RECIPE).with(SOURCE).with(CONFIG);
    let entry = cache.entry(&key, progress, |progress, entry| compile(cache, entry, progress))?;
    Ok(SmallKernel { image: entry.join("bzImage"), vmlinux: entry.join("vmlinux") })
}

fn compile(cache: &Cache, entry: &Path, progress: &mut Progress) -> Result<()> {
    let work = entry.join("work");
    let kernel = KernelSource::unpack(cache, Suite::default(), SOURCE, &[], &work, progress)?;

    progress.long_step("compiling the small kernel");
    let config = work.join("config");
    fs::write(&config, CONFIG).map_err(Error::io("write", &config))?;
    for target in ["allnoconfig", "bzImage"] {
        tool::run(kernel.make().env("KCONFIG_ALLCONFIG", &config).arg(target), "make")?;
    }
    for (from, to) in [("arch/x86/boot/bzImage", "bzImage"), ("vmlinux", "vmlinux")] {
        let (from, to) = (kernel.objects.join(from), entry.join(to));
        fs::rename(&from, &to).map_err(Error::io("find", &from))?;
    }
    fs::remove_dir_all(&work).map_err(Error::io("remove", &work))
}
