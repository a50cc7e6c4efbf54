//! The lab's self-test: counts of known programs must be exact on the simulated host and in a guest of the peer.
//!
//! Booting takes most of the time, so each group of checks is one boot. Each check has a name and a result of its own.

mod intel;
mod riscv64;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fmt::Write;

use guest_images::{Progress, Suite};

use crate::error::{Error, Result};
use crate::scenario::Scenario;
use crate::scenario::peer::{self, MachineType};
use crate::scenario::programs::{
    GUEST_EXITS_CPUID, GUEST_EXITS_INJECTED, GUEST_EXITS_INTERRUPTS, GUEST_EXITS_MSR, GUEST_EXITS_ROM,
    GUEST_EXITS_WBINVD, GUEST_LOOP_INSTRUCTIONS, GUEST_LOOP_ROM, KNOWN, LIST_FUNCTIONS_ONLY, LOOP,
    LOOP_BRANCHES, LOOP_CONDITIONAL_BRANCHES, LOOP_INSTRUCTIONS,
};

pub use intel::{
    in_a_guest as in_an_intel_guest, on_the_host as on_the_intel_host,
    with_older_versions as with_older_versions_on_intel,
};
pub use riscv64::{in_a_guest as in_a_riscv_guest, on_the_host as on_the_riscv_host};

/// Result of a check.
#[derive(Debug, Clone)]
pub struct Check {
    /// What is counted, and where.
    pub name: String,
    /// The measured count, or `None` if the script printed none.
    pub measured: Option<u64>,
    /// The exact count.
    pub expected: u64,
}

impl Check {
    /// Returns true if the count is exact.
    pub fn holds(&self) -> bool {
        self.measured == Some(self.expected)
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.measured {
            Some(measured) => write!(f, "{}: {measured}", self.name)?,
            None => write!(f, "{}: no number", self.name)?,
        }
        if self.holds() { Ok(()) } else { write!(f, ", not {}", self.expected) }
    }
}

/// Events and their counts over a long loop: most by Linux's names.
const NAMED: [(&str, u64); 5] = [
    ("instructions:u", LOOP_INSTRUCTIONS),
    ("cycles:u", LOOP_INSTRUCTIONS),
    ("branches:u", LOOP_BRANCHES),
    ("rd1:u", LOOP_CONDITIONAL_BRANCHES),
    ("branch-misses:u", 1),
];

/// The events of the table below: instructions, cycles, branches, conditional branches, taken branches, data cache
/// accesses. Their counts are the same on the host and in a guest.
const EVENTS: [&str; 6] = ["rc0:u", "r76:u", "rc2:u", "rd1:u", "rc4:u", "r40:u"];
const COUNTS: [(&str, [u64; 6]); 10] = [
    ("loop", [20_000_004, 20_000_004, 10_000_001, 10_000_000, 10_000_000, 0]),
    ("rep", [12, 104_108, 1, 0, 1, 104_096]),
    ("fault", [4005, 4005, 1001, 1000, 1000, 1000]),
    ("ud", [6010, 7010, 3002, 1000, 3001, 3000]),
    ("call", [800_006, 800_006, 700_001, 100_000, 700_000, 400_000]),
    ("alternate", [400_004, 400_004, 200_001, 200_000, 150_000, 0]),
    ("never", [400_004, 400_004, 200_001, 200_000, 100_000, 0]),
    ("stream", [262_164, 262_164, 65_541, 65_540, 65_536, 65_536]),
    ("small", [10_284, 10_284, 2571, 2570, 2560, 2560]),
    ("operands", [16_005, 16_005, 1001, 1000, 1000, 16_000]),
];

/// Mispredicted branches, cache references and cache misses. Task switches change these counts, so they are compared on
/// the host only, where these programs end before a task switch.
const MODEL_EVENTS: [&str; 3] = ["rc3:u", "rff60:u", "r964:u"];
const MODEL_COUNTS: [(&str, [u64; 3]); 10] = [
    ("loop", [1, 0, 0]),
    ("rep", [0, 1627, 1563]),
    ("fault", [1, 1000, 1000]),
    ("ud", [1001, 2, 2]),
    ("call", [3, 1, 1]),
    ("alternate", [50_001, 0, 0]),
    ("never", [2, 0, 0]),
    ("stream", [5, 65_536, 65_536]),
    ("small", [11, 256, 256]),
    ("operands", [1, 5, 5]),
];

/// Branches with the fields `CNT_MASK`, `INV` and `EDGE` of `PERF_CTL`.
const FIELD_EVENTS: [&str; 6] =
    ["r10000c2:u", "r18000c2:u", "r20000c2:u", "r28000c2:u", "r400c2:u", "r18400c2:u"];
const FIELD_COUNTS: [(&str, [u64; 6]); 2] = [
    ("loop", [10_000_001, 10_000_003, 0, 20_000_004, 10_000_001, 10_000_001]),
    ("call", [700_001, 100_005, 0, 800_006, 100_002, 100_002]),
];

