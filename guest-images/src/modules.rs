//! The modules of a kernel that drive Tally's devices, as an archive to put in front of an initrd.
//!
//! Kernels have some of them built in, and distributions pack the others in different ways. Here they come unpacked and
//! in one folder, with the lists that `modprobe` needs. A module tells itself what it needs and drives, and which kernel
//! it is for, in its section `.modinfo`, so a folder of modules is all that is needed.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufReader, Read};
use std::path::{Path, PathBuf};

use crate::cpio::Archive;
use crate::{Error, Result};

/// The bus of the devices, and the devices: console, file system, disk.
const WANTED: [&str; 4] = ["virtio_mmio", "virtio_console", "virtiofs", "virtio_blk"];
/// How modules may be packed.
const PACKED: [&str; 3] = ["gz", "xz", "zst"];

/// The archive for the kernel whose modules are in `folder`, which is one such as `/lib/modules/RELEASE`. What is not
/// there is taken to be part of the kernel.
pub fn archive(folder: &Path) -> Result<Vec<u8>> {
    let mut archive = Archive::new();
    add(&mut archive, folder)?;
    Ok(archive.finish())
}

/// Adds what [`archive`] is made of.
pub fn add(archive: &mut Archive, folder: &Path) -> Result<()> {
    let mut files = BTreeMap::new();
    list(folder, &mut files)?;
    let mut found = Vec::new();
    for name in WANTED {
        find(name, &files, &mut found)?;
    }
    let Some(release) = found.first().map(|module| module.release.clone()) else { return Ok(()) };
    let place = format!("lib/modules/{release}");
    let (mut needs, mut aliases) = (String::new(), String::new());
    for (at, module) in found.iter().enumerate() {
        archive.file(&format!("{place}/{}.ko", module.name), 0o644, &module.content);
        needs.push_str(&line_of_needs(module, &found[..at]));
        aliases.extend(module.aliases.iter().map(|alias| format!("alias {alias} {}\n", module.name)));
    }
    archive.file(&format!("{place}/modules.dep"), 0o644, needs.as_bytes());
    archive.file(&format!("{place}/modules.alias"), 0o644, aliases.as_bytes());
    Ok(())
}

struct Module {
    name: String,
    content: Vec<u8>,
    release: String,
    needs: Vec<String>,
    aliases: Vec<String>,
}

impl Module {
    fn read(name: &str, path: &Path) -> Result<Self> {
        let content = unpack(path).map_err(Error::io("unpack", path))?;
        let facts = facts(&content).ok_or_else(|| Error::NotAModule(path.to_path_buf()))?;
        let value = |key: &str| facts.iter().find_map(|fact| fact.strip_prefix(key)?.strip_prefix('='));
        let release = value("vermagic").and_then(|magic| magic.split_whitespace().next());
        Ok(Self {
            name: name.to_owned(),
            release: release.ok_or_else(|| Error::NotAModule(path.to_path_buf()))?.to_owned(),
            needs: value("depends")
                .unwrap_or_default()
                .split(',')
                .filter(|need| !need.is_empty())
                .map(plain)
                .collect(),
            aliases: facts.iter().filter_map(|fact| fact.strip_prefix("alias=")).map(str::to_owned).collect(),
            content,
        })
    }
}

/// The line for `modprobe` about a module: all that has to be loaded before it, what comes first at the end. None of the
/// `earlier` modules needs one that follows it.
fn line_of_needs(module: &Module, earlier: &[Module]) -> String {
    let mut needs: Vec<&String> = module.needs.iter().collect();
    let mut line = format!("{}.ko:", module.name);
    for other in earlier.iter().rev() {
        if needs.contains(&&other.name) {
            needs.extend(&other.needs);
            line.extend([" ", &other.name, ".ko"]);
        }
    }
    line + "\n"
}

/// Adds a module and, before it, those that it needs.
fn find(name: &str, files: &BTreeMap<String, PathBuf>, found: &mut Vec<Module>) -> Result<()> {
    let Some(path) = files.get(name).filter(|_| !found.iter().any(|module| module.name == name)) else {
        return Ok(());
    };
    let module = Module::read(name, path)?;
    for need in &module.needs {
        find(need, files, found)?;
    }
    found.push(module);
    Ok(())
}

