//! The command line of `tally-lab`.

mod bench;
mod beside;
mod count;
mod demo;
mod figures;
mod tally;

use std::ffi::OsString;
use std::io::{stderr, stdout};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};
use guest_images::{Arch, Progress, Release, Suite};
use tally_lab::self_test::{self, Check};
use tally_lab::{Error, HostPmu, Perfmon, Processor, Result, Scenario, Silicon, cross};

/// Exit status of failures of the lab itself, which differs from that of a script.
const LAB_FAILED: u8 = 125;

/// A simulated host with an exact PMU and real KVM, for machines that have none.
#[derive(Parser)]
#[command(
    name = "tally-lab",
    version,
    max_term_width = 80,
    after_help = "\
Examples:
  tally-lab build
  tally-lab run -- perf stat -e instructions:u true"
)]
struct Arguments {
    #[command(subcommand)]
    command: Subcommands,
}

#[derive(Subcommand)]
enum Subcommands {
    /// Build the lab: the CPU, the host, the default guest
    #[command(after_help = "Examples:\n  tally-lab build\n  tally-lab build --host intel")]
    Build {
        #[command(flatten)]
        host: HostOption,
    },
    /// Run a shell script on the simulated host
    Exec(Exec),
    /// Run `tally run` on the simulated host, where counts are exact
    Run(Run),
    /// Count what a program executes, the same on every machine
    Count(count::Count),
    /// Check that the lab counts exactly
    #[command(visible_alias = "test", after_help = "Example:\n  tally-lab self-test")]
    SelfTest,
    /// Count and sample in a guest, on this machine if possible
    #[command(after_help = "\
Where this machine's KVM cannot run Linux, the guest runs on the simulated host.

Example:
  tally-lab demo")]
    Demo,
    /// Run clippy on the code for RISC-V hosts
    #[command(after_help = "\
Uses the lab's own compiler, so rustup needs no target for RISC-V.

Example:
  tally-lab lint")]
    Lint,
    /// Measure what things cost
    #[command(after_help = "Examples:\n  tally-lab figures\n  tally-lab figures pmu")]
    Figures {
        /// boot: the lab itself, and booting a guest; pmu: a guest's use of its counters; use:
        /// commands; shares: shared folders; watch: what monitoring costs a guest; outside: what
        /// sampling it from outside does; riscv: as pmu, on the RISC-V host
        #[arg(value_enum, default_value_t = figures::Measured::Boot, hide_possible_values = true)]
        what: figures::Measured,
        /// Write the tables into this Markdown file
        #[arg(long, value_name = "FILE")]
        write: Option<PathBuf>,
    },
    /// Compare what counters cost with Tally and with KVM's vPMU
    Bench(bench::Bench),
    /// Show in which functions host and guest spend an overflow
    Profile(bench::Profile),
}

#[derive(Args)]
#[command(after_help = "\
Instructions, branches and a cache model are exact there, time is not. Works
as `tally run` does here, but input from a terminal is not passed on.
Folders and disks are copied there and back. The lab's own failures have
status 125.

Example:
  tally-lab run --share .:rw -- sh -c 'sort >sorted' <words")]
struct Run {
    /// Kill `tally` after this time, and show where it hung
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    lab_limit: u64,
    /// Number of the host's CPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    lab_smp: u32,
    /// The host's memory, in MiB or as 2G
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = memory)]
    lab_memory: u32,
    #[command(flatten)]
    kind: Kind,
    /// Arguments of `tally run`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

#[derive(Args)]
#[command(
    override_usage = "tally-lab exec [OPTIONS] SCRIPT [ARGUMENT]...",
    after_help = "Example:\n  tally-lab exec --with tally --out results script.sh"
)]
struct Exec {
    /// Copy a file to the script's working directory
    #[arg(long, value_name = "FILE[:NAME]")]
    with: Vec<String>,
    /// Copy the default guest there, where tally finds it
    #[arg(long)]
    with_guest: bool,
    /// Copy tally there, compiled for that host
    #[arg(long)]
    with_tally: bool,
    /// Copy what the script leaves in $OUT to DIR
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    #[command(flatten)]
    machine: MachineOptions,
    #[arg(hide = true)]
    script: PathBuf,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    arguments: Vec<OsString>,
}

#[derive(Args)]
struct MachineOptions {
    /// Kill the script after this time
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    limit: u64,
    /// Number of the host's CPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    smp: u32,
    /// The host's memory, in MiB or as 2G
    #[arg(long, value_name = "SIZE", default_value = "2G", value_parser = memory)]
    memory: u32,
    /// Give an AMD host's PMU the registers of PerfMonV2, as `--perfmon 2` does
    #[arg(long, hide = true, conflicts_with = "perfmon")]
    perfmon_v2: bool,
    /// Version of the host's PMU: 2 (amd), or 2, 4 or 5 (intel)
    #[arg(long, value_name = "VERSION", value_parser = perfmon)]
    perfmon: Option<Perfmon>,
    /// Mistakes of the host's PMU: zen2, zen4 (amd), skylake, icelake (intel), riscv, or KNOB=VALUE
    #[arg(long, value_name = "PROFILE")]
    silicon: Option<Silicon>,
    #[command(flatten)]
    kind: Kind,
    /// Show the host's console
    #[arg(short, long)]
    verbose: bool,
}

