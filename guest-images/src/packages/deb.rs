//! Unpacks packages without installing them: a package is an `ar` archive with a compressed `tar` archive (deb(5)).

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read, Seek, SeekFrom};
use std::path::Path;

use crate::decompress;
use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"!<arch>\n";
const HEADER: usize = 60;

/// Unpacks the files of a package into a directory. Nothing is written outside of it, whatever the package has.
pub fn unpack(deb: &Path, into: &Path) -> Result<()> {
    let mut file = BufReader::new(File::open(deb).map_err(Error::io("open", deb))?);
    let (name, size) = find_data(&mut file).map_err(Error::io("unpack", deb))?;
    unpack_tar(decompress::reader(&name, file.take(size)), into).map_err(Error::io("unpack", deb))
}

/// Moves to the start of the archive with the files. Returns its name and size.
fn find_data(file: &mut (impl Read + Seek)) -> io::Result<(String, u64)> {
    let damaged = || io::Error::new(ErrorKind::InvalidData, "it is not a Debian package");
    let mut magic = [0; MAGIC.len()];
    file.read_exact(&mut magic)?;
    if magic != *MAGIC {
        return Err(damaged());
    }
    loop {
        let mut header = [0; HEADER];
        file.read_exact(&mut header).map_err(|_| damaged())?;
        let text = std::str::from_utf8(&header).map_err(|_| damaged())?;
        let name = text.get(..16).ok_or_else(damaged)?.trim_end().trim_end_matches('/');
        let size: u64 = text.get(48..58).and_then(|size| size.trim_end().parse().ok()).ok_or_else(damaged)?;
        if name.starts_with("data.tar") {
            return Ok((name.to_owned(), size));
        }
        // Members begin at even places.
        let next = i64::try_from(size.next_multiple_of(2)).map_err(|_| damaged())?;
        file.seek(SeekFrom::Current(next))?;
    }
}

fn unpack_tar(data: impl Read, into: &Path) -> io::Result<()> {
    std::fs::create_dir_all(into)?;
    let mut archive = tar::Archive::new(data);
    for entry in archive.entries()? {
        let mut entry = entry?;
        // The result is false for paths with `..`; links that lead outside are errors.
        if !entry.unpack_in(into)? {
            let path = entry.path()?.display().to_string();
            return Err(io::Error::new(
                ErrorKind::InvalidData,
                format!("{path} is outside of the directory"),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use tar::{Builder, EntryType, Header};

    /// Returns a package with these files and symbolic links.
    pub fn package(files: &[(&str, &[u8])], links: &[(&str, &str)]) -> Vec<u8> {
        let mut tar = Builder::new(Vec::new());
        let mut add = |kind, path: &str, target: &str, content: &[u8]| {
            let mut header = Header::new_gnu();
            header.set_entry_type(kind);
            header.set_mode(0o755);
            header.set_size(content.len() as u64);
            // The methods for names refuse what is tested here.
            header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
            header.as_gnu_mut().unwrap().linkname[..target.len()].copy_from_slice(target.as_bytes());
            header.set_cksum();
            tar.append(&header, content).unwrap();
        };
        for (path, target) in links {
            add(EntryType::Symlink, path, target, b"");
        }
        for (path, content) in files {
            add(EntryType::Regular, path, "", content);
        }
        let tar = tar.into_inner().unwrap();
        let mut deb = MAGIC.to_vec();
        for (name, content) in [("debian-binary", &b"2.0"[..]), ("control.tar", b""), ("data.tar", &tar)] {
            let size = content.len();
            deb.extend(format!("{name:<16}{:<12}{:<6}{:<6}{:<8}{size:<10}`\n", 0, 0, 0, 100_644).bytes());
            deb.extend(content);
            deb.resize(deb.len().next_multiple_of(2), b'\n');
        }
        deb
    }

    fn unpacked(deb: &[u8], root: &Path) -> Result<()> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.deb");
        fs::write(&path, deb).unwrap();
        unpack(&path, root)
    }

    #[test]
    fn files_and_links_have_their_places_and_permissions() {
        let root = tempfile::tempdir().unwrap();
        let deb = package(&[("./usr/bin/x", b"program")], &[("./usr/bin/y", "x"), ("./bin", "usr/bin")]);
        unpacked(&deb, root.path()).unwrap();
        assert_eq!(fs::read_to_string(root.path().join("bin/y")).unwrap(), "program");
        let mode = fs::metadata(root.path().join("usr/bin/x")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o755);
    }

    #[test]
    fn nothing_is_written_outside() {
        let folder = tempfile::tempdir().unwrap();
        let (root, outside) = (folder.path().join("root"), folder.path().join("outside"));
        fs::create_dir_all(&outside).unwrap();
        let target = outside.to_str().unwrap();
        for deb in [
            package(&[("../outside/x", b"")], &[]),
            package(&[("usr/../../outside/x", b"")], &[]),
            package(&[("usr/x", b"")], &[("usr", target)]),
            package(&[("usr/x", b"")], &[("usr", "../outside")]),
        ] {
            let _ = fs::remove_dir_all(&root);
            assert!(unpacked(&deb, &root).is_err());
            assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
        }
        fs::remove_dir_all(&root).unwrap();
        // An absolute path begins at the root directory of the package.
        unpacked(&package(&[("/usr/x", b"")], &[]), &root).unwrap();
        assert!(root.join("usr/x").exists());
        // A link that an earlier package has left is not followed either.
        symlink(&outside, root.join("earlier")).unwrap();
        assert!(unpacked(&package(&[("earlier/x", b"")], &[]), &root).is_err());
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }

    #[test]
    fn a_damaged_package_is_named() {
        let root = tempfile::tempdir().unwrap();
        let deb = package(&[("./usr/bin/x", b"program")], &[]);
        for end in [0, 8, 40, 100, 400] {
            let said = unpacked(&deb[..end], root.path()).unwrap_err().to_string();
            assert!(said.contains("x.deb"), "{said}");
        }
    }
}