/// Samples: the event, the period, the addresses (a pattern for `grep`), and the number of samples at these addresses.
type Samples = [(&'static str, u64, &'static str, u64); 4];
const SAMPLES: Samples = [
    ("rc0:u", 100_000, "401007", 200),
    ("r76:u", 100_000, "401007", 200),
    ("rc2:u", 100_000, "401005", 99),
    ("rd1:u", 100_000, "401009", 1),
];
/// Samples in a guest with KVM's vPMU. One of them may be in the kernel: if another interrupt is pending at an
/// overflow, the guest takes that one first.
const GUEST_SAMPLES: Samples = [
    ("rc0:u", 100_000, r"401007\|ffffffff", 200),
    ("r76:u", 100_000, r"401007\|ffffffff", 200),
    ("rc2:u", 100_000, r"401005\|401009\|ffffffff", 100),
    ("rd1:u", 100_000, r"401005\|401009\|ffffffff", 100),
];

/// A script that counts, and the counts that it must print.
#[derive(Default)]
struct Plan {
    script: String,
    expected: Vec<(String, u64)>,
}

impl Plan {
    /// Counts these events in each of these programs.
    fn count<const N: usize>(&mut self, events: [&str; N], programs: &[(&str, [u64; N])]) {
        for (program, counts) in programs {
            self.stat(&format!("known-{program}"), program, events.into_iter().zip(*counts));
        }
    }

    /// Counts these events in the program `file`. Its checks begin with `name`.
    fn stat<'a>(&mut self, file: &str, name: &str, expected: impl Iterator<Item = (&'a str, u64)>) {
        let mut events = Vec::new();
        for (event, count) in expected {
            self.expected.push((format!("{name} {event}"), count));
            events.push(event);
        }
        writeln!(
            self.script,
            "perf stat -x, -o stat -e {} ./{file}; awk -F, 'NF > 3 {{ print \"{name}\", $3, $1 }}' stat",
            events.join(",")
        )
        .expect("writing to a string cannot fail");
    }

    /// Counts the samples of the long loop, and those of the short loop at each of these addresses.
    fn sample(&mut self, samples: &Samples) {
        self.script += LIST_FUNCTIONS_ONLY;
        self.script += "perf record -q -c 1000000 -e instructions:u -o data ./loop\n\
                        echo samples instructions:u $(perf script -i data -F event | grep -c instructions)\n";
        self.expected.push(("samples instructions:u".to_owned(), 200));
        for (event, period, addresses, count) in samples {
            self.sample_at("known-loop", event, *period, addresses, *count);
        }
    }

    /// Counts the samples of a program at these addresses.
    fn sample_at(&mut self, file: &str, event: &str, period: u64, addresses: &str, count: u64) {
        let name = format!("samples {event}@{}", addresses.replace("\\|", ","));
        writeln!(
            self.script,
            "perf record -q -c {period} -e {event} -o data ./{file}\n\
             echo '{name}' $(perf script -i data -F ip | grep -c '{addresses}')"
        )
        .expect("writing to a string cannot fail");
        self.expected.push((name, count));
    }

    /// Compares the expected counts with the printed `numbers`.
    fn check(self, place: &str, numbers: &BTreeMap<String, u64>) -> Vec<Check> {
        self.expected
            .into_iter()
            .map(|(name, expected)| Check {
                measured: numbers.get(&name).copied(),
                name: format!("{place}: {name}"),
                expected,
            })
            .collect()
    }
}

/// Returns the checks that the host and a guest have in common.
fn common(samples: &Samples) -> Plan {
    let mut plan = Plan::default();
    plan.stat("loop", "long-loop", NAMED.into_iter());
    plan.count(EVENTS, &COUNTS);
    plan.count(FIELD_EVENTS, &FIELD_COUNTS);
    plan.sample(samples);
    plan
}

fn programs() -> impl Iterator<Item = (String, &'static [u8])> {
    let known = KNOWN.iter().map(|(name, content)| (format!("known-{name}"), *content));
    known.chain([("loop".to_owned(), LOOP)])
}

/// Runs the checks on the simulated host itself.
pub fn on_the_host(progress: &mut Progress) -> Result<Vec<Check>> {
    let mut plan = common(&SAMPLES);
    plan.count(MODEL_EVENTS, &MODEL_COUNTS);
    let scenario = programs()
        .fold(Scenario::with_all_counters(plan.script.clone()), |scenario, (name, content)| {
            scenario.program(content, &name)
        });
    Ok(plan.check("host", &numbers(&scenario, progress)?))
}

/// Runs the checks in a guest of the peer, with KVM's own virtual PMU.
pub fn in_a_guest(progress: &mut Progress) -> Result<Vec<Check>> {
    let plan = common(&GUEST_SAMPLES);
    let numbers = numbers(&guest_of_the_peer(&plan, progress)?, progress)?;
    Ok(plan.check("guest", &numbers))
}

