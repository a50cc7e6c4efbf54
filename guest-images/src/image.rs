//! Picks what an image needs out of unpacked packages, and packs it.
//!
//! Libraries are found by asking the packages' own dynamic linker, so an image has those that its programs load and
//! no others.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::Cache;
use crate::cpio::Archive;
use crate::emulator::emulator;
use crate::{Error, Progress, Release, Result, tool};

/// Where the packages put libraries, beside the folders that are named after the kind of processor.
const LIBRARY_FOLDERS: [&str; 3] = ["lib64", "usr/lib64", "usr/lib"];

/// A folder that packages of one release were unpacked into.
pub struct Unpacked<'a> {
    root: &'a Path,
    release: Release,
    /// What runs its programs, if this machine does not by itself.
    emulator: Option<PathBuf>,
}

impl<'a> Unpacked<'a> {
    /// Packages of a release that were unpacked into `root`.
    pub fn new(
        cache: &Cache,
        root: &'a Path,
        release: impl Into<Release>,
        progress: &mut Progress,
    ) -> Result<Self> {
        let release = release.into();
        Ok(Self { root, release, emulator: emulator(cache, release.arch, progress)? })
    }

    /// The first of these paths that exists.
    pub fn find(&self, paths: &[&str]) -> Result<PathBuf> {
        find(self.root, self.release, paths)
    }

    /// Puts programs at the paths that they have in their packages, and the libraries that they load, into an image.
    pub fn add_programs(&self, image: &mut Archive, programs: &[&str]) -> Result<()> {
        let (place, folder) = (self.release.arch.linker(), self.release.arch.libraries());
        let name = place.rsplit('/').next().unwrap_or(place);
        let linker = self.find(&[place, &format!("usr/{place}"), &format!("lib/{folder}/{name}")])?;
        let mut libraries = BTreeSet::new();
        for program in programs {
            let file = self.find(&[program])?;
            image.copy(program, &file)?;
            libraries.extend(self.libraries(&linker, &file)?);
        }
        for library in &libraries {
            let name = library.file_name().unwrap_or_default().to_string_lossy();
            image.copy(&format!("lib/{folder}/{name}"), library)?;
        }
        image.copy(place, &linker)
    }

    /// Puts a static busybox and a link for each of its commands into an image.
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

    /// Runs one of the packages' programs here.
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
        let folders = [format!("lib/{own}"), format!("usr/lib/{own}"), format!("usr/lib/{own}/pulseaudio")];
        let folders = folders.iter().map(|folder| &**folder).chain(LIBRARY_FOLDERS);
        let folders: Vec<String> =
            folders.map(|folder| self.root.join(folder).display().to_string()).collect();
        let mut command = self.command(linker);
        command.args(["--inhibit-cache", "--library-path", &folders.join(":"), "--list"]).arg(program);
        // A line is `libc.so.6 => /path/libc.so.6 (0x...)`; the linker itself and the vDSO have no arrow.
        tool::run(&mut command, "libc6")?
            .lines()
            .filter_map(|line| line.trim().split_once(" => "))
            .map(|(name, place)| match place.rsplit_once(" (") {
                Some((path, _)) => Ok(PathBuf::from(path)),
                None => Err(Error::NotInPackages { suite: self.release.suite.name(), what: name.to_owned() }),
            })
            .collect()
    }
}

/// The first of these paths that exists in a folder that packages of a release were unpacked into.
pub fn find(root: &Path, release: Release, paths: &[&str]) -> Result<PathBuf> {
    let full = paths.iter().map(|path| root.join(path.trim_start_matches('/')));
    full.into_iter()
        .find(|path| path.exists())
        .ok_or_else(|| Error::NotInPackages { suite: release.suite.name(), what: paths.join(" or ") })
}

/// The only folder in `folder` whose name begins with `prefix`.
pub fn only_folder(folder: &Path, prefix: &str) -> Option<PathBuf> {
    fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path())).find(|path| {
        path.is_dir() && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
    })
}
