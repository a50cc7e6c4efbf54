//! PMU models that a guest can have, and the differences that matter to the tests. Every test of counting and sampling
//! runs with each selected model.

use tally_lab::programs::LOOP_CONDITIONAL_BRANCHES;

use crate::host::{self, Host};
use crate::suite;

/// A program that executes a loop of `dec` and `jnz`, and four more instructions.
#[derive(Clone, Copy)]
pub struct Loop {
    rounds: u64,
}

impl Loop {
    /// [`tally_lab::programs::LOOP`].
    pub const LONG: Self = Self { rounds: LOOP_CONDITIONAL_BRANCHES };
    /// The program `loop` of [`tally_lab::programs::KNOWN`].
    pub const SHORT: Self = Self { rounds: 10_000_000 };

    /// Returns the number of instructions in user mode.
    pub const fn instructions(self) -> u64 {
        2 * self.rounds + 4
    }

    /// Returns the number of branches. The system call at the end counts as one.
    pub const fn branches(self) -> u64 {
        self.rounds + 1
    }

    /// Returns the number of conditional branches. Only the last is mispredicted.
    pub const fn conditional_branches(self) -> u64 {
        self.rounds
    }
}

/// An event in perf's notation, and a function that returns its count for a loop.
type Event = (&'static str, fn(Loop) -> u64);

/// An event in perf's notation, and its expected count.
pub type ExpectedCount = (&'static str, u64);

/// A PMU that a guest can have.
pub struct Model {
    /// Name in `tally run --pmu NAME`.
    pub pmu: &'static str,
    /// More options of `tally run`, with which the guest has six counters.
    pub options: &'static str,
    /// Option of `tally run` with which the guest leaves two of the host's counters to other users.
    pub spare_two_counters: &'static str,
    /// As many events as there are counters. All of them fit on the counters at once.
    six: [Event; 6],
    /// Four more events. Any six consecutive events of the ten, taken cyclically, also fit on the counters at once.
    four_more: [Event; 4],
    /// Events with a name in perf that the guest supports.
    pub named: Named,
    /// Lists of raw events, each no longer than the number of counters. Task switches do not change their counts.
    pub raw: &'static [Raw],
    /// Events that the guest's kernel accepts and the host does not have, each with the words of Tally's notice.
    pub refused: &'static [(&'static str, &'static str)],
}

/// Set of named events that a guest supports.
pub enum Named {
    /// Those that the host supports.
    OfTheHost,
    /// The same without those whose names begin with one of these.
    OfTheHostWithout(&'static [&'static str]),
    /// The listed ones.
    These(&'static [&'static str]),
}

/// A list of raw events in the guest's encoding, and the same events in the host's.
pub struct Raw {
    /// Events in the guest's encoding.
    pub guest: &'static str,
    /// Events in the host's encoding.
    pub host: &'static str,
}

impl Raw {
    /// Creates a list whose events have the same encoding in guest and host.
    const fn same(events: &'static str) -> Self {
        Self { guest: events, host: events }
    }
}

impl Model {
    /// Returns as many events as there are counters, with their counts for a loop.
    pub fn six(&self, of: Loop) -> [ExpectedCount; 6] {
        self.six.map(|(event, count)| (event, count(of)))
    }

    /// Returns ten events, more than there are counters, with their counts for a loop.
    pub fn ten(&self, of: Loop) -> Vec<ExpectedCount> {
        self.six.iter().chain(&self.four_more).map(|(event, count)| (*event, count(of))).collect()
    }
}

/// Joins the names of events with a separator.
pub fn list(events: &[ExpectedCount], separator: &str) -> String {
    events.iter().map(|(event, _)| *event).collect::<Vec<_>>().join(separator)
}

/// Returns the models that a test covers: one in the first tier, all in the second.
pub fn selected_models() -> &'static [Model] {
    if host::current() == Host::Intel {
        return &ON_INTEL;
    }
    if suite::runs_second_tier() { &MODELS } else { &MODELS[..1] }
}

/// All models on the AMD host, which has six counters.
pub static MODELS: [Model; 2] = [
    Model {
        pmu: "amd",
        options: "",
        spare_two_counters: "--counters 4",
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
    // Four general counters, and a fixed one each for instructions and for cycles. Any six consecutive events have
    // both.
    Model {
        pmu: "intel",
        options: "",
        spare_two_counters: "--counters 2",
        six: INTEL_SIX,
        four_more: INTEL_FOUR_MORE,
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

/// Events of Intel's PMU.
const INTEL_SIX: [Event; 6] = [
    ("instructions:u", Loop::instructions),
    ("cycles:u", Loop::instructions),
    ("branches:u", Loop::branches),
    ("rc0:u", Loop::instructions),
    ("r3c:u", Loop::instructions),
    ("rc4:u", Loop::branches),
];
const INTEL_FOUR_MORE: [Event; 4] = [
    ("cpu/event=0xc0/u", Loop::instructions),
    ("cpu/event=0x3c/u", Loop::instructions),
    ("cpu/event=0xc4/u", Loop::branches),
    ("cpu/instructions/u", Loop::instructions),
];

/// All models on the Intel host, which has eight general counters and three fixed ones.
static ON_INTEL: [Model; 1] = [Model {
    pmu: "intel",
    // The third fixed counter is for reference cycles only.
    options: "--counters 4",
    spare_two_counters: "",
    six: INTEL_SIX,
    four_more: INTEL_FOUR_MORE,
    // Events of off-core responses.
    named: Named::OfTheHostWithout(&["LLC-", "node-"]),
    raw: &[
        Raw::same("rc0:u,r3c:u,rc4:u,r1c4:u"),
        Raw::same("r10000c4:u,r18000c4:u,r20000c4:u,r28000c4:u"),
        Raw::same("r400c4:u,r18400c4:u,cpu/event=0xc4,cmask=1,inv/u,cpu/event=0xc4,umask=0x1/u"),
    ],
    refused: &[],
}];
