//! Files of packages, and what the signed index says of them.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};
use tempfile::NamedTempFile;

use crate::error::{Error, Result};

/// A package in the archive, or one of the files of a source package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    /// The package's name.
    pub name: String,
    /// The name of the `.deb` file.
    pub file: String,
    /// The file's address.
    pub(super) uri: String,
    pub(super) size: u64,
    /// The file's SHA-256 in the signed index.
    sha256: [u8; 32],
}

impl Package {
    /// Parses the output of `apt-get --print-uris`. Its lines have the form `'URI' FILE SIZE SHA256:HASH`.
    pub(super) fn parse_all(uris: &str) -> Result<Vec<Self>> {
        let lines = uris.lines().filter(|line| line.starts_with('\''));
        lines.map(|line| Self::parse(line).ok_or_else(|| Error::NoHash(line.to_owned()))).collect()
    }

    fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let uri = words.next()?.trim_matches('\'').to_owned();
        let file = words.next().filter(|file| !file.contains('/'))?.to_owned();
        let size = words.next()?.parse().ok()?;
        let sha256 = from_hex(words.next()?.strip_prefix("SHA256:")?)?;
        let name = file.split('_').next()?.to_owned();
        Some(Self { name, file, uri, size, sha256 })
    }

    /// Returns true if the package contains shared libraries. Packages with a library's data or an interpreter's
    /// modules are excluded, because a program that is only linked with the library does not need them.
    pub fn is_library(&self) -> bool {
        const RUNTIME_DATA: [&str; 4] = ["-common", "-data", "-stdlib", "-minimal"];
        (self.name.starts_with("lib") || self.name.starts_with("zlib"))
            && !RUNTIME_DATA.iter().any(|suffix| self.name.ends_with(suffix))
    }

    /// Returns the version as apt takes it: in the file's name, the colon after an epoch is encoded. The name of a
    /// source package's file has no epoch.
    pub fn version(&self) -> String {
        let rest = self.file.split('_').nth(1).unwrap_or_default();
        rest.strip_suffix(".dsc").unwrap_or(rest).replace("%3a", ":")
    }

    /// Returns the hash as apt writes it.
    pub(super) fn hash(&self) -> String {
        self.sha256.iter().fold("SHA256:".to_owned(), |text, byte| text + &format!("{byte:02x}"))
    }

    /// Returns true if the file in this directory is the one that the signed index names.
    pub(super) fn is_in(&self, folder: &Path) -> bool {
        let path = folder.join(&self.file);
        fs::metadata(&path).is_ok_and(|file| file.len() == self.size)
            && File::open(path)
                .and_then(|file| copy_and_hash(file, io::sink()))
                .is_ok_and(|hash| hash == self.sha256)
    }

    /// Moves the file from one directory to another if it is the one that the signed index names.
    pub(super) fn take(&self, from: &Path, into: &Path) -> Result<()> {
        let (from, to) = (from.join(&self.file), into.join(&self.file));
        let source = File::open(&from).map_err(Error::io("find", &from))?;
        // Another process may be taking the same package.
        let copy = NamedTempFile::new_in(into).map_err(Error::io("create a file in", into))?;
        if copy_and_hash(source, &copy).map_err(Error::io("copy", &from))? != self.sha256 {
            return Err(Error::WrongHash(self.file.clone()));
        }
        copy.persist(&to).map_err(|refused| Error::io("create", &to)(refused.error))?;
        fs::remove_file(&from).map_err(Error::io("remove", from))
    }
}

fn from_hex(text: &str) -> Option<[u8; 32]> {
    let byte = |at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..text.len()).step_by(2).map(byte).collect();
    bytes?.try_into().ok()
}

fn copy_and_hash(mut from: impl Read, mut to: impl Write) -> io::Result<[u8; 32]> {
    let mut hash = Sha256::new();
    let mut block = vec![0; 1 << 16];
    loop {
        match from.read(&mut block) {
            Ok(0) => return Ok(hash.finalize().into()),
            Ok(length) => {
                hash.update(&block[..length]);
                to.write_all(&block[..length])?;
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// SHA-256 of "abc" (FIPS 180-2, appendix B.1).
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn line(file: &str, size: u64) -> String {
        format!("'http://mirror.example/pool/x' {file} {size} SHA256:{ABC}\n")
    }

    fn package(name: &str) -> Package {
        Package::parse(&line(&format!("{name}_1_amd64.deb"), 3)).unwrap()
    }

    #[test]
    fn a_line_of_apt_is_parsed() {
        let text = format!("Reading package lists...\n{}", line("libc6_1%3a2.36-9~x_amd64.deb", 2_759_320));
        let packages = Package::parse_all(&text).unwrap();
        assert_eq!((packages[0].name.as_str(), packages[0].size), ("libc6", 2_759_320));
        assert_eq!(packages[0].version(), "1:2.36-9~x");
        assert_eq!(packages[0].uri, "http://mirror.example/pool/x");
        assert_eq!(packages[0].hash(), format!("SHA256:{ABC}"));
        assert_eq!(Package::parse(&line("qemu_7.2+dfsg-7.dsc", 1)).unwrap().version(), "7.2+dfsg-7");
    }

    #[test]
    fn a_package_without_a_sha256_in_the_index_is_an_error() {
        for hash in ["MD5Sum:78f9188026cbf5e150859a45ec6a608f", "SHA256:00", ""] {
            let error = Package::parse_all(&format!("'http://mirror.example/x' x_1_amd64.deb 3 {hash}"));
            assert!(error.unwrap_err().to_string().contains("x_1_amd64.deb"), "{hash}");
        }
    }

    #[test]
    fn a_changed_file_of_the_same_size_is_not_the_package() {
        let folder = tempfile::tempdir().unwrap();
        let package = package("abc");
        let path = folder.path().join(&package.file);
        assert!(!package.is_in(folder.path()));
        fs::write(&path, "abd").unwrap();
        assert!(!package.is_in(folder.path()));
        fs::write(&path, "abc").unwrap();
        assert!(package.is_in(folder.path()));
    }

    #[test]
    fn a_downloaded_file_that_is_not_in_the_index_is_not_taken() {
        let (from, into) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let package = package("abc");
        fs::write(from.path().join(&package.file), "abd").unwrap();
        let said = package.take(from.path(), into.path()).unwrap_err().to_string();
        assert!(said.starts_with("abc_1_amd64.deb"), "{said}");
        assert_eq!(fs::read_dir(into.path()).unwrap().count(), 0);
        fs::write(from.path().join(&package.file), "abc").unwrap();
        package.take(from.path(), into.path()).unwrap();
        assert!(package.is_in(into.path()));
    }

    #[test]
    fn libraries_are_distinguished_from_their_data_packages() {
        assert!(package("libpython3.11").is_library() && package("zlib1g").is_library());
        assert!(!package("libpython3.11-stdlib").is_library() && !package("python3").is_library());
    }
}
