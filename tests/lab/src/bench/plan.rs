//! What the benchmark runs: which workloads, how they are measured meanwhile, and where. All have names, which people type and
//! scripts print.

use std::fmt;
use std::str::FromStr;

/// A program that is slowed down by what is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Workload {
    /// Goes round a loop. A unit is an instruction.
    Loop,
    /// Makes system calls. A unit is one.
    Syscalls,
    /// Two tasks and a pipe. A unit is a switch from one to the other.
    Switches,
    /// Loads from memory, each of which waits for the last. A unit is one.
    Memory,
    /// Short programs and small files, like a build. A unit is some twenty programs.
    Compile,
}

impl Workload {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Loop, Self::Syscalls, Self::Switches, Self::Memory, Self::Compile];

    fn name(self) -> &'static str {
        match self {
            Self::Loop => "loop",
            Self::Syscalls => "syscalls",
            Self::Switches => "switches",
            Self::Memory => "memory",
            Self::Compile => "compile",
        }
    }
}

/// In which modes of the processor samples are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Modes {
    /// In programs.
    User,
    /// In the kernel too.
    All,
}

/// What is done while a workload runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Measure {
    /// Nothing. The others are compared with this.
    Nothing,
    /// `perf stat` with so many events.
    Stat(u8, Modes),
    /// `perf record` with a sample whenever so many instructions have been executed.
    Record(u64, u8, Modes),
    /// `perf record` with so many samples in a second.
    Rate(u32, u8),
    /// `perf stat` that prints its counts every so many milliseconds.
    Interval(u32, u8),
    /// The workload, which is the loop, reads its own counter.
    Read,
}

impl Measure {
    /// How many events there are.
    pub fn events(self) -> u8 {
        match self {
            Self::Nothing => 0,
            Self::Read => 1,
            Self::Stat(events, _)
            | Self::Record(_, events, _)
            | Self::Rate(_, events)
            | Self::Interval(_, events) => events,
        }
    }

    /// Whether samples are taken.
    pub fn samples(self) -> bool {
        matches!(self, Self::Record(..) | Self::Rate(..))
    }

    /// The command that does it, in front of that which it is done to.
    pub fn command(self, events: Events) -> String {
        /// Without looking for what is no part of any of this: that alone takes half of perf's start.
        const RECORD: &str = "perf record -q -B --no-bpf-event -o data";
        let list = |modes| events.list(self.events(), modes);
        match self {
            Self::Nothing | Self::Read => String::new(),
            Self::Stat(_, modes) => format!("perf stat -x, -o counts -e {}", list(modes)),
            Self::Record(period, _, modes) => {
                format!("{RECORD} -c {period} -e {}", list(modes))
            }
            Self::Rate(hertz, _) => {
                format!("{RECORD} -F {hertz} -e {}", list(Modes::All))
            }
            Self::Interval(milliseconds, _) => {
                format!("perf stat -I {milliseconds} -x, -o counts -e {}", list(Modes::User))
            }
        }
    }
}

/// Which events are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Events {
    /// Instructions: all overflow together.
    Instructions,
    /// Instructions and cycles in turn, which fit on all counters of Intel's PMU. In the lab one happens as often as the other.
    InTurn,
}

impl Events {
    fn list(self, number: u8, modes: Modes) -> String {
        let suffix = if modes == Modes::User { ":u" } else { "" };
        let names: &[&str] = match self {
            Self::Instructions => &["instructions"],
            Self::InTurn => &["instructions", "cycles"],
        };
        let events = names.iter().cycle().take(number.into()).map(|name| format!("{name}{suffix}"));
        events.collect::<Vec<_>>().join(",")
    }
}

/// A row of the table: this workload, so long, measured in this way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Row {
    /// The workload.
    pub workload: Workload,
    /// Its length.
    pub units: u64,
    /// How it is measured.
    pub measure: Measure,
}

impl Row {
    /// Whether that workload can be measured in that way: only the loop reads a counter.
    pub fn makes_sense(workload: Workload, measure: Measure) -> bool {
        measure != Measure::Read || workload == Workload::Loop
    }

