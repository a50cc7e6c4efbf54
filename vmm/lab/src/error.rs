//! Errors of the lab.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use guest_images::distribution;

/// A failure of the lab itself, as opposed to one of the script that runs in it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An image could not be built, or one of its packages could not be downloaded.
    #[error(transparent)]
    Image(#[from] guest_images::Error),
    /// An operation on a file or directory failed.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// The operation, as a verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// An operation failed that has no file name.
    #[error("cannot {action}: {source}")]
    System {
        /// The operation, as a verb and its object.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// Packages with which the lab CPU is built are missing, and this user cannot install them.
    #[error("building the lab CPU needs packages that are not installed; as root: {}", distribution::advice(.0))]
    MissingPackages(Vec<&'static str>),
    /// The lab CPU does not compile.
    #[error("the lab CPU does not compile: {0}")]
    Compile(String),
    /// The simulated host ended before the script did.
    #[error("the simulated host ended before the script did ({cause})\n{console}")]
    HostDied {
        /// Exit status of the lab CPU.
        cause: String,
        /// The last lines of its console.
        console: String,
    },
    /// The script was still running at its timeout.
    #[error("the script was still running after {} s and has been killed; it hung here:\n{place}", limit.as_secs())]
    Hung {
        /// The timeout.
        limit: Duration,
        /// Where the script hung.
        place: String,
    },
    /// The simulated host did not start the script in time.
    #[error("the simulated host did not boot within {} s; it hung here:\n{place}", limit.as_secs())]
    NotBooted {
        /// The timeout.
        limit: Duration,
        /// Where the host hung.
        place: String,
    },
    /// A program of this machine cannot run on the simulated host.
    #[error("cannot count {program}: {why}")]
    Uncountable {
        /// The program.
        program: PathBuf,
        /// The reason.
        why: String,
    },
    /// There are no counts, or nothing to compare them with.
    #[error("{0}")]
    Counts(String),
    /// An option does not exist for this host.
    #[error("{option} is not available on {host} hosts")]
    NotOnThisHost {
        /// The option.
        option: &'static str,
        /// The host.
        host: &'static str,
    },
    /// The host's files do not fit into its memory.
    #[error("the simulated host's files do not fit into its {mib} MiB of memory")]
    NoMemory {
        /// The host's memory.
        mib: u64,
    },
    /// The host's kernel is not in the format for boot loaders.
    #[error("{0} is no Linux kernel for boot loaders (a bzImage)")]
    NoKernel(PathBuf),
    /// The benchmark needs something that this machine does not have.
    #[error("the benchmark cannot run on this machine: {0}")]
    NotHere(String),
    /// Cargo's output names no executable.
    #[error("cargo has compiled no program: its output names no executable")]
    NoProgram,
    /// The program was compiled for a package, and something has to be compiled.
    #[error("programs for RISC-V hosts are compiled from Tally's source: use `tally-lab` of a checkout")]
    NoSource,
    /// The options leave nothing to measure.
    #[error(
        "there is nothing to measure: `read` works with the workload `loop` only, and `kvm` needs qemu-system-x86_64"
    )]
    NothingToMeasure,
    /// One of this project's programs is not in the directory of `tally-lab`.
    #[error(
        "there is no program `{program}` in {}; build it with cargo build --release --package {package}",
        folder.display()
    )]
    MissingProgram {
        /// The program.
        program: &'static str,
        /// The program's package.
        package: &'static str,
        /// The directory of `tally-lab`.
        folder: PathBuf,
    },
    /// An option names something that cannot be copied to the simulated host or back.
    #[error("{option} {path}: {why}")]
    Refused {
        /// The option.
        option: &'static str,
        /// The option's value.
        path: PathBuf,
        /// The reason.
        why: String,
    },
    /// The archive of what a guest changed is not complete.
    #[error("the guest's changes did not come back completely from the simulated host, and are lost")]
    Lost,
    /// A row of the benchmark without samples was to be profiled.
    #[error("{0} takes no samples that could be profiled")]
    NoSamples(String),
    /// A guest that samples could not be profiled.
    #[error("cannot profile the guest: {0}")]
    NotProfiled(String),
    /// A program failed.
    #[error("`{0}` failed")]
    Command(String),
}

impl Error {
    /// Returns a function for `map_err` that adds the file to an I/O error.
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }

    /// Returns a function for `map_err` that adds the operation to an I/O error.
    pub(crate) fn system(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { action, source }
    }
}

/// Result of the lab's functions.
pub type Result<T> = std::result::Result<T, Error>;
