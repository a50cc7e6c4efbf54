//! Self-test of the RISC-V host: one program with known counts, on the host and in a guest of the peer.
//!
//! A guest's samples are not compared, as KVM's vPMU delivers hardly any of them.

use std::ffi::OsStr;

use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_images::payloads::riscv64::{LOOP, LOOP_BRANCHES, LOOP_START};
use guest_images::{Arch, Progress, Release};

use super::{Check, Plan, numbers};
use crate::error::Result;
use crate::scenario::Scenario;
use crate::scenario::peer;
use crate::simulator::image::default_host;

/// Sampling period. It is even, as is the number of instructions before the loop, so all samples are at the loop's
/// start.
const PERIOD: u64 = 20_000;

/// Returns the checks that the host and a guest have in common.
fn common() -> Plan {
    let mut plan = Plan::default();
    let (all, branches) = (LOOP_INSTRUCTIONS, LOOP_BRANCHES);
    let events = [("instructions:u", all), ("cycles:u", all), ("branches:u", branches)];
    for event in events {
        plan.stat("loop", "loop", [event].into_iter());
    }
    // The last two are raw events: instructions, and conditional branches.
    plan.stat("loop", "loop together", events.into_iter().chain([("r2:u", all), ("r15:u", branches)]));
    plan
}

/// Runs the checks on the simulated host itself.
pub fn on_the_host(progress: &mut Progress) -> Result<Vec<Check>> {
    let mut plan = common();
    let place = format!("{LOOP_START:x}");
    for event in ["instructions:u", "cycles:u"] {
        plan.sample_at("loop", event, PERIOD, &place, LOOP_INSTRUCTIONS / PERIOD);
    }
    // A branch is the last instruction of a round, so its sample is at the start of the next round. The sample of the
    // last branch is after the loop.
    plan.sample_at("loop", "branches:u", PERIOD / 2, &place, LOOP_BRANCHES / (PERIOD / 2) - 1);
    let scenario = Scenario::with_all_counters(plan.script.clone())
        .host(default_host(Arch::Riscv64))
        .program(LOOP, "loop");
    let numbers = numbers(&scenario, progress)?;
    Ok(plan.check("riscv64", &numbers))
}

/// Runs the checks in a guest of the peer, with KVM's own virtual PMU.
pub fn in_a_guest(progress: &mut Progress) -> Result<Vec<Check>> {
    let plan = common();
    let command: [&OsStr; 2] = ["sh".as_ref(), "./plan".as_ref()];
    let files = [("loop", LOOP), ("plan", plan.script.as_bytes())];
    let scenario = Scenario::with_all_counters(peer::linux_on_riscv(&command))
        .host(default_host(Arch::Riscv64))
        .guest_with(Release::of(Arch::Riscv64), &files, progress)?;
    let numbers = numbers(&scenario, progress)?;
    Ok(plan.check("riscv64 guest", &numbers))
}