/// The simulated host.
#[derive(Args)]
struct HostOption {
    /// The host: amd, intel or riscv64
    #[arg(long, value_name = "HOST")]
    host: Option<Processor>,
    /// The host by its architecture: x86_64 (amd) or riscv64
    #[arg(long, value_name = "ARCH", conflicts_with = "host", hide = true)]
    arch: Option<Arch>,
}

impl HostOption {
    fn processor(&self) -> Processor {
        let of_arch = |arch| Processor::of(arch, HostPmu::default());
        self.host.unwrap_or_else(|| of_arch(self.arch.unwrap_or_default()))
    }
}

/// The simulated host, and kernels of host and guest.
#[derive(Args)]
struct Kind {
    #[command(flatten)]
    host: HostOption,
    /// The Debian release of the host's kernel
    #[arg(long, value_name = "SUITE")]
    host_suite: Option<Suite>,
    /// The Debian release of the default guest's kernel
    #[arg(long, value_name = "SUITE")]
    guest_suite: Option<Suite>,
}

impl Kind {
    fn arch(&self) -> Arch {
        self.host.processor().arch()
    }

    fn host(&self) -> Release {
        let default = tally_lab::default_host(self.arch());
        Release { suite: self.host_suite.unwrap_or(default.suite), ..default }
    }

    fn guest(&self) -> Release {
        let default = Release::of(self.arch());
        Release { suite: self.guest_suite.unwrap_or(default.suite), ..default }
    }

    /// Returns the PMU of a host whose PMU no option selects.
    fn pmu(&self) -> HostPmu {
        match self.host.processor() {
            Processor::Intel => HostPmu::INTEL,
            Processor::Amd | Processor::Riscv64 => HostPmu::default(),
        }
    }

    /// Returns an error if the host does not have what the options ask for.
    fn check(&self) -> Result<()> {
        let too_old = Some(Suite::Bookworm);
        let wants = [
            (self.host_suite == too_old, "--host-suite=bookworm"),
            (self.guest_suite == too_old, "--guest-suite=bookworm"),
        ];
        self.refuse(&wants, self.arch() == Arch::X86_64)
    }

    /// Returns an error if one of these options was given, unless the host has them.
    fn refuse(&self, options: &[(bool, &'static str)], has_them: bool) -> Result<()> {
        match options.iter().find(|(is_wanted, _)| *is_wanted && !has_them) {
            Some((_, option)) => Err(Error::NotOnThisHost { option, host: self.host.processor().name() }),
            None => Ok(()),
        }
    }
}

impl MachineOptions {
    fn check(&self) -> Result<()> {
        let processor = self.kind.host.processor();
        self.kind.check()?;
        self.kind.refuse(&[(self.perfmon_v2, "--perfmon-v2")], processor == Processor::Amd)?;
        if let Some(knob) = self.silicon.and_then(|silicon| silicon.missing_on(processor)) {
            self.kind.refuse(&[(true, knob)], false)?;
        }
        let has_it = match processor {
            Processor::Amd => self.perfmon.is_none_or(|version| version == Perfmon::V2),
            Processor::Intel => true,
            Processor::Riscv64 => false,
        };
        self.kind.refuse(&[(self.perfmon.is_some(), "--perfmon")], has_it)
    }

    fn apply(&self, scenario: Scenario) -> Scenario {
        let pmu = match self.perfmon {
            Some(version) if self.kind.host.processor() == Processor::Intel => HostPmu::Intel(version),
            Some(_) => HostPmu::PerfMonV2,
            None if self.perfmon_v2 => HostPmu::PerfMonV2,
            None => self.kind.pmu(),
        };
        scenario
            .limit(Duration::from_secs(self.limit))
            .processors(self.smp)
            .memory_mib(self.memory)
            .pmu(pmu)
            .silicon(self.silicon.unwrap_or_default())
            .host(self.kind.host())
            .show_console(self.verbose)
    }
}

/// Returns the two parts of `FILE[:NAME]`: a file of this machine, and its name in the script's working directory.
fn named(file: &str) -> (&str, String) {
    match file.rsplit_once(':') {
        Some((path, name)) => (path, name.to_owned()),
        None => (file, Path::new(file).file_name().unwrap_or_default().to_string_lossy().into_owned()),
    }
}

fn perfmon(text: &str) -> std::result::Result<Perfmon, String> {
    let version = text.parse().ok().and_then(Perfmon::from_number);
    version.ok_or_else(|| "the versions are 2, 4 and 5".to_owned())
}

fn memory(text: &str) -> std::result::Result<u32, String> {
    let (number, unit) = match text.strip_suffix(['G', 'g']) {
        Some(number) => (number, 1024),
        None => (text.strip_suffix(['M', 'm']).unwrap_or(text), 1),
    };
    number
        .parse::<u32>()
        .ok()
        .and_then(|number| number.checked_mul(unit))
        .filter(|mib| *mib >= 256)
        .ok_or_else(|| "a size of at least 256M, such as 512M or 2G".to_owned())
}

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Printing fails only if the stream is closed.
            let _ = error.print();
            return if error.use_stderr() { ExitCode::from(LAB_FAILED) } else { ExitCode::SUCCESS };
        }
    };
    let mut progress = Progress::stderr("tally-lab").verbose(arguments.command.is_verbose());
    let result = match arguments.command {
        Subcommands::Build { host } => tally_lab::build(host.processor(), &mut progress).map(|()| 0),
        Subcommands::Exec(exec) => exec.run(&mut progress),
        Subcommands::Run(run) => run.run(&mut progress),
        Subcommands::Count(count) => count.run(&mut progress),
        Subcommands::SelfTest => self_test(&mut progress),
        Subcommands::Bench(bench) => bench.run(&mut progress),
        Subcommands::Profile(profile) => profile.run(&mut progress),
        Subcommands::Lint => cross::lint(&mut progress).map(|passed| u8::from(!passed)),
        Subcommands::Demo => demo::run(&mut progress),
        Subcommands::Figures { what, write } => {
            figures::measure(what, write.as_deref(), &mut progress).map(|()| 0)
        }
    };
    drop(progress);
    match result {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("tally-lab: {error}");
            ExitCode::from(LAB_FAILED)
        }
    }
}

