//! Errors while an image is built, with messages that say what to do.

use std::io;
use std::path::{Path, PathBuf};

use crate::distribution;
use crate::http::Failure;

/// The reason why an image could not be built or found.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory could not be read or written.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// The action that failed, as a verb.
        action: &'static str,
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    #[error("no place for the cache: set TALLY_CACHE, XDG_CACHE_HOME or HOME")]
    NoCacheFolder,
    #[error(
        "the cache {cache} is not used, for programs are run from it and {folder} belongs to user {owner}: \
         set TALLY_CACHE to a folder of your own"
    )]
    CacheOfOther {
        cache: PathBuf,
        /// The directory that belongs to another user.
        folder: PathBuf,
        owner: u32,
    },
    #[error(
        "the cache {cache} is not used, for programs are run from it and others may write to {folder} \
         (mode {mode:o}): `chmod go-w {folder}`, or set TALLY_CACHE to a folder of your own"
    )]
    CacheWritable {
        cache: PathBuf,
        /// The directory to which others may write.
        folder: PathBuf,
        mode: u32,
    },
    #[error(
        "{what} of {suite} cannot be fetched: {uri}: {failure}. Without a network, copy the cache of a machine that has \
         them (~/.cache/tally or TALLY_CACHE), or set TALLY_GUEST to a folder with the files `kernel` and `initrd`"
    )]
    NoNetwork { what: String, suite: &'static str, uri: String, failure: Failure },
    #[error("cannot fetch {uri}: {failure}: set TALLY_MIRROR to another mirror, or http_proxy and no_proxy")]
    Download { uri: String, failure: Failure },
    #[error("{uri} is not used: {reason}. Set TALLY_MIRROR to another mirror")]
    NotSigned { uri: String, reason: String },
    #[error("{uri} is not used: the index {what}. Set TALLY_MIRROR to another mirror")]
    Index { uri: String, what: String },
    #[error("there are no package lists of {0} in the cache")]
    NoLists(&'static str),
    #[error("{suite} has no package {name}")]
    NoPackage { suite: &'static str, name: String },
    #[error(
        "{suite} has no package for `{on}`, which {package} depends on: set TALLY_MIRROR to another mirror"
    )]
    Unmet { suite: &'static str, package: String, on: String },
    #[error(
        "{uri}: the SHA-256 is not that of the mirror's signed index: set TALLY_MIRROR to another mirror"
    )]
    WrongHash {
        uri: String,
        /// A part of the file was here before.
        is_continued: bool,
    },
    #[error("`{program}` is not installed: {}", distribution::advice(&[package]))]
    MissingProgram {
        program: String,
        /// Debian's name of the package that contains it.
        package: &'static str,
    },
    /// A program that was run failed.
    #[error("`{command}` failed ({status}): {tail}")]
    Command {
        command: String,
        status: String,
        /// The last lines of its output.
        tail: String,
    },
    #[error("unknown architecture `{0}`: x86_64 or riscv64")]
    UnknownArch(String),
    #[error("{suite}: {what} not found in the unpacked packages")]
    NotInPackages { suite: &'static str, what: String },
    #[error("{0}: not a kernel module of 64 bits")]
    NotAModule(PathBuf),
    #[error("TALLY_GUEST={} has no file `{file}`", folder.display())]
    GuestFolder { folder: PathBuf, file: &'static str },
    #[error("{path}: {reason}")]
    Image { path: PathBuf, reason: String },
    #[error("unknown suite `{0}`: bookworm, trixie or sid")]
    UnknownSuite(String),
}

impl Error {
    /// For `map_err`: adds the action and the file to an I/O error.
    pub fn io(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::Io { action, path, source }
    }
}

/// The result of this crate's fallible functions.
pub type Result<T> = std::result::Result<T, Error>;
