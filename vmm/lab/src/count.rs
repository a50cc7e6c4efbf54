//! `tally-lab count`: what a command of this machine executes in the simulated processor. The numbers are the same on
//! every machine and day, so that a script can compare them with those of another version of the program.

mod program;
mod report;

use std::ffi::{OsStr, OsString};
use std::io::{stderr, stdout};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use guest_images::Progress;
use tally_lab::{Error, Processor, Result, Scenario, quoted};

use crate::{Kind, named, tally};
use program::Program;
use report::{Baseline, Report, Threshold};

/// The options of `tally-lab count`.
#[derive(Args)]
#[command(
    override_usage = "tally-lab count [OPTIONS] PROGRAM [ARGUMENT]...",
    after_help = "\
Exact and repeatable on any machine: instructions, branches, a model of caches
and branch prediction. Not good for: time. What the program prints goes to
standard error. Status 1: a count has grown; 125: there are none.

Example:
  tally-lab count --baseline counts.json --threshold 0.5% ./prog"
)]
pub struct Count {
    /// Copy a file to the program's working directory
    #[arg(long, value_name = "FILE[:NAME]")]
    with: Vec<String>,
    /// Other events, as perf names them
    #[arg(short, long, value_name = "LIST", value_delimiter = ',')]
    events: Vec<String>,
    /// Count in a guest that boots this kernel
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Compare with what an earlier run printed with --json
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Growth that is accepted, such as 0.5%
    #[arg(long, value_name = "PERCENT", default_value = "1%", requires = "baseline")]
    threshold: Threshold,
    /// Kill the program after this time
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    limit: u64,
    #[command(flatten)]
    kind: Kind,
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    command: Vec<OsString>,
}

/// Status of `tally-lab count` if a count has grown.
const GROWN: u8 = 1;
/// Name of the script in its working directory in a guest.
const SCRIPT: &str = "count";

impl Count {
    /// Counts, and prints the counts. Returns the status.
    pub fn run(self, progress: &mut Progress) -> Result<u8> {
        self.kind.check()?;
        let baseline = self.baseline.as_deref().map(Baseline::read).transpose()?;
        let (name, arguments) = self.command.split_first().expect("clap requires it");
        let program = Program::find(name, self.kind.arch())?;
        let mut files = program.files()?;
        for file in &self.with {
            let (path, name) = named(file);
            files.push((name, program::read(path.as_ref())?));
        }
        let script = self.script(&program, arguments);
        let scenario = match &self.kernel {
            None => files
                .into_iter()
                .fold(Scenario::new(script), |scenario, (name, content)| scenario.program(content, &name)),
            Some(kernel) => {
                files.push((SCRIPT.to_owned(), script.into_bytes()));
                let files: Vec<(&str, &[u8])> =
                    files.iter().map(|(name, content)| (&**name, &**content)).collect();
                let run = format!("./tally run --kernel kernel -- sh ./{SCRIPT}");
                Scenario::new(run)
                    .file(kernel, "kernel")
                    .file(tally::program_for(self.kind.arch(), progress)?, "tally")
                    .guest_with(self.kind.guest(), &files, progress)?
            }
        };
        let (host, pmu) = (self.kind.host(), self.kind.pmu());
        let scenario = scenario.limit(Duration::from_secs(self.limit)).host(host).pmu(pmu);
        let mut printed = Vec::new();
        let status = scenario.run_with(progress, &mut printed, &mut stderr())?;
        if printed.is_empty() {
            return Err(Error::Counts("nothing was counted, for the reason above".to_owned()));
        }
        if status != 0 {
            return Err(Error::Counts(format!(
                "the program ended with status {status}: nothing was counted"
            )));
        }
        let lab = tally_lab::identity(host, self.kind.host.processor(), progress)?;
        let mut report = Report::new(lab, &self.command, &String::from_utf8_lossy(&printed))?;
        if let Some(baseline) = &baseline {
            report.compare(baseline, self.threshold)?;
        }
        report.print(&mut stdout(), self.json)?;
        Ok(if report.has_grown() { GROWN } else { 0 })
    }

    /// Returns the script that counts. It prints what perf prints; what the program prints goes to standard error.
    ///
    /// perf does not say that a signal has ended the program, the kernel does.
    fn script(&self, program: &Program, arguments: &[OsString]) -> String {
        let usual = match self.kind.host.processor() {
            Processor::Amd | Processor::Intel => {
                "instructions:u,instructions:k,branches:u,branch-misses:u,cache-references:u,cache-misses:u"
            }
            Processor::Riscv64 => "instructions:u,instructions:k,branches:u",
        };
        let events = if self.events.is_empty() { usual.to_owned() } else { self.events.join(",") };
        let word = |word: &OsStr| String::from_utf8_lossy(&quoted(word)).into_owned();
        let mut command = program.command();
        command.extend(arguments.iter().map(|argument| word(argument)));
        format!(
            "exec 3>&1 >&2 </dev/null
echo 1 >/proc/sys/kernel/print-fatal-signals
dmesg -c >/tmp/before
perf stat -x, -o /tmp/counts -e {events} -- {command}
status=$?
signal=$(dmesg | sed -n 's/.*potentially unexpected fatal signal \\([0-9]*\\).*/\\1/p' | tail -n 1)
[ $status != 0 ] || [ -z \"$signal\" ] || status=$((128 + signal))
[ ! -e /tmp/counts ] || cat /tmp/counts >&3
exit $status
",
            events = word(events.as_ref()),
            command = command.join(" "),
        )
    }
}
