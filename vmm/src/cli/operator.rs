//! The options of the commands for running VMs.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;
use vpmu::policy::Setting;

use crate::cli::address::Address;
use crate::cli::policy;
use crate::protocol::recording::SampledEvent;

/// The options of `tally list`.
#[derive(Debug, Args)]
#[command(after_help = "\
Lists this user's VMs; for root, all users' VMs.

Examples:
  tally list
  tally list --json")]
pub struct List {
    /// Print JSON: a list of {pid, name, runs, pmu, cpus, memory, started, age}
    #[arg(long)]
    pub json: bool,
}

/// The options of `tally stat`.
#[derive(Debug, Args)]
#[command(after_help = "\
On a terminal it refreshes until q or Ctrl-C; otherwise it prints one block per
interval. `-` means not counted, because no counter was free.

Examples:
  tally stat
  tally stat perf --interval 0.5
  tally stat perf --json
  tally stat --metrics 9100")]
pub struct Stat {
    /// The VM's process or name [default: all VMs]
    pub vm: Option<String>,
    /// Print JSON, over one interval
    #[arg(long, conflicts_with = "count")]
    pub json: bool,
    /// Refresh interval: 0.01 to 60
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,
    /// Print this many times, then end
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub count: Option<u32>,
    /// Serve OpenMetrics of all VMs at unix:PATH, HOST:PORT or PORT instead
    #[arg(long, value_name = "ADDR", conflicts_with_all = ["vm", "json", "count", "interval"])]
    pub metrics: Option<Address>,
}

/// The options of `tally policy`.
#[derive(Debug, Args)]
#[command(after_help = "\
Keys, the same as in the TOML file (without changes, the policy is printed):
  tier=architectural|standard|enhanced    allow=EVENT,r00c0/00ff,...
  min-period=COUNTS    max-interrupts-per-second=N|none    spare-counters=N
  freeze=guest|hybrid|host    on-starvation=report|scale|stop    ebb=true|false
  record=true|false

Examples:
  tally policy 1234 allow=cycles,instructions min-period=10000
  tally policy web --disable 0:3")]
pub struct ChangePolicy {
    /// A running VM: its process or its name
    #[arg(value_name = "PID|NAME", required_unless_present = "print")]
    pub vm: Option<String>,
    /// Print a policy: a file or `tenant`
    #[arg(long, value_name = "FILE", exclusive = true)]
    pub print: Option<PathBuf>,
    /// A new policy, in TOML, or `tenant`
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Enable a counter again
    #[arg(long, value_name = "VCPU:COUNTER")]
    pub enable: Vec<CounterName>,
    /// Disable a counter: it stops counting
    #[arg(long, value_name = "VCPU:COUNTER")]
    pub disable: Vec<CounterName>,
    /// Settings to change
    #[arg(value_name = "KEY=VALUE", value_parser = policy::assignment)]
    pub settings: Vec<Setting>,
}

/// The options of `tally snapshot`.
#[derive(Debug, Args)]
#[command(after_help = "\
The VM stands still while it is written, and then goes on. Its shares and disks
stay where they are: a disk that has changed since is refused by `tally run
--restore`, unless `--disk` gives a copy. A run with --flamegraph or --pmu kvm
cannot be saved.

Examples:
  tally snapshot web web.saved
  tally snapshot 1234 /var/tmp/saved --stop
  tally run --restore web.saved")]
pub struct Snapshot {
    /// A running VM: its process or its name
    #[arg(value_name = "PID|NAME")]
    pub vm: String,
    /// The folder, which must not exist
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
    /// End the VM then
    #[arg(long)]
    pub stop: bool,
}

/// The options of `tally record`.
#[derive(Debug, Args)]
#[command(after_help = "\
Ends after --duration, at Ctrl-C, or with the VM. The kernel's symbols are
written beside the samples: perf report --kallsyms perf.data.kallsyms.

Examples:
  tally record web --duration 10 --flamegraph web.svg
  tally record 1234 -e instructions:u -c 1000003 -o web.data")]
