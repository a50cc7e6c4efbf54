//! Copies programs and their libraries from unpacked packages into an image.
//!
//! The libraries are those that the programs' ELF files name, and they come from the packages alone. Nothing of a
//! package is run, and nothing of this machine gets into an image.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use object::elf::{self, FileHeader64};
use object::read::elf::{ElfFile64, FileHeader};
use object::{Endianness, FileKind};

use crate::cpio::Archive;
use crate::error::{Error, Result};
use crate::release::{Arch, Release};
use crate::root;

/// Start of the list of commands in a busybox: NUL-terminated names in order, of which these are the first.
const FIRST_COMMANDS: &[u8] = b"[\0[[\0";

/// A directory into which packages of one release were unpacked.
pub struct Unpacked<'a> {
    root: &'a Path,
    release: Release,
}

/// What a program or a library says of the libraries that it needs.
struct Dynamic {
    needed: Vec<String>,
    /// The directories in which they are looked for before the system's.
    directories: Vec<String>,
}

impl<'a> Unpacked<'a> {
    /// Uses the packages of a release that were unpacked into `root`.
    pub fn new(root: &'a Path, release: impl Into<Release>) -> Self {
        Self { root, release: release.into() }
    }

    /// Returns the first of these paths that exists. Links are followed in the packages only.
    pub fn find(&self, paths: &[&str]) -> Result<PathBuf> {
        let mut found = paths.iter().filter_map(|path| root::resolve(self.root, Path::new(path)));
        found.next().ok_or_else(|| self.missing(paths.join(" or ")))
    }

    /// Adds programs to an image, at the same paths as in their packages, and their libraries.
    pub fn add_programs(&self, image: &mut Archive, programs: &[&str]) -> Result<()> {
        let (path, directory) = (self.release.arch.linker(), self.release.arch.libraries());
        let name = path.rsplit('/').next().unwrap_or(path);
        let linker = self.find(&[path, &format!("usr/{path}"), &format!("lib/{directory}/{name}")])?;
        // The C library needs the linker, which has a place of its own.
        let mut libraries = BTreeMap::from([(name.to_owned(), linker.clone())]);
        for program in programs {
            let file = self.find(&[program])?;
            image.copy(program, &file)?;
            self.add_libraries(&file, &mut libraries)?;
        }
        libraries.remove(name);
        for (name, library) in &libraries {
            image.copy(&format!("lib/{directory}/{name}"), library)?;
        }
        image.copy(path, &linker)
    }

    /// Adds a static busybox to an image, and a symbolic link for each of its commands.
    pub fn add_busybox(&self, image: &mut Archive) -> Result<()> {
        let busybox = self.find(&["bin/busybox", "usr/bin/busybox"])?;
        let content = fs::read(&busybox).map_err(Error::io("read", &busybox))?;
        let commands = commands(&content).ok_or_else(|| self.missing("busybox's list of commands".into()))?;
        image.copy("bin/busybox", &busybox)?;
        for name in commands {
            if name != "busybox" {
                image.link(&format!("bin/{name}"), "busybox");
            }
        }
        Ok(())
    }

    /// Adds all libraries that a file needs, directly and indirectly, to those that were found.
    fn add_libraries(&self, file: &Path, found: &mut BTreeMap<String, PathBuf>) -> Result<()> {
        let content = fs::read(file).map_err(Error::io("read", file))?;
        let dynamic = dynamic(&content, file, self.release.arch).ok_or_else(|| {
            self.missing(format!("a program for {} in {}", self.release.arch, file.display()))
        })?;
        for name in dynamic.needed {
            if found.contains_key(&name) {
                continue;
            }
            let library = self.library(&name, &dynamic.directories).ok_or_else(|| {
                let whose = file.strip_prefix(self.root).unwrap_or(file);
                self.missing(format!("the library {name}, which {} needs,", whose.display()))
            })?;
            found.insert(name, library.clone());
            self.add_libraries(&library, found)?;
        }
        Ok(())
    }

    /// Returns the library of this name in these directories or in the system's (ld.so(8)).
    fn library(&self, name: &str, directories: &[String]) -> Option<PathBuf> {
        let own = self.release.arch.libraries();
        let system = [format!("/lib/{own}"), format!("/usr/lib/{own}"), "/lib".into(), "/usr/lib".into()];
        directories.iter().chain(&system).find_map(|directory| {
            // `$ORIGIN` is a path on this machine, as the file was found there.
            let path = match Path::new(directory).strip_prefix(self.root) {
                Ok(inside) => inside.join(name),
                Err(_) => Path::new(directory).join(name),
            };
            let path = root::resolve(self.root, &path)?;
            let content = fs::read(&path).ok()?;
            dynamic(&content, &path, self.release.arch).is_some().then_some(path)
        })
    }

    fn missing(&self, what: String) -> Error {
        Error::NotInPackages { suite: self.release.suite.name(), what }
    }
}

/// Reads the dynamic section of a file (System V ABI, "Dynamic Linking"). Returns `None` if it is not an ELF file of
/// this architecture.
fn dynamic(content: &[u8], path: &Path, arch: Arch) -> Option<Dynamic> {
    if !matches!(FileKind::parse(content), Ok(FileKind::Elf64)) {
        return None;
    }
    let file: ElfFile64<Endianness> = ElfFile64::parse(content).ok()?;
    let header: &FileHeader64<Endianness> = file.elf_header();
    let machine = match arch {
        Arch::X86_64 => elf::EM_X86_64,
        Arch::Riscv64 => elf::EM_RISCV,
    };
    if header.e_machine(header.endian().ok()?) != machine {
        return None;
    }
    let table = file.elf_dynamic_table().ok()?;
    let strings = |tag| {
        let entries = table.iter().filter(move |entry| entry.tag == tag);
        let strings =
            entries.map(|entry| Some(String::from_utf8_lossy(table.string(entry).ok()?).into_owned()));
        strings.collect::<Option<Vec<String>>>()
    };
    // DT_RPATH has no meaning beside DT_RUNPATH.
    let paths = [strings(elf::DT_RUNPATH)?, strings(elf::DT_RPATH)?];
    let paths = paths.into_iter().find(|paths| !paths.is_empty()).unwrap_or_default();
    let origin = path.parent()?.to_str()?;
    let directories = paths.iter().flat_map(|paths| paths.split(':')).filter(|path| !path.is_empty());
    let directories = directories.map(|path| path.replace("${ORIGIN}", origin).replace("$ORIGIN", origin));
    Some(Dynamic { needed: strings(elf::DT_NEEDED)?, directories: directories.collect() })
}

/// Returns the commands of a busybox, which it would list itself. The sorted names are in its read-only data, one after
/// the other.
fn commands(busybox: &[u8]) -> Option<Vec<&str>> {
    let start = busybox.windows(FIRST_COMMANDS.len()).position(|window| window == FIRST_COMMANDS)?;
    let names = busybox[start..].split(|byte| *byte == 0).take_while(|name| !name.is_empty());
    let names = names.map(std::str::from_utf8).collect::<std::result::Result<Vec<_>, _>>().ok()?;
    (names.is_sorted() && names.contains(&"sh") && names.contains(&"mount")).then_some(names)
}

/// Returns a directory in `folder` whose name starts with `prefix`. There should be only one.
pub fn only_folder(folder: &Path, prefix: &str) -> Option<PathBuf> {
    fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.path())).find(|path| {
        path.is_dir() && path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix))
    })
}

#[cfg(test)]
pub(crate) mod tests;
