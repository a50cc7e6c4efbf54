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
    /// The machine's package sources contain no Debian archive.
    #[error(
        "no Debian archive in this machine's package sources (/etc/apt/sources.list, /etc/apt/sources.list.d): \
         set TALLY_MIRROR to the address of one"
    )]
    NoArchive,
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