/// Lists the modules in a folder and those below it by name. Links are not followed: some lead to the kernel's source.
fn list(folder: &Path, files: &mut BTreeMap<String, PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::io("read", folder))? {
        let entry = entry.map_err(Error::io("read", folder))?;
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
    let unpacked = match name.rsplit_once('.')? {
        (rest, ending) if PACKED.contains(&ending) => rest,
        _ => name,
    };
    unpacked.strip_suffix(".ko").map(plain)
}

/// Modules are the same to the kernel with either line in their names.
fn plain(name: &str) -> String {
    name.replace('-', "_")
}

fn unpack(path: &Path) -> io::Result<Vec<u8>> {
    let mut packed = BufReader::new(File::open(path)?);
    let mut content = Vec::new();
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("gz") => flate2::bufread::GzDecoder::new(packed).read_to_end(&mut content)?,
        Some("xz") => lzma_rust2::XzReader::new(packed, false).read_to_end(&mut content)?,
        Some("zst") => ruzstd::decoding::StreamingDecoder::new(packed)
            .map_err(io::Error::other)?
            .read_to_end(&mut content)?,
        _ => packed.read_to_end(&mut content)?,
    };
    Ok(content)
}

/// The lines `KEY=VALUE` of the section `.modinfo` (ELF-64 object file format, "Sections").
fn facts(module: &[u8]) -> Option<Vec<String>> {
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

    /// A module of which nothing is there but its `.modinfo`.
    fn module(facts: &str) -> Vec<u8> {
        const NAMES: &[u8] = b"\0.modinfo\0";
        let mut file = vec![0; 0x40];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let headers = 0x40 + NAMES.len() + facts.len();
        file[0x28..0x30].copy_from_slice(&headers.to_le_bytes());
        file[0x3a..0x40].copy_from_slice(&[0x40, 0, 3, 0, 1, 0]);
        file.extend_from_slice(NAMES);
        file.extend_from_slice(facts.as_bytes());
        let sections = [(0_u32, 0, 0), (0, 0x40, NAMES.len()), (1, 0x40 + NAMES.len(), facts.len())];
        for (name, start, length) in sections {
            let mut header = [0; 0x40];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&start.to_le_bytes());
            header[0x20..0x28].copy_from_slice(&length.to_le_bytes());
            file.extend_from_slice(&header);
        }
        file
    }

    fn driver(needs: &str, alias: &str) -> Vec<u8> {
        module(&format!("license=GPL\0alias={alias}\0depends={needs}\0vermagic=6.9.1-x SMP mod_unload \0"))
    }

    /// The text of a file in an archive.
    fn file(archive: &[u8], path: &str) -> String {
        let text = String::from_utf8_lossy(archive);
        let (_, rest) = text.split_once(&format!("{path}\0")).unwrap_or_else(|| panic!("no file {path}"));
        rest.trim_start_matches('\0').split(['\0']).next().unwrap().split("070701").next().unwrap().to_owned()
    }

    #[test]
    fn modules_come_unpacked_with_what_they_need_and_what_they_drive() {
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
        put("kernel/c/virtio_net.ko", b"a driver of a device that is not there");

        let archive = archive(folder.path()).unwrap();
        let needs = "virtio.ko:\nvirtio_ring.ko: virtio.ko\nvirtio_console.ko: virtio_ring.ko virtio.ko\n\
                     virtio_blk.ko: virtio_ring.ko virtio.ko\n";
        assert_eq!(file(&archive, "lib/modules/6.9.1-x/modules.dep"), needs);
        let aliases = "alias x virtio\nalias y virtio_ring\nalias virtio:d00000003v* virtio_console\n\
                       alias virtio:d00000002v* virtio_blk\n";
        assert_eq!(file(&archive, "lib/modules/6.9.1-x/modules.alias"), aliases);
        let content = driver("block-core,virtio_ring", "virtio:d00000002v*");
        assert!(archive.windows(content.len()).any(|window| window == content));
        assert!(!String::from_utf8_lossy(&archive).contains("virtio_net"));
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
}
