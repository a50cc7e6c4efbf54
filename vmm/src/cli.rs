//! The command line of `tally`. Users' scripts depend on it.

pub mod address;
pub mod network;
mod operator;
pub mod policy;

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::{OsStringValueParser, PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{ArgAction, Args, Parser, Subcommand};
use clap_complete::Shell;
use devices::Access;
use guest_images::container::Config;
use tally_machine::Size;
use tally_machine::pmu::Choice;
use vpmu::policy::OnStarvation;

use self::address::Address;
use self::network::{Network, Published};
use crate::arch::help;
use crate::host::lab;
use crate::host::printer;
use crate::protocol::ending::FAILURE;
use crate::protocol::record::LEAST_SIZE;
use crate::sandbox;

pub use self::operator::{ChangePolicy, CounterName, List, Log, Record, Snapshot, Stat, Symbols, Top};

/// A KVM virtual machine monitor for measuring software
#[derive(Debug, Parser)]
#[command(
    version,
    max_term_width = 80,
    // Without the usual empty line above the usage: all of it fits a screen.
    help_template = "{about-with-newline}{usage-heading} {usage}\n\n{all-args}{after-help}",
    after_help = "\
Example:
  tally run -- perf stat true"
)]
pub struct Cli {
    /// The command to carry out.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Boot a guest, and run a command in it if one is given
    Run(Box<Run>),
    /// List the running VMs
    List(List),
    /// Show the counters and exits of running VMs
    Stat(Stat),
    /// Sample a running VM from outside, for perf report
    Record(Record),
    /// Show which functions run in running VMs, live
    Top(Top),
    /// Write the symbols of a running VM's kernel
    #[command(hide = true)]
    Symbols(Symbols),
    /// Save a running VM in a folder, for `tally run --restore`
    Snapshot(Snapshot),
    /// Change or print what a running VM's guest may count
    Policy(ChangePolicy),
    /// Check this host's KVM and PMU, and print fixes
    Doctor(Doctor),
    /// Check that counters in guests count correctly on this host
    #[command(hide = !lab::LAB_AVAILABLE)]
    Check(Check),
    /// Print an event log, or add a note to a running VM's log
    Log(Log),
    /// Use the simulated host, for machines without a PMU or KVM
    #[command(
        disable_help_flag = true,
        hide = !lab::LAB_AVAILABLE,
        after_help = "\
Examples:
  tally lab --help
  tally lab run -- perf stat true"
    )]
    Lab {
        /// What `tally-lab` is given
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Benchmark the cost of using counters, compared with KVM's vPMU
    #[command(
        disable_help_flag = true,
        hide = !lab::LAB_AVAILABLE,
        after_help = "\
`tally bench --help` tells the options.

Examples:
  tally bench --quick
  tally bench --here"
    )]
    Bench {
        /// What `tally-lab bench` is given
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Print a script that completes commands and options in a shell
    #[command(
        hide = true,
        after_help = "Example:\n  tally completions bash >~/.local/share/bash-completion/completions/tally"
    )]
    Completions {
        /// bash, elvish, fish, powershell or zsh
        #[arg(hide_possible_values = true)]
        shell: Shell,
    },
    /// Print the manual page, or write those of all commands
    #[command(
        hide = true,
        after_help = "Examples:\n  tally man | man -l -\n  tally man ~/.local/share/man/man1"
    )]
    Man {
        /// Where to write tally.1, tally-run.1 and so on
        folder: Option<PathBuf>,
    },
}

/// Options that a restored guest was started with, or that are for its start.
const SAVED_WITH_A_GUEST: [&str; 19] = [
    "kernel",
    "initrd",
    "append",
    "cpus",
    "memory",
    "share",
    "root",
    "root_mounts",
    "user",
    "env",
    "net",
    "publish",
    "pmu",
    "counters",
    "boot",
    "save_template",
    "flamegraph",
    "command",
    "pmu_log",
];

/// The options of `tally run`.
#[derive(Debug, Clone, Args)]
#[command(after_help = format!("\
What guests see with --pmu:{pmus}
The command's output and exit status become Tally's; 125 is Tally's own failure.
Without COMMAND and --root, this is the guest's console; Ctrl-A X ends the VM.

Examples:
  tally run --root / -- perf record -g ./prog", pmus = help::PMUS))]
