//! The RISC-V host's proof: one program, whose every instruction is known, on the host and in a guest of the peer's.
//!
//! Counts are exact, whatever is counted. Samples are taken of cycles, which are instructions here: this processor's overflows of
//! the counter of instructions get lost now and then, as the lab's README says. A guest's are not compared: of those, KVM's vPMU
//! delivers hardly any.

use std::ffi::OsStr;

use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_images::payloads::riscv64::{LOOP, LOOP_START};
use guest_images::{Arch, Progress, Release};

use super::{Check, Plan, numbers};
use crate::{Result, Scenario, default_host, peer};

/// Even, as the instructions are before the place where the program loops.
const PERIOD: u64 = 20_000;

/// What both the host and a guest must count.
fn everywhere() -> Plan {
    let mut plan = Plan::default();
    let (instructions, cycles) = (("instructions:u", LOOP_INSTRUCTIONS), ("cycles:u", LOOP_INSTRUCTIONS));
    plan.stat("loop", "loop", [instructions].into_iter());
    plan.stat("loop", "loop", [cycles].into_iter());
    plan.stat("loop", "loop together", [instructions, cycles].into_iter());
    plan
}

/// Checks of the simulated host itself.
pub fn on_the_host(progress: &mut Progress) -> Result<Vec<Check>> {
    let mut plan = everywhere();
    plan.sample_at("loop", "cycles:u", PERIOD, &format!("{LOOP_START:x}"), LOOP_INSTRUCTIONS / PERIOD);
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
