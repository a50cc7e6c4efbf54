//! Compiles a small kernel from the distribution's source, for tests only.
//!
//! Debian's kernels support Xen (`CONFIG_PARAVIRT_XXL`), so they read counters with one out-of-line function. A kernel
//! without Xen support has RDPMC inlined in several places. This is such a kernel; see `small_kernel.config`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use crate::cache::{Cache, Key};
use crate::error::{Error, Result};
use crate::packages::Repository;
use crate::progress::Progress;
use crate::release::Suite;
use crate::tool;

const CONFIG: &str = include_str!("small_kernel.config");
const SOURCE: &str = "linux-source-6.1";
/// Packages and static libraries that objtool, a program of the kernel's build, is linked with.
const LIBRARIES: [(&str, &str); 2] = [("libelf-dev", "libelf.a"), ("zlib1g-dev", "libz.a")];
/// Programs that the kernel's build runs, and their packages.
const PROGRAMS: [(&str, &str); 6] = [
    ("make", "make"),
    ("gcc", "gcc"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("xz", "xz-utils"),
];
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

/// Returns the packages that must be installed to compile the kernel.
pub fn small_kernel_needs() -> [&'static str; PROGRAMS.len()] {
    PROGRAMS.map(|(_, package)| package)
}

/// Compiles the kernel, unless it is in the cache. This takes some minutes and, temporarily, 1.5 GB of disk space.
pub fn small_kernel(cache: &Cache, progress: &mut Progress) -> Result<SmallKernel> {
    let key = Key::new("small-kernel").with(RECIPE).with(SOURCE).with(CONFIG);
    let entry = cache.entry(&key, progress, |progress, entry| compile(cache, entry, progress))?;
    Ok(SmallKernel { image: entry.join("bzImage"), vmlinux: entry.join("vmlinux") })
}

fn compile(cache: &Cache, entry: &Path, progress: &mut Progress) -> Result<()> {
    for (program, package) in PROGRAMS {
        tool::run(Command::new(program).arg("--version"), package)?;
    }
    let work = entry.join("work");
    unpack(cache, &work, progress)?;

    progress.long_step("compiling the small kernel");
    let config = work.join("config");
    fs::write(&config, CONFIG).map_err(Error::io("write", &config))?;
    let objects = work.join("objects");
    fs::create_dir(&objects).map_err(Error::io("create", &objects))?;
    let usr = work.join("usr");
    let make = |target: &str| {
        let mut make = Command::new("make");
        make.arg("-C").arg(work.join(SOURCE)).arg(format!("O={}", objects.display()));
        make.arg(format!("HOSTCFLAGS=-I{}", usr.join("include").display()));
        make.arg(format!("HOSTLDFLAGS=-L{} -lz", usr.join("lib").display()));
        make.env("KCONFIG_ALLCONFIG", &config);
        // Keeps data of this machine out of the kernel, so that the build is reproducible.
        make.envs([
            ("KBUILD_BUILD_TIMESTAMP", "@0"),
            ("KBUILD_BUILD_USER", "tally"),
            ("KBUILD_BUILD_HOST", "tally"),
        ]);
        let jobs = thread::available_parallelism().map_or(1, usize::from);
        tool::run(make.args(["--silent", &format!("-j{jobs}"), target]), "make")
    };
    make("allnoconfig")?;
    make("bzImage")?;
    for (from, to) in [("arch/x86/boot/bzImage", "bzImage"), ("vmlinux", "vmlinux")] {
        let (from, to) = (objects.join(from), entry.join(to));
        fs::rename(&from, &to).map_err(Error::io("find", &from))?;
    }
    fs::remove_dir_all(&work).map_err(Error::io("remove", &work))
}

/// Unpacks the kernel's source, and into `usr` the headers and static libraries that its build needs. Shared libraries
/// must not be there: the linker would prefer them, and they would be missing when the program runs.
fn unpack(cache: &Cache, work: &Path, progress: &mut Progress) -> Result<()> {
    let suite = Suite::default();
    let repository = Repository::open(cache, suite, progress)?;
    let mut packages = repository.resolve(&[SOURCE, LIBRARIES[0].0, LIBRARIES[1].0])?;
    packages.retain(|package| {
        package.name == SOURCE || LIBRARIES.iter().any(|(library, _)| package.name == *library)
    });
    repository.unpack(&packages, work, progress)?;
    for (package, library) in LIBRARIES {
        let to = work.join("usr/lib").join(library);
        let from = work.join("usr/lib/x86_64-linux-gnu").join(library);
        fs::rename(&from, &to).map_err(|_| Error::NotInPackages {
            suite: suite.name(),
            what: format!("{library} of {package}"),
        })?;
    }
    progress.step("unpacking the source of the small kernel");
    let archive = work.join(format!("usr/src/{SOURCE}.tar.xz"));
    tool::run(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(work), "tar").map(drop)
}