pub struct Run {
    /// The guest's kernel.
    #[arg(long, value_name = "PATH", help = help::KERNEL)]
    pub kernel: Option<PathBuf>,
    /// The initrd, or modules: 'FILE ARGS,FILE ...'
    #[arg(long, value_name = "PATH")]
    pub initrd: Option<PathBuf>,
    /// Words to add to the kernel's command line
    #[arg(long, value_name = "STRING", default_value = "", hide_default_value = true)]
    pub append: String,
    /// Number of vCPUs
    #[arg(long, value_name = "N", default_value_t = 1, allow_negative_numbers = true)]
    pub cpus: u32,
    /// Memory, in bytes or with K, M or G
    #[arg(long, value_name = "SIZE", default_value = "512M", allow_negative_numbers = true)]
    pub memory: Size,
    /// A host folder, at the same path; `:rw` to write
    #[arg(long, value_name = "DIR[:ro|rw]", value_parser = given(Access::ReadOnly))]
    pub share: Vec<HostPath>,
    /// The root: a host folder, read-only, or an image
    #[arg(long, value_name = "DIR|IMAGE", conflicts_with = "initrd")]
    pub root: Option<PathBuf>,
    /// How a command is run in that image, which has been unpacked
    #[arg(skip)]
    pub image: Option<Config>,
    /// What is mounted in the root, too
    #[arg(long, requires = "root")]
    pub root_mounts: bool,
    /// Whom COMMAND runs as [default: root]
    #[arg(long, value_name = "NAME[:GROUP]")]
    pub user: Option<OsString>,
    /// A variable for COMMAND; without =VALUE, yours
    #[arg(long, value_name = "NAME[=VALUE]", value_parser = variable())]
    pub env: Vec<Variable>,
    /// A raw image: /dev/vda and on, writable unless :ro
    #[arg(long, value_name = "FILE[:ro]", value_parser = given(Access::ReadWrite))]
    pub disk: Vec<HostPath>,
    /// A network: user (by passt), or tap=NAME
    #[arg(long, value_name = "HOW")]
    pub net: Option<Network>,
    /// A port of a guest with --net user: HOST:GUEST
    #[arg(long, value_name = "PORTS", requires = "net")]
    pub publish: Vec<Published>,
    /// The PMU that the guest sees
    #[arg(long, default_value = Choice::Auto.name(), value_parser = pmu(), hide_possible_values = true)]
    pub pmu: Choice,
    /// Number of that PMU's counters [default: all free]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub counters: Option<u32>,
    /// Log what happens to the guest's counters
    #[arg(long, value_name = "FILE")]
    pub pmu_log: Option<PathBuf>,
    /// Size at which it becomes FILE.1
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = log_size, requires = "pmu_log")]
    pub pmu_log_size: u64,
    /// Policy: a file or `tenant`, see `tally policy`
    #[arg(long, value_name = "FILE")]
    pub pmu_policy: Option<PathBuf>,
    /// On lost hardware: report (default), scale or stop
    #[arg(long, value_name = "HOW", value_parser = one_of(&ON_STARVATION), hide_possible_values = true)]
    pub on_starvation: Option<OnStarvation>,
    /// Serve OpenMetrics at unix:PATH, HOST:PORT or PORT
    #[arg(long, value_name = "ADDR")]
    pub metrics: Option<Address>,
    /// Confine this VM: on, log or off [default: on]
    #[arg(long, value_name = "MODE", value_parser = one_of(&SANDBOX), default_value = "on", hide_default_value = true, hide_possible_values = true)]
    pub sandbox: sandbox::Mode,
    /// Boot, even where a saved guest could start at once
    #[arg(long)]
    pub boot: bool,
    /// Continue the guest that `tally snapshot` has saved
    #[arg(long, value_name = "DIR", conflicts_with_all = SAVED_WITH_A_GUEST)]
    pub restore: Option<PathBuf>,
    /// The disks of a restored guest are not those that it was started with
    #[arg(skip)]
    pub has_other_disks: bool,
    /// Where the guest is saved when it waits for its command, instead of running it
    #[arg(long, value_name = "DIR", hide = true)]
    pub save_template: Option<PathBuf>,
    /// Name of this VM [default: what it runs]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Sample COMMAND with perf, and draw a flame graph
    #[arg(long, value_name = "OUT.svg", requires = "command")]
    pub flamegraph: Option<PathBuf>,
    /// Log what Tally does, show the console (-vv: more)
    #[arg(long, short, action = ArgAction::Count)]
    pub verbose: u8,
    /// Command that the default guest runs
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// A host path that the guest may access.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostPath {
    pub path: PathBuf,
    /// What the guest may do with it.
    pub access: Access,
}

/// A variable of the command's environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Variable {
    pub name: OsString,
    /// None if it is the caller's.
    pub value: Option<OsString>,
}

