//! Collects the kernel modules for Tally's devices and shares in an archive, which is put in front of an initrd.
//!
//! Some of these modules may be built into the kernel, and distributions compress the others in different ways. The
//! archive contains them decompressed in one directory, with the files that `modprobe` needs (`modules.dep` and
//! `modules.alias`). These files are generated from the modules alone: the section `.modinfo` of a module contains its
//! dependencies, its aliases and the kernel's release.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use crate::cpio::Archive;
use crate::decompress;
use crate::error::{Error, Result};

/// The drivers of the transport and of the devices: console, file system, disk, network. And the overlay over a file
/// system of the host's.
const WANTED: [&str; 6] =
    ["virtio_mmio", "virtio_console", "virtiofs", "virtio_blk", "virtio_net", "overlay"];
/// File that lists the modules of a tree in which a kernel was built.
pub const ORDER: &str = "modules.order";
/// File name extensions of compressed modules.
const COMPRESSED: [&str; 3] = ["gz", "xz", "zst"];

/// Creates an archive for the kernel whose modules are in `directory`, such as `/lib/modules/RELEASE`. Missing modules
/// are assumed to be built into the kernel.
pub fn archive(directory: &Path) -> Result<Vec<u8>> {
    let mut archive = Archive::new();
    add(&mut archive, directory)?;
    Ok(archive.finish())
}

/// Creates an archive for the kernel in the tree in which it was built, whose `modules.order` lists the modules.
pub fn archive_of_tree(tree: &Path) -> Result<Vec<u8>> {
    let list = tree.join(ORDER);
    let order = fs::read_to_string(&list).map_err(Error::io("read", list))?;
    // Since Linux 6.3 it has the objects from which modules are made.
    let modules =
        order.lines().map(|line| line.strip_suffix(".o").map_or(line.into(), |rest| format!("{rest}.ko")));
    let files = modules.filter_map(|module| Some((module_name(Path::new(&module))?, tree.join(&module))));
    let mut archive = Archive::new();
    add_some(&mut archive, &files.collect())?;
    Ok(archive.finish())
}

/// Adds the modules to an existing archive, as described for [`archive`].
pub fn add(archive: &mut Archive, directory: &Path) -> Result<()> {
    add_some(archive, &all(directory)?)
}

fn add_some(archive: &mut Archive, files: &BTreeMap<String, PathBuf>) -> Result<()> {
    let mut found = Vec::new();
    for name in WANTED {
        find(name, files, &mut found)?;
    }
    let Some(release) = found.first().map(|module| module.release.clone()) else { return Ok(()) };
    let path = format!("lib/modules/{release}");
    let (mut dependencies, mut aliases) = (String::new(), String::new());
    for (index, module) in found.iter().enumerate() {
        archive.file(&format!("{path}/{}.ko", module.name), 0o644, &module.content);
        dependencies.push_str(&dependency_line(module, &found[..index]));
        aliases.extend(module.aliases.iter().map(|alias| format!("alias {alias} {}\n", module.name)));
    }
    archive.file(&format!("{path}/modules.dep"), 0o644, dependencies.as_bytes());
    archive.file(&format!("{path}/modules.alias"), 0o644, aliases.as_bytes());
    Ok(())
}

struct Module {
    name: String,
    content: Vec<u8>,
    release: String,
    dependencies: Vec<String>,
    aliases: Vec<String>,
}

impl Module {
    fn read(name: &str, path: &Path) -> Result<Self> {
        let content = content(path)?;
        let modinfo = modinfo(&content).ok_or_else(|| Error::NotAModule(path.to_path_buf()))?;
        let value = |key: &str| modinfo.iter().find_map(|line| line.strip_prefix(key)?.strip_prefix('='));
        let release = value("vermagic").and_then(|magic| magic.split_whitespace().next());
        Ok(Self {
            name: name.to_owned(),
            release: release.ok_or_else(|| Error::NotAModule(path.to_path_buf()))?.to_owned(),
            dependencies: value("depends")
                .unwrap_or_default()
                .split(',')
                .filter(|name| !name.is_empty())
                .map(normalized)
                .collect(),
            aliases: modinfo
                .iter()
                .filter_map(|line| line.strip_prefix("alias="))
                .map(str::to_owned)
                .collect(),
            content,
        })
    }
}

/// Returns a module's line of `modules.dep`, with all its direct and indirect dependencies. `modprobe` loads the last
/// one first. `earlier` must be sorted so that every module comes after its dependencies.
fn dependency_line(module: &Module, earlier: &[Module]) -> String {
    let mut dependencies: Vec<&String> = module.dependencies.iter().collect();
    let mut line = format!("{}.ko:", module.name);
    for other in earlier.iter().rev() {
        if dependencies.contains(&&other.name) {
            dependencies.extend(&other.dependencies);
            line.extend([" ", &other.name, ".ko"]);
        }
    }
    line + "\n"
}

