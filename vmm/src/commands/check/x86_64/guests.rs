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
use tally_machine::target::STATISTICS;
use vmm_sys_util::tempfile::TempFile;

use super::report::{Distribution, Report};
use crate::run::logging;

/// Runs guests by `tally run` with the same options.
pub struct Guests {
    program: PathBuf,
    options: Vec<String>,
    /// Remarks that the report has already.
    known: Vec<String>,
    /// Frequency of a guest's time-stamp counter, in kHz.
    clock: u32,
}

/// What a guest and Tally have said.
struct Said {
    out: String,
    /// What the PMU has done, as the machine says it at its end.
    statistics: Option<String>,
}

impl Guests {
    /// Prepares guests with the PMU that is checked.
    pub fn new(choice: Choice, counters: Option<u32>, known: Vec<String>, clock: u32) -> Result<Self> {
        let mut words = vec!["run".to_owned(), format!("--pmu={}", choice.name())];
        words.extend(counters.map(|counters| format!("--counters={counters}")));
        Ok(Self {
            program: env::current_exe().context("cannot find this program's file")?,
            options: words,
            known,
            clock,
        })
    }

    /// Runs a guest, which has to end with this status, and returns its output. Tally's messages become notes in the
    /// report.
    fn run(&self, arguments: &[&str], status: i32, report: &mut Report) -> Result<Said> {
        let mut command = Command::new(&self.program);
        command.args(&self.options).args(arguments).stdin(Stdio::null());
        // The messages are a part of the report, and must not depend on the user's environment.
        command.env(logging::VARIABLE, format!("{STATISTICS}=debug"));
        child::die_with_this_process(&mut command, child::Death::Terminate);
        let Output { status: ended, stdout, stderr } = command.output().context("cannot run this program")?;
        let said = String::from_utf8_lossy(&stderr);
        let said = said.lines().map(|line| line.trim_start_matches("tally: ").to_owned());
        let (statistics, said): (Vec<_>, Vec<_>) = said.partition(|line| line.contains(ALARMS));
        let news: Vec<String> = said.into_iter().filter(|line| !self.known.contains(line)).collect();
        if ended.code() != Some(status) {
            bail!("a guest failed: {}", news.last().map_or("it said nothing", String::as_str));
        }
        for line in news {
            report.fact("note", &line)?;
        }
        let out = String::from_utf8_lossy(&stdout).into_owned();
        Ok(Said { out, statistics: statistics.into_iter().next() })
    }
}

/// What follows the number of alarms, and of those that found nothing, in what a machine says at its end.
const ALARMS: &str = " alarms, ";
const IGNORED: &str = " with nothing to do, ";

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
        format!("{} {} pmi=nmi,{OVERFLOWS},{PERIOD} {}", enabling(model), counts.join(" "), measuring(model));
    let said = guests.run(&["--kernel", &path, "--append", &words], ENDED, report)?;
    let lines = || said.out.lines();

    let mut counts = lines().filter_map(|line| line.strip_prefix("count ")?.split(' ').nth(1));
    for name in counters {
        let found = counts.next().and_then(|count| u64::from_str_radix(count, 16).ok());
        report.count(&format!("{name} in user mode"), found, 2 * ROUNDS + 1)?;
    }
    let overflows = lines().find_map(|line| line.strip_prefix("pmi "));
    let number = |what: &str| {
        let part = overflows?.split(", ").find_map(|part| part.strip_suffix(what))?;
        part.trim().parse().ok()
    };
    report.count(&format!("overflows, {PERIOD} instructions apart"), number(" overflows"), OVERFLOWS)?;
    report.count("their NMIs", number(" interrupts"), OVERFLOWS)?;
    let mut late = lines().filter_map(|line| line.strip_prefix("late "));
    for what in LATE {
        report.measured(what, late.next().and_then(Distribution::parse))?;
    }
    let way = lines().find_map(|line| line.strip_prefix("way ")).and_then(Distribution::parse);
    let in_nanoseconds = |ticks| u64::saturating_mul(ticks, 1_000_000) / u64::from(guests.clock.max(1));
    report.measured("ns from the loop to its NMI's handler", way.map(|way| way.map(in_nanoseconds)))?;
    if let Some((alarms, ignored)) = said.statistics.as_deref().and_then(alarms) {
        report.number("alarms from the host's events", alarms)?;
        report.number("alarms that found nothing to do", ignored)?;
    }
    Ok(())
}

/// Returns how many alarms there were, and how many found nothing.
fn alarms(statistics: &str) -> Option<(u64, u64)> {
    let (alarms, rest) = statistics.split_once(ALARMS)?;
    let (ignored, _) = rest.split_once(IGNORED)?;
    Some((alarms.rsplit(' ').next()?.parse().ok()?, ignored.parse().ok()?))
}

/// What is measured of an overflow's interrupt, besides its time.
const LATE: [&str; 2] = ["NMIs late by so many instructions", "NMIs late by so many branches"];

/// Returns the words that measure how late interrupts are, in instructions and in branches, and how long their way is.
fn measuring(model: Model) -> String {
    const INSTRUCTIONS: u32 = 0xc0;
    let branches = match model {
        Model::Amd(_) => 0xc2,
        Model::Intel(_) => 0xc4,
    };
    // It is on, interrupts, and counts user mode.
    let word = |word, event| format!("{word}=nmi,{OVERFLOWS},{PERIOD},1,0:{:#x}", 0x51_0000 | event);
    [word("late", INSTRUCTIONS), word("late", branches), word("way", INSTRUCTIONS)].join(" ")
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

    let mut found = said.out.lines().map(|line| line.split(' ').next().and_then(|count| count.parse().ok()));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarms_are_found_in_what_a_machine_says_at_its_end() {
        let said = "vCPU 0: 3012 alarms, 12 with nothing to do, 3000 overflows, 3000 interrupts";
        assert_eq!(alarms(said), Some((3012, 12)));
        assert_eq!(alarms("vCPU 0: no alarms, "), None);
    }
}