/// Reads a variable.
fn variable() -> impl TypedValueParser<Value = Variable> {
    OsStringValueParser::new().try_map(|text| {
        let mut parts =
            text.as_bytes().splitn(2, |byte| *byte == b'=').map(|part| OsStr::from_bytes(part).to_owned());
        let name = parts.next().filter(|name| !name.is_empty()).ok_or("a variable needs a name")?;
        Ok::<_, &'static str>(Variable { name, value: parts.next() })
    })
}

/// Reads a path that may end in `:ro` or `:rw`.
fn given(default: Access) -> impl TypedValueParser<Value = HostPath> {
    OsStringValueParser::new().map(move |text| {
        let bytes = text.as_bytes();
        let (path, access) = [(&b":ro"[..], Access::ReadOnly), (b":rw", Access::ReadWrite)]
            .into_iter()
            .find_map(|(end, access)| Some((bytes.strip_suffix(end)?, access)))
            .unwrap_or((bytes, default));
        HostPath { path: OsStr::from_bytes(path).into(), access }
    })
}

/// Reads the maximum size of an event log.
fn log_size(text: &str) -> Result<u64, String> {
    let Size { bytes, .. } = text.parse()?;
    if bytes < LEAST_SIZE {
        return Err(format!("too small a log: it needs at least {}K", LEAST_SIZE >> 10));
    }
    Ok(bytes)
}

/// Reads the name of a PMU.
fn pmu() -> impl TypedValueParser<Value = Choice> {
    let names = Choice::ALL.map(|choice| PossibleValue::new(choice.name()).help(help::of_pmu(choice)));
    PossibleValuesParser::new(names).map(|name| {
        let choice = Choice::ALL.into_iter().find(|choice| choice.name() == name);
        choice.expect("no other name is possible")
    })
}

/// The values of `--on-starvation`.
const ON_STARVATION: [(&str, OnStarvation); 3] =
    [("report", OnStarvation::Report), ("scale", OnStarvation::Scale), ("stop", OnStarvation::Stop)];
/// The values of `--sandbox`.
const SANDBOX: [(&str, sandbox::Mode); 3] =
    [("on", sandbox::Mode::On), ("log", sandbox::Mode::Log), ("off", sandbox::Mode::Off)];

/// Reads one of some values by its name.
fn one_of<T: Copy + Send + Sync + 'static>(
    values: &'static [(&'static str, T)],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(values.iter().map(|(name, _)| name)).map(|given| {
        let value = values.iter().find(|(name, _)| *name == given);
        value.expect("no other name is possible").1
    })
}

/// Returns the name of one of some values.
fn name_of<T: PartialEq>(values: &[(&'static str, T)], value: &T) -> &'static str {
    values.iter().find(|(_, of)| of == value).expect("all have names").0
}

impl Run {
    /// Returns the value of `--on-starvation` as it is given, if it is.
    pub fn on_starvation_name(&self) -> Option<&'static str> {
        self.on_starvation.map(|how| name_of(&ON_STARVATION, &how))
    }

    /// Returns the value of `--sandbox` as it is given.
    pub fn sandbox_name(&self) -> &'static str {
        name_of(&SANDBOX, &self.sandbox)
    }
}

/// The options of `tally doctor`.
#[derive(Debug, Args)]
#[command(after_help = "\
Each line is a fact: `ok`; `BAD` if it prevents guests or their counters from
working; `-` for information. Commands that fix a problem are in backticks. The
last line is the result. The exit status is 1 if any fact is BAD.

Examples:
  tally doctor
  tally doctor --json")]
pub struct Doctor {
    /// Print JSON: a list of {about, state, says, commands}
    #[arg(long)]
    pub json: bool,
}

/// The options of `tally check`.
#[derive(Debug, Args)]
#[command(after_help = "\
Runs programs with known event counts in guests, and prints the measured counts
next to the expected ones. The exit status is 0 if all counts are correct, 1 if
one is wrong, and 125 if nothing could be checked.

Examples:
  tally check
  tally check --counters 3")]
pub struct Check {
    /// The PMU that the guests see: amd, amd-legacy, intel or intel-v2
    #[arg(long, default_value = Choice::Auto.name(), value_parser = pmu(), hide_possible_values = true)]
    pub pmu: Choice,
    /// Number of counters that they see [default: all that the host has free]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub counters: Option<u32>,
    /// Print JSON, when everything is done
    #[arg(long)]
    pub json: bool,
}

/// Answers a command line that is not carried out: prints help or the version if that was asked for, or else one line
/// with the mistake.
pub fn refuse(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        // An error means that standard output is closed.
        let _ = error.print();
        return if error.use_stderr() { ExitCode::from(FAILURE) } else { ExitCode::SUCCESS };
    }
    printer::say(&one_line(&error.render().to_string()));
    ExitCode::from(FAILURE)
}

