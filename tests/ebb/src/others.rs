//! Events of others on the same counters, and what event-based branches do not have.

use std::os::fd::OwnedFd;

use tally_ebb::{Error, Event, check};

use crate::code::spin;
use crate::event;
use crate::promise::{Failure, PERIOD, Seen, Verdict, equal, holds};

static SEEN: Seen = Seen::nothing();

/// What branches do not have is refused before the kernel sees it.
pub fn attributes() -> Verdict {
    type Change = fn(&mut tally_ebb::Attr);
    let wrong: [Change; 9] = [
        |attr| attr.type_ = 0,
        |attr| attr.config = 0xc0,
        |attr| attr.set_pinned(0),
        |attr| attr.set_exclusive(0),
        |attr| attr.set_exclude_kernel(0),
        |attr| attr.set_inherit(1),
        |attr| attr.set_freq(1),
        |attr| attr.__bindgen_anon_1.sample_period = 1,
        |attr| attr.set_enable_on_exec(1),
    ];
    for change in wrong {
        let mut attr = Event::INSTRUCTIONS.attr();
        change(&mut attr);
        holds("it is refused", matches!(check(&attr, 0, -1, true), Err(Error::Refused(_))))?;
    }
    let attr = Event::INSTRUCTIONS.attr();
    holds(
        "an event of a CPU is refused",
        check(&attr, -1, 0, true).is_err() && check(&attr, 0, 0, true).is_err(),
    )?;
    holds("an event of a task is not", check(&attr, 0, -1, true).is_ok())?;
    let branches = SEEN.branched()?;
    let _first = branches.open(Event::INSTRUCTIONS, PERIOD)?;
    let second = branches.open(Event::INSTRUCTIONS, PERIOD);
    holds("an event has one slot", matches!(second, Err(Error::NoSlot)))?;
    let short = branches.open(Event::AMD_CYCLES, 999);
    holds("a period that the handler may not fit into is refused", matches!(short, Err(Error::Refused(_))))?;
    holds("a thread has one block", matches!(SEEN.branched(), Err(Error::Refused(_))))?;
    Ok(format!("{} refused", wrong.len() + 3))
}

/// After the event is closed, nothing is branched.
pub fn close() -> Verdict {
    let branches = SEEN.branched()?;
    branches.enable();
    let counter = branches.open(Event::INSTRUCTIONS, PERIOD)?;
    counter.enable()?;
    spin(2 * PERIOD);
    drop(counter);
    let before = SEEN.branches();
    spin(10 * PERIOD);
    equal("branches after the close", SEEN.branches() - before, 0)?;
    holds("branches before", before >= 2)?;
    drop(branches);
    spin(10 * PERIOD);
    Ok(format!("{before} branches"))
}

/// Opens as many events of instructions as there are counters, and more.
fn take_all_counters(task: i32, cpu: i32, pinned: bool) -> Result<Vec<OwnedFd>, Failure> {
    let mut attr = Event::INSTRUCTIONS.attr();
    attr.config = 0xc0;
    attr.set_disabled(0);
    attr.set_exclusive(0);
    attr.set_pinned(pinned.into());
    (0..12).map(|_| event::open(&attr, task, cpu)).collect()
}

/// The event counts beside events of this kind: it is pinned, and they are not.
fn evicts(task: i32, cpu: i32) -> Verdict {
    let others = take_all_counters(task, cpu, false)?;
    let branches = SEEN.branched()?;
    branches.enable();
    let counter = branches.open(Event::INSTRUCTIONS, PERIOD)?;
    counter.enable()?;
    spin(10 * PERIOD);
    counter.disable()?;
    crate::counting::whole(&counter, PERIOD)?;
    SEEN.all_taken(&branches, &counter)?;
    drop(others);
    Ok(format!("{} branches", SEEN.branches()))
}

pub fn evicts_cpu_event() -> Verdict {
    evicts(-1, 0)
}

pub fn evicts_task_event() -> Verdict {
    evicts(0, -1)
}

/// Pinned events that were there before keep their counters: a read of the event returns the end of its file.
fn stays_out(task: i32, cpu: i32) -> Verdict {
    let _others = take_all_counters(task, cpu, true)?;
    let branches = SEEN.branched()?;
    branches.enable();
    let counter = branches.open(Event::INSTRUCTIONS, PERIOD)?;
    holds("it has no counter", matches!(counter.enable(), Err(Error::NoCounter)))?;
    equal("count", counter.count()?, None)?;
    spin(10 * PERIOD);
    equal("branches", SEEN.branches(), 0)?;
    Ok("end of file".into())
}

pub fn pinned_cpu_event() -> Verdict {
    stays_out(-1, 0)
}

pub fn pinned_task_event() -> Verdict {
    stays_out(0, -1)
}
