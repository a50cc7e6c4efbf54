//! Errors while an image is built, with messages that say what to do.

use std::io;
use std::path::{Path, PathBuf};

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
    /// The machine's package sources contain no Debian archive.
    #[error(
        "no Debian archive in this machine's package sources (/etc/apt/sources.list, /etc/apt/sources.list.d): \
         set TALLY_MIRROR to the address of one"
    )]
    NoArchive,
    /// The signature of an archive's index cannot be verified.
    #[error(
        "the signature of {uri} cannot be verified: {reason} Install the package debian-archive-keyring, or set \
         TALLY_MIRROR to another mirror"
    )]
    NotSigned {
        /// The archive's address.
        uri: String,
        /// What apt says.
        reason: String,
    },
    /// A line of apt about a package has no SHA-256.
    #[error("the mirror's index has no SHA-256 of a package: {0}: set TALLY_MIRROR to another mirror")]
    NoHash(String),
    /// A downloaded file is not the one that the signed index names.
    #[error("{0}: the SHA-256 is not that of the mirror's signed index: set TALLY_MIRROR to another mirror")]
    WrongHash(String),
    /// A required program is not installed.
    #[error("`{program}` is not installed: apt-get install {package}")]
    MissingProgram {
        /// The program.
        program: String,
        /// The package that contains it.
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
