//! What the benchmark runs: workloads, how they are measured, and where. The names of these are used on the command
//! line and in the output of the scripts.

use std::fmt;
use std::str::FromStr;

/// A program whose slowdown is measured. Its length is a number of units.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Workload {
    /// A loop. A unit is an instruction.
    Loop,
    /// System calls. A unit is one call.
    Syscalls,
    /// Two tasks that hand a byte to and fro through pipes. A unit is a task switch.
    Switches,
    /// Loads from memory, each of which depends on the previous one. A unit is one load.
    Memory,
    /// Short programs and small files, as in a build. A unit is about twenty programs.
    Compile,
}

impl Workload {
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

/// Processor modes in which events are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Modes {
    /// User mode only.
    User,
    /// User mode and the kernel.
    All,
}

/// How a workload is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Measure {
    /// Nothing is measured. The others are compared with this.
    Nothing,
    /// `perf stat` with this many events.
    Stat(u8, Modes),
    /// `perf record` with this period in instructions, and with this many events.
    Record(u64, u8, Modes),
    /// `perf record` with this many samples per second, and with this many events.
    Rate(u32, u8),
    /// `perf stat` that prints its counts at this interval in milliseconds, with this many events.
    Interval(u32, u8),
    /// The workload, which must be the loop, reads its own counter, in this way.
    Read(Way),
}

/// How a program reads a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Way {
    /// By the system call `read`.
    Call,
    /// By RDPMC, from the event's mapped page. Guests need a host whose KVM lets that fault, which Debian's oldest
    /// kernel does not on AMD's processors.
    Rdpmc,
}

impl Measure {
    /// Number of events.
    pub fn events(self) -> u8 {
        match self {
            Self::Nothing => 0,
            Self::Read(_) => 1,
            Self::Stat(events, _)
            | Self::Record(_, events, _)
            | Self::Rate(_, events)
            | Self::Interval(_, events) => events,
        }
    }

    /// Returns true if samples are taken.
    pub fn samples(self) -> bool {
        matches!(self, Self::Record(..) | Self::Rate(..))
    }

    /// Returns the perf command that measures the command after it.
    pub fn command(self, events: Events) -> String {
        /// The options turn off build IDs and BPF events, which are not needed here and take half of perf's start.
        const RECORD: &str = "perf record -q -B --no-bpf-event -o data";
        let list = |modes| events.list(self.events(), modes);
        match self {
            Self::Nothing | Self::Read(_) => String::new(),
            Self::Stat(_, modes) => format!("perf stat -x, -o counts -e {}", list(modes)),
            Self::Record(period, _, modes) => {
                format!("{RECORD} -c {period} -e {}", list(modes))
            }
            // What `perf record` samples by itself.
            Self::Rate(hertz, 1) => format!("{RECORD} -F {hertz} -e cycles"),
            Self::Rate(hertz, _) => format!("{RECORD} -F {hertz} -e {}", list(Modes::All)),
            Self::Interval(milliseconds, _) => {
                format!("perf stat -I {milliseconds} -x, -o counts -e {}", list(Modes::User))
            }
        }
    }
}

/// The events that are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Events {
    /// Instructions only, so all events overflow together.
    Instructions,
    /// Instructions and cycles in turn, so they fit on all counters of Intel's PMU, fixed ones included. In the lab
    /// both have the same count.
    Alternating,
}

impl Events {
    fn list(self, number: u8, modes: Modes) -> String {
        let suffix = if modes == Modes::User { ":u" } else { "" };
        let names: &[&str] = match self {
            Self::Instructions => &["instructions"],
            Self::Alternating => &["instructions", "cycles"],
        };
        let events = names.iter().cycle().take(number.into()).map(|name| format!("{name}{suffix}"));
        events.collect::<Vec<_>>().join(",")
    }
}

/// A row of the table: a workload of some length, measured in some way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Row {
    pub workload: Workload,
    /// Length of the workload.
    pub units: u64,
    pub measure: Measure,
}

impl Row {
    /// Returns true if the workload can be measured in this way. Only the loop can read its own counter.
    pub fn is_possible(workload: Workload, measure: Measure) -> bool {
        !matches!(measure, Measure::Read(_)) || workload == Workload::Loop
    }

    /// Creates a row whose number of units follows from `length`.
    pub fn new(workload: Workload, measure: Measure, length: Length) -> Self {
        /// Number of instructions of the loop.
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
            // A unit of this workload takes long on a real machine too.
            (Length::Real, Workload::Compile) => units * 4,
            (Length::Real, _) => units * 10,
        };
        Self { workload, units, measure }
    }

    /// Returns the row without measuring, with which this row is compared.
    #[must_use]
    pub fn base(self) -> Self {
        Self { measure: Measure::Nothing, ..self }
    }

    /// Returns the row that counts the events of a sampling row. The expected number of samples follows from its count,
    /// and from the number of events that are counted at a time.
    pub fn counting(self) -> Option<Self> {
        let modes = match self.measure {
            Measure::Record(_, _, modes) => modes,
            Measure::Rate(..) => Modes::All,
            _ => return None,
        };
        Some(Self { measure: Measure::Stat(self.measure.events(), modes), ..self })
    }
}

