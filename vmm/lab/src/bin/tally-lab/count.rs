//! `tally-lab count`: what a command of this machine executes in the simulated processor. The numbers are the same on
//! every machine and day, so that a script can compare them with those of another version of the program.

mod program;
mod report;

use std::ffi::{OsStr, OsString};
use std::io::{self, Write, stderr, stdout};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use guest_images::Progress;
use tally_lab::{Error, Processor, Result, Scenario, quoted};

use crate::{Kind, named, tally};
use program::Program;
use report::{Baseline, Place, Report, SEPARATOR, Threshold};

/// The options of `tally-lab count`.
#[derive(Args)]
#[command(
    override_usage = "tally-lab count [OPTIONS] PROGRAM [ARGUMENT]...",
    after_help = "\
Exact and repeatable on any machine: instructions, branches, a model of caches
and branch prediction. Not good for: time. What the program prints goes to
standard error. Status 1: a count has grown; 125: nothing was counted.

Example:
  tally-lab count --baseline counts.json --threshold 0.5% ./prog"
)]
pub struct Count {
    /// Copy a file to the program's working directory
    #[arg(long, value_name = "FILE[:NAME]")]
    with: Vec<String>,
    /// Count these events instead, as perf names them
    #[arg(short, long, value_name = "LIST", value_delimiter = ',')]
    events: Vec<String>,
    /// Count in a guest that boots this kernel
    #[arg(long, value_name = "FILE")]
    kernel: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Compare with what --json printed earlier
    #[arg(long, value_name = "FILE")]
    baseline: Option<PathBuf>,
    /// Accept growth up to this, such as 0.5%
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
const SCRIPT: &str = ".tally-count";

impl Count {
    /// Counts, and prints the counts. Returns the status.
    pub fn run(self, progress: &mut Progress) -> Result<u8> {
        self.kind.check()?;
        let processor = self.kind.host.processor();
        let place = if self.in_guest() { Place::Guest } else { Place::Host };
        let baseline = self.baseline.as_deref().map(Baseline::read).transpose()?;
        let events = match &baseline {
            None if self.events.is_empty() => usual_events(processor),
            None => self.events.clone(),
            Some(baseline) => baseline.events(processor.name(), place, &self.events)?,
        };
        let (name, arguments) = self.command.split_first().expect("clap requires it");
        let program = Program::find(name, self.kind.arch())?;
        let mut files = program.files()?;
        for file in &self.with {
            let (path, name) = named(file);
            files.push((name, program::read(path.as_ref())?));
        }
        program::refuse_equal_names(&files)?;
        let scenario = self.scenario(files, script(&events, &program, arguments), progress)?;
        let (host, pmu) = (self.kind.host(), self.kind.pmu());
        let scenario = scenario.limit(Duration::from_secs(self.limit)).host(host).pmu(pmu);
        let mut printed = Vec::new();
        let mut errors = LastLine::new(stderr());
        let status = scenario.run_with(progress, &mut printed, &mut errors)?;
        let failed = |how: String| Err(Error::Counts(format!("the program {how}: nothing was counted")));
        if printed.is_empty() {
            return Err(Error::Counts("nothing was counted, for the reason above".to_owned()));
        }
        if status != 0 {
            return failed(format!("ended with status {status}"));
        }
        // perf's own status is 0 then.
        if let Some(signal) =
            errors.last().strip_prefix(&format!("{}: ", program.command()[0])).and_then(signal)
        {
            return failed(format!("was ended by a signal ({signal})"));
        }
        let lab = tally_lab::parts_of_host(host, processor, progress)?;
        let mut report =
            Report::new(processor.name(), place, lab, &self.command, &String::from_utf8_lossy(&printed))?;
        if let Some(baseline) = &baseline {
            report.compare(baseline, self.threshold)?;
        }
        report.print(&mut stdout(), self.json)?;
        Ok(if report.has_grown() { GROWN } else { 0 })
    }

    fn in_guest(&self) -> bool {
        self.kernel.is_some() || self.kind.guest_suite.is_some()
    }