/// Returns a scenario that runs a plan in a guest of the peer.
fn guest_of_the_peer(plan: &Plan, progress: &mut Progress) -> Result<Scenario> {
    let command: [OsString; 2] = ["sh".into(), "./plan".into()];
    let mut files: Vec<(String, &[u8])> = programs().collect();
    files.push(("plan".to_owned(), plan.script.as_bytes()));
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, content)| (&**name, *content)).collect();
    let script = peer::linux(MachineType::Default, &command);
    Scenario::with_all_counters(script).guest_with(Suite::default(), &files, progress)
}

/// Counts instructions of a guest that only loops: those of the guest, of the host, and of both, in one group. The
/// debug-exit device ends the peer with an odd status, which perf passes on.
const COUNT_APART: &str = "
perf stat -x, -o stat -e '{instructions:uG,instructions:uH,instructions:uGH}' PEER >/dev/null
awk -F, 'NF > 3 { print $3, $1 }' stat
";

/// Checks events that count in the guest only, or on the host only.
pub fn guest_and_host_apart(progress: &mut Progress) -> Result<Vec<Check>> {
    let script = COUNT_APART.replace("PEER", &peer::firmware("guest-loop.rom"));
    let numbers =
        numbers(&Scenario::with_all_counters(script).program(GUEST_LOOP_ROM, "guest-loop.rom"), progress)?;
    Ok(apart("apart", &numbers))
}

/// Returns the checks of the numbers that [`COUNT_APART`] prints.
fn apart(place: &str, numbers: &BTreeMap<String, u64>) -> Vec<Check> {
    let number = |event: &str| numbers.get(event).copied();
    let (guest, host, both) =
        (number("instructions:uG"), number("instructions:uH"), number("instructions:uGH"));
    vec![
        Check {
            name: format!("{place}: a guest's loop, counted by an event for guests only"),
            measured: guest,
            expected: GUEST_LOOP_INSTRUCTIONS,
        },
        Check {
            name: format!(
                "{place}: a guest's loop, as the difference of events for both and for the host only"
            ),
            measured: both.zip(host).and_then(|(both, host)| both.checked_sub(host)),
            expected: GUEST_LOOP_INSTRUCTIONS,
        },
    ]
}

/// Counts a guest's exits, and the instructions that KVM has to read and decode itself. These are the software
/// interrupts whose delivery caused the exit. For all other instructions the processor saves the next RIP (APM volume
/// 2, section 15.7.1).
const COUNT_EXITS: &str = "
echo nrips $(grep -c [1Y] /sys/module/kvm_amd/parameters/nrips)
perf stat -x, -o stat -e kvm:kvm_cpuid,kvm:kvm_msr,kvm:kvm_inj_virq,kvm:kvm_emulate_insn PEER >/dev/null
echo steps $(($? >> 1))
awk -F, 'NF > 3 { print $3, $1 }' stat
";

/// Checks that the processor saves the next RIP at an exit, and that the guest continues there.
pub fn leaving_a_guest(progress: &mut Progress) -> Result<Vec<Check>> {
    let script = COUNT_EXITS.replace("PEER", &peer::firmware("guest-exits.rom"));
    let numbers =
        numbers(&Scenario::with_all_counters(script).program(GUEST_EXITS_ROM, "guest-exits.rom"), progress)?;
    let steps = GUEST_EXITS_CPUID + GUEST_EXITS_MSR + GUEST_EXITS_WBINVD + GUEST_EXITS_INTERRUPTS;
    let expected = [
        ("nrips", "KVM uses the next RIP", 1),
        ("steps", "instructions after which the guest continues at the right one", steps),
        ("kvm:kvm_cpuid", "CPUIDs", GUEST_EXITS_CPUID),
        ("kvm:kvm_msr", "RDMSRs and WRMSRs", GUEST_EXITS_MSR),
        ("kvm:kvm_inj_virq", "interrupts injected again", GUEST_EXITS_INJECTED),
        ("kvm:kvm_emulate_insn", "instructions that KVM decodes", GUEST_EXITS_INTERRUPTS),
    ];
    Ok(expected
        .map(|(key, name, expected)| Check {
            name: format!("exits: {name}"),
            measured: numbers.get(key).copied(),
            expected,
        })
        .into())
}

/// Runs a scenario that prints lines of a name and a number.
fn numbers(scenario: &Scenario, progress: &mut Progress) -> Result<BTreeMap<String, u64>> {
    let outcome = scenario.run(progress)?;
    if outcome.status != 0 {
        let stderr = String::from_utf8_lossy(&outcome.stderr);
        return Err(Error::Command(format!("the self-test's script: {}", stderr.trim())));
    }
    let pair = |line: &str| {
        let (name, number) = line.trim().rsplit_once(' ')?;
        Some((name.to_owned(), number.parse().ok()?))
    };
    Ok(outcome.text().lines().filter_map(pair).collect())
}
