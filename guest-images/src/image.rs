//! Copies programs and their libraries from unpacked packages into an image.
//!
//! The packages' own dynamic linker lists the libraries of each program, so an image contains exactly those that are
//! needed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::Cache;
use crate::cpio::Archive;
use crate::emulator::emulator;
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::release::Release;
use crate::tool;

/// Library directories of the packages, in addition to those named after the architecture.
const LIBRARY_DIRECTORIES: [&str; 3] = ["lib64", "usr/lib64", "usr/lib"];

/// A directory into which packages of one release were unpacked.
pub struct Unpacked<'a> {
    root: &'a Path,
    release: Release,
    /// The emulator for its programs, if they are for another architecture.
    emulator: Option<PathBuf>,
}

impl<'a> Unpacked<'a> {
    /// Uses the packages of a release that were unpacked into `root`.
    pub fn new(
        cache: &Cache,
        root: &'a Path,
        release: impl Into<Release>,
        progress: &mut Progress,
    ) -> Result<Self> {
        let release = release.into();
        Ok(Self { root, release, emulator: emulator(cache, release.arch, progress)? })
    }

    /// Returns the first of these paths that exists.
    pub fn find(&self, paths: &[&str]) -> Result<PathBuf> {
        find(self.root, self.release, paths)
    }

    /// Adds programs to an image, at the same paths as in their packages, and their libraries.
    pub fn add_programs(&self, image: &mut Archive, programs: &[&str]) -> Result<()> {
        let (path, directory) = (self.release.arch.linker(), self.release.arch.libraries());
        let name = path.rsplit('/').next().unwrap_or(path);
        let linker = self.find(&[path, &format!("usr/{path}"), &format!("lib/{directory}/{name}")])?;
        let mut libraries = BTreeSet::new();
        for program in programs {
            let file = self.find(&[program])?;
            image.copy(program, &file)?;
            libraries.extend(self.libraries(&linker, &file)?);
        }
        for library in &libraries {
            let name = library.file_name().unwrap_or_default().to_string_lossy();
            image.copy(&format!("lib/{directory}/{name}"), library)?;
        }
        image.copy(path, &linker)
    }

    /// Adds a static busybox to an image, and a symbolic link for each of its commands.
    pub fn add_busybox(&self, image: &mut Archive) -> Result<()> {
        let busybox = self.find(&["bin/busybox", "usr/bin/busybox"])?;
        image.copy("bin/busybox", &busybox)?;
        for name in tool::run(self.command(&busybox).arg("--list"), "busybox-static")?.lines() {
            if name != "busybox" {
                image.link(&format!("bin/{name}"), "busybox");
            }
        }
        Ok(())
    }

    /// Returns a command that runs one of the packages' programs on this machine.
    fn command(&self, program: &Path) -> Command {
        match &self.emulator {
            None => Command::new(program),
            Some(emulator) => {
                let mut command = Command::new(emulator);
                command.arg(program);
                command
            }
        }
    }

    fn libraries(&self, linker: &Path, program: &Path) -> Result<Vec<PathBuf>> {
        let own = self.release.arch.libraries();
        let directories =
            [format!("lib/{own}"), format!("usr/lib/{own}"), format!("usr/lib/{own}/pulseaudio")];
        let directories = directories.iter().map(|directory| &**directory).chain(LIBRARY_DIRECTORIES);
        let directories: Vec<String> =
            directories.map(|directory| self.root.join(directory).display().to_string()).collect();
        let mut command = self.command(linker);
        command.args(["--inhibit-cache", "--library-path", &directories.join(":"), "--list"]).arg(program);
        // Lines have the form `libc.so.6 => /path/libc.so.6 (0x...)`. The linker itself and the vDSO have no arrow.
        tool::run(&mut command, "libc6")?
            .lines()
            .filter_map(|line| line.trim().split_once(" => "))
            .map(|(name, location)| match location.rsplit_once(" (") {
                Some((path, _)) => Ok(PathBuf::from(path)),
                None => Err(Error::NotInPackages { suite: self.release.suite.name(), what: name.to_owned() }),
            })
            .collect()
    }
}

/// Returns the first of these paths that exists in a directory into which packages of a release were unpacked.
pub fn find(root: &Path, release: Release, paths: &[&str]) -> Result<PathBuf> {
    let full = paths.iter().map(|path| root.join(path.trim_start_matches('/')));
    full.into_iter()
        .find(|path| path.exists())
        .ok_or_else(|| Error::NotInPackages { suite: release.suite.name(), what: paths.join(" or ") })
}

/// Returns a directory in `folder` whose name starts with `prefix`. There should be only one.
pub fn only_folder(folder: &Path, prefix: &str) -> Option<PathBuf> {
    fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path())).find(|path| {
        path.is_dir() && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
    })
}