    /// Returns a scenario that runs a script among these files, on the host or in a guest.
    fn scenario(
        &self,
        mut files: Vec<(String, Vec<u8>)>,
        script: String,
        progress: &mut Progress,
    ) -> Result<Scenario> {
        if !self.in_guest() {
            let scenario = Scenario::with_all_counters(script);
            return Ok(files
                .into_iter()
                .fold(scenario, |scenario, (name, content)| scenario.program(content, &name)));
        }
        files.push((SCRIPT.to_owned(), script.into_bytes()));
        let files: Vec<(&str, &[u8])> = files.iter().map(|(name, content)| (&**name, &**content)).collect();
        let kernel = if self.kernel.is_some() { "--kernel kernel" } else { "" };
        let scenario = Scenario::with_all_counters(format!("./tally run {kernel} -- sh ./{SCRIPT}"))
            .file(tally::program_for(self.kind.arch(), progress)?, "tally")
            .guest_with(self.kind.guest(), &files, progress)?;
        Ok(match &self.kernel {
            Some(kernel) => scenario.file(kernel, "kernel"),
            None => scenario,
        })
    }
}

/// Returns the events that are counted if none are named: as many as there are counters.
fn usual_events(processor: Processor) -> Vec<String> {
    let all = [
        "instructions:u",
        "instructions:k",
        "branches:u",
        "branch-misses:u",
        "cache-references:u",
        "cache-misses:u",
    ];
    let number = match processor {
        Processor::Amd | Processor::Intel => all.len(),
        // It has no others.
        Processor::Riscv64 => 3,
    };
    all[..number].iter().map(|&event| event.to_owned()).collect()
}

/// Returns the script that counts. It prints what perf prints; what the program prints goes to standard error.
fn script(events: &[String], program: &Program, arguments: &[OsString]) -> String {
    let word = |word: &OsStr| String::from_utf8_lossy(&quoted(word)).into_owned();
    let words = program.command().into_iter().map(OsString::from).chain(arguments.iter().cloned());
    let command: Vec<String> = words.map(|argument| word(&argument)).collect();
    format!(
        "exec 3>&1 >&2 </dev/null
perf stat -x '{SEPARATOR}' -o /tmp/counts -e {} -- {}
status=$?
[ ! -e /tmp/counts ] || cat /tmp/counts >&3
exit $status
",
        word(events.join(",").as_ref()),
        command.join(" "),
    )
}

/// Returns the text after a program's name if it is that of a signal with which perf reports the program's end: a
/// signal that ends programs.
fn signal(text: &str) -> Option<&str> {
    const SIGNALS: [&str; 20] = [
        "Hangup",
        "Interrupt",
        "Quit",
        "Illegal instruction",
        "Trace/breakpoint trap",
        "Aborted",
        "Bus error",
        "Floating point exception",
        "Killed",
        "User defined signal 1",
        "Segmentation fault",
        "User defined signal 2",
        "Broken pipe",
        "Alarm clock",
        "Terminated",
        "CPU time limit exceeded",
        "File size limit exceeded",
        "Virtual timer expired",
        "Profiling timer expired",
        "Bad system call",
    ];
    SIGNALS.contains(&text).then_some(text)
}

/// Passes a stream on, and keeps the start of its last line.
struct LastLine<W> {
    to: W,
    line: Vec<u8>,
    is_whole: bool,
}

impl<W: Write> LastLine<W> {
    const MOST: usize = 4096;

    fn new(to: W) -> Self {
        Self { to, line: Vec::new(), is_whole: false }
    }

    fn last(&self) -> String {
        String::from_utf8_lossy(&self.line).into_owned()
    }
}

impl<W: Write> Write for LastLine<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for &byte in bytes {
            if std::mem::replace(&mut self.is_whole, byte == b'\n') {
                self.line.clear();
            }
            if byte != b'\n' && self.line.len() < Self::MOST {
                self.line.push(byte);
            }
        }
        self.to.write_all(bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_a_stream_is_kept() {
        let mut stream = LastLine::new(Vec::new());
        for text in ["one\ntw", "o\n", "./prog: Killed", "\n"] {
            stream.write_all(text.as_bytes()).unwrap();
        }
        assert_eq!(stream.last(), "./prog: Killed");
        assert_eq!(stream.to, b"one\ntwo\n./prog: Killed\n");
        stream.write_all(b"x").unwrap();
        assert_eq!(stream.last(), "x");
    }

    #[test]
    fn only_the_text_of_a_signal_is_one() {
        assert_eq!(signal("Killed"), Some("Killed"));
        assert_eq!(signal("Killed 3 sheep"), None);
    }
}
