//! Several threads in turns, each with more events than there are counters: an event that takes two of them, pinned and
//! sampled ones, a group, and others by themselves. No two threads have the same events in the same order.
//!
//! Every thread runs the same loop in each turn, so that each event happens at the same rate all the time, and what it
//! has counted, scaled by its times, is what the whole loop has. How far it is from that is no property of the PMU
//! alone: it is measured on the host and in guests, and compared.

use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use perf_event_open_sys::bindings;

use crate::code::{Codes, in_pairs, instructions, spin};
use crate::event::{Counter, Event};
use crate::failure::{Failure, Verdict, checked, equal, within};

const THREADS: usize = 4;
/// Number of counts from one overflow of the sampled event to the next.
const PERIOD: u64 = 100_000;
/// Number of events of a thread that are in no group, neither pinned nor sampled.
const SINGLE: usize = 8;

/// Number of turns of each thread.
const TURNS: usize = 60;
/// Rounds of the loop in a turn: a millisecond, if an instruction takes a nanosecond.
const ROUNDS: u64 = 500_000;

/// An event, and how often it happens in 2 instructions of the loop in user mode, if that is known.
type Rate = (Event, Option<u64>);

/// Which events threads have.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Which {
    /// Those of the processor.
    All,
    /// Those that processors of every vendor have.
    Common,
}

/// Returns the events that threads have by themselves.
fn events(codes: &Codes, which: Which) -> Vec<Rate> {
    let cycles = Event::hardware(bindings::PERF_COUNT_HW_CPU_CYCLES);
    let everywhere = |event: Event| event.with(|attr| attr.set_exclude_kernel(0));
    let kernel = |event: Event| everywhere(event).with(|attr| attr.set_exclude_user(1));
    let conditional = codes.conditional_branches.map(|code| (Event::raw(code), Some(1)));
    let pair = in_pairs().map(|code| (Event::raw(code), Some(0)));
    let others = [
        (Event::instructions(), Some(2)),
        (kernel(Event::branches()), None),
        (cycles, Some(2)),
        (Event::branches(), Some(1)),
        (everywhere(Event::instructions()), None),
        (everywhere(cycles), None),
        (kernel(Event::instructions()), None),
        (everywhere(Event::branches()), None),
    ];
    let is_here = |_: &Rate| which == Which::All;
    pair.into_iter().filter(is_here).chain(others).chain(conditional.into_iter().filter(is_here)).collect()
}

/// Whose turn it is.
#[derive(Default)]
struct Baton {
    turn: Mutex<usize>,
    passed: Condvar,
}

impl Baton {
    fn take(&self, thread: usize) {
        let turn = self.turn.lock().expect("nobody panics");
        drop(self.passed.wait_while(turn, |turn| *turn % THREADS != thread).expect("nobody panics"));
    }

    fn pass(&self) {
        *self.turn.lock().expect("nobody panics") += 1;
        self.passed.notify_all();
    }
}

/// The counters of a thread.
struct Counters {
    /// A pinned event of all instructions, in some threads.
    pinned: Option<Counter>,
    /// The others, with how often each happens in 2 instructions.
    others: Vec<(Counter, Option<u64>)>,
}

impl Counters {
    /// Opens the counters of a thread. The first two have events by themselves only, the third has a pinned and a
    /// sampled one beside them, and the last a sampled one and a group.
    fn open(thread: usize, which: Which) -> Result<Self, Failure> {
        let codes = Codes::of_this_processor()?;
        let pinned = (thread == 2).then(|| Event::instructions().pinned().open()).transpose()?;
        let mut others = Vec::new();
        if thread >= 2 {
            others.push((Event::branches().every(PERIOD).open()?, Some(1)));
        }
        if thread == 3 {
            let leader = Event::branches().open()?;
            let join = |error| Failure::System { action: "join a group".into(), source: error };
            let member = Event::instructions().open_with(&leader).map_err(join)?;
            others.extend([(leader, Some(1)), (member, Some(2))]);
        }
        let mut events = events(&codes, which);
        let first = thread.saturating_sub(1) * 3;
        events.rotate_left(first);
        for (event, rate) in events.into_iter().cycle().take(SINGLE) {
            others.push((event.open()?, rate));
        }
        Ok(Self { pinned, others })
    }

    /// Returns by how many millionths the farthest scaled count is from what it should be.
    fn farthest(&self) -> Result<u64, Failure> {
        let all = TURNS as u64 * instructions(ROUNDS);
        if let Some(pinned) = &self.pinned {
            let counts = pinned.counts()?;
            equal("time of the pinned event", counts.running, counts.enabled)?;
            within("instructions of the thread", counts.value, all..all + all / 100)?;
        }
        let mut farthest = 0;
        for (counter, rate) in &self.others {
            let counts = counter.counts()?;
            within("time of an event that takes turns", counts.running, 1..=counts.enabled)?;
            let Some(rate) = rate else { continue };
            let scaled = u128::from(counts.value) * u128::from(counts.enabled) / u128::from(counts.running);
            let expected = u128::from(all) * u128::from(*rate) / 2;
            let millionths = scaled.abs_diff(expected) * 1_000_000 / expected.max(1);
            farthest = farthest.max(u64::try_from(millionths).unwrap_or(u64::MAX));
        }
        Ok(farthest)
    }
}

fn take_turns(thread: usize, which: Which, baton: &Baton) -> Result<u64, Failure> {
    let counters = Counters::open(thread, which)?;
    for turn in 0..TURNS {
        baton.take(thread);
        if turn == 0 {
            switch(libc::PR_TASK_PERF_EVENTS_ENABLE)?;
        }
        spin(ROUNDS);
        if turn + 1 == TURNS {
            switch(libc::PR_TASK_PERF_EVENTS_DISABLE)?;
        }
        baton.pass();
    }
    counters.farthest()
}

fn switch(option: i32) -> Result<(), Failure> {
    // SAFETY: the calls take numbers, and only enable or disable this thread's counters.
    checked("switch all counters", unsafe { libc::prctl(option) }).map(drop)
}

/// Measures with all events of the processor.
pub fn turns() -> Verdict {
    measure(Which::All)
}

/// Measures with the events that a guest has on a host of another vendor as well.
pub fn with_common_events() -> Verdict {
    measure(Which::Common)
}

/// Returns how far scaled counts are from what they should be, in millionths: the farthest of each thread.
fn measure(which: Which) -> Verdict {
    let baton = Arc::new(Baton::default());
    let threads: Vec<_> = (0..THREADS)
        .map(|thread| {
            let baton = Arc::clone(&baton);
            thread::spawn(move || take_turns(thread, which, &baton))
        })
        .collect();
    let farthest = threads
        .into_iter()
        .map(|thread| thread.join().expect("threads do not panic"))
        .collect::<Result<Vec<_>, _>>()?;
    Ok(farthest.iter().map(u64::to_string).collect::<Vec<_>>().join(" "))
}
