//! Builds and runs the fuzz targets (the package `fuzz-targets`) with libFuzzer, on a stable compiler.
//!
//! `cargo fuzz run` of the crate cargo-fuzz does much the same. It would be one more tool to install, and it needs an
//! unstable compiler for what it does by default. What is left without that is the compiler's flags below.
//!
//! The corpus of each target is committed, and small: [`fuzz_targets::corpus`]. Inputs that reach something new are
//! kept between runs in `target/fuzz/corpus/NAME`, and findings in `target/fuzz/findings/NAME`. libFuzzer reads
//! folders, so the inputs of a pack are written to `target/fuzz/unpacked/NAME` before each run.

mod outcome;
mod record;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use fuzz_targets::corpus::{self, Error as CorpusError};
use fuzz_targets::{REPLAY_VARIABLE, TARGET_VARIABLE, Target};
use guest_images::Progress;
use guest_images::child::{Death, die_with_this_process, processor_time};
use rustix::io::retry_on_intr;
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
use tempfile::TempDir;

pub use outcome::{Finding, Outcome, table};
pub use record::Record;

/// Makes the compiler count which edges of the code are taken and pass on what is compared, for libFuzzer. Checks of
/// overflows are in the profile `fuzz`.
const FLAGS: [&str; 7] = [
    "--cfg",
    "fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];
/// libFuzzer is C++.
const NEEDS: [&str; 1] = ["g++"];
/// The compiler's name of the host, which is also the build's target.
const TRIPLE: &str =
    if cfg!(target_arch = "riscv64") { "riscv64gc-unknown-linux-gnu" } else { "x86_64-unknown-linux-gnu" };
/// Time after which one input counts as a finding. The targets count work where they can; this is for all other loops,
/// and for a busy machine.
const INPUT_LIMIT: &str = "-timeout=60";
/// The same time, below which an input is not slow: libFuzzer would keep one as if it were a finding.
const SLOW: &str = "-report_slow_units=60";
/// Most bytes of the inputs of a target's pack.
const MAX_CORPUS: usize = 64 << 10;
/// Memory with which a run counts as a finding, in MiB: more than the largest kernel, packed and unpacked.
const MEMORY_LIMIT: &str = "-rss_limit_mb=3072";

/// Why a target cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A package cannot be installed.
    #[error(transparent)]
    Lab(#[from] tally_lab::Error),
    /// A committed corpus cannot be used.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    #[error("{} has {inputs} inputs, with the numbers 1 to {inputs}", pack.display())]
    NoInput { pack: PathBuf, inputs: usize },
    #[error("the fuzz targets do not compile: {0}")]
    Build(String),
    /// A file cannot be used.
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{} has no row for {target}: add `{}`", path.display(), record::empty_row(target))]
    NoRow { path: PathBuf, target: &'static str },
    #[error("{target}: libFuzzer ended with {status}; its last words are in {}", log.display())]
    Failed { target: &'static str, status: String, log: PathBuf },
}

type Result<T> = std::result::Result<T, Error>;

fn file(path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { path, source }
}

/// The compiled targets.
pub struct Fuzzer {
    program: PathBuf,
    project: PathBuf,
}

impl Fuzzer {
    /// Compiles the targets, unless that has been done. Installs what is missing for that.
    pub fn build(progress: &mut Progress) -> Result<Self> {
        tally_lab::ensure(&NEEDS, progress)?;
        let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let project = fs::canonicalize(&project).map_err(file(&project))?;
        progress.step("compiling the fuzz targets");
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(&project).args([
            "build",
            "--quiet",
            "--locked",
            "--profile=fuzz",
            "--package=fuzz-targets",
        ]);
        cargo.args(["--features=libfuzzer", "--bin=fuzz-target", "--target-dir=target/fuzz"]);
        cargo.args(["--target", TRIPLE]);
        // Instead of the flags in .cargo/config.toml: this program is not linked statically.
        cargo.env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\x1f")).env_remove("RUSTFLAGS");
        die_with_this_process(&mut cargo, Death::Terminate);
        let status = cargo.status().map_err(|error| Error::Build(error.to_string()))?;
        if !status.success() {
            return Err(Error::Build(status.to_string()));
        }
        let program = project.join("target/fuzz").join(TRIPLE).join("fuzz/fuzz-target");
        Ok(Self { program, project })
    }

    /// Returns a folder below `target/fuzz`, and creates it.
    fn folder(&self, kind: &str, name: &str) -> Result<PathBuf> {
        let folder = self.project.join("target/fuzz").join(kind).join(name);
        fs::create_dir_all(&folder).map_err(file(&folder))?;
        Ok(folder)
    }

    /// Returns a folder below `target/fuzz` in which there is nothing.
    fn empty_folder(&self, kind: &str, name: &str) -> Result<PathBuf> {
        let folder = self.folder(kind, name)?;
        fs::remove_dir_all(&folder).and_then(|()| fs::create_dir(&folder)).map_err(file(&folder))?;
        Ok(folder)
    }

    /// Returns the folders with the committed corpus of a target.
    fn committed(&self, target: &Target) -> Result<Vec<PathBuf>> {
        let unpacked = self.empty_folder("unpacked", target.name)?;
        for (input, number) in corpus::read(&target.pack())?.iter().zip(1..) {
            unpack(&unpacked, number, input)?;
        }
        Ok([unpacked, target.named()].into_iter().filter(|folder| folder.is_dir()).collect())
    }

    /// Returns a command that runs a target, and its folder for temporary files, which is removed after it: a target
    /// that has a finding cannot do that.
    fn command(&self, target: &Target) -> Result<(Command, TempDir)> {
        // A file system in memory is faster, where there is one.
        let memory = Path::new("/dev/shm");
        let folder = if memory.is_dir() { TempDir::new_in(memory) } else { TempDir::new() };
        let folder = folder.map_err(file(memory))?;
        let mut command = Command::new(&self.program);
        command.env(TARGET_VARIABLE, target.name).env("TMPDIR", folder.path()).env("RUST_BACKTRACE", "1");
        command.current_dir(&self.project).args([INPUT_LIMIT, SLOW, MEMORY_LIMIT]);
        die_with_this_process(&mut command, Death::Kill);
        Ok((command, folder))
    }

    /// Runs a target for this time, or until its first finding.
    pub fn run(&self, target: &'static Target, time: Duration) -> Result<Outcome> {
        let (working, committed) = (self.folder("corpus", target.name)?, self.committed(target)?);
        let findings = self.folder("findings", target.name)?;
        let (mut command, _temporary) = self.command(target)?;
        command.arg(&working).args(&committed);
        command.arg(format!("-max_total_time={}", time.as_secs()));
        command.arg(format!("-max_len={}", target.max_len));
        command.arg(format!("-artifact_prefix={}/", findings.display()));
        command.arg("-print_final_stats=1");
        let (log, status, ran) = self.log(target, command)?;
        let text = String::from_utf8_lossy(&fs::read(&log).map_err(file(&log))?).into_owned();
        Outcome::of(target, &text, ran, status.success()).ok_or_else(|| Error::Failed {
            target: target.name,
            status: status.to_string(),
            log,
        })
    }

    /// Runs a command, and writes what it prints into a file. Returns the file, the status, and for how long it ran on
    /// a processor.
    fn log(&self, target: &Target, mut command: Command) -> Result<(PathBuf, ExitStatus, Duration)> {
        let log = self.folder("logs", "")?.join(format!("{}.log", target.name));
        let out = File::create(&log).map_err(file(&log))?;
        let err = out.try_clone().map_err(file(&log))?;
        let mut child = command.stdout(out).stderr(err).spawn().map_err(file(&self.program))?;
        // Waits until it has ended, and leaves it a zombie, which keeps its statistics.
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        retry_on_intr(|| waitid(WaitId::Pid(Pid::from_child(&child)), ended))
            .map_err(|error| file(&self.program)(error.into()))?;
        let ran = processor_time(&child).map_err(file(&self.program))?;
        let status = child.wait().map_err(file(&self.program))?;
        Ok((log, status, ran))
    }

    /// Runs a target on one input, which is a file or `PACK#NUMBER`, or all of a pack. Returns whether all went well.
    /// What the target prints goes to the terminal.
    pub fn replay(&self, target: &Target, input: &Path) -> Result<bool> {
        let inputs = self.replayed(target, input)?;
        let (mut command, _temporary) = self.command(target)?;
        let status = command.env(REPLAY_VARIABLE, "1").args(inputs).status().map_err(file(&self.program))?;
        Ok(status.success())
    }

    /// Returns the files with what is to be replayed. Those from a pack are written to `target/fuzz/replayed`.
    fn replayed(&self, target: &Target, input: &Path) -> Result<Vec<PathBuf>> {
        let Some((pack, number)) = in_pack(input) else {
            return Ok(vec![fs::canonicalize(input).map_err(file(input))?]);
        };
        let pack = fs::canonicalize(&pack).map_err(file(&pack))?;
        let folder = self.empty_folder("replayed", target.name)?;
        let inputs = corpus::read(&pack)?;
        let mut files = Vec::new();
        for (input, of) in inputs.iter().zip(1..) {
            if number.is_none_or(|number| number == of) {
                files.push(unpack(&folder, of, input)?);
            }
        }
        if files.is_empty() { Err(Error::NoInput { pack, inputs: inputs.len() }) } else { Ok(files) }
    }

    /// Adds inputs that were kept to a target's committed corpus: of the few that reach as much as all of them, the
    /// shortest, up to [`MAX_CORPUS`] bytes. Inputs with a name that a person has given stay.
    pub fn merge(&self, target: &'static Target) -> Result<()> {
        let (working, committed) = (self.folder("corpus", target.name)?, self.committed(target)?);
        let merged = self.empty_folder("merged", target.name)?;
        let (mut command, _temporary) = self.command(target)?;
        command.args(["-set_cover_merge=1".into(), format!("-max_len={}", target.max_len)]);
        command.arg(&merged).args(&committed).arg(&working);
        let (log, status, _) = self.log(target, command)?;
        if !status.success() {
            return Err(Error::Failed { target: target.name, status: status.to_string(), log });
        }
        let named = target.named();
        let named = if named.is_dir() { inputs(&named)? } else { Vec::new() };
        let mut room = MAX_CORPUS;
        let fits = |input: &Vec<u8>| room.checked_sub(input.len()).map(|left| room = left).is_some();
        let packed = inputs(&merged)?.into_iter().filter(|input| !named.contains(input)).take_while(fits);
        Ok(corpus::write(&target.pack(), packed.collect())?)
    }
}

/// Writes an input of a pack into a folder, by its number.
fn unpack(folder: &Path, number: usize, input: &[u8]) -> Result<PathBuf> {
    let path = folder.join(number.to_string());
    fs::write(&path, input).map_err(file(&path))?;
    Ok(path)
}

/// Returns the pack that is meant, and the number of the input in it if there is one. Returns `None` for other files.
fn in_pack(input: &Path) -> Option<(PathBuf, Option<usize>)> {
    let (pack, number) = match input.to_str()?.rsplit_once('#') {
        Some((pack, number)) => (Path::new(pack), Some(number.parse().ok()?)),
        None => (input, None),
    };
    (pack.extension()? == "inputs").then(|| (pack.to_owned(), number))
}

/// Returns the inputs in a folder, the shortest first.
fn inputs(folder: &Path) -> Result<Vec<Vec<u8>>> {
    let read = || -> io::Result<Vec<Vec<u8>>> {
        fs::read_dir(folder)?.map(|input| fs::read(input?.path())).collect()
    };
    let mut inputs = read().map_err(file(folder))?;
    inputs.sort();
    inputs.sort_by_key(Vec::len);
    Ok(inputs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_of_a_pack_are_named_by_their_number() {
        let pack = |name: &str, number| Some((PathBuf::from(name), number));
        assert_eq!(in_pack(Path::new("corpus/pmu.inputs#17")), pack("corpus/pmu.inputs", Some(17)));
        assert_eq!(in_pack(Path::new("corpus/pmu.inputs")), pack("corpus/pmu.inputs", None));
        for file in ["corpus/pmu/whole", "crash-0123", "folder#1/whole", "whole#1", "pmu.inputs#x"] {
            assert_eq!(in_pack(Path::new(file)), None, "{file}");
        }
    }
}