/// Returns the first paragraph of clap's message as one line; the rest repeats the usage.
fn one_line(text: &str) -> String {
    let paragraph = text.split("\n\n").next().unwrap_or(text);
    let words: Vec<&str> = paragraph.split_whitespace().collect();
    format!("{} (`tally --help` tells more)", words.join(" ").trim_start_matches("error: "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn refusal(arguments: &[&str]) -> String {
        one_line(&Cli::try_parse_from(arguments).unwrap_err().render().to_string())
    }

    #[test]
    fn a_mistake_in_a_command_line_is_one_line() {
        assert!(refusal(&["tally", "run", "--bogus"]).starts_with("unexpected argument '--bogus' found"));
        let unknown_pmu = refusal(&["tally", "run", "--pmu", "foo"]);
        assert!(
            unknown_pmu.contains("'foo'") && unknown_pmu.contains("[possible values: auto, "),
            "{unknown_pmu}"
        );
        assert!(!refusal(&["tally", "run", "--memory", "12X"]).contains('\n'));
    }

    #[test]
    fn a_folder_is_read_only_and_a_disk_writable_by_default() {
        let arguments = ["tally", "run", "--share", "/a", "--share=b:rw", "--disk", "c:ro", "--disk", "d:x"];
        let cli = Cli::try_parse_from(arguments).unwrap();
        let Command::Run(run) = cli.command else { panic!("not run") };
        let given = |path: &str, access| HostPath { path: path.into(), access };
        assert_eq!(run.share, [given("/a", Access::ReadOnly), given("b", Access::ReadWrite)]);
        assert_eq!(run.disk, [given("c", Access::ReadOnly), given("d:x", Access::ReadWrite)]);
    }

    #[test]
    fn an_event_log_has_a_maximum_size() {
        let size = |arguments: &[&str]| {
            let cli = Cli::try_parse_from([&["tally", "run"], arguments].concat());
            cli.map(|cli| if let Command::Run(run) = cli.command { run.pmu_log_size } else { 0 })
        };
        assert_eq!(size(&["--pmu-log", "f"]).unwrap(), 64 << 20);
        assert_eq!(size(&["--pmu-log", "f", "--pmu-log-size", "1G"]).unwrap(), 1 << 30);
        assert_eq!(size(&[]).unwrap(), 64 << 20);
        assert!(size(&["--pmu-log-size", "1G"]).is_err(), "there is no log");
        let said = refusal(&["tally", "run", "--pmu-log", "f", "--pmu-log-size", "64K"]);
        assert!(said.contains("too small a log: it needs at least 128K"), "{said}");
    }

    #[test]
    fn every_pmu_can_be_named() {
        for choice in Choice::ALL {
            let cli = Cli::try_parse_from(["tally", "run", "--pmu", choice.name()]).unwrap();
            let Command::Run(run) = cli.command else { panic!("not run") };
            assert_eq!(run.pmu, choice);
        }
    }

    #[test]
    fn everything_behind_two_dashes_is_the_command() {
        let cli = Cli::try_parse_from(["tally", "run", "--", "perf", "--version", "--", "x"]).unwrap();
        let Command::Run(run) = cli.command else { panic!("not run") };
        assert_eq!(run.command, ["perf", "--version", "--", "x"]);
    }

    #[test]
    fn every_example_can_be_typed() {
        let mut tally = Cli::command();
        tally.build();
        let commands = tally.get_subcommands().filter(|command| command.get_name() != "help");
        for command in commands.chain([&tally]) {
            let examples = examples(command);
            assert!(!examples.is_empty(), "{} has no example", command.get_name());
            for example in examples {
                let parsed = Cli::try_parse_from(&example);
                assert!(parsed.is_ok(), "{example:?}: {}", parsed.unwrap_err());
            }
        }
    }

    /// Returns the examples in a command's help, split into words as a shell does, without pipes and redirections.
    fn examples(command: &clap::Command) -> Vec<Vec<String>> {
        let help = command.clone().render_long_help().to_string();
        let lines = help.lines().filter_map(|line| line.strip_prefix("  tally "));
        lines.map(|line| words(&format!("tally {line}"))).collect()
    }

    fn words(line: &str) -> Vec<String> {
        let (mut words, mut quoted) = (vec![String::new()], false);
        for c in line.chars() {
            match c {
                '\'' => quoted = !quoted,
                ' ' if !quoted => words.push(String::new()),
                '|' | '>' if !quoted => break,
                c => words.last_mut().expect("there is one").push(c),
            }
        }
        words.retain(|word| !word.is_empty());
        words
    }
}
