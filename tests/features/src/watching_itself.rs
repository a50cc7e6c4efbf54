//! A program that watches itself and wants the PMU for that: what POWER promises for event-based branches, in terms that
//! every processor has. The event is pinned and exclusive, and its overflows come as signals to the thread that they are of.

use perf_event_open_sys::bindings;

use crate::code::{PARENT_INSTRUCTIONS, instructions, run_in_child};
use crate::event::{Event, Reading, over_all, values};
use crate::failure::{Failure, Verdict, equal, within};
use crate::handler::{self, overflow, send_to};
use crate::worker::{Worker, in_child, this_thread};

const ROUNDS: u64 = 1_000_000;
const PERIOD: u64 = 1_000_000;

/// An event for oneself.
fn own() -> Event {
    Event::instructions().pinned().exclusive()
}

/// Two threads that watch themselves each get their own overflows, where and when they happen.
pub fn own_signal_on_own_thread() -> Verdict {
    handler::install()?;
    let worker = Worker::start();
    worker.begin(|| watch(3 * PERIOD));
    watch(2 * PERIOD)?;
    worker.finish()?;
    worker.end();
    Ok("10 overflows on each of 2 threads".into())
}

fn watch(period: u64) -> Result<(), Failure> {
    let counter = own().every(period).open()?;
    send_to(&counter, this_thread())?;
    (1..=10).try_for_each(|times| overflow(&counter, period, times))
}

/// While it counts, no event runs that is not pinned; when it is gone, they do.
pub fn alone_on_the_pmu() -> Verdict {
    let others = Event::instructions().open_each(2)?;
    let counter = own().open()?;
    over_all(20 * ROUNDS)?;
    equal("its instructions", counter.value()?, instructions(20 * ROUNDS))?;
    equal("those of the others", values(&others)?, vec![0; 2])?;
    counter.enable()?;
    for other in &others {
        let before = other.counts()?;
        other.over(ROUNDS)?;
        let after = other.counts()?;
        within("the time that another was enabled", after.enabled, before.enabled + 1..)?;
        equal("its time and instructions", (after.running, after.value), (before.running, 0))?;
    }
    drop(counter);
    over_all(ROUNDS)?;
    equal("the others, when it is gone", values(&others)?, vec![instructions(ROUNDS); 2])?;
    Ok(format!("{} beside none, then {}", instructions(20 * ROUNDS), instructions(ROUNDS)))
}

/// Of two pinned events, one of them exclusive, the one that was there first counts; the other is in the error state.
pub fn first_pinned_wins() -> Verdict {
    let pinned = Event::instructions().pinned();
    for (first, second) in [(own(), pinned), (pinned, own()), (own(), own())] {
        let (first, second) = (first.open()?, second.open()?);
        first.enable()?;
        second.enable()?;
        equal("the second, enabled", second.read()?, Reading::EndOfFile)?;
        second.disable()?;
        first.disable()?;
        let counts = first.counts()?;
        equal("time running of the first", counts.running, counts.enabled)?;
        drop(first);
        second.over(ROUNDS)?;
        equal("the second, when the first is gone", second.value()?, instructions(ROUNDS))?;
    }
    Ok("end of file for the second of two, three times".into())
}

/// A child is not watched; it may watch itself.
pub fn own_counter_stays_behind() -> Verdict {
    let counter = own().open()?;
    run_in_child(counter.call(bindings::ENABLE, 0), ROUNDS, counter.call(bindings::DISABLE, 0))?;
    equal("the parent", counter.value()?, PARENT_INSTRUCTIONS)?;
    let status = in_child(|| {
        let value = own().open().and_then(|counter| counter.over(ROUNDS).and_then(|_| counter.value()));
        i32::from(value.ok() != Some(instructions(ROUNDS)))
    })?;
    equal("the status of the child, which counted itself", status, 0)?;
    equal("the parent, after that", counter.value()?, PARENT_INSTRUCTIONS)?;
    Ok(format!("{PARENT_INSTRUCTIONS} in the parent, {} in the child", instructions(ROUNDS)))
}
