//! Finds a Debian archive: in this machine's package sources, in both formats of apt, where there are some.
//!
//! Two archives are used: the main one, and that of the security updates. Third-party repositories have other suites.
//! Sources whose address does not start with `http://` are passed over: signatures protect packages, not TLS.

mod expiry;

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

pub use expiry::Expiry;

/// Suites by which a Debian archive is recognised.
const DEBIAN_SUITES: [&str; 9] =
    ["bullseye", "bookworm", "trixie", "forky", "sid", "oldstable", "stable", "testing", "unstable"];

/// Debian's own archive, whose name leads to a server nearby.
const DEBIAN: &str = "http://deb.debian.org/debian";

/// An archive and the keys with which its index is signed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Archive {
    pub uri: String,
    /// The value of `Signed-By`, as written in the machine's sources.
    pub signed_by: Option<String>,
    /// What is done about an index that has expired.
    pub expiry: Expiry,
}

#[derive(Clone, Copy)]
enum Kind {
    /// The releases.
    Main,
    /// Security updates of the releases.
    Security,
}

impl Archive {
    /// Returns the archive in `TALLY_MIRROR` if that is set, or else the one in this machine's sources, or else
    /// Debian's own.
    pub fn of_this_machine() -> Self {
        let set = mirror().map(|uri| Self::new(&uri, None));
        set.or_else(|| Self::in_sources(Kind::Main)).unwrap_or_else(|| Self::new(DEBIAN, None))
    }

    fn new(uri: &str, signed_by: Option<String>) -> Self {
        Self { uri: uri.trim_end_matches('/').to_owned(), signed_by, expiry: Expiry::Refused }
    }

    /// Returns the archive with what a source's option says of an index that has expired.
    fn with_option(self, value: Option<&str>) -> Self {
        Self { expiry: value.map_or(self.expiry, Expiry::of_value), ..self }
    }

    /// Returns the archive of the security updates of this one: the one in this machine's sources, or else the one that
    /// most mirrors have beside this one, if its address can be told.
    pub fn security_updates(&self) -> Option<Self> {
        let configured = if mirror().is_none() { Self::in_sources(Kind::Security) } else { None };
        configured.or_else(|| self.security_beside())
    }

    fn security_beside(&self) -> Option<Self> {
        let is_usual = self.uri.ends_with("/debian");
        is_usual.then(|| Self { uri: format!("{}-security", self.uri), ..self.clone() })
    }

    /// Returns the files with the archive's keys that the machine's sources name.
    pub(crate) fn keyrings(&self) -> impl Iterator<Item = &Path> {
        let words = self.signed_by.iter().flat_map(|keys| keys.split([',', ' ', '\n']));
        words.map(Path::new).filter(|path| path.is_absolute())
    }

    fn in_sources(kind: Kind) -> Option<Self> {
        let files = source_files();
        let mut texts = files.iter().filter_map(|path| Some((path, fs::read_to_string(path).ok()?)));
        let found = texts.find_map(|(path, text)| match path.extension() {
            Some(extension) if extension == "sources" => from_stanzas(&text, kind),
            _ => from_lines(&text, kind),
        })?;
        let accepted = [found.expiry, Expiry::of_this_machine()].contains(&Expiry::Accepted);
        Some(Self { expiry: if accepted { Expiry::Accepted } else { Expiry::Refused }, ..found })
    }
}