    /// As long as is asked for.
    pub fn new(workload: Workload, measure: Measure, length: Length) -> Self {
        /// How many instructions the loop has.
        const LOOP: u64 = 600_000_000;
        let units = match (workload, measure) {
            (Workload::Loop, Measure::Record(period, ..)) => (period * 3000).min(LOOP),
            (Workload::Loop, _) => LOOP,
            (Workload::Syscalls, _) => 300_000,
            (Workload::Switches, _) => 3_000,
            (Workload::Memory, _) => 20_000_000,
            (Workload::Compile, _) => 6,
        };
        let units = match (length, workload) {
            (Length::Short, _) => units / 3,
            (Length::Usual, _) => units,
            // A round of short programs takes its time anywhere.
            (Length::Real, Workload::Compile) => units * 4,
            (Length::Real, _) => units * 10,
        };
        Self { workload, units, measure }
    }

    /// The one that it is compared with.
    #[must_use]
    pub fn base(self) -> Self {
        Self { measure: Measure::Nothing, ..self }
    }

    /// The one that tells how many samples there should be: how often the events happen, and how many are counted at a time.
    pub fn census(self) -> Option<Self> {
        let modes = match self.measure {
            Measure::Record(_, _, modes) => modes,
            Measure::Rate(..) => Modes::All,
            _ => return None,
        };
        Some(Self { measure: Measure::Stat(self.measure.events(), modes), ..self })
    }
}

/// How long workloads are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// In the lab, where an instruction takes a nanosecond.
    Usual,
    /// There, for who is in a hurry.
    Short,
    /// On a real machine, which is faster.
    Real,
}

/// What is measured if nothing else is asked for.
pub const ALL: &[(Workload, &[&str])] = &[
    (
        Workload::Loop,
        &[
            "stat:1",
            "stat:4",
            "stat:6",
            "stat:10",
            "record:10000:1",
            "record:10000:6",
            "record:10000:10",
            "record:100000:1",
            "record:100000:6",
            "record:100000:10",
            "record:1000000:1",
            "record:1000000:6",
            "record:1000000:10",
            "record:100000:6:all",
            "rate:1000:1",
            "rate:1000:6",
            "rate:1000:10",
            "interval:100:1",
            "interval:100:6",
            "read",
        ],
    ),
    (Workload::Syscalls, &["stat:6", "record:100000:6:all", "rate:1000:6", "rate:1000:10"]),
    (Workload::Switches, &["stat:1", "stat:4", "stat:6", "stat:10"]),
    (Workload::Memory, &["stat:6", "record:100000:6", "rate:1000:6", "rate:1000:10"]),
    (Workload::Compile, &["stat:6", "record:100000:6:all", "rate:1000:6", "rate:1000:10"]),
];

/// What is measured in a few minutes.
pub const QUICK: &[(Workload, &[&str])] = &[
    (
        Workload::Loop,
        &["record:100000:1", "record:100000:6", "record:100000:10", "rate:1000:6", "rate:1000:10", "read"],
    ),
    (Workload::Switches, &["stat:6"]),
];

/// Where the same is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Column {
    /// The host itself, without a guest.
    Host,
    /// A guest of Tally's with this PMU.
    Tally(&'static str),
    /// A guest of the distribution's QEMU, with KVM's own vPMU.
    Kvm,
    /// A guest with KVM's mediated vPMU, which gives it the host's counters: with Linux 7.0 and PerfMonV2. QEMU has to know that
    /// too, and the stable release's does not: so this is one of Tally's, with KVM's PMU.
    Mediated,
}

impl Column {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Host,
        Self::Tally("auto"),
        Self::Tally("amd"),
        Self::Tally("amd-legacy"),
        Self::Tally("intel"),
        Self::Tally("intel-v2"),
        Self::Kvm,
        Self::Mediated,
    ];
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "l1",
            Self::Tally(pmu) => pmu,
            Self::Kvm => "kvm",
            Self::Mediated => "mediated",
        })
    }
}

impl FromStr for Column {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        named(text, &Self::ALL)
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Workload {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        named(text, &Self::ALL)
    }
}