/// Adds a module to `found`, after its dependencies.
fn find(name: &str, files: &BTreeMap<String, PathBuf>, found: &mut Vec<Module>) -> Result<()> {
    let Some(path) = files.get(name).filter(|_| !found.iter().any(|module| module.name == name)) else {
        return Ok(());
    };
    let module = Module::read(name, path)?;
    for dependency in &module.dependencies {
        find(dependency, files, found)?;
    }
    found.push(module);
    Ok(())
}

/// Returns the files of all modules below a directory, by name (with underscores).
pub fn all(directory: &Path) -> Result<BTreeMap<String, PathBuf>> {
    let mut files = BTreeMap::new();
    list(directory, &mut files)?;
    Ok(files)
}

/// Finds all modules below a directory, by name. Does not follow symbolic links, because some lead to the kernel's
/// source.
fn list(directory: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory).map_err(Error::io("read", directory))? {
        let entry = entry.map_err(Error::io("read", directory))?;
        let path = entry.path();
        if entry.file_type().map_err(Error::io("read", &path))?.is_dir() {
            list(&path, files)?;
        } else if let Some(name) = module_name(&path) {
            files.insert(name, path);
        }
    }
    Ok(())
}

fn module_name(path: &Path) -> Option<String> {
    let name = path.file_name()?.to_str()?;
    let decompressed = match name.rsplit_once('.')? {
        (rest, extension) if COMPRESSED.contains(&extension) => rest,
        _ => name,
    };
    decompressed.strip_suffix(".ko").map(normalized)
}

/// Returns a module's name with underscores. The kernel does not distinguish them from hyphens.
fn normalized(name: &str) -> String {
    name.replace('-', "_")
}

/// Returns a module's content, decompressed.
pub fn content(path: &Path) -> Result<Vec<u8>> {
    decompress(path).map_err(Error::io("decompress", path))
}

fn decompress(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    let file = BufReader::new(File::open(path)?);
    decompress::reader(&path.to_string_lossy(), file).read_to_end(&mut content)?;
    Ok(content)
}

