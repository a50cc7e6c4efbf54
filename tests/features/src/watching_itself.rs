//! Self-monitoring programs that need the PMU for themselves. POWER's event-based branches promise this; the same
//! promise is checked here with what every processor has. The event is pinned and exclusive, and each overflow sends a
//! signal to the thread that it happened on.

use perf_event_open_sys::bindings;

use crate::code::{PARENT_INSTRUCTIONS, instructions, run_in_child};
use crate::event::{Event, Reading, count_loop_with_all, values};
use crate::failure::{Failure, Verdict, equal, within};
use crate::handler::{self, overflow, send_to};
use crate::worker::{Worker, in_child, this_thread};

const ROUNDS: u64 = 1_000_000;
const PERIOD: u64 = 1_000_000;

/// Returns the event with which a program monitors itself.
fn own() -> Event {
    Event::instructions().pinned().exclusive()
}

/// Two threads that monitor themselves each get the signals of their own overflows, at the instruction of the overflow.
pub fn own_signal_on_own_thread() -> Verdict {
    handler::install()?;
    let worker = Worker::start();
    worker.begin(|| watch(3 * PERIOD));
    watch(2 * PERIOD)?;
    worker.finish()?;
    worker.end();
    Ok("10 overflows on each of 2 threads".into())
}

/// Monitors the calling thread for ten overflows.
fn watch(period: u64) -> Result<(), Failure> {
    let counter = own().every(period).open()?;
    send_to(&counter, this_thread())?;
    (1..=10).try_for_each(|times| overflow(&counter, period, times))
}

/// While the event counts, no event runs that is not pinned. The others run again once the event is closed.
pub fn alone_on_the_pmu() -> Verdict {
    let others = Event::instructions().open_each(2)?;
    let counter = own().open()?;
    count_loop_with_all(20 * ROUNDS)?;
    equal("its instructions", counter.value()?, instructions(20 * ROUNDS))?;
    equal("those of the others", values(&others)?, vec![0; 2])?;
    counter.enable()?;
    for other in &others {
        let before = other.counts()?;
        other.count_loop(ROUNDS)?;
        let after = other.counts()?;
        within("the time that another was enabled", after.enabled, before.enabled + 1..)?;
        equal("its time and instructions", (after.running, after.value), (before.running, 0))?;
    }
    drop(counter);
    count_loop_with_all(ROUNDS)?;
    equal("the others, when it is closed", values(&others)?, vec![instructions(ROUNDS); 2])?;
    Ok(format!("{} beside none, then {}", instructions(20 * ROUNDS), instructions(ROUNDS)))
}

/// Of two pinned events, at least one of them exclusive, the one that was enabled first counts. The other is in the
/// error state.
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
        second.count_loop(ROUNDS)?;
        equal("the second, when the first is closed", second.value()?, instructions(ROUNDS))?;
    }
    Ok("end of file for the second of two, three times".into())
}

/// A child process is not monitored by its parent's event. The child can monitor itself.
pub fn own_counter_stays_behind() -> Verdict {
    let counter = own().open()?;
    run_in_child(counter.call(bindings::ENABLE, 0), ROUNDS, counter.call(bindings::DISABLE, 0))?;
    equal("the parent", counter.value()?, PARENT_INSTRUCTIONS)?;
    let status = in_child(|| {
        let value = own().open().and_then(|counter| counter.count_loop(ROUNDS).and_then(|_| counter.value()));
        i32::from(value.ok() != Some(instructions(ROUNDS)))
    })?;
    equal("the status of the child, which counted itself", status, 0)?;
    equal("the parent, after that", counter.value()?, PARENT_INSTRUCTIONS)?;
    Ok(format!("{PARENT_INSTRUCTIONS} in the parent, {} in the child", instructions(ROUNDS)))
}
