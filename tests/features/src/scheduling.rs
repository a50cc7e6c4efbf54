//! Scheduling of events on the PMU: multiplexing, pinned and exclusive events, groups.
//!
//! The loops last for many of Linux's rotation intervals (4 ms). Counts of user mode are exact all the same, because
//! events are rotated in the kernel: each instruction of the loop is counted by as many events as there are counters in
//! use.

use crate::code::{COUNTERS, REFUSES_LARGE_GROUPS, instructions};
use crate::event::{Counter, Event, Reading, count_loop_with_all, values};
use crate::failure::{Failure, Verdict, equal, within};

/// 40 ms, if each instruction takes a nanosecond.
const ROUNDS: u64 = 20_000_000;
const TOTAL: u64 = instructions(ROUNDS);

/// An event that is not multiplexed runs all the time that it is enabled. While it is disabled, its times stand still.
pub fn times() -> Verdict {
    let counter = Event::instructions().open()?;
    equal("at first", (counter.counts()?.enabled, counter.counts()?.running), (0, 0))?;
    counter.count_loop(ROUNDS)?;
    let counts = counter.counts()?;
    within("nanoseconds", counts.enabled, 1..)?;
    equal("time running", counts.running, counts.enabled)?;
    crate::code::spin(ROUNDS);
    equal("after some time disabled", counter.counts()?, counts)?;
    counter.request(perf_event_open_sys::bindings::RESET, 0)?;
    let reset = counter.counts()?;
    equal("reset", (reset.value, reset.enabled, reset.running), (0, counts.enabled, counts.running))?;
    Ok(format!("enabled {} ns, running {} ns", counts.enabled, counts.running))
}

/// If there is one event more than counters, all events take turns, and every counter is always in use.
pub fn multiplexing() -> Verdict {
    let counters = Event::instructions().open_each(COUNTERS + 1)?;
    count_loop_with_all(ROUNDS)?;
    for counter in &counters {
        let counts = counter.counts()?;
        within("the time that one of them ran", counts.running, 1..counts.enabled)?;
        within("instructions of one of them", counts.value, 1..TOTAL)?;
    }
    let values = values(&counters)?;
    equal("instructions of all", values.iter().sum(), COUNTERS as u64 * TOTAL)?;
    Ok(format!("{values:?}"))
}

/// A pinned event keeps its counter while the others take turns on the rest.
pub fn pinned() -> Verdict {
    let others = Event::instructions().open_each(COUNTERS)?;
    let pinned = Event::instructions().pinned().open()?;
    count_loop_with_all(ROUNDS)?;
    let counts = pinned.counts()?;
    equal("time running", counts.running, counts.enabled)?;
    equal("instructions", counts.value, TOTAL)?;
    let others = values(&others)?;
    for &other in &others {
        within("instructions of one of the others", other, 1..TOTAL)?;
    }
    equal("instructions of the others", others.iter().sum(), (COUNTERS as u64 - 1) * TOTAL)?;
    Ok(format!("{TOTAL} beside {others:?}"))
}

/// A pinned event for which there is no counter is in the error state, and the others are not. When there is a counter
/// again, the event can be enabled again.
pub fn pinned_without_room() -> Verdict {
    let rounds = 1_000_000;
    let mut counters = Event::instructions().pinned().open_each(COUNTERS + 1)?;
    let last = counters.pop().expect("there is at least one counter");
    for counter in &counters {
        counter.enable()?;
    }
    last.count_loop(rounds)?;
    equal("the one too many", last.read()?, Reading::EndOfFile)?;
    for counter in &counters {
        counter.disable()?;
        let counts = counter.counts()?;
        equal("time running of one that was there before", counts.running, counts.enabled)?;
    }
    counters.pop();
    for counter in &counters {
        counter.enable()?;
    }
    last.count_loop(rounds)?;
    let value = last.value()?;
    equal("when there is a counter again", value, instructions(rounds))?;
    Ok(format!("end of file, then {value}"))
}

/// An exclusive event never shares the PMU: either it is on the PMU, or the others are.
pub fn exclusive() -> Verdict {
    let alone = Event::instructions().exclusive().open()?;
    let others = Event::instructions().open_group(2)?;
    count_loop_with_all(ROUNDS)?;
    let (alone, others) = (alone.counts()?, common_count(&others)?);
    within("the time that it ran", alone.running, 1..alone.enabled)?;
    within("its instructions", alone.value, 1..TOTAL)?;
    equal("instructions of it and the others", alone.value + others, TOTAL)?;
    Ok(format!("{} alone, {others} beside each other", alone.value))
}

/// Of two groups that do not fit on the PMU together, each is on the PMU as a whole or not at all.
pub fn group() -> Verdict {
    const MEMBERS: usize = COUNTERS / 2 + 1;
    let (one, other) =
        (Event::instructions().open_group(MEMBERS)?, Event::instructions().open_group(MEMBERS)?);
    count_loop_with_all(ROUNDS)?;
    let (first, second) = (common_count(&one)?, common_count(&other)?);
    within("instructions of the first", first, 1..TOTAL)?;
    equal("instructions of both", first + second, TOTAL)?;
    Ok(format!("{first} and {second}"))
}

/// Returns the count of a group, whose members must all have the same count and times.
fn common_count(group: &[Counter]) -> Result<u64, Failure> {
    let leader = group[0].counts()?;
    for member in group {
        equal("count and times of a member", member.counts()?, leader)?;
    }
    Ok(leader.value)
}

/// A group with one member more than there are counters is refused, or never counts. Without that member the group
/// counts.
pub fn group_too_large() -> Verdict {
    let rounds = 1_000_000;
    let group = Event::instructions().open_group(COUNTERS)?;
    match Event::instructions().open_with(&group[0]) {
        Err(error) => equal("the error for one more", error.raw_os_error(), Some(libc::EINVAL))?,
        Ok(_) if REFUSES_LARGE_GROUPS => equal("a group of one more", "opened", "refused")?,
        Ok(one_more) => {
            group[0].count_loop(rounds)?;
            equal("what a group of one more counts", common_count(&group)?, 0)?;
            equal("what the last one counts", one_more.value()?, 0)?;
        }
    }
    group[0].count_loop(rounds)?;
    equal("instructions", common_count(&group)?, instructions(rounds))?;
    Ok(format!("nothing with one more than {COUNTERS}; {} without it", instructions(rounds)))
}

/// A group that needs a counter which a pinned event holds does not run at all.
pub fn group_without_room() -> Verdict {
    let pinned = Event::instructions().pinned().open()?;
    let group = Event::instructions().open_group(COUNTERS)?;
    count_loop_with_all(ROUNDS)?;
    equal("the pinned one", pinned.value()?, TOTAL)?;
    for member in &group {
        let counts = member.counts()?;
        within("the time that it was enabled", counts.enabled, 1..)?;
        equal("its time and instructions", (counts.running, counts.value), (0, 0))?;
    }
    Ok(format!("{TOTAL} beside a group that never ran"))
}
