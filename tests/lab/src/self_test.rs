//! The lab proves itself: counts of known programs, on the simulated host and in a guest of the peer's, must be exact.
//!
//! Booting takes most of the time, so each group of checks is one boot, and each check is reported by its name.

mod riscv64;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fmt::Write;

use guest_images::{Progress, Suite};

use crate::peer::{self, Machine};
use crate::programs::{
    GUEST_EXITS_CPUID, GUEST_EXITS_INJECTED, GUEST_EXITS_INTERRUPTS, GUEST_EXITS_MSR, GUEST_EXITS_ROM,
    GUEST_EXITS_WBINVD, GUEST_LOOP_INSTRUCTIONS, GUEST_LOOP_ROM, KNOWN, LOOP, LOOP_BRANCHES,
    LOOP_CONDITIONAL_BRANCHES, LOOP_INSTRUCTIONS,
};
use crate::{Error, Result, Scenario};

pub use riscv64::{in_a_guest as in_a_riscv_guest, on_the_host as on_the_riscv_host};

/// What a check found.
#[derive(Debug, Clone)]
pub struct Check {
    /// What is counted, and where.
    pub name: String,
    /// What was measured, or nothing if the measurement said nothing.
    pub measured: Option<u64>,
    /// What it must be.
    pub expected: u64,
}

impl Check {
    /// Whether the count is exact.
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

/// Events as Linux names them, over a long loop.
const NAMED: [(&str, u64); 5] = [
    ("instructions:u", LOOP_INSTRUCTIONS),
    ("cycles:u", LOOP_INSTRUCTIONS),
    ("branches:u", LOOP_BRANCHES),
    ("rd1:u", LOOP_CONDITIONAL_BRANCHES),
    ("branch-misses:u", 1),
];

/// The events of the table below: instructions, cycles, branches, conditional ones, taken ones, data cache accesses.
/// They come out the same wherever the program runs.
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

/// Mispredicted branches, cache references and cache misses. Task switches change them, so they are compared on the
/// host alone, where these programs are too short to be switched away from.
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

/// Branches with a threshold, inverted, and by edges.
const FIELD_EVENTS: [&str; 6] =
    ["r10000c2:u", "r18000c2:u", "r20000c2:u", "r28000c2:u", "r400c2:u", "r18400c2:u"];
const FIELD_COUNTS: [(&str, [u64; 6]); 2] = [
    ("loop", [10_000_001, 10_000_003, 0, 20_000_004, 10_000_001, 10_000_001]),
    ("call", [700_001, 100_005, 0, 800_006, 100_002, 100_002]),
];

/// Samples by event, period, and the addresses (for `grep`) that so many must be found at.
type Samples = [(&'static str, u64, &'static str, u64); 4];
const SAMPLES: Samples = [
    ("rc0:u", 100_000, "401007", 200),
    ("r76:u", 100_000, "401007", 200),
    ("rc2:u", 100_000, "401005", 99),
    ("rd1:u", 100_000, "401009", 1),
];
/// In a guest with KVM's vPMU one of them may be the kernel's: where another interrupt waits already, that one is taken first.
const GUEST_SAMPLES: Samples = [
    ("rc0:u", 100_000, r"401007\|ffffffff", 200),
    ("r76:u", 100_000, r"401007\|ffffffff", 200),
    ("rc2:u", 100_000, r"401005\|401009\|ffffffff", 100),
    ("rd1:u", 100_000, r"401005\|401009\|ffffffff", 100),
];

/// What a script is to count, and what must come out.
#[derive(Default)]
struct Plan {
    script: String,
    expected: Vec<(String, u64)>,
}

impl Plan {
    /// Every program of these with these events.
    fn count<const N: usize>(&mut self, events: [&str; N], programs: &[(&str, [u64; N])]) {
        for (program, counts) in programs {
            self.stat(&format!("known-{program}"), program, events.into_iter().zip(*counts));
        }
    }

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

    /// Samples of the long loop by number, and of the short one by place.
    fn sample(&mut self, samples: &Samples) {
        self.script += "perf record -q -c 1000000 -e instructions:u -o data ./loop\n\
                        echo samples instructions:u $(perf script -i data -F event | grep -c instructions)\n";
        self.expected.push(("samples instructions:u".to_owned(), 200));
        for (event, period, addresses, count) in samples {
            self.sample_at("known-loop", event, *period, addresses, *count);
        }
    }

