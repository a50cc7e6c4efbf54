//! The PMUs that a guest can have, and what differs between them for who counts in it: one entry each, and every test of
//! counting and sampling holds for all.

use tally_lab::programs::{LOOP_BRANCHES, LOOP_CONDITIONAL_BRANCHES, LOOP_INSTRUCTIONS};

/// An event in perf's notation, and how often it happens in [`tally_lab::programs::LOOP`].
pub type Known = (&'static str, u64);

/// A PMU that a guest can have, on a host with AMD's of six counters.
pub struct Model {
    /// Its name in `tally run --pmu NAME`.
    pub pmu: &'static str,
    /// What leaves two of the host's counters to others.
    pub leaving_two: &'static str,
    /// As many events as there are counters, and they fit on all of them at once.
    pub six: [Known; 6],
    /// Four more. Any six of the ten that follow each other, round and round, fit as well.
    pub four_more: [Known; 4],
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
    /// The ten events.
    pub fn ten(&self) -> Vec<Known> {
        [&self.six[..], &self.four_more].concat()
    }
}

/// Events as perf takes them.
pub fn list(events: &[Known], separator: &str) -> String {
    events.iter().map(|(event, _)| *event).collect::<Vec<_>>().join(separator)
}

/// All of them.
pub static MODELS: [Model; 2] = [
    Model {
        pmu: "amd",
        leaving_two: "--counters 4",
        six: [
            ("instructions:u", LOOP_INSTRUCTIONS),
            ("cycles:u", LOOP_INSTRUCTIONS),
            ("branches:u", LOOP_BRANCHES),
            ("rd1:u", LOOP_CONDITIONAL_BRANCHES),
            ("rc4:u", LOOP_CONDITIONAL_BRANCHES),
            ("r28000c2:u", LOOP_INSTRUCTIONS),
        ],
        four_more: [
            ("r10000c2:u", LOOP_BRANCHES),
            ("r18000c2:u", LOOP_BRANCHES + 2),
            ("r400c2:u", LOOP_BRANCHES),
            ("r18400c2:u", LOOP_BRANCHES),
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
            ("instructions:u", LOOP_INSTRUCTIONS),
            ("cycles:u", LOOP_INSTRUCTIONS),
            ("branches:u", LOOP_BRANCHES),
            ("rc0:u", LOOP_INSTRUCTIONS),
            ("r3c:u", LOOP_INSTRUCTIONS),
            ("rc4:u", LOOP_BRANCHES),
        ],
        four_more: [
            ("cpu/event=0xc0/u", LOOP_INSTRUCTIONS),
            ("cpu/event=0x3c/u", LOOP_INSTRUCTIONS),
            ("cpu/event=0xc4/u", LOOP_BRANCHES),
            ("cpu/instructions/u", LOOP_INSTRUCTIONS),
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
