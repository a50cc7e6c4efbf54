//! Events that were opened otherwise than they should be: the kernel does not know the flag, so it refuses none of
//! them.

use std::os::fd::OwnedFd;

use tally_ebb::{Attr, Branches, Event, SlotClaim};

use crate::code::spin;
use crate::event::{self, DISABLE, ENABLE, REFRESH, count, request};
use crate::promise::{Failure, PERIOD, Seen, Verdict, equal, holds};
use crate::tasks::{Child, end, yield_now};

static SEEN: Seen = Seen::nothing();
/// Rounds of a loop that takes 20 periods, and two more for the last interrupt to come.
const TWENTY: u64 = 11 * PERIOD;

/// Gives the calling thread branches.
fn branched() -> Result<Branches, Failure> {
    let branches = SEEN.branched()?;
    branches.enable();
    Ok(branches)
}

/// Opens an event for a task or a CPU, with a change.
fn open(change: impl FnOnce(&mut Attr), task: i32, cpu: i32) -> Result<OwnedFd, Failure> {
    let mut attr = Event::INSTRUCTIONS.attr();
    change(&mut attr);
    event::open(&attr, task, cpu)
}

/// Counts twenty periods, and checks that there was a branch for each.
fn twenty_branches(branches: &Branches, claim: &SlotClaim) -> Result<(), Failure> {
    let due = || SEEN.branches() + u64::from(branches.is_pending());
    let before = [due(), claim.overflows()];
    spin(TWENTY);
    let taken = due() - before[0];
    equal("branches", taken, claim.overflows() - before[1])?;
    holds("there were branches", taken >= 20)
}

/// Runs a child that has not asked for branches, and checks that there were none for it.
fn child_that_did_not_ask() -> Result<(), Failure> {
    let child = Child::spawn(|| {
        let before = SEEN.branches();
        spin(TWENTY);
        end(equal("branches of a child that has not asked", SEEN.branches(), before));
    })?;
    equal("its status", child.wait()?, 0)
}

/// A child has the event, too: it is branched if it asks for that.
pub fn inherited() -> Verdict {
    let branches = branched()?;
    let claim = branches.want(Event::INSTRUCTIONS, PERIOD)?;
    let event = open(|attr| attr.set_inherit(1), 0, -1)?;
    request(&event, ENABLE, 0)?;
    twenty_branches(&branches, &claim)?;
    child_that_did_not_ask()?;
    let child = Child::spawn(|| {
        end((|| {
            let branches = branched()?;
            let claim = branches.want(Event::INSTRUCTIONS, PERIOD)?;
            // A counter that runs without branches is looked at when the kernel starts it anew.
            std::thread::sleep(std::time::Duration::from_millis(1));
            twenty_branches(&branches, &claim)
        })());
    })?;
    equal("status of a child that has asked", child.wait()?, 0)?;
    request(&event, DISABLE, 0)?;
    request(&event, ENABLE, 0)?;
    twenty_branches(&branches, &claim)?;
    Ok("branched where it was asked for".into())
}

/// An event of the CPU counts all threads, of which the one that asks is branched.
pub fn for_a_cpu() -> Verdict {
    let branches = branched()?;
    let claim = branches.want(Event::INSTRUCTIONS, PERIOD)?;
    let event = open(|_| {}, -1, 0)?;
    request(&event, ENABLE, 0)?;
    twenty_branches(&branches, &claim)?;
    child_that_did_not_ask()?;
    request(&event, DISABLE, 0)?;
    request(&event, ENABLE, 0)?;
    twenty_branches(&branches, &claim)?;
    Ok("branched where it was asked for".into())
}

/// The kernel samples the event, beside the branches: after as many samples as were asked for it disables the event.
pub fn sampled() -> Verdict {
    const SAMPLES: i32 = 3;
    const SAMPLES_APART: u64 = 5 * PERIOD + 21;
    let branches = branched()?;
    let claim = branches.want(Event::INSTRUCTIONS, PERIOD)?;
    let event = open(|attr| attr.__bindgen_anon_1.sample_period = SAMPLES_APART, 0, -1)?;
    request(&event, REFRESH, SAMPLES)?;
    spin(TWENTY);
    let counted = count(&event)?;
    equal("count in periods of the kernel", counted / SAMPLES_APART, SAMPLES.cast_unsigned().into())?;
    equal("count", counted, claim.overflows() * PERIOD + PERIOD - claim.left())?;
    equal("branches", SEEN.branches() + u64::from(branches.is_pending()), claim.overflows())?;
    Ok(format!("{SAMPLES} samples, {} branches", SEEN.branches()))
}

/// What the program does in the kernel is not counted, even for an event that does not exclude it.
pub fn with_the_kernel() -> Verdict {
    let branches = branched()?;
    let without = count_calls(&branches, true)?;
    let with = count_calls(&branches, false)?;
    equal("count with the kernel", with, without)?;
    Ok(format!("{without} instructions"))
}

/// Counts a hundred system calls and what is between them. It is one function, as counts of two copies of its code need
/// not be equal.
#[inline(never)]
fn count_calls(branches: &Branches, is_kernel_excluded: bool) -> Result<u64, Failure> {
    let claim = branches.want(Event::INSTRUCTIONS, PERIOD)?;
    let event = open(|attr| attr.set_exclude_kernel(is_kernel_excluded.into()), 0, -1)?;
    request(&event, ENABLE, 0)?;
    for _ in 0..100 {
        spin(PERIOD);
        yield_now();
    }
    request(&event, DISABLE, 0)?;
    let counted = count(&event)?;
    equal("count", counted, claim.overflows() * PERIOD + PERIOD - claim.left())?;
    Ok(counted)
}
