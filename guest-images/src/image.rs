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

/// Compresses an archive in the lz4 format that the kernel's unpacker reads: quick to undo even where every
/// instruction is simulated.
pub fn compress(archive: &[u8]) -> Vec<u8> {
    // `Documentation/admin-guide/initrd.rst` leaves the format to lz4's own documents: the "legacy frame" is a magic
    // number, then blocks of at most 8 MiB of content, each after its compressed length.
    const MAGIC: u32 = 0x184c_2102;
    const BLOCK: usize = 8 << 20;
    let mut packed = MAGIC.to_le_bytes().to_vec();
    for block in archive.chunks(BLOCK) {
        let compressed = lz4_flex::block::compress(block);
        let length = u32::try_from(compressed.len()).expect("a block is smaller than 4 GiB");
        packed.extend_from_slice(&length.to_le_bytes());
        packed.extend_from_slice(&compressed);
    }
    packed
}

/// The only folder in `folder` whose name begins with `prefix`.
pub fn only_folder(folder: &Path, prefix: &str) -> Option<PathBuf> {
    fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path())).find(|path| {
        path.is_dir() && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressed_blocks_come_back() {
        let content: Vec<u8> = (0..9_000_000_u32).map(|i| (i / 1000).to_le_bytes()[0]).collect();
        let packed = compress(&content);
        assert_eq!(packed[..4], [0x02, 0x21, 0x4c, 0x18]);
        let length = u32::from_le_bytes(packed[4..8].try_into().unwrap()) as usize;
        let first = lz4_flex::block::decompress(&packed[8..8 + length], 8 << 20).unwrap();
        assert_eq!(first, content[..8 << 20]);
        assert!(packed.len() < content.len() / 10);
    }
}
