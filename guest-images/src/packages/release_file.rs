//! An archive's index of indexes, the file `InRelease` of a suite.

use std::collections::HashMap;
use std::time::SystemTime;

use super::listed::{Listed, from_hex};
use super::stanza::Stanza;
use crate::date;

/// What is used of an `InRelease`.
#[derive(Debug, PartialEq, Eq)]
pub struct ReleaseFile {
    /// The suite's name, which stays when it becomes stable.
    pub codename: String,
    pub date: SystemTime,
    /// The time from which on it may be used no more.
    pub valid_until: Option<SystemTime>,
    /// The server has indexes also at an address with their hash, where they stay when there are newer ones.
    pub is_by_hash: bool,
    files: HashMap<String, Listed>,
}

impl ReleaseFile {
    /// Parses the text that is signed.
    pub fn parse(text: &str) -> Option<Self> {
        let stanza = Stanza::of(text);
        let field = |name| stanza.field(name);
        let valid_until = match field("Valid-Until") {
            Some(date) => Some(date::parse(date)?),
            None => None,
        };
        let files = field("SHA256")?.lines().map(str::trim).filter(|line| !line.is_empty());
        let files = files.map(|line| {
            let mut words = line.split_whitespace();
            let (sha256, size) = (from_hex(words.next()?)?, words.next()?.parse().ok()?);
            Some((words.next()?.to_owned(), Listed { size, sha256 }))
        });
        Some(Self {
            codename: field("Codename")?.to_owned(),
            date: date::parse(field("Date")?)?,
            valid_until,
            is_by_hash: field("Acquire-By-Hash") == Some("yes"),
            files: files.collect::<Option<_>>()?,
        })
    }

    /// Returns what it says of a file.
    pub fn file(&self, path: &str) -> Option<Listed> {
        self.files.get(path).copied()
    }
}