impl Subcommands {
    fn is_verbose(&self) -> bool {
        matches!(self, Self::Exec(exec) if exec.machine.verbose)
    }
}

impl Run {
    fn run(self, progress: &mut Progress) -> Result<u8> {
        self.kind.check()?;
        let (host, pmu) = (self.kind.host(), self.kind.pmu());
        tally::Run::new(self.arguments, self.kind.guest(), self.lab_memory, progress)?
            .on(|scenario| {
                let scenario = scenario.limit(Duration::from_secs(self.lab_limit)).processors(self.lab_smp);
                scenario.host(host).pmu(pmu)
            })
            .run(progress)
    }
}

fn self_test(progress: &mut Progress) -> Result<u8> {
    progress.step("self-test on the simulated host");
    let mut checks = self_test::on_the_host(progress)?;
    progress.step("self-test in a guest of the peer");
    checks.extend(self_test::in_a_guest(progress)?);
    progress.step("self-test of counting guest and host apart");
    checks.extend(self_test::guest_and_host_apart(progress)?);
    progress.step("self-test of leaving a guest and going on");
    checks.extend(self_test::leaving_a_guest(progress)?);
    progress.step("self-test on the simulated Intel host");
    checks.extend(self_test::on_the_intel_host(progress)?);
    progress.step("self-test in a guest of the peer on Intel");
    checks.extend(self_test::in_an_intel_guest(progress)?);
    progress.step("self-test with older versions of Intel's PMU");
    checks.extend(self_test::with_older_versions_on_intel(progress)?);
    progress.step("self-test on the simulated RISC-V host");
    checks.extend(self_test::on_the_riscv_host(progress)?);
    progress.step("self-test in a guest of the peer on RISC-V");
    checks.extend(self_test::in_a_riscv_guest(progress)?);
    progress.done();
    for check in &checks {
        println!("{:<6} {check}", if check.holds() { "ok" } else { "FAILED" });
    }
    Ok(u8::from(!checks.iter().all(Check::holds)))
}

impl Exec {
    fn run(self, progress: &mut Progress) -> Result<u8> {
        self.machine.check()?;
        let script = std::fs::read(&self.script).map_err(|source| Error::File {
            action: "read",
            path: self.script.clone(),
            source,
        })?;
        let mut scenario = self.machine.apply(Scenario::new(script).arguments(self.arguments));
        for file in &self.with {
            let (path, name) = named(file);
            scenario = scenario.file(path, &name);
        }
        if self.with_guest {
            scenario = scenario.guest(self.machine.kind.guest(), progress)?;
        }
        if self.with_tally {
            scenario = scenario.file(tally::program_for(self.machine.kind.arch(), progress)?, "tally");
        }
        if let Some(out) = self.out {
            scenario = scenario.keep_output_in(out);
        }
        scenario.run_with(progress, &mut stdout(), &mut stderr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn every_example_can_be_typed() {
        let mut lab = Arguments::command();
        lab.build();
        let commands = lab.get_subcommands().filter(|command| command.get_name() != "help");
        for command in commands.chain([&lab]) {
            let help = command.clone().render_long_help().to_string();
            let mut examples = help.lines().filter(|line| line.starts_with("  tally-lab ")).peekable();
            assert!(examples.peek().is_some(), "{} has no example", command.get_name());
            for example in examples {
                let parsed = Arguments::try_parse_from(example.split_whitespace());
                assert!(parsed.is_ok(), "{example}: {}", parsed.err().expect("the result is an error"));
            }
        }
    }
}
