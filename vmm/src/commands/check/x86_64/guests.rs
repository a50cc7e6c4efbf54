//! The two guests, and the known counts of the programs in them. Each guest is a run of this program, so that the check
//! covers what users run.

use std::env;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{self, Command, Output, Stdio};

use anyhow::{Context, Result, bail};
use guest_images::child;
use guest_images::payloads::{BARE_METAL, LOOP_BRANCHES, LOOP_INSTRUCTIONS};
use tally_machine::pmu::{Choice, Model};
use vmm_sys_util::tempfile::TempFile;

use super::report::Report;
use crate::run::logging;

/// Runs guests by `tally run` with the same options.
pub struct Guests {
    program: PathBuf,
    options: Vec<String>,
    /// Remarks that the report has already.
    known: Vec<String>,
}

impl Guests {
    /// Prepares guests with the PMU that is checked.
    pub fn new(choice: Choice, counters: Option<u32>, known: Vec<String>) -> Result<Self> {
        let mut words = vec!["run".to_owned(), format!("--pmu={}", choice.name())];
        words.extend(counters.map(|counters| format!("--counters={counters}")));
        Ok(Self {
            program: env::current_exe().context("cannot find this program's file")?,
            options: words,
            known,
        })
    }

    /// Runs a guest, which has to end with this status, and returns its output. Tally's messages become notes in the
    /// report.
    fn run(&self, arguments: &[&str], status: i32, report: &mut Report) -> Result<String> {
        let mut command = Command::new(&self.program);
        command.args(&self.options).args(arguments).stdin(Stdio::null());
        // The messages are a part of the report, and must not depend on the user's environment.
        command.env_remove(logging::VARIABLE);
        child::die_with_this_process(&mut command, child::Death::Terminate);
        let Output { status: ended, stdout, stderr } = command.output().context("cannot run this program")?;
        let said = String::from_utf8_lossy(&stderr);
        let said = said.lines().map(|line| line.trim_start_matches("tally: ").to_owned());
        let news: Vec<String> = said.filter(|line| !self.known.contains(line)).collect();
        if ended.code() != Some(status) {
            bail!("a guest failed: {}", news.last().map_or("it said nothing", String::as_str));
        }
        for line in news {
            report.fact("note", &line)?;
        }
        Ok(String::from_utf8_lossy(&stdout).into_owned())
    }
}

/// Number of rounds of `count-user`'s loop. A round has two instructions; one more instruction leaves the loop.
const ROUNDS: u64 = 10_000_000;
/// Number of overflows, and the instructions between two of them.
const OVERFLOWS: u64 = 1000;
const PERIOD: u64 = 50_000;

/// Counts in user mode with each counter, and takes overflows.
pub fn bare_metal(guests: &Guests, model: Model, report: &mut Report) -> Result<()> {
    /// Instructions in user mode, which have the same encoding on AMD and Intel. Fixed counters ignore it.
    const INSTRUCTIONS: &str = "0:0x4100c0";
    /// Status after a write of 0 to the debug-exit port, with which the guest ends.
    const ENDED: i32 = 1;
    let kernel = payload()?;
    let path = format!("/proc/{}/fd/{}", process::id(), kernel.as_raw_fd());
    let counters = counters(model);
    let count = |counter| format!("count-user={INSTRUCTIONS},{ROUNDS},{counter}");
    let counts: Vec<String> = (0..counters.len()).map(count).collect();
    let words =
        format!("{} {} pmi=nmi,{OVERFLOWS},{PERIOD} {}", enabling(model), counts.join(" "), late(model));
    let said = guests.run(&["--kernel", &path, "--append", &words], ENDED, report)?;

    let mut counts = said.lines().filter_map(|line| line.strip_prefix("count ")?.split(' ').nth(1));
    for name in counters {
        let found = counts.next().and_then(|count| u64::from_str_radix(count, 16).ok());
        report.count(&format!("{name} in user mode"), found, 2 * ROUNDS + 1)?;
    }
    let overflows = said.lines().find_map(|line| line.strip_prefix("pmi "));
    let number = |what: &str| {
        let part = overflows?.split(", ").find_map(|part| part.strip_suffix(what))?;
        part.trim().parse().ok()
    };
    report.count(&format!("overflows, {PERIOD} instructions apart"), number(" overflows"), OVERFLOWS)?;
    report.count("their NMIs", number(" interrupts"), OVERFLOWS)?;
    for (what, line) in UNITS.into_iter().zip(said.lines().filter_map(|line| line.strip_prefix("late "))) {
        report.measured(&format!("NMIs come late by so many {what}"), &lateness(line))?;
    }
    Ok(())
}

