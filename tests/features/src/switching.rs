//! Switching counters on and off: one, a group, and all that a task has made.

use perf_event_open_sys::bindings;

use crate::code::{self, instructions, spin};
use crate::event::{Event, Target, over_all, values};
use crate::failure::{Verdict, equal};
use crate::worker::{Worker, this_thread};

const ROUNDS: u64 = 1_000_000;
const ONCE: u64 = instructions(ROUNDS);

/// A counter counts from when it is switched on until it is switched off, keeps its count, and can be set to zero.
pub fn ioctl() -> Verdict {
    let counter = Event::instructions().open()?;
    spin(ROUNDS);
    equal("before it is switched on", counter.value()?, 0)?;
    counter.over(ROUNDS)?;
    spin(ROUNDS);
    equal("switched off", counter.value()?, ONCE)?;
    counter.over(ROUNDS)?;
    equal("switched on again", counter.value()?, 2 * ONCE)?;
    counter.request(bindings::RESET, 0)?;
    equal("reset", counter.value()?, 0)?;
    counter.over(ROUNDS)?;
    equal("after that", counter.value()?, ONCE)?;
    Ok(format!("0, {ONCE}, {}, 0, {ONCE}", 2 * ONCE))
}

/// A request for a whole group reaches all its members; one for the leader does not switch on the others.
pub fn ioctl_on_a_group() -> Verdict {
    let all = u64::from(bindings::PERF_IOC_FLAG_GROUP);
    let group = Event::instructions().open_group(3)?;
    let leader = &group[0];
    leader.over(ROUNDS)?;
    equal("members follow their leader", values(&group)?, vec![ONCE; 3])?;
    leader.request(bindings::DISABLE, all)?;
    leader.over(ROUNDS)?;
    equal("members that are off stay off", values(&group)?, vec![2 * ONCE, ONCE, ONCE])?;
    code::run(leader.call(bindings::ENABLE, all), ROUNDS, leader.call(bindings::DISABLE, all))?;
    equal("the whole group", values(&group)?, vec![3 * ONCE, 2 * ONCE, 2 * ONCE])?;
    leader.request(bindings::RESET, all)?;
    equal("the whole group reset", values(&group)?, vec![0; 3])?;
    Ok(format!("{ONCE} each time"))
}

/// One `prctl` switches all counters that the thread has made, whatever they count, and no others.
pub fn prctl() -> Verdict {
    let mut counters = vec![Event::instructions().open()?];
    counters.extend(Event::instructions().open_group(2)?);
    let worker = Worker::start();
    let here = this_thread();
    // Counts this thread, but was made by another.
    let (hand_over, handed_over) = std::sync::mpsc::channel();
    worker.run(move || {
        let counter = Event::instructions().open_for(Target::Task(here))?;
        hand_over.send(counter).expect("somebody waits for it");
        Ok(())
    })?;
    let foreign = handed_over.recv().expect("it has been sent");
    spin(ROUNDS);
    equal("before", values(&counters)?, vec![0; 3])?;
    over_all(ROUNDS)?;
    spin(ROUNDS);
    equal("after", values(&counters)?, vec![ONCE; 3])?;
    equal("the one that another thread has made", foreign.value()?, 0)?;
    worker.end();
    Ok(format!("{ONCE} in each of 3"))
}
