//! The lab proves itself: counts of known programs, on the simulated host and in a guest of the peer's, must be exact.
//!
//! Booting takes most of the time, so each group of checks is one boot, and each check is reported by its name.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;

use guest_images::{Progress, Suite};

use crate::peer::{self, Machine};
use crate::programs::{
    GUEST_LOOP_INSTRUCTIONS, GUEST_LOOP_ROM, LOOP, LOOP_BRANCHES, LOOP_CONDITIONAL_BRANCHES,
    LOOP_INSTRUCTIONS,
};
use crate::{Error, Result, Scenario};

/// What a check found.
#[derive(Debug, Clone)]
pub struct Check {
    /// What is claimed.
    pub name: &'static str,
    /// What was measured, or nothing if the measurement said nothing.
    pub measured: Option<u64>,
    /// What it must be.
    pub expected: u64,
}

impl Check {
    /// Whether the claim holds.
    pub fn holds(&self) -> bool {
        self.measured == Some(self.expected)
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.holds() { "ok" } else { "FAILED" };
        write!(f, "{verdict:<6} {}: ", self.name)?;
        match self.measured {
            Some(measured) => write!(f, "{measured}")?,
            None => write!(f, "no number")?,
        }
        if self.holds() { Ok(()) } else { write!(f, ", not {}", self.expected) }
    }
}

/// Counts and samples a loop of known length, and prints the name and the value of each number.
const COUNT: &str = "
perf stat -x, -o stat -e instructions:u,cycles:u,branches:u,rd1:u,branch-misses:u ./loop
awk -F, 'NF > 3 { print $3, $1 }' stat
perf record -q -c 1000000 -e instructions:u -o data ./loop
echo samples $(perf script -i data -F event | grep -c instructions)
";

/// Counts a guest that is nothing but a loop: on both sides, on each, and all at the same time.
const COUNT_APART: &str = "
perf stat -x, -o stat -e '{instructions:uG,instructions:uH,instructions:uGH}' PEER >/dev/null
awk -F, 'NF > 3 { print $3, $1 }' stat
";

/// What [`COUNT`] must print, wherever it runs, and the claim that this makes.
const COUNTS: [(&str, u64, [&str; 2]); 6] = [
    (
        "instructions:u",
        LOOP_INSTRUCTIONS,
        ["the host counts every instruction", "a guest of KVM's PMU counts every instruction"],
    ),
    (
        "cycles:u",
        LOOP_INSTRUCTIONS,
        ["on the host an instruction is a cycle", "in a guest an instruction is a cycle"],
    ),
    ("branches:u", LOOP_BRANCHES, ["the host counts every branch", "a guest counts every branch"]),
    (
        "rd1:u",
        LOOP_CONDITIONAL_BRANCHES,
        ["the host counts every conditional branch", "a guest counts every conditional branch"],
    ),
    ("branch-misses:u", 1, ["on the host a loop ends unpredicted", "in a guest a loop ends unpredicted"]),
    ("samples", 200, ["the host takes every sample", "a guest takes every sample"]),
];

/// Checks of the simulated host itself.
pub fn on_the_host(progress: &mut Progress) -> Result<Vec<Check>> {
    let numbers = numbers(&Scenario::new(COUNT).program(LOOP, "loop"), progress)?;
    Ok(counts(&numbers, 0))
}

/// Checks of a guest under the peer, with KVM's own virtual PMU.
pub fn in_a_guest(progress: &mut Progress) -> Result<Vec<Check>> {
    let command: [OsString; 3] = ["sh".into(), "-c".into(), COUNT.into()];
    let scenario = Scenario::new(peer::linux(Machine::Default, &command));
    let numbers = numbers(&scenario.guest_with(Suite::default(), &[("loop", LOOP)], progress)?, progress)?;
    Ok(counts(&numbers, 1))
}

fn counts(numbers: &BTreeMap<String, u64>, place: usize) -> Vec<Check> {
    COUNTS
        .iter()
        .map(|&(event, expected, names)| Check {
            name: names[place],
            measured: numbers.get(event).copied(),
            expected,
        })
        .collect()
}

/// Checks of events that count only in the guest, or only outside it.
pub fn guest_and_host_apart(progress: &mut Progress) -> Result<Vec<Check>> {
    // The debug-exit device ends the peer with an odd status, which perf passes on.
    let script = COUNT_APART.replace("PEER", &peer::firmware("guest-loop.rom"));
    let numbers = numbers(&Scenario::new(script).program(GUEST_LOOP_ROM, "guest-loop.rom"), progress)?;
    let number = |event: &str| numbers.get(event).copied();
    let (guest, host, both) =
        (number("instructions:uG"), number("instructions:uH"), number("instructions:uGH"));
    Ok(vec![
        Check {
            name: "an event for guests alone finds a guest's loop to the instruction",
            measured: guest,
            expected: GUEST_LOOP_INSTRUCTIONS,
        },
        Check {
            name: "an event for the host alone finds nothing of a guest's loop",
            measured: both.zip(host).and_then(|(both, host)| both.checked_sub(host)),
            expected: GUEST_LOOP_INSTRUCTIONS,
        },
    ])
}

/// Runs a scenario that prints names and numbers.
fn numbers(scenario: &Scenario, progress: &mut Progress) -> Result<BTreeMap<String, u64>> {
    let outcome = scenario.run(progress)?;
    if outcome.status != 0 {
        let stderr = String::from_utf8_lossy(&outcome.stderr);
        return Err(Error::Command(format!("the self-test's script: {}", stderr.trim())));
    }
    let pair = |line: &str| {
        let (name, number) = line.trim().split_once(' ')?;
        Some((name.to_owned(), number.parse().ok()?))
    };
    Ok(outcome.text().lines().filter_map(pair).collect())
}