/// What lateness is measured in.
const UNITS: [&str; 2] = ["instructions", "branches"];

/// Returns the words that measure how late interrupts are, with the event of each of the [`UNITS`].
fn late(model: Model) -> String {
    let branches = match model {
        Model::Amd(_) => 0xc2,
        Model::Intel(_) => 0xc4,
    };
    // It is on, interrupts, and counts user mode.
    let word = |event| format!("late=nmi,{OVERFLOWS},{PERIOD},1,0:{:#x}", 0x51_0000 | event);
    [0xc0, branches].map(word).join(" ")
}

/// Returns how late they were: the number of interrupts, the least, the median, the 99th percentile, the most.
fn lateness(line: &str) -> String {
    match line.split(' ').collect::<Vec<_>>()[..] {
        [number, least, median, most_of_them, most] => {
            format!("{least} to {most}, median {median}, 99 % at most {most_of_them} ({number} NMIs)")
        }
        _ => "no NMI came".to_owned(),
    }
}

/// Returns the bare-metal program in an unlinked file, which is gone when this process ends.
fn payload() -> Result<File> {
    let mut file = TempFile::new().context("cannot create a temporary file")?.into_file();
    file.write_all(BARE_METAL).context("cannot write the bare-metal program")?;
    Ok(file)
}

/// Returns the words that enable all counters: after a reset, Intel's fixed counters are off.
fn enabling(model: Model) -> String {
    const GLOBAL_CONTROL: u32 = 0x38f;
    match model {
        Model::Amd(_) => String::new(),
        Model::Intel(shape) => {
            let all = |counters| (1_u32 << counters) - 1;
            format!("wrmsr={GLOBAL_CONTROL:#x},{:#x}:{:#x}", all(shape.fixed), all(shape.general))
        }
    }
}

/// Returns the names of the counters that can count instructions.
fn counters(model: Model) -> Vec<String> {
    let general = |counters| (0..counters).map(|counter| format!("instructions, counter {counter}"));
    match model {
        Model::Amd(version) => general(version.counters()).collect(),
        Model::Intel(shape) => {
            let fixed = (shape.fixed > 0).then(|| "instructions, fixed counter 0".to_owned());
            general(shape.general).chain(fixed).collect()
        }
    }
}

/// Counts and samples with `perf`.
pub fn linux(guests: &Guests, model: Model, report: &mut Report) -> Result<()> {
    const PROGRAM: &str = "/lib/tally/loop";
    const SAMPLES_APART: u64 = 100_000;
    let stat = |events: &str| {
        format!(
            "perf stat -x ' ' -o /tmp/stat -e '{events}' {PROGRAM}; grep :u /tmp/stat | cut -d ' ' -f 1,3"
        )
    };
    let at_once = vec!["branches:u"; general(model)].join(",");
    let script = [
        // Otherwise the kernel lowers the sampling rate when samples take long.
        "echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent".to_owned(),
        stat("instructions:u"),
        stat("branches:u"),
        stat(&at_once),
        // Nothing is sampled in the kernel, and reading its list of symbols takes longer than the program.
        "mount --bind /dev/null /proc/kallsyms".to_owned(),
        format!("perf record -q -o /tmp/data -c {SAMPLES_APART} -e instructions:u {PROGRAM} 2>/dev/null"),
        "echo $(perf script -i /tmp/data -F period | wc -l) samples".to_owned(),
    ]
    .join("; ");
    let said = guests.run(&["--", "sh", "-c", &script], 0, report)?;

    let mut found = said.lines().map(|line| line.split(' ').next().and_then(|count| count.parse().ok()));
    let mut next = || found.next().flatten();
    report.count("perf stat -e instructions:u", next(), LOOP_INSTRUCTIONS)?;
    report.count("perf stat -e branches:u", next(), LOOP_BRANCHES)?;
    for counter in 0..general(model) {
        report.count(
            &format!("branches:u, {} at once, {}", general(model), counter + 1),
            next(),
            LOOP_BRANCHES,
        )?;
    }
    let samples = LOOP_INSTRUCTIONS / SAMPLES_APART;
    report.count(&format!("perf record -c {SAMPLES_APART} -e instructions:u"), next(), samples)?;
    Ok(())
}

fn general(model: Model) -> usize {
    match model {
        Model::Amd(version) => version.counters(),
        Model::Intel(shape) => shape.general,
    }
}
