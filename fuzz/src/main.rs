//! `cargo fuzz`: runs the fuzz targets for as long as the user says.

use std::collections::HashSet;
use std::num::NonZero;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;
use std::thread;
use std::time::Duration;

use clap::Parser;
use fuzz_targets::{TARGETS, Target, target};
use guest_images::Progress;
use tally_fuzz::{Error, Fuzzer, Outcome, Record, table};

/// Look for inputs with which Tally does what it never must
#[derive(Parser)]
#[command(
    name = "cargo fuzz",
    max_term_width = 80,
    after_help = "\
Inputs that reach something new are kept in target/fuzz/corpus, for the next
run. A finding ends its target's run; the status is then 1.

Examples:
  cargo fuzz                        # all targets, a minute each
  cargo fuzz --minutes 120 share    # one target for two hours
  cargo fuzz --write SECURITY.md    # add up what was run, in its table
  cargo fuzz --merge                # commit what the runs have kept"
)]
struct Arguments {
    /// The targets; all if none is named
    #[arg(value_name = "TARGET", value_parser = chosen)]
    targets: Vec<&'static Target>,
    /// Time for each target
    // To libFuzzer, 0 means without end.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u64).range(1..))]
    minutes: u64,
    /// Number of targets that run at a time; default: as many as this machine has cores
    #[arg(long, value_name = "N")]
    jobs: Option<NonZero<usize>>,
    /// Add the outcomes to the table in this Markdown file
    #[arg(long, value_name = "FILE", conflicts_with = "merge")]
    write: Option<PathBuf>,
    /// Put the kept inputs into the committed corpus, as few of them as reach all, instead of a run
    #[arg(long)]
    merge: bool,
    /// Run a target on this input alone; inputs of a pack are `PACK#NUMBER`, and a pack is all of them
    #[arg(long, value_name = "FILE", conflicts_with_all = ["merge", "write"])]
    replay: Option<PathBuf>,
    /// Print the targets
    #[arg(long, conflicts_with = "write")]
    list: bool,
}

fn chosen(name: &str) -> Result<&'static Target, String> {
    target(name).ok_or_else(|| {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        format!("the targets are {}", names.join(", "))
    })
}

fn main() -> ExitCode {
    let mut arguments = Arguments::parse();
    if arguments.targets.is_empty() {
        arguments.targets = TARGETS.iter().collect();
    }
    let mut named = HashSet::new();
    arguments.targets.retain(|target| named.insert(target.name));
    match run(&arguments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("fuzz: {error}");
            ExitCode::from(2)
        }
    }
}

/// Does what the arguments say. Returns whether nothing was found.
fn run(arguments: &Arguments) -> Result<bool, Error> {
    if arguments.list {
        for Target { name, about, .. } in &arguments.targets {
            println!("{name:<10}{about}");
        }
        return Ok(true);
    }
    let record = arguments.write.as_deref().map(|file| Record::new(file, &arguments.targets)).transpose()?;
    let mut progress = Progress::stderr("fuzz");
    let fuzzer = Fuzzer::build(&mut progress)?;
    progress.done();
    if let Some(input) = &arguments.replay {
        return arguments
            .targets
            .iter()
            .try_fold(true, |all, target| Ok(fuzzer.replay(target, input)? && all));
    }
    if arguments.merge {
        arguments.targets.iter().try_for_each(|target| fuzzer.merge(target))?;
        return Ok(true);
    }
    let results = run_all(&fuzzer, arguments, record.as_ref());
    let (outcomes, errors): (Vec<_>, Vec<_>) = results.into_iter().partition(Result::is_ok);
    let outcomes: Vec<Outcome> = outcomes.into_iter().flatten().collect();
    print!("{}", table(&outcomes));
    for Outcome { target, finding, .. } in &outcomes {
        if let Some(finding) = finding {
            println!("{target}: {}", finding.what);
            println!("  cargo fuzz {target} --replay {}", finding.input.display());
        }
    }
    errors.into_iter().try_for_each(|error| error.map(drop))?;
    Ok(outcomes.iter().all(|outcome| outcome.finding.is_none()))
}

/// Runs the targets, some at a time, and records each outcome as it comes. Returns the results in the order of the
/// targets.
fn run_all(fuzzer: &Fuzzer, arguments: &Arguments, record: Option<&Record>) -> Vec<Result<Outcome, Error>> {
    let time = Duration::from_secs(arguments.minutes.saturating_mul(60));
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let jobs = arguments.jobs.map_or(cores, NonZero::get);
    let waiting = Mutex::new(arguments.targets.iter().enumerate());
    let results = Mutex::new(Vec::new());
    thread::scope(|scope| {
        for _ in 0..jobs.min(arguments.targets.len()) {
            scope.spawn(|| {
                let next = || waiting.lock().expect("no thread panics").next();
                while let Some((number, target)) = next() {
                    let result = fuzzer.run(target, time);
                    // One at a time writes to the record.
                    let mut results = results.lock().expect("no thread panics");
                    let recorded = result.and_then(|outcome| {
                        record.map_or(Ok(()), |record| record.add(&outcome))?;
                        Ok(outcome)
                    });
                    results.push((number, recorded));
                }
            });
        }
    });
    let mut results = results.into_inner().expect("no thread panics");
    results.sort_by_key(|(number, _)| *number);
    results.into_iter().map(|(_, result)| result).collect()
}
