//! Why the lab could not do what it was asked.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use guest_images::Arch;

/// A failure of the lab itself, as opposed to one of the script that runs in it.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An image or one of its packages could not be had.
    #[error(transparent)]
    Image(#[from] guest_images::Error),
    /// A file or folder could not be read or written.
    #[error("cannot {action} {path}: {source}")]
    File {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system refused something that has no file name.
    #[error("cannot {action}: {source}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// Packages are missing that building the lab CPU needs, and this user cannot install them.
    #[error("building the lab CPU needs packages that are not installed; as root: apt-get install {}", .0.join(" "))]
    MissingPackages(Vec<&'static str>),
    /// The lab CPU does not compile.
    #[error("the lab CPU does not compile: {0}")]
    Compile(String),
    /// The simulated host ended before the script did.
    #[error("the simulated host ended before the script did ({cause})\n{console}")]
    HostDied {
        /// What is known of why.
        cause: String,
        /// The last lines of its console.
        console: String,
    },
    /// The script was still running at its limit.
    #[error("the script was still running after {} s and has been killed; it was here:\n{place}", limit.as_secs())]
    Hung {
        /// The limit that it had.
        limit: Duration,
        /// Where it was.
        place: String,
    },
    /// The simulated host did not get as far as the script.
    #[error("the simulated host did not boot within {} s; it was here:\n{place}", limit.as_secs())]
    NotBooted {
        /// How long it had.
        limit: Duration,
        /// Where it was.
        place: String,
    },
    /// The simulated host is of a kind that does not have it.
    #[error("{option}: a host of the kind {arch} has no such thing")]
    NotOnThisHost {
        /// What was asked for.
        option: &'static str,
        /// The kind of host.
        arch: Arch,
    },
    /// This machine is not one that can be measured.
    #[error("the benchmark cannot run on this machine: {0}")]
    NotHere(String),
    /// Cargo has made no program of what is one.
    #[error("cargo says of no program that it has compiled it")]
    NoProgram,
    /// Nothing is left of a benchmark.
    #[error("nothing of what was asked for can be measured: only the workload `loop` reads its counter")]
    NothingToMeasure,
    /// One of this project's programs is not where it is looked for.
    #[error("no program `{program}` in {}: cargo build --release --package {package}", folder.display())]
    NotBeside {
        /// The program.
        program: &'static str,
        /// The package that it is of.
        package: &'static str,
        /// Where it was looked for.
        folder: PathBuf,
    },
    /// An option names something that cannot be taken to the simulated host, or be brought back from there.
    #[error("{option} {path}: {why}")]
    Refused {
        /// The option.
        option: &'static str,
        /// What it names.
        path: PathBuf,
        /// What is wrong with that.
        why: String,
    },
    /// What a guest left did not come back whole.
    #[error("what the guest changed did not come back whole from the simulated host, and is lost")]
    Lost,
    /// A program that was run failed.
    #[error("`{0}` failed")]
    Command(String),
}

impl Error {
    /// For `map_err`: names the file that an I/O error is about.
    pub(crate) fn file(action: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::File { action, path, source }
    }

    /// For `map_err`: says what the system refused.
    pub(crate) fn system(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { action, source }
    }
}
