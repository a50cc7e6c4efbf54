//! A distribution's kernel source, and what compiles it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::packages::{Package, Repository};
use crate::progress::Progress;
use crate::release::Suite;
use crate::tool;

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

/// Returns the packages that must be installed to compile a kernel.
pub fn kernel_needs() -> [&'static str; PROGRAMS.len()] {
    PROGRAMS.map(|(_, package)| package)
}

/// The unpacked source, and where it is compiled.
pub struct KernelSource {
    pub source: PathBuf,
    pub objects: PathBuf,
    usr: PathBuf,
}

impl KernelSource {
    /// Unpacks a package with a kernel's source into a new folder, and others beside it. The folder also gets what is
    /// needed to compile it: some 1.5 GB in all.
    pub fn unpack(
        cache: &Cache,
        suite: Suite,
        package: &str,
        others: &[&str],
        work: &Path,
        progress: &mut Progress,
    ) -> Result<Self> {
        for (program, package) in PROGRAMS {
            tool::run(Command::new(program).arg("--version"), package)?;
        }
        let packages: Vec<_> = [package].iter().chain(others).copied().collect();
        unpack(&Repository::open(cache, suite, progress)?, &packages, work, progress)?;
        // What is linked here is of this machine's release.
        let libraries = LIBRARIES.map(|(package, _)| package);
        unpack(&Repository::open(cache, Suite::default(), progress)?, &libraries, work, progress)?;
        // Shared libraries must not be there: the linker would prefer them, and they would be missing when the program
        // runs.
        for (package, library) in LIBRARIES {
            let to = work.join("usr/lib").join(library);
            let from = work.join("usr/lib/x86_64-linux-gnu").join(library);
            fs::rename(&from, &to).map_err(|_| Error::NotInPackages {
                suite: Suite::default().name(),
                what: format!("{library} of {package}"),
            })?;
        }
        progress.step("unpacking a kernel's source");
        let archive = work.join(format!("usr/src/{package}.tar.xz"));
        tool::run(Command::new("tar").arg("-xf").arg(archive).arg("-C").arg(work), "tar")?;
        let objects = work.join("objects");
        fs::create_dir(&objects).map_err(Error::io("create", &objects))?;
        Ok(Self { source: work.join(package), objects, usr: work.join("usr") })
    }

    /// Returns a command that makes something of the source.
    pub fn make(&self) -> Command {
        let mut make = Command::new("make");
        make.arg("-C").arg(&self.source).arg(format!("O={}", self.objects.display()));
        make.arg(format!("HOSTCFLAGS=-I{}", self.usr.join("include").display()));
        // Linux 6.1 links objtool with what the first of these says last, Linux 6.12 with what the second says.
        make.arg(format!("HOSTLDFLAGS=-L{} -lz", self.usr.join("lib").display()));
        make.arg("LIBELF_LIBS=-lelf -lz");
        // Keeps data of this machine out of the kernel, so that the build is reproducible.
        make.envs([
            ("KBUILD_BUILD_TIMESTAMP", "@0"),
            ("KBUILD_BUILD_USER", "tally"),
            ("KBUILD_BUILD_HOST", "tally"),
        ]);
        let jobs = thread::available_parallelism().map_or(1, usize::from);
        make.args(["--silent", &format!("-j{jobs}")]);
        make
    }
}

/// Unpacks packages, without those that they depend on.
fn unpack(repository: &Repository, names: &[&str], into: &Path, progress: &mut Progress) -> Result<()> {
    let mut packages = repository.resolve(names)?;
    packages.retain(|package: &Package| names.contains(&package.name.as_str()));
    repository.unpack(&packages, into, progress)
}
