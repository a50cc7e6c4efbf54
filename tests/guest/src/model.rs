//! The PMUs that a guest can have, and what differs between them for who counts in it: one entry each, and every test of
//! counting and sampling holds for all.

use tally_lab::programs::LOOP_CONDITIONAL_BRANCHES;

use crate::suite;

/// A program that goes round `dec` and `jnz` so often, with four more instructions around that.
#[derive(Clone, Copy)]
pub struct Loop {
    rounds: u64,
}

impl Loop {
    /// [`tally_lab::programs::LOOP`].
    pub const LONG: Self = Self { rounds: LOOP_CONDITIONAL_BRANCHES };
    /// The one of [`tally_lab::programs::KNOWN`].
    pub const SHORT: Self = Self { rounds: 10_000_000 };

    /// All that it executes in user mode.
    pub const fn instructions(self) -> u64 {
        2 * self.rounds + 4
    }

    /// The system call that ends it is one.
    pub const fn branches(self) -> u64 {
        self.rounds + 1
    }

    /// One of these is predicted wrongly, the last.
    pub const fn conditional_branches(self) -> u64 {
        self.rounds
    }
}

/// An event in perf's notation, and how often it happens in a loop.
type Event = (&'static str, fn(Loop) -> u64);

/// An event in perf's notation, and how often it happens.
pub type Known = (&'static str, u64);

/// A PMU that a guest can have, on a host with AMD's of six counters.
pub struct Model {
    /// Its name in `tally run --pmu NAME`.
    pub pmu: &'static str,
    /// What leaves two of the host's counters to others.
    pub leaving_two: &'static str,
    /// As many events as there are counters, and they fit on all of them at once.
    six: [Event; 6],
    /// Four more. Any six of the ten that follow each other, round and round, fit as well.
    four_more: [Event; 4],
    /// The events that have a name in perf.
    pub named: Named,
    /// Events by number, as many at a time as there are counters, and none that a task switch disturbs.
    pub raw: &'static [Raw],
    /// Events that the guest's kernel takes and the host does not have, and what Tally says of them.
    pub refused: &'static [(&'static str, &'static str)],
}

/// Which of the events that have a name a guest has.
pub enum Named {
    /// The host's.
    OfTheHost,
    /// These.
    These(&'static [&'static str]),
}

/// A list of events as the guest has it, and what the host calls the same.
pub struct Raw {
    /// The guest's events.
    pub guest: &'static str,
    /// The host's.
    pub host: &'static str,
}

impl Raw {
    /// Events that both call the same.
    const fn same(events: &'static str) -> Self {
        Self { guest: events, host: events }
    }
}

impl Model {
    /// As many events as there are counters, with their counts of a loop.
    pub fn six(&self, of: Loop) -> [Known; 6] {
        self.six.map(|(event, count)| (event, count(of)))
    }

    /// Four events more, with their counts of a loop.
    pub fn ten(&self, of: Loop) -> Vec<Known> {
        self.six.iter().chain(&self.four_more).map(|(event, count)| (*event, count(of))).collect()
    }
}

/// Events as perf takes them.
pub fn list(events: &[Known], separator: &str) -> String {
    events.iter().map(|(event, _)| *event).collect::<Vec<_>>().join(separator)
}

/// Those that a test looks at which is about more than a model: one in the first tier, all in the second.
pub fn selected() -> &'static [Model] {
    if suite::has_breadth() { &MODELS } else { &MODELS[..1] }
}

/// All of them.
pub static MODELS: [Model; 2] = [
    Model {
        pmu: "amd",
        leaving_two: "--counters 4",
        six: [
            ("instructions:u", Loop::instructions),
            ("cycles:u", Loop::instructions),
            ("branches:u", Loop::branches),
            ("rd1:u", Loop::conditional_branches),
            ("rc4:u", Loop::conditional_branches),
            ("r28000c2:u", Loop::instructions),
        ],
        four_more: [
            ("r10000c2:u", Loop::branches),
            ("r18000c2:u", |of| of.branches() + 2),
            ("r400c2:u", Loop::branches),
            ("r18400c2:u", Loop::branches),
        ],
        named: Named::OfTheHost,
        // Plain events, then branches with a threshold, inverted, and by edges, in both of perf's notations.
        raw: &[
            Raw::same("rc0:u,r76:u,rc2:u,rd1:u,rc4:u,r40:u"),
            Raw::same("r10000c2:u,r18000c2:u,r20000c2:u,r28000c2:u,r400c2:u,r18400c2:u"),
            Raw::same(
                "cpu/event=0xc2,cmask=1/u,cpu/event=0xc2,cmask=1,inv/u,cpu/event=0xc2,cmask=2/u,\
                 cpu/event=0xc2,cmask=2,inv/u,cpu/event=0xc2,edge/u,cpu/event=0xd1,umask=0x0/u",
            ),
        ],
        refused: &[],
    },
    // Four counters for every event, one for instructions and one for cycles: what follows each other has both.
    Model {
        pmu: "intel",
        leaving_two: "--counters 2",
        six: [
            ("instructions:u", Loop::instructions),
            ("cycles:u", Loop::instructions),
            ("branches:u", Loop::branches),
            ("rc0:u", Loop::instructions),
            ("r3c:u", Loop::instructions),
            ("rc4:u", Loop::branches),
        ],
        four_more: [
            ("cpu/event=0xc0/u", Loop::instructions),
            ("cpu/event=0x3c/u", Loop::instructions),
            ("cpu/event=0xc4/u", Loop::branches),
            ("cpu/instructions/u", Loop::instructions),
        ],
        named: Named::These(&["cycles", "instructions", "branches", "branch-misses", "ref-cycles"]),
        raw: &[
            Raw { guest: "rc0:u,r3c:u,rc4:u,rc0:u,r3c:u,rc4:u", host: "rc0:u,r76:u,rc2:u,rc0:u,r76:u,rc2:u" },
            Raw {
                guest: "cpu/event=0xc4,umask=0x0/u,cpu/event=0x3c/u,cpu/event=0xc0/u",
                host: "cpu/event=0xc2,umask=0x0/u,cpu/event=0x76/u,cpu/event=0xc0/u",
            },
        ],
        refused: &[
            ("ref-cycles:u", "ref-cycles:u"),
            ("r4f2e:u", "r4f2e:u (LLC references)"),
            ("rd1:u", "rd1:u (an event of the guest's vendor only)"),
            ("r10000c4:u", "r10000c4:u (with a threshold or by edges)"),
        ],
    },
];