/// Returns the value of `TALLY_MIRROR`.
fn mirror() -> Option<String> {
    env::var("TALLY_MIRROR").ok().filter(|uri| !uri.is_empty())
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

fn is_debian(suites: &str, components: &str, kind: Kind) -> bool {
    let is_ours = |suite: &str| match kind {
        Kind::Main => DEBIAN_SUITES.contains(&suite),
        Kind::Security => suite.strip_suffix("-security").is_some_and(|suite| DEBIAN_SUITES.contains(&suite)),
    };
    suites.split_whitespace().any(is_ours)
        && components.split_whitespace().any(|component| component == "main")
}

/// Parses the one-line format: `deb [signed-by=KEYRING] URI SUITE COMPONENTS`.
fn from_lines(text: &str, kind: Kind) -> Option<Archive> {
    text.lines().find_map(|line| {
        let line = line.split('#').next()?.trim().strip_prefix("deb ")?.trim();
        let (options, line) = match line.strip_prefix('[') {
            Some(rest) => rest.split_once(']')?,
            None => ("", line),
        };
        let mut words = line.split_whitespace();
        let (uri, suite) = (words.next()?, words.next()?);
        let components: Vec<&str> = words.collect();
        let option = |name: &str| options.split_whitespace().find_map(|option| option.strip_prefix(name));
        (is_debian(suite, &components.join(" "), kind) && uri.starts_with("http://")).then(|| {
            Archive::new(uri, option("signed-by=").map(str::to_owned))
                .with_option(option("check-valid-until="))
        })
    })
}

/// Parses the format of `.sources` files: stanzas of fields.
fn from_stanzas(text: &str, kind: Kind) -> Option<Archive> {
    text.split("\n\n").find_map(|stanza| {
        let enabled =
            field(stanza, "Enabled").is_none_or(|value| !matches!(value.as_str(), "no" | "false" | "0"));
        let binary = field(stanza, "Types")?.split_whitespace().any(|kind| kind == "deb");
        let uris = field(stanza, "URIs")?;
        let uri = uris.split_whitespace().find(|uri| uri.starts_with("http://"))?;
        let components = field(stanza, "Components").unwrap_or_default();
        let debian = is_debian(&field(stanza, "Suites")?, &components, kind);
        let checks = field(stanza, "Check-Valid-Until");
        (enabled && binary && debian)
            .then(|| Archive::new(uri, field(stanza, "Signed-By")).with_option(checks.as_deref()))
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
            Kind::Main,
        );
        let expected = Archive::new("http://mirror.example/debian", Some("/keys/debian.gpg".into()));
        assert_eq!(archive, Some(expected));
    }

    #[test]
    fn only_the_enabled_stanza_of_a_debian_archive_is_read() {
        let text = "Types: deb\nURIs: http://tools.example/apt\nSuites: nodistro\nComponents: main\n\n\
                    Types: deb\nEnabled: no\nURIs: http://off.example/debian\nSuites: bookworm\nComponents: main\n\n\
                    Types: deb\n# a comment\nURIs: http://mirror.example/debian\nSuites: bookworm bookworm-updates\n\
                    Components: main\nSigned-By:\n -----BEGIN\n .\n -----END\n";
        let archive = from_stanzas(text, Kind::Main).unwrap();
        assert_eq!(archive.uri, "http://mirror.example/debian");
        assert_eq!(archive.signed_by.as_deref(), Some("\n -----BEGIN\n .\n -----END"));
    }

    #[test]
    fn a_source_may_say_that_its_index_is_used_when_it_has_expired() {
        let line = "deb [check-valid-until=no] http://mirror.example/debian sid main";
        let stanza = "Types: deb\nURIs: http://mirror.example/debian\nSuites: sid\nComponents: main\nCheck-Valid-Until: no";
        for archive in [from_lines(line, Kind::Main), from_stanzas(stanza, Kind::Main)] {
            assert_eq!(archive.unwrap().expiry, Expiry::Accepted);
        }
    }

    #[test]
    fn sources_that_are_not_fetched_by_http_are_passed_over() {
        let lines = "deb https://tls.example/debian bookworm main\ndeb cdrom:[x]/ bookworm main\n\
                     deb http://mirror.example/debian bookworm main\n";
        assert_eq!(from_lines(lines, Kind::Main).unwrap().uri, "http://mirror.example/debian");
        let stanza = "Types: deb\nURIs: https://tls.example/debian\nSuites: bookworm\nComponents: main\n";
        assert_eq!(from_stanzas(stanza, Kind::Main), None);
    }

    #[test]
    fn security_updates_are_found_in_an_archive_of_their_own() {
        let line = "deb http://mirror.example/security/ bookworm-security main";
        assert_eq!(from_lines(line, Kind::Main), None, "they alone are not a release");
        let stanza =
            "Types: deb\nURIs: http://mirror.example/security\nSuites: bookworm-security\nComponents: main\n";
        assert_eq!(from_stanzas(stanza, Kind::Main), None);
        for found in [from_lines(line, Kind::Security), from_stanzas(stanza, Kind::Security)] {
            assert_eq!(found.unwrap().uri, "http://mirror.example/security");
        }
        assert_eq!(from_lines("deb http://mirror.example/debian bookworm main", Kind::Security), None);
    }

    #[test]
    fn a_mirror_has_the_security_updates_beside_the_releases() {
        let beside = |uri: &str| Archive::new(uri, Some("/keys/debian.gpg".into())).security_beside();
        let found = beside("http://mirror.example/debian/").unwrap();
        assert_eq!(found.uri, "http://mirror.example/debian-security");
        assert_eq!(found.signed_by.as_deref(), Some("/keys/debian.gpg"));
        assert_eq!(beside("http://snapshot.example/archive/debian/20250520T000000Z"), None);
    }
}
