//! Finds the Debian archive in this machine's package sources, in both formats of apt.
//!
//! Only the main archive is used. Security updates and third-party repositories have other suites.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Suites by which a Debian archive is recognised.
const DEBIAN_SUITES: [&str; 9] =
    ["bullseye", "bookworm", "trixie", "forky", "sid", "oldstable", "stable", "testing", "unstable"];

/// An archive and the keys with which its index is signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Archive {
    /// The archive's address.
    pub uri: String,
    /// The value of `Signed-By`, as written in the machine's sources.
    pub signed_by: Option<String>,
}

impl Archive {
    /// Returns the archive in `TALLY_MIRROR` if that is set, or else the one in this machine's sources.
    pub fn of_this_machine() -> Result<Self> {
        if let Some(uri) = env::var("TALLY_MIRROR").ok().filter(|uri| !uri.is_empty()) {
            let signed_by = Some("/usr/share/keyrings/debian-archive-keyring.gpg".to_owned());
            return Ok(Self { uri, signed_by: signed_by.filter(|keyring| Path::new(keyring).exists()) });
        }
        source_files()
            .iter()
            .filter_map(|path| Some((path, fs::read_to_string(path).ok()?)))
            .find_map(|(path, text)| match path.extension() {
                Some(extension) if extension == "sources" => from_stanzas(&text),
                _ => from_lines(&text),
            })
            .ok_or(Error::NoArchive)
    }
}

fn source_files() -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(directory) = fs::read_dir("/etc/apt/sources.list.d") {
        let mut more: Vec<PathBuf> = directory
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| {
                path.extension().is_some_and(|extension| extension == "list" || extension == "sources")
            })
            .collect();
        more.sort();
        files.append(&mut more);
    }
    files
}

fn is_debian(suites: &str, components: &str) -> bool {
    suites.split_whitespace().any(|suite| DEBIAN_SUITES.contains(&suite))
        && components.split_whitespace().any(|component| component == "main")
}

/// Parses the one-line format: `deb [signed-by=KEYRING] URI SUITE COMPONENTS`.
fn from_lines(text: &str) -> Option<Archive> {
    text.lines().find_map(|line| {
        let line = line.split('#').next()?.trim().strip_prefix("deb ")?.trim();
        let (options, line) = match line.strip_prefix('[') {
            Some(rest) => rest.split_once(']')?,
            None => ("", line),
        };
        let mut words = line.split_whitespace();
        let (uri, suite) = (words.next()?, words.next()?);
        let components: Vec<&str> = words.collect();
        let signed_by = options.split_whitespace().find_map(|option| option.strip_prefix("signed-by="));
        is_debian(suite, &components.join(" "))
            .then(|| Archive { uri: uri.to_owned(), signed_by: signed_by.map(str::to_owned) })
    })
}

/// Parses the format of `.sources` files: stanzas of fields.
fn from_stanzas(text: &str) -> Option<Archive> {
    text.split("\n\n").find_map(|stanza| {
        let enabled =
            field(stanza, "Enabled").is_none_or(|value| !matches!(value.as_str(), "no" | "false" | "0"));
        let binary = field(stanza, "Types")?.split_whitespace().any(|kind| kind == "deb");
        let uri = field(stanza, "URIs")?.split_whitespace().next()?.to_owned();
        let debian = is_debian(&field(stanza, "Suites")?, &field(stanza, "Components").unwrap_or_default());
        (enabled && binary && debian).then(|| Archive { uri, signed_by: field(stanza, "Signed-By") })
    })
}

/// Returns a field's value with its continuation lines. An embedded key needs them unchanged.
fn field(stanza: &str, name: &str) -> Option<String> {
    let mut value: Option<String> = None;
    for line in stanza.lines().filter(|line| !line.starts_with('#')) {
        if let Some(value) = value.as_mut() {
            if !line.starts_with([' ', '\t']) {
                break;
            }
            value.push('\n');
            value.push_str(line);
        } else if let Some((key, first)) = line.split_once(':')
            && key.eq_ignore_ascii_case(name)
        {
            value = Some(first.trim().to_owned());
        }
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_one_line_source_is_read_with_its_keyring() {
        let archive = from_lines(
            "# deb http://old.example/debian bookworm main\n\
             deb http://tools.example/apt stable-tools main\n\
             deb [arch=amd64 signed-by=/keys/debian.gpg] http://mirror.example/debian bookworm main contrib # here\n",
        );
        let expected = Archive {
            uri: "http://mirror.example/debian".into(),
            signed_by: Some("/keys/debian.gpg".into()),
        };
        assert_eq!(archive, Some(expected));
    }

    #[test]
    fn only_the_enabled_stanza_of_a_debian_archive_is_read() {
        let text = "Types: deb\nURIs: http://tools.example/apt\nSuites: nodistro\nComponents: main\n\n\
                    Types: deb\nEnabled: no\nURIs: http://off.example/debian\nSuites: bookworm\nComponents: main\n\n\
                    Types: deb\n# a comment\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n\
                    Components: main\nSigned-By:\n -----BEGIN\n .\n -----END\n";
        let archive = from_stanzas(text).unwrap();
        assert_eq!(archive.uri, "http://mirror.example/debian");
        assert_eq!(archive.signed_by.as_deref(), Some("\n -----BEGIN\n .\n -----END"));
    }

    #[test]
    fn security_suites_alone_are_not_an_archive() {
        let text =
            "Types: deb\nURIs: http://mirror.example/security\nSuites: bookworm-security\nComponents: main\n";
        assert_eq!(from_stanzas(text), None);
    }
}