    /// Samples of a program that are to be found at these addresses.
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

    /// Compares with what was printed.
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

/// What both the host and a guest must count.
fn everywhere(samples: &Samples) -> Plan {
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

/// Checks of the simulated host itself.
pub fn on_the_host(progress: &mut Progress) -> Result<Vec<Check>> {
    let mut plan = everywhere(&SAMPLES);
    plan.count(MODEL_EVENTS, &MODEL_COUNTS);
    let scenario = programs().fold(Scenario::new(plan.script.clone()), |scenario, (name, content)| {
        scenario.program(content, &name)
    });
    Ok(plan.check("host", &numbers(&scenario, progress)?))
}

/// Checks of a guest under the peer, with KVM's own virtual PMU.
pub fn in_a_guest(progress: &mut Progress) -> Result<Vec<Check>> {
    let plan = everywhere(&GUEST_SAMPLES);
    let command: [OsString; 2] = ["sh".into(), "./plan".into()];
    let mut files: Vec<(String, &[u8])> = programs().collect();
    files.push(("plan".to_owned(), plan.script.as_bytes()));
    let files: Vec<(&str, &[u8])> = files.iter().map(|(name, content)| (&**name, *content)).collect();
    let scenario = Scenario::new(peer::linux(Machine::Default, &command)).guest_with(
        Suite::default(),
        &files,
        progress,
    )?;
    let numbers = numbers(&scenario, progress)?;
    Ok(plan.check("guest", &numbers))
}

/// Counts a guest that is nothing but a loop: on both sides, on each, and all at the same time. The debug-exit device
/// ends the peer with an odd status, which perf passes on.
const COUNT_APART: &str = "
perf stat -x, -o stat -e '{instructions:uG,instructions:uH,instructions:uGH}' PEER >/dev/null
awk -F, 'NF > 3 { print $3, $1 }' stat
";

/// Checks of events that count only in the guest, or only outside it.
pub fn guest_and_host_apart(progress: &mut Progress) -> Result<Vec<Check>> {
    let script = COUNT_APART.replace("PEER", &peer::firmware("guest-loop.rom"));
    let numbers = numbers(&Scenario::new(script).program(GUEST_LOOP_ROM, "guest-loop.rom"), progress)?;
    let number = |event: &str| numbers.get(event).copied();
    let (guest, host, both) =
        (number("instructions:uG"), number("instructions:uH"), number("instructions:uGH"));
    Ok(vec![
        Check {
            name: "apart: a guest's loop, as events for guests alone find it".to_owned(),
            measured: guest,
            expected: GUEST_LOOP_INSTRUCTIONS,
        },
        Check {
            name: "apart: a guest's loop, as what events for the host alone lack".to_owned(),
            measured: both.zip(host).and_then(|(both, host)| both.checked_sub(host)),
            expected: GUEST_LOOP_INSTRUCTIONS,
        },
    ])
}

/// Counts what a guest leaves for, and how many of its instructions KVM has to read and decode itself: those in the middle
/// of whose interrupt the guest was left. For all others the processor says where the next one is.
const COUNT_EXITS: &str = "
echo nrips $(grep -c [1Y] /sys/module/kvm_amd/parameters/nrips)
perf stat -x, -o stat -e kvm:kvm_cpuid,kvm:kvm_msr,kvm:kvm_inj_virq,kvm:kvm_emulate_insn PEER >/dev/null
echo steps $(($? >> 1))
awk -F, 'NF > 3 { print $3, $1 }' stat
";

/// Checks that the processor tells KVM where a guest goes on, and that it does go on there.
pub fn leaving_a_guest(progress: &mut Progress) -> Result<Vec<Check>> {
    let script = COUNT_EXITS.replace("PEER", &peer::firmware("guest-exits.rom"));
    let numbers = numbers(&Scenario::new(script).program(GUEST_EXITS_ROM, "guest-exits.rom"), progress)?;
    let steps = GUEST_EXITS_CPUID + GUEST_EXITS_MSR + GUEST_EXITS_WBINVD + GUEST_EXITS_INTERRUPTS;
    let expected = [
        ("nrips", "KVM uses the address of the next instruction", 1),
        ("steps", "instructions that a guest goes on behind", steps),
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

/// Runs a scenario that prints names and numbers.
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
