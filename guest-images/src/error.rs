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
        /// The file or directory.
        path: PathBuf,
        /// The error of the system call.
        source: io::Error,
    },
    /// None of the environment variables that determine the cache's directory is set.
    #[error("no place for the cache: set TALLY_CACHE, XDG_CACHE_HOME or HOME")]
    NoCacheFolder,
    /// The cache's directory, or one above it, belongs to another user.
    #[error(
        "the cache {cache} is not used, for programs are run from it and {folder} belongs to user {owner}: \
         set TALLY_CACHE to a folder of your own"
    )]
    CacheOfOther {
        /// The cache's directory.
        cache: PathBuf,
        /// The directory that belongs to another user.
        folder: PathBuf,
        /// That user's number.
        owner: u32,
    },
    /// Other users may write to the cache's directory or to one above it.
    #[error(
        "the cache {cache} is not used, for programs are run from it and others may write to {folder} \
         (mode {mode:o}): `chmod go-w {folder}`, or set TALLY_CACHE to a folder of your own"
    )]
    CacheWritable {
        /// The cache's directory.
        cache: PathBuf,
        /// The directory to which others may write.
        folder: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// There is no connection to the mirror or to the proxy.
    #[error(
        "{what} of {suite} cannot be fetched: {uri}: {failure}. Without a network, copy the cache of a machine that has \
         them (~/.cache/tally or TALLY_CACHE), or set TALLY_GUEST to a folder with the files `kernel` and `initrd`"
    )]
    NoNetwork {
        /// What is missing.
        what: String,
        /// The suite.
        suite: &'static str,
        /// The address.
        uri: String,
        /// The reason.
        failure: Failure,
    },
    /// A file could not be fetched.
    #[error("cannot fetch {uri}: {failure}: set TALLY_MIRROR to another mirror, or http_proxy and no_proxy")]
    Download {
        /// The address.
        uri: String,
        /// The reason.
        failure: Failure,
    },
    /// The signature of an archive's index cannot be verified.
    #[error("{uri} is not used: {reason}. Set TALLY_MIRROR to another mirror")]
    NotSigned {
        /// The index's address.
        uri: String,
        /// What is wrong.
        reason: String,
    },
    /// An archive's index is signed, but cannot be used.
    #[error("{uri} is not used: the index {what}. Set TALLY_MIRROR to another mirror")]
    Index {
        /// The index's address.
        uri: String,
        /// What is wrong.
        what: String,
    },
    /// There are no package lists in the cache.
    #[error("there are no package lists of {0} in the cache: `tally doctor --update` fetches them")]
    NoLists(&'static str),
    /// There is no package of this name.
    #[error("{suite} has no package {name}")]
    NoPackage {
        /// The suite.
        suite: &'static str,
        /// The package's name.
        name: String,
    },
    /// A package depends on one that is not there.
    #[error(
        "{suite} has no package for `{on}`, which {package} depends on: set TALLY_MIRROR to another mirror"
    )]
    Unmet {
        /// The suite.
        suite: &'static str,
        /// The package.
        package: String,
        /// What it depends on.
        on: String,
    },
    /// A downloaded file is not the one that the signed index names.
    #[error(
        "{uri}: the SHA-256 is not that of the mirror's signed index: set TALLY_MIRROR to another mirror"
    )]
    WrongHash {
        /// The file's address.
        uri: String,
        /// A part of the file was here before.
        is_continued: bool,
    },
    /// A required program is not installed.
    #[error("`{program}` is not installed: {}", distribution::advice(&[package]))]
    MissingProgram {
        /// The program.
        program: String,
        /// Debian's name of the package that contains it.
        package: &'static str,
    },
    /// A program that was run failed.
    #[error("`{command}` failed ({status}): {tail}")]
    Command {
        /// The command line.
        command: String,
        /// The program's exit status.
        status: String,
        /// The last lines of its output.
        tail: String,
    },
    /// There is no such architecture.
    #[error("unknown architecture `{0}`: x86_64 or riscv64")]
    UnknownArch(String),
    /// The packages do not contain a file that the image needs.
    #[error("{suite}: {what} not found in the unpacked packages")]
    NotInPackages {
        /// The suite of the packages.
        suite: &'static str,
        /// The missing file.
        what: String,
    },
    /// A file has the name of a kernel module but is not a valid one.
    #[error("{0}: not a kernel module of 64 bits")]
    NotAModule(PathBuf),
    /// The directory in `TALLY_GUEST` does not contain a guest.
    #[error("TALLY_GUEST={} has no file `{file}`", folder.display())]
    GuestFolder {
        /// The directory.
        folder: PathBuf,
        /// The missing file.
        file: &'static str,
    },
    /// There is no suite of this name.
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