pub struct Record {
    /// A running VM: its process or its name
    #[arg(value_name = "PID|NAME")]
    pub vm: String,
    /// Samples in a second of each vCPU [default: 999]
    #[arg(short = 'F', long = "freq", value_name = "HZ", conflicts_with = "count", value_parser = clap::value_parser!(u64).range(1..))]
    pub frequency: Option<u64>,
    /// Counts between two samples
    #[arg(short, long, value_name = "PERIOD", value_parser = clap::value_parser!(u64).range(MIN_PERIOD..))]
    pub count: Option<u64>,
    /// Event, as for perf, with :u or :k for a level
    #[arg(short, long, default_value = "cycles", hide_default_value = true)]
    pub event: SampledEvent,
    /// Callers: fp (frame pointers) or no
    #[arg(long, value_name = "HOW", value_parser = PossibleValuesParser::new(["fp", "no"]), hide_possible_values = true)]
    pub call_graph: Option<String>,
    /// Also draw a flame graph, of callers
    #[arg(long, value_name = "FILE.svg")]
    pub flamegraph: Option<PathBuf>,
    /// End after this time
    #[arg(long, value_name = "SECONDS", value_parser = duration)]
    pub duration: Option<Duration>,
    /// Where to, for perf [default: perf.data]
    #[arg(short, long, value_name = "FILE", default_value = "perf.data", hide_default_value = true)]
    pub output: PathBuf,
}

/// Least number of counts between two samples: with fewer, a guest would do little else.
const MIN_PERIOD: u64 = 1000;

/// The options of `tally top`.
#[derive(Debug, Args)]
#[command(after_help = "\
On a terminal it refreshes until q or Ctrl-C; otherwise it prints a block of 20
functions per interval. VMs are sampled from outside, as by tally record.

Examples:
  tally top
  tally top web -e instructions:u --count 1")]
pub struct Top {
    /// The VM's process or name [default: all VMs]
    pub vm: Option<String>,
    /// Samples in a second of each vCPU [default: 999]
    #[arg(short = 'F', long = "freq", value_name = "HZ", value_parser = clap::value_parser!(u64).range(1..))]
    pub frequency: Option<u64>,
    /// Event, as for perf, with :u or :k for a level [default: cycles]
    #[arg(short, long, default_value = "cycles", hide_default_value = true)]
    pub event: SampledEvent,
    /// Refresh interval: 0.01 to 60
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = interval)]
    pub interval: Duration,
    /// Print this many times, then end
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub count: Option<u32>,
}

/// The options of `tally symbols`.
#[derive(Debug, Args)]
#[command(after_help = "\
Writes DIR/kallsyms and DIR/modules: the symbols that the guest's Linux and its
modules have in its memory, for `perf kvm --guestkallsyms --guestmodules`.

Example:
  tally symbols web web.symbols")]
pub struct Symbols {
    /// A running VM: its process or its name
    #[arg(value_name = "PID|NAME")]
    pub vm: String,
    /// The folder, which is created if need be
    #[arg(value_name = "DIR")]
    pub folder: PathBuf,
}

/// The options of `tally log`.
#[derive(Debug, Args)]
#[command(after_help = "\
Each line of --show is one record: time in seconds, vCPU, event, and the guest's
instruction pointer. A summary follows.

Examples:
  tally run --pmu-log events -- perf record true
  tally log web 'the second phase begins'
  tally log --show events | less
  tally log --show events --summary")]
pub struct Log {
    /// Running VM whose event log is flushed
    #[arg(value_name = "PID|NAME", required_unless_present = "show", conflicts_with = "show")]
    pub vm: Option<String>,
    /// A note to write into its log
    pub text: Option<String>,
    /// Print the file that `tally run --pmu-log FILE` writes
    #[arg(long, value_name = "FILE")]
    pub show: Option<PathBuf>,
    /// Print only the summary
    #[arg(long, requires = "show")]
    pub summary: bool,
}

/// A vCPU's counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CounterName {
    pub vcpu: u8,
    pub counter: usize,
}

impl FromStr for CounterName {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let name = text.split_once(':').and_then(|(vcpu, counter)| {
            Some(Self { vcpu: vcpu.parse().ok()?, counter: counter.parse().ok()? })
        });
        name.ok_or("the numbers of a vCPU and of a counter are wanted, as in 0:3")
    }
}

fn duration(text: &str) -> Result<Duration, &'static str> {
    let seconds = text.parse().ok().filter(|seconds| (0.01..=1e6).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or("0.01 to 1000000 seconds are possible")
}

fn interval(text: &str) -> Result<Duration, &'static str> {
    let seconds = text.parse().ok().filter(|seconds| (0.01..=60.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or("0.01 to 60 seconds are possible")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_may_be_part_of_a_second() {
        assert_eq!(interval("0.25"), Ok(Duration::from_millis(250)));
        for wrong in ["0", "-1", "61", "NaN", "inf", "1s", ""] {
            assert!(interval(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_counter_is_named_by_two_numbers() {
        assert_eq!("1:12".parse(), Ok(CounterName { vcpu: 1, counter: 12 }));
        for wrong in ["1", "1:", ":1", "1:2:3", "256:0", "-1:0", "a:b"] {
            assert!(wrong.parse::<CounterName>().is_err(), "{wrong}");
        }
    }
}