/// Returns the strings `KEY=VALUE` of the section `.modinfo` (ELF-64 object file format, "Sections").
fn modinfo(module: &[u8]) -> Option<Vec<String>> {
    let number = |at: usize, size: usize| {
        let bytes = module.get(at..at.checked_add(size)?)?;
        Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
    };
    if !module.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (headers, size, count, names) =
        (number(0x28, 8)?, number(0x3a, 2)?, number(0x3c, 2)?, number(0x3e, 2)?);
    let header = |section: usize| headers.checked_add(section * size);
    let content = |section: usize| {
        let header = header(section)?;
        let (start, length) = (number(header.checked_add(0x18)?, 8)?, number(header.checked_add(0x20)?, 8)?);
        module.get(start..start.checked_add(length)?)
    };
    let names = content(names)?;
    let is_modinfo = |section: &usize| {
        let name = header(*section).and_then(|header| number(header, 4)).and_then(|name| names.get(name..));
        name.is_some_and(|name| name.starts_with(b".modinfo\0"))
    };
    let strings = content((0..count).find(is_modinfo)?)?.split(|byte| *byte == 0);
    Some(strings.map(|string| String::from_utf8_lossy(string).into_owned()).collect())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Returns an ELF file with only a section `.modinfo`.
    fn module(modinfo: &str) -> Vec<u8> {
        const NAMES: &[u8] = b"\0.modinfo\0";
        let mut file = vec![0; 0x40];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let headers = 0x40 + NAMES.len() + modinfo.len();
        file[0x28..0x30].copy_from_slice(&headers.to_le_bytes());
        file[0x3a..0x40].copy_from_slice(&[0x40, 0, 3, 0, 1, 0]);
        file.extend_from_slice(NAMES);
        file.extend_from_slice(modinfo.as_bytes());
        let sections = [(0_u32, 0, 0), (0, 0x40, NAMES.len()), (1, 0x40 + NAMES.len(), modinfo.len())];
        for (name, start, length) in sections {
            let mut header = [0; 0x40];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&start.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&length.to_le_bytes());
            file.extend_from_slice(&header);
        }
        file
    }

    fn driver(depends: &str, alias: &str) -> Vec<u8> {
        module(&format!("license=GPL\0alias={alias}\0depends={depends}\0vermagic=6.9.1-x SMP mod_unload \0"))
    }

    /// Returns the text of a file in an archive.
    fn file(archive: &[u8], path: &str) -> String {
        let text = String::from_utf8_lossy(archive);
        let (_, rest) = text.split_once(&format!("{path}\0")).unwrap_or_else(|| panic!("no file {path}"));
        rest.trim_start_matches('\0').split(['\0']).next().unwrap().split("070701").next().unwrap().to_owned()
    }

    #[test]
    fn modules_are_decompressed_and_listed_with_dependencies_and_aliases() {
        let folder = tempfile::tempdir().unwrap();
        let put = |path: &str, content: &[u8]| {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        put("kernel/a/virtio.ko", &driver("", "x"));
        put("kernel/a/virtio_ring.ko.zst", &{
            let level = ruzstd::encoding::CompressionLevel::Fastest;
            ruzstd::encoding::compress_to_vec(driver("virtio", "y").as_slice(), level)
        });
        put("kernel/b/virtio-blk.ko.xz", &{
            let mut packer = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::default()).unwrap();
            packer.write_all(&driver("block-core,virtio_ring", "virtio:d00000002v*")).unwrap();
            packer.finish().unwrap()
        });
        put("kernel/b/virtio_console.ko.gz", &{
            let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            packer.write_all(&driver("virtio_ring", "virtio:d00000003v*")).unwrap();
            packer.finish().unwrap()
        });
        put("kernel/c/virtio_gpu.ko", b"a driver of a device that is not there");

        let archive = archive(folder.path()).unwrap();
        let needs = "virtio.ko:\nvirtio_ring.ko: virtio.ko\nvirtio_console.ko: virtio_ring.ko virtio.ko\n\
                     virtio_blk.ko: virtio_ring.ko virtio.ko\n";
        assert_eq!(file(&archive, "lib/modules/6.9.1-x/modules.dep"), needs);
        let aliases = "alias x virtio\nalias y virtio_ring\nalias virtio:d00000003v* virtio_console\n\
                       alias virtio:d00000002v* virtio_blk\n";
        assert_eq!(file(&archive, "lib/modules/6.9.1-x/modules.alias"), aliases);
        let content = driver("block-core,virtio_ring", "virtio:d00000002v*");
        assert!(archive.windows(content.len()).any(|window| window == content));
        assert!(!String::from_utf8_lossy(&archive).contains("virtio_gpu"));
    }

    #[test]
    fn a_kernel_with_everything_built_in_gets_an_empty_archive() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(archive(folder.path()).unwrap(), Archive::new().finish());
    }

    #[test]
    fn a_damaged_module_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("virtio_mmio.ko");
        for end in [0, 0x40, 0x100] {
            fs::write(&path, &driver("", "")[..end]).unwrap();
            let error = archive(folder.path()).unwrap_err().to_string();
            assert!(error.contains("virtio_mmio.ko: not a kernel module"), "{error}");
        }
        fs::write(folder.path().join("virtiofs.ko.xz"), "text").unwrap();
        fs::remove_file(&path).unwrap();
        let error = archive(folder.path()).unwrap_err().to_string();
        assert!(error.contains("virtiofs.ko.xz"), "{error}");
    }

    #[test]
    fn modules_of_a_tree_are_those_that_it_lists() {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path();
        fs::create_dir_all(tree.join("drivers/virtio")).unwrap();
        fs::create_dir(tree.join("old")).unwrap();
        fs::write(tree.join("drivers/virtio/virtio_ring.ko"), driver("virtio", "y")).unwrap();
        fs::write(tree.join("drivers/virtio/virtio-mmio.ko"), driver("virtio_ring", "x")).unwrap();
        // What an earlier configuration has left.
        fs::write(tree.join("old/overlay.ko"), driver("", "z")).unwrap();
        assert!(archive_of_tree(tree).is_err(), "nothing was built");
        for order in [
            "drivers/virtio/virtio_ring.o\ndrivers/virtio/virtio-mmio.o\n",
            "drivers/virtio/virtio-mmio.ko\ndrivers/virtio/virtio_ring.ko\n",
        ] {
            fs::write(tree.join(ORDER), order).unwrap();
            let archive = archive_of_tree(tree).unwrap();
            let dependencies = file(&archive, "lib/modules/6.9.1-x/modules.dep");
            assert_eq!(dependencies, "virtio_ring.ko:\nvirtio_mmio.ko: virtio_ring.ko\n");
        }
        fs::write(tree.join(ORDER), "drivers/gone/virtio_net.o\n").unwrap();
        let error = archive_of_tree(tree).unwrap_err().to_string();
        assert!(error.contains("drivers/gone/virtio_net.ko"), "{error}");
    }
}
