//! A kernel of another make than the distribution's, compiled from the distribution's source.
//!
//! Debian's kernels read counters through one function, because they can run under Xen; kernels that cannot have that
//! inlined in several places. `small_kernel.config` says what this one is for. It is for tests: nobody needs it to run
//! Tally.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use crate::cache::{Cache, Key};
use crate::packages::Apt;
use crate::{Error, Progress, Result, Suite, tool};

const CONFIG: &str = include_str!("small_kernel.config");
const SOURCE: &str = "linux-source-6.1";
/// Linked into objtool, a program of the kernel's build.
const LIBRARIES: [(&str, &str); 2] = [("libelf-dev", "libelf.a"), ("zlib1g-dev", "libz.a")];
/// What the kernel's build runs, and which package has it.
const PROGRAMS: [(&str, &str); 6] = [
    ("make", "make"),
    ("gcc", "gcc"),
    ("flex", "flex"),
    ("bison", "bison"),
    ("bc", "bc"),
    ("xz", "xz-utils"),
];
/// Counts up when the way of building changes.
const RECIPE: &str = "1";

/// The same kernel in both of its files.
#[derive(Debug, Clone)]
pub struct SmallKernel {
    /// The bzImage, packed with gzip, without symbols.
    pub image: PathBuf,
    /// The ELF file, with symbols.
    pub vmlinux: PathBuf,
}

/// Compiles the kernel if that has not been done. It takes some minutes and a gigabyte and a half, for the time being.
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
        // Nothing of this machine gets into the kernel, so that it boots alike everywhere.
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

/// The kernel's source, and in `usr` the headers and static libraries of what its build is linked against. Only those:
/// a shared library beside them would be preferred, and be missing when the program runs.
fn unpack(cache: &Cache, work: &Path, progress: &mut Progress) -> Result<()> {
    let suite = Suite::default();
    let apt = Apt::open(cache, suite, progress)?;
    let mut packages = apt.resolve(&[SOURCE, LIBRARIES[0].0, LIBRARIES[1].0])?;
    packages.retain(|package| {
        package.name == SOURCE || LIBRARIES.iter().any(|(library, _)| package.name == *library)
    });
    apt.unpack(&packages, work, progress)?;
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
