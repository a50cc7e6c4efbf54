//! Picks what an image needs out of unpacked packages, and packs it.
//!
//! Libraries are found by asking the packages' own dynamic linker, so an image has those that its programs load and
//! no others.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cpio::Archive;
use crate::{Error, Result, Suite, tool};

/// The dynamic linker, under every name that it is called by.
const LINKER: &str = "/lib64/ld-linux-x86-64.so.2";
/// Where the packages put libraries.
const LIBRARY_FOLDERS: [&str; 6] = [
    "lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/pulseaudio",
    "lib64",
    "usr/lib64",
    "usr/lib",
];

/// A folder that packages of one suite were unpacked into.
pub struct Unpacked<'a> {
    root: &'a Path,
    suite: Suite,
}

impl<'a> Unpacked<'a> {
    /// Packages of `suite` that were unpacked into `root`.
    pub fn new(root: &'a Path, suite: Suite) -> Self {
        Self { root, suite }
    }

    /// The first of these paths that exists.
    pub fn find(&self, paths: &[&str]) -> Result<PathBuf> {
        paths
            .iter()
            .map(|path| self.root.join(path.trim_start_matches('/')))
            .find(|path| path.exists())
            .ok_or_else(|| Error::NotInPackages { suite: self.suite.name(), what: paths.join(" or ") })
    }

    /// Puts programs at the paths that they have in their packages, and the libraries that they load, into an image.
    pub fn add_programs(&self, image: &mut Archive, programs: &[&str]) -> Result<()> {
        let linker = self.find(&[
            LINKER,
            "usr/lib64/ld-linux-x86-64.so.2",
            "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
        ])?;
        let mut libraries = BTreeSet::new();
        for program in programs {
            let file = self.find(&[program])?;
            image.copy(program, &file)?;
            libraries.extend(self.libraries(&linker, &file)?);
        }
        for library in &libraries {
            let name = library.file_name().unwrap_or_default().to_string_lossy();
            image.copy(&format!("lib/x86_64-linux-gnu/{name}"), library)?;
        }
        image.copy(LINKER, &linker)
    }

    fn libraries(&self, linker: &Path, program: &Path) -> Result<Vec<PathBuf>> {
        let folders: Vec<String> =
            LIBRARY_FOLDERS.iter().map(|folder| self.root.join(folder).display().to_string()).collect();
        let mut command = Command::new(linker);
        command.args(["--inhibit-cache", "--library-path", &folders.join(":"), "--list"]).arg(program);
        // A line is `libc.so.6 => /path/libc.so.6 (0x...)`; the linker itself and the vDSO have no arrow.
        tool::run(&mut command, "libc6")?
            .lines()
            .filter_map(|line| line.trim().split_once(" => "))
            .map(|(name, place)| match place.rsplit_once(" (") {
                Some((path, _)) => Ok(PathBuf::from(path)),
                None => Err(Error::NotInPackages { suite: self.suite.name(), what: name.to_owned() }),
            })
            .collect()
    }
}

/// Puts a static busybox and a link for each of its commands into an image.
pub fn add_busybox(image: &mut Archive, busybox: &Path) -> Result<()> {
    image.copy("bin/busybox", busybox)?;
    for name in tool::run(Command::new(busybox).arg("--list"), "busybox-static")?.lines() {
        if name != "busybox" {
            image.link(&format!("bin/{name}"), "busybox");
        }
    }
    Ok(())
}

/// The only folder in `folder` whose name begins with `prefix`.
pub fn only_folder(folder: &Path, prefix: &str) -> Option<PathBuf> {
    fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path())).find(|path| {
        path.is_dir() && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
    })
}
