//! What is counted, and where the program is branched.

use std::sync::atomic::Ordering::Relaxed;

use tally_ebb::{Branches, Counter, Event};

use crate::code::{spin, spin_with_all_in_use};
use crate::promise::{Failure, Seen, Verdict, cycles as cycle_event, equal, holds, jumps};

static SEEN: Seen = Seen::nothing();

/// Checks that what the kernel has counted is what the overflows and the rest of the period come to. Returns the count.
pub fn whole(counter: &Counter, period: u64) -> Result<u64, Failure> {
    let count = counter.count()?.ok_or(Failure("the event has no counter".into()))?;
    equal("count", count, counter.overflows() * period + period - counter.left())?;
    Ok(count)
}

/// Counts a loop. Returns the count, and the number of branches.
fn count(branches: &Branches, event: Event, period: u64, loops: u64) -> Result<[u64; 2], Failure> {
    let before = SEEN.branches();
    let counter = branches.open(event, period)?;
    counter.enable()?;
    spin(loops);
    counter.disable()?;
    let count = whole(&counter, period)?;
    equal("branches", SEEN.branches() - before, counter.overflows())?;
    Ok([count, counter.overflows()])
}

pub fn cycles() -> Verdict {
    let branches = SEEN.branched()?;
    branches.enable();
    let [count, taken] = count(&branches, cycle_event(), 50_000, 1_000_000)?;
    holds("two million cycles are forty periods", taken >= 40 && count >= 2_000_000)?;
    Ok(format!("{count} cycles, {taken} branches"))
}

/// Between a disable and an enable, nothing is counted, and the period goes on where it was.
pub fn stands_still() -> Verdict {
    const PERIOD: u64 = 1_000_000;
    let branches = SEEN.branched()?;
    branches.enable();
    let counter = branches.open(Event::INSTRUCTIONS, PERIOD)?;
    for _ in 0..5 {
        counter.enable()?;
        spin(150_000);
        counter.disable()?;
        spin(2_000_000);
    }
    let count = whole(&counter, PERIOD)?;
    equal("branches", SEEN.branches(), 1)?;
    Ok(format!("{count} instructions"))
}

/// A handler takes the same number of instructions each time; all others are those of the loop. The last overflow is
/// far from the end, so that its handler is counted, too.
pub fn instructions() -> Verdict {
    const PERIOD: u64 = 100_000;
    let branches = SEEN.branched()?;
    branches.enable();
    let mut handler = None;
    let [empty, _] = count(&branches, Event::INSTRUCTIONS, PERIOD, 1)?;
    for loops in [525_000, 1_025_000, 5_025_000, 50_025_000] {
        let [count, taken] = count(&branches, Event::INSTRUCTIONS, PERIOD, loops)?;
        let handlers = count - empty - 2 * (loops - 1);
        equal("instructions that are left over", handlers % taken, 0)?;
        equal("instructions of a handler", *handler.get_or_insert(handlers / taken), handlers / taken)?;
    }
    Ok(format!("{} instructions in each handler", handler.unwrap_or(0)))
}

/// The branch comes at the instruction behind the overflow, which is another one if the period is longer by one.
pub fn places() -> Verdict {
    const PERIOD: u64 = 100_000;
    let branches = SEEN.branched()?;
    branches.enable();
    let mut places = [0; 2];
    for (place, more) in places.iter_mut().zip(0..) {
        let counter = branches.open(Event::INSTRUCTIONS, PERIOD + more)?;
        counter.enable()?;
        let mut addresses = spin(PERIOD);
        counter.disable()?;
        *place = SEEN.instruction.load(Relaxed);
        addresses.sort_unstable_by_key(|address| *address != *place);
        equal("address of the branch", *place, addresses[0])?;
    }
    holds("one instruction later is another place", places[0] != places[1])?;
    Ok(format!("at {:#x} and {:#x}", places[0], places[1]))
}

/// A new period holds from the next overflow on.
pub fn period_changes() -> Verdict {
    let branches = SEEN.branched()?;
    branches.enable();
    let counter = branches.open(Event::INSTRUCTIONS, 100_000)?;
    counter.enable()?;
    counter.set_period(1_000_000);
    spin(1_000_000);
    counter.disable()?;
    let count = counter.count()?.ok_or(Failure("the event has no counter".into()))?;
    equal("branches", SEEN.branches(), 2)?;
    equal("count", count, 100_000 + 1_000_000 + 1_000_000 - counter.left())?;
    Ok(format!("{count} instructions"))
}

pub fn several_counters() -> Verdict {
    let branches = SEEN.branched()?;
    branches.enable();
    let periods = [300_000, 70_000, 110_000];
    let first = branches.open(Event::INSTRUCTIONS, periods[0])?;
    let others = [
        branches.open_with(&first, cycle_event(), periods[1])?,
        branches.open_with(&first, jumps(), periods[2])?,
    ];
    first.enable()?;
    spin(3_000_000);
    first.disable()?;
    let counters = [&first, &others[0], &others[1]];
    let mut overflows = 0;
    for (counter, period) in counters.into_iter().zip(periods) {
        holds("it has overflowed", counter.overflows() >= 3_000_000 / period)?;
        whole(counter, period)?;
        overflows += counter.overflows();
    }
    // Those that come together are one branch.
    holds("a branch for each, or for several at once", (1..=overflows).contains(&SEEN.branches()))?;
    Ok(format!("{overflows} overflows, {} branches", SEEN.branches()))
}

pub fn red_zone() -> Verdict {
    let branches = SEEN.branched()?;
    branches.enable();
    let counter = branches.open(Event::INSTRUCTIONS, 1009)?;
    counter.enable()?;
    let is_intact = spin_with_all_in_use(1_000_000);
    counter.disable()?;
    holds("registers, flags and red zone are as they were", is_intact)?;
    holds("there were branches", SEEN.branches() > 100)?;
    Ok(format!("{} branches", SEEN.branches()))
}
