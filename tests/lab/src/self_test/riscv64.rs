//! The RISC-V host's proof: one program, whose every instruction is known, on the host and in a guest of the peer's.
//!
//! A guest's samples are not compared: of those, KVM's vPMU delivers hardly any.

use std::ffi::OsStr;

use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_images::payloads::riscv64::{LOOP, LOOP_BRANCHES, LOOP_START};
use guest_images::{Arch, Progress, Release};

use super::{Check, Plan, numbers};
use crate::{Result, Scenario, default_host, peer};

/// Even, as the instructions are before the place where the program loops.
const PERIOD: u64 = 20_000;

/// What both the host and a guest must count.
fn everywhere() -> Plan {
    let mut plan = Plan::default();
    let (all, branches) = (LOOP_INSTRUCTIONS, LOOP_BRANCHES);
    let events = [("instructions:u", all), ("cycles:u", all), ("branches:u", branches)];
    for event in events {
        plan.stat("loop", "loop", [event].into_iter());
    }
    // The last two by the processor's own numbers: instructions, and conditional branches.
    plan.stat("loop", "loop together", events.into_iter().chain([("r2:u", all), ("r15:u", branches)]));
    plan
}

/// Checks of the simulated host itself.
pub fn on_the_host(progress: &mut Progress) -> Result<Vec<Check>> {
    let mut plan = everywhere();
    let place = format!("{LOOP_START:x}");
    for event in ["instructions:u", "cycles:u"] {
        plan.sample_at("loop", event, PERIOD, &place, LOOP_INSTRUCTIONS / PERIOD);
    }
    // A branch is the last instruction of a round: the next one is the first, but behind the last round.
    plan.sample_at("loop", "branches:u", PERIOD / 2, &place, LOOP_BRANCHES / (PERIOD / 2) - 1);
    let scenario = Scenario::new(plan.script.clone()).host(default_host(Arch::Riscv64)).program(LOOP, "loop");
    let numbers = numbers(&scenario, progress)?;
    Ok(plan.check("riscv64", &numbers))
}

/// Checks of a guest under the peer, with KVM's own virtual PMU.
pub fn in_a_guest(progress: &mut Progress) -> Result<Vec<Check>> {
    let plan = everywhere();
    let command: [&OsStr; 2] = ["sh".as_ref(), "./plan".as_ref()];
    let files = [("loop", LOOP), ("plan", plan.script.as_bytes())];
    let scenario = Scenario::new(peer::linux_on_riscv(&command))
        .host(default_host(Arch::Riscv64))
        .guest_with(Release::of(Arch::Riscv64), &files, progress)?;
    let numbers = numbers(&scenario, progress)?;
    Ok(plan.check("riscv64 guest", &numbers))
}
