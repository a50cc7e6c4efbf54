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
    File { action: &'static str, path: PathBuf, source: io::Error },
    /// An operation failed that has no file name.
    #[error("cannot {action}: {source}")]
    System {
        /// The operation, as a verb and its object.
        action: &'static str,
        source: io::Error,
    },
    #[error("building the lab CPU needs packages that are not installed; as root: {}", distribution::advice(.0))]
    MissingPackages(Vec<&'static str>),
    #[error("the lab CPU does not compile: {0}")]
    Compile(String),
    #[error("the simulated host ended before the script did ({cause})\n{console}")]
    HostDied {
        /// Exit status of the lab CPU.
        cause: String,
        /// The last lines of its console.
        console: String,
    },
    #[error("the script was still running after {} s and has been killed; it hung here:\n{place}", limit.as_secs())]
    Hung { limit: Duration, place: String },
    #[error("the simulated host did not boot within {} s; it hung here:\n{place}", limit.as_secs())]
    NotBooted { limit: Duration, place: String },
    #[error("cannot count {program}: {why}")]
    Uncountable { program: PathBuf, why: String },
    /// There are no counts, or nothing to compare them with.
    #[error("{0}")]
    Counts(String),
    #[error("{option} is not available on {host} hosts")]
    NotOnThisHost { option: &'static str, host: &'static str },
    #[error("the simulated host's files do not fit into its {mib} MiB of memory")]
    NoMemory { mib: u64 },
    #[error("{0} is no Linux kernel for boot loaders (a bzImage)")]
    NoKernel(PathBuf),
    #[error("the benchmark cannot run on this machine: {0}")]
    NotHere(String),
    #[error("cargo has compiled no program: its output names no executable")]
    NoProgram,
    #[error("programs for RISC-V hosts are compiled from Tally's source: use `tally-lab` of a checkout")]
    NoSource,
    #[error(
        "there is nothing to measure: `read` works with the workload `loop` only, and `kvm` needs qemu-system-x86_64"
    )]
    NothingToMeasure,
    #[error(
        "there is no program `{program}` in {}; build it with cargo build --release --package {package}",
        folder.display()
    )]
    MissingProgram { program: &'static str, package: &'static str, folder: PathBuf },
    /// An option names something that cannot be copied to the simulated host or back.
    #[error("{option} {path}: {why}")]
    Refused { option: &'static str, path: PathBuf, why: String },
    #[error("the guest's changes did not come back completely from the simulated host, and are lost")]
    Lost,
    #[error("{0} takes no samples that could be profiled")]
    NoSamples(String),
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

pub type Result<T> = std::result::Result<T, Error>;
