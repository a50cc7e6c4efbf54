//! What can go wrong while an image is built, in words that say what to do about it.

use std::io;
use std::path::{Path, PathBuf};

/// Why an image could not be built or found.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder could not be read or written.
    #[error("cannot {action} {path}: {source}")]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// None of the variables that say where the cache belongs is set.
    #[error("no place for the cache: set TALLY_CACHE, XDG_CACHE_HOME or HOME")]
    NoCacheFolder,
    /// The machine's package sources name no Debian archive.
    #[error(
        "no Debian archive in this machine's package sources (/etc/apt/sources.list, /etc/apt/sources.list.d): \
         set TALLY_MIRROR to the address of one"
    )]
    NoArchive,
    /// A program that is needed is not installed.
    #[error("`{program}` is not installed: apt-get install {package}")]
    MissingProgram {
        /// The program.
        program: String,
        /// The package that has it.
        package: &'static str,
    },
    /// A program that was run failed.
    #[error("`{command}` failed ({status}): {tail}")]
    Command {
        /// The command line.
        command: String,
        /// How it ended.
        status: String,
        /// The last lines that it printed.
        tail: String,
    },
    /// There is no such kind of processor here.
    #[error("no host of the kind {0}: x86_64 or riscv64")]
    UnknownArch(String),
    /// The archive does not have a file that the image needs.
    #[error("{suite}: {what} not found in the unpacked packages")]
    NotInPackages {
        /// The suite that was looked at.
        suite: &'static str,
        /// What is missing.
        what: String,
    },
    /// A file is called as a module of the kernel is, and is none.
    #[error("{0}: not a kernel module of 64 bits")]
    NotAModule(PathBuf),
    /// `TALLY_GUEST` names a folder without a guest in it.
    #[error("TALLY_GUEST={} has no file `{file}`", folder.display())]
    GuestFolder {
        /// The folder.
        folder: PathBuf,
        /// The file that it lacks.
        file: &'static str,
    },
    /// No suite has this name.
    #[error("unknown suite `{0}`: bookworm, trixie or sid")]
    UnknownSuite(String),
}

impl Error {
    /// For `map_err`: names the file that an I/O error is about.
    pub fn io(action: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let path = path.as_ref().to_path_buf();
        move |source| Self::Io { action, path, source }
    }
}