/// Length of workloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    /// For the lab, where an instruction takes a nanosecond.
    Usual,
    /// For the lab, for `--quick`.
    Short,
    /// For a real machine, which is faster.
    Real,
}

/// The measurements that are made by default.
pub const ALL: &[(Workload, &[&str])] = &[
    (
        Workload::Loop,
        &[
            "rate:4000:1",
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
    (Workload::Syscalls, &["rate:4000:1", "stat:6", "record:100000:6:all", "rate:1000:6", "rate:1000:10"]),
    (Workload::Switches, &["rate:4000:1", "stat:1", "stat:4", "stat:6", "stat:10"]),
    (Workload::Memory, &["rate:4000:1", "stat:6", "record:100000:6", "rate:1000:6", "rate:1000:10"]),
    (Workload::Compile, &["rate:4000:1", "stat:6", "record:100000:6:all", "rate:1000:6", "rate:1000:10"]),
];

/// The measurements for `--quick`, which take a few minutes.
pub const QUICK: &[(Workload, &[&str])] = &[
    (
        Workload::Loop,
        &[
            "rate:4000:1",
            "record:100000:1",
            "record:100000:6",
            "record:100000:10",
            "rate:1000:6",
            "rate:1000:10",
            "read",
        ],
    ),
    (Workload::Switches, &["stat:6"]),
];

/// A place where the workloads run: the host, or a kind of guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Column {
    /// The host itself, without a guest.
    Host,
    /// A guest of Tally with this PMU.
    Tally(&'static str),
    /// A guest of the distribution's QEMU, with KVM's own vPMU.
    Kvm,
    /// A guest with KVM's mediated vPMU, which needs Linux 7.0 and PerfMonV2, and gives the guest the host's counters.
    /// QEMU needs support for that too, which the stable release's does not have. So this is a guest of Tally, with
    /// KVM's vPMU.
    Mediated,
}

impl Column {
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
        format!("use one of {}", names.join(", "))
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
            Self::Read(Way::Call) => f.write_str("read"),
            Self::Read(Way::Rdpmc) => f.write_str("rdpmc"),
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
        /// Maximum number of events, which is more than the counters of any PMU.
        const MAX_EVENTS: u8 = 32;
        let (rest, modes) = match text.strip_suffix(":all") {
            Some(rest) => (rest, Modes::All),
            None => (text, Modes::User),
        };
        let words: Vec<&str> = rest.split(':').collect();
        let events = |word: &str| word.parse().ok().filter(|events| (1..=MAX_EVENTS).contains(events));
        let number = |word: &str| word.parse::<u32>().ok().filter(|number| *number > 0);
        let measure = match (&*words, modes) {
            (["stat", n], _) => events(n).map(|n| Self::Stat(n, modes)),
            (["record", period, n], _) => {
                both(number(period), events(n), |period, n| Self::Record(period.into(), n, modes))
            }
            (["rate", hertz, n], Modes::User) => both(number(hertz), events(n), Self::Rate),
            // perf's minimum is 10 ms.
            (["interval", time, n], Modes::User) => {
                both(number(time).filter(|time| *time >= 10), events(n), Self::Interval)
            }
            (["read"], Modes::User) => Some(Self::Read(Way::Call)),
            (["rdpmc"], Modes::User) => Some(Self::Read(Way::Rdpmc)),
            (["nothing"], Modes::User) => Some(Self::Nothing),
            _ => None,
        };
        measure.ok_or_else(|| {
            "use stat:EVENTS[:all], record:PERIOD:EVENTS[:all], rate:HERTZ:EVENTS, \
             interval:MILLISECONDS:EVENTS, read or rdpmc"
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
            return Err(format!("`{text}` is not a row WORKLOAD/UNITS/MEASURE"));
        };
        let units = units.parse().map_err(|error| format!("{text}: {error}"))?;
        Ok(Self { workload: workload.parse()?, units, measure: measure.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_as_they_are_printed() {
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
    fn a_read_by_an_instruction_is_a_measurement_of_the_loop() {
        let measure: Measure = "rdpmc".parse().unwrap();
        assert_eq!((measure, measure.to_string()), (Measure::Read(Way::Rdpmc), "rdpmc".to_owned()));
        assert!(Row::is_possible(Workload::Loop, measure) && !Row::is_possible(Workload::Memory, measure));
    }

    #[test]
    fn a_measurement_that_is_not_possible_is_refused() {
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
            "use one of loop, syscalls, switches, memory, compile"
        );
    }

    #[test]
    fn events_alternate_for_intels_pmu() {
        let command = |events| Measure::Stat(3, Modes::User).command(events);
        assert!(command(Events::Instructions).ends_with(" instructions:u,instructions:u,instructions:u"));
        assert!(command(Events::Alternating).ends_with(" instructions:u,cycles:u,instructions:u"));
    }
}