fn named<T: Copy + fmt::Display>(text: &str, all: &[T]) -> Result<T, String> {
    all.iter().find(|one| one.to_string() == text).copied().ok_or_else(|| {
        let names: Vec<_> = all.iter().map(T::to_string).collect();
        format!("there are {}", names.join(", "))
    })
}

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nothing => f.write_str("nothing"),
            Self::Stat(events, modes) => write!(f, "stat:{events}{modes}"),
            Self::Record(period, events, modes) => write!(f, "record:{period}:{events}{modes}"),
            Self::Rate(hertz, events) => write!(f, "rate:{hertz}:{events}"),
            Self::Interval(milliseconds, events) => write!(f, "interval:{milliseconds}:{events}"),
            Self::Read => f.write_str("read"),
        }
    }
}

impl fmt::Display for Modes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Self::User { "" } else { ":all" })
    }
}

impl FromStr for Measure {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        /// More than any PMU has room for at once.
        const MOST_EVENTS: u8 = 32;
        let (rest, modes) = match text.strip_suffix(":all") {
            Some(rest) => (rest, Modes::All),
            None => (text, Modes::User),
        };
        let words: Vec<&str> = rest.split(':').collect();
        let events = |word: &str| word.parse().ok().filter(|events| (1..=MOST_EVENTS).contains(events));
        let number = |word: &str| word.parse::<u32>().ok().filter(|number| *number > 0);
        let measure = match (&*words, modes) {
            (["stat", n], _) => events(n).map(|n| Self::Stat(n, modes)),
            (["record", period, n], _) => {
                both(number(period), events(n), |period, n| Self::Record(period.into(), n, modes))
            }
            (["rate", hertz, n], Modes::User) => both(number(hertz), events(n), Self::Rate),
            // perf takes no shorter intervals.
            (["interval", time, n], Modes::User) => {
                both(number(time).filter(|time| *time >= 10), events(n), Self::Interval)
            }
            (["read"], Modes::User) => Some(Self::Read),
            (["nothing"], Modes::User) => Some(Self::Nothing),
            _ => None,
        };
        measure.ok_or_else(|| {
            "there are stat:EVENTS[:all], record:PERIOD:EVENTS[:all], rate:HERTZ:EVENTS, \
             interval:MILLISECONDS:EVENTS or read"
                .to_owned()
        })
    }
}

fn both<A, B, T>(a: Option<A>, b: Option<B>, make: impl FnOnce(A, B) -> T) -> Option<T> {
    Some(make(a?, b?))
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.workload, self.units, self.measure)
    }
}

impl FromStr for Row {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let [workload, units, measure] = text.split('/').collect::<Vec<_>>()[..] else {
            return Err(format!("`{text}` is no row"));
        };
        let units = units.parse().map_err(|error| format!("{text}: {error}"))?;
        Ok(Self { workload: workload.parse()?, units, measure: measure.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_measured_is_read_as_it_is_written() {
        for (workload, measures) in ALL.iter().chain(QUICK) {
            for text in *measures {
                let measure: Measure = text.parse().unwrap();
                assert_eq!(measure.to_string(), *text);
                let row = Row::new(*workload, measure, Length::Usual);
                assert_eq!(row.to_string().parse(), Ok(row));
            }
        }
        for column in Column::ALL {
            assert_eq!(column.to_string().parse(), Ok(column));
        }
    }

    #[test]
    fn what_nobody_can_measure_is_refused() {
        for text in [
            "",
            "stat",
            "stat:0",
            "stat:33",
            "record:0:1",
            "record:1000",
            "rate:x:1",
            "interval:9:1",
            "read:1",
        ] {
            assert!(text.parse::<Measure>().is_err(), "{text}");
        }
        assert_eq!(
            "wrong".parse::<Workload>().unwrap_err(),
            "there are loop, syscalls, switches, memory, compile"
        );
    }

    #[test]
    fn events_come_in_turn_where_intels_counters_are() {
        let command = |events| Measure::Stat(3, Modes::User).command(events);
        assert!(command(Events::Instructions).ends_with(" instructions:u,instructions:u,instructions:u"));
        assert!(command(Events::InTurn).ends_with(" instructions:u,cycles:u,instructions:u"));
    }
}
