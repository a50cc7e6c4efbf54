//! Files of packages, and what the signed index says of them.

use std::path::Path;

use super::listed::{Listed, from_hex};
use super::stanza::Stanza;

/// A package in the archive, or one of the files of a source package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    pub name: String,
    pub version: String,
    /// The name of the `.deb` file.
    pub file: String,
    pub(super) uri: String,
    pub(super) listed: Listed,
}

impl Package {
    /// Reads a stanza of the list `Packages` of an archive.
    pub(super) fn parse(stanza: Stanza, archive: &str) -> Option<Self> {
        let field = |name| stanza.field(name);
        let (name, version) = (field("Package")?.to_owned(), field("Version")?.to_owned());
        // The names of apt's cache, where the colon after an epoch is encoded.
        let file = format!("{name}_{}_{}.deb", version.replace(':', "%3a"), field("Architecture")?);
        let listed = Listed { size: field("Size")?.parse().ok()?, sha256: from_hex(field("SHA256")?)? };
        let uri = address(archive, field("Filename")?);
        is_file_name(&file).then_some(Self { name, version, file, uri, listed })
    }

    /// Reads the files in a stanza of the list `Sources` of an archive.
    pub(super) fn parse_source(stanza: Stanza, archive: &str) -> Option<Vec<Self>> {
        let field = |name| stanza.field(name);
        let (name, version, folder) = (field("Package")?, field("Version")?, field("Directory")?);
        let lines = field("Checksums-Sha256")?.lines().filter(|line| !line.trim().is_empty());
        let files = lines.map(|line| {
            let mut words = line.split_whitespace();
            let (sha256, size, file) = (from_hex(words.next()?)?, words.next()?.parse().ok()?, words.next()?);
            is_file_name(file).then(|| Self {
                name: name.to_owned(),
                version: version.to_owned(),
                file: file.to_owned(),
                uri: address(archive, &format!("{folder}/{file}")),
                listed: Listed { size, sha256 },
            })
        });
        files.collect()
    }

    /// Returns true if the package contains shared libraries. Packages with a library's data or an interpreter's
    /// modules are excluded, because a program that is only linked with the library does not need them.
    pub fn is_library(&self) -> bool {
        const RUNTIME_DATA: [&str; 4] = ["-common", "-data", "-stdlib", "-minimal"];
        (self.name.starts_with("lib") || self.name.starts_with("zlib"))
            && !RUNTIME_DATA.iter().any(|suffix| self.name.ends_with(suffix))
    }

    /// Returns true if the file in this directory is the one that the signed index names.
    pub(super) fn is_in(&self, folder: &Path) -> bool {
        self.listed.is(&folder.join(&self.file))
    }
}

/// Returns the address of a file in an archive. Some servers take a plus sign for a space.
fn address(archive: &str, path: &str) -> String {
    format!("{archive}/{}", path.replace('+', "%2b"))
}

/// Returns true if a text names a file in whatever directory it is put.
fn is_file_name(text: &str) -> bool {
    !text.contains('/') && text.bytes().all(|byte| byte.is_ascii_graphic()) && !text.starts_with('.')
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// SHA-256 of "abc" (FIPS 180-2, appendix B.1).
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    fn package(name: &str, hash: &str) -> Option<Package> {
        let text = format!(
            "Package: {name}\nArchitecture: amd64\nVersion: 1:2.36-9~x\nFilename: pool/x+1.deb\nSize: 3\nSHA256: {hash}\n"
        );
        Package::parse(Stanza::of(&text), "http://mirror.example/debian")
    }

    #[test]
    fn a_package_has_its_address_and_its_name_in_the_cache() {
        let package = package("libc6", ABC).unwrap();
        assert_eq!((package.name.as_str(), package.version.as_str()), ("libc6", "1:2.36-9~x"));
        assert_eq!(package.file, "libc6_1%3a2.36-9~x_amd64.deb");
        assert_eq!(package.uri, "http://mirror.example/debian/pool/x%2b1.deb");
        assert_eq!(package.listed.hex(), ABC);
    }

    #[test]
    fn a_source_package_has_files() {
        let text = format!(
            "Package: qemu\nVersion: 1:7.2-1\nDirectory: pool/q\nChecksums-Sha256:\n {ABC} 3 qemu_7.2-1.dsc\n {ABC} 9 qemu_7.2.orig.tar.xz\n"
        );
        let files = Package::parse_source(Stanza::of(&text), "http://mirror.example/debian").unwrap();
        assert_eq!(files[1].uri, "http://mirror.example/debian/pool/q/qemu_7.2.orig.tar.xz");
        let text = text.replace(" qemu_7.2-1.dsc", " ../qemu.dsc");
        assert_eq!(Package::parse_source(Stanza::of(&text), ""), None, "a file goes nowhere else");
    }

    #[test]
    fn a_package_without_a_sha256_or_with_a_strange_name_is_not_one() {
        for hash in ["78f9188026cbf5e150859a45ec6a608f", "00", ""] {
            assert_eq!(package("x", hash), None);
        }
        for name in ["../x", ".x", "a b"] {
            assert_eq!(package(name, ABC), None);
        }
    }

    #[test]
    fn a_changed_file_of_the_same_size_is_not_the_package() {
        let folder = tempfile::tempdir().unwrap();
        let package = package("abc", ABC).unwrap();
        let path = folder.path().join(&package.file);
        assert!(!package.is_in(folder.path()));
        fs::write(&path, "abd").unwrap();
        assert!(!package.is_in(folder.path()));
        fs::write(&path, "abc").unwrap();
        assert!(package.is_in(folder.path()));
    }

    #[test]
    fn libraries_are_distinguished_from_their_data_packages() {
        let is_library = |name| package(name, ABC).unwrap().is_library();
        assert!(is_library("libpython3.11") && is_library("zlib1g"));
        assert!(!is_library("libpython3.11-stdlib") && !is_library("python3"));
    }
}
