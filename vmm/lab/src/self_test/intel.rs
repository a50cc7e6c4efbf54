//! Self-test of the Intel host: programs with known counts, on the host and in a guest of the peer.
//!
//! The programs and their counts are those of the AMD host (`cpu/README.md`), with Intel's encodings of the events.

use std::time::Duration;

use guest_images::Progress;

use super::{COUNT_APART, Check, Plan, Samples, apart, guest_of_the_peer, numbers, programs};
use crate::error::Result;
use crate::scenario::Scenario;
use crate::scenario::peer;
use crate::scenario::programs::{
    GUEST_LOOP_ROM, LOOP_BRANCHES, LOOP_CONDITIONAL_BRANCHES, LOOP_INSTRUCTIONS, NO_TABLE_OF_EVENTS,
};
use crate::simulator::board::{HostPmu, Perfmon};

/// Events and their counts over a long loop: most by Linux's names.
const NAMED: [(&str, u64); 6] = [
    ("instructions:u", LOOP_INSTRUCTIONS),
    ("cycles:u", LOOP_INSTRUCTIONS),
    ("ref-cycles:u", LOOP_INSTRUCTIONS),
    ("branches:u", LOOP_BRANCHES),
    ("r1c4:u", LOOP_CONDITIONAL_BRANCHES),
    ("branch-misses:u", 1),
];

/// The events of the table below: instructions, cycles, branches, conditional branches.
const EVENTS: [&str; 4] = ["rc0:u", "r3c:u", "rc4:u", "r1c4:u"];
const COUNTS: [(&str, [u64; 4]); 10] = [
    ("loop", [20_000_004, 20_000_004, 10_000_001, 10_000_000]),
    ("rep", [12, 104_106, 1, 0]),
    ("fault", [4005, 4005, 1001, 1000]),
    ("ud", [6010, 6010, 3002, 1000]),
    ("call", [800_006, 800_006, 700_001, 100_000]),
    ("alternate", [400_004, 400_004, 200_001, 200_000]),
    ("never", [400_004, 400_004, 200_001, 200_000]),
    ("stream", [262_164, 262_164, 65_541, 65_540]),
    ("small", [10_284, 10_284, 2571, 2570]),
    ("operands", [16_005, 16_005, 1001, 1000]),
];

/// Mispredicted branches, LLC references and LLC misses; see [`super::MODEL_EVENTS`].
const MODEL_EVENTS: [&str; 3] = ["rc5:u", "r4f2e:u", "r412e:u"];
/// Branches with CMASK, INV and EDGE. Six of them need more counters than version 4 has.
const FIELD_EVENTS: [&str; 6] =
    ["r10000c4:u", "r18000c4:u", "r20000c4:u", "r28000c4:u", "r400c4:u", "r18400c4:u"];

const SAMPLES: Samples = [
    ("rc0:u", 100_000, "401007", 200),
    ("r3c:u", 100_000, "401007", 200),
    ("rc4:u", 100_000, "401005", 99),
    ("r1c4:u", 100_000, "401009", 1),
];
/// Samples in a guest with KVM's vPMU; see [`super::GUEST_SAMPLES`].
const GUEST_SAMPLES: Samples = [
    ("rc0:u", 100_000, r"401007\|ffffffff", 200),
    ("r3c:u", 100_000, r"401007\|ffffffff", 200),
    ("rc4:u", 100_000, r"401005\|401009\|ffffffff", 100),
    ("r1c4:u", 100_000, r"401005\|401009\|ffffffff", 100),
];

/// Returns the checks that the host and a guest have in common.
fn common(samples: &Samples) -> Plan {
    let mut plan = Plan { script: NO_TABLE_OF_EVENTS.to_owned(), ..Plan::default() };
    plan.stat("loop", "long-loop", NAMED.into_iter());
    plan.count(EVENTS, &COUNTS);
    plan.sample(samples);
    plan
}

/// This host is slow, and a machine may be busy with other work.
const LIMIT: Duration = Duration::from_mins(30);

fn with_programs(script: String) -> Scenario {
    programs().fold(Scenario::with_all_counters(script).limit(LIMIT), |scenario, (name, content)| {
        scenario.program(content, &name)
    })
}

/// Runs the checks on the simulated host itself, and those of events that count in a guest only.
pub fn on_the_host(progress: &mut Progress) -> Result<Vec<Check>> {
    let mut plan = common(&SAMPLES);
    plan.count(MODEL_EVENTS, &super::MODEL_COUNTS);
    plan.count(FIELD_EVENTS, &super::FIELD_COUNTS);
    let script = plan.script.clone() + &COUNT_APART.replace("PEER", &peer::firmware("guest-loop.rom"));
    let scenario = with_programs(script).program(GUEST_LOOP_ROM, "guest-loop.rom").pmu(HostPmu::INTEL);
    let numbers = numbers(&scenario, progress)?;
    let mut checks = plan.check("intel", &numbers);
    checks.extend(apart("intel, apart", &numbers));
    Ok(checks)
}

/// Runs the checks with the older versions of the host's PMU.
pub fn with_older_versions(progress: &mut Progress) -> Result<Vec<Check>> {
    let mut checks = Vec::new();
    for version in [Perfmon::V2, Perfmon::V4] {
        let plan = common(&SAMPLES);
        let scenario = with_programs(plan.script.clone()).pmu(HostPmu::Intel(version));
        let numbers = numbers(&scenario, progress)?;
        checks.extend(plan.check(&format!("intel, version {}", version.number()), &numbers));
    }
    Ok(checks)
}

/// Runs the checks in a guest of the peer, with KVM's own virtual PMU.
pub fn in_a_guest(progress: &mut Progress) -> Result<Vec<Check>> {
    let plan = common(&GUEST_SAMPLES);
    let scenario = guest_of_the_peer(&plan, progress)?.pmu(HostPmu::INTEL).limit(LIMIT);
    let numbers = numbers(&scenario, progress)?;
    Ok(plan.check("intel guest", &numbers))
}
