//! Enabling and disabling counters: a single one, a group, and all that a task has opened.

use perf_event_open_sys::bindings;

use crate::code::{self, instructions, spin};
use crate::event::{Event, Target, count_loop_with_all, values};
use crate::failure::{Verdict, equal};
use crate::worker::{Worker, this_thread};

const ROUNDS: u64 = 1_000_000;
const ONCE: u64 = instructions(ROUNDS);

/// A counter counts while it is enabled, keeps its count while it is disabled, and can be reset to zero.
pub fn ioctl() -> Verdict {
    let counter = Event::instructions().open()?;
    spin(ROUNDS);
    equal("before it is enabled", counter.value()?, 0)?;
    counter.count_loop(ROUNDS)?;
    spin(ROUNDS);
    equal("disabled", counter.value()?, ONCE)?;
    counter.count_loop(ROUNDS)?;
    equal("enabled again", counter.value()?, 2 * ONCE)?;
    counter.request(bindings::RESET, 0)?;
    equal("reset", counter.value()?, 0)?;
    counter.count_loop(ROUNDS)?;
    equal("after that", counter.value()?, ONCE)?;
    Ok(format!("0, {ONCE}, {}, 0, {ONCE}", 2 * ONCE))
}

/// A request with `PERF_IOC_FLAG_GROUP` applies to all members. One for the leader enables no member that is disabled.
pub fn ioctl_on_a_group() -> Verdict {
    let all = u64::from(bindings::PERF_IOC_FLAG_GROUP);
    let group = Event::instructions().open_group(3)?;
    let leader = &group[0];
    leader.count_loop(ROUNDS)?;
    equal("members follow their leader", values(&group)?, vec![ONCE; 3])?;
    leader.request(bindings::DISABLE, all)?;
    leader.count_loop(ROUNDS)?;
    equal("members that are off stay off", values(&group)?, vec![2 * ONCE, ONCE, ONCE])?;
    code::run(leader.call(bindings::ENABLE, all), ROUNDS, leader.call(bindings::DISABLE, all))?;
    equal("the whole group", values(&group)?, vec![3 * ONCE, 2 * ONCE, 2 * ONCE])?;
    leader.request(bindings::RESET, all)?;
    equal("the whole group reset", values(&group)?, vec![0; 3])?;
    Ok(format!("{ONCE} each time"))
}

/// One `prctl` enables or disables all counters that the thread has opened, and no others.
pub fn prctl() -> Verdict {
    let mut counters = vec![Event::instructions().open()?];
    counters.extend(Event::instructions().open_group(2)?);
    let worker = Worker::start();
    let here = this_thread();
    // Another thread opens a counter for this thread.
    let (hand_over, handed_over) = std::sync::mpsc::channel();
    worker.run(move || {
        let counter = Event::instructions().open_for(Target::Task(here))?;
        hand_over.send(counter).expect("the receiver exists");
        Ok(())
    })?;
    let foreign = handed_over.recv().expect("the job has sent a counter");
    spin(ROUNDS);
    equal("before", values(&counters)?, vec![0; 3])?;
    count_loop_with_all(ROUNDS)?;
    spin(ROUNDS);
    equal("after", values(&counters)?, vec![ONCE; 3])?;
    equal("the one that another thread has opened", foreign.value()?, 0)?;
    worker.end();
    Ok(format!("{ONCE} in each of 3"))
}
