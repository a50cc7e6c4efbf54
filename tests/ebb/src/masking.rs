//! Overflows that a program does not want to be branched for, or not yet.

use std::sync::atomic::Ordering::Relaxed;
use std::thread;
use std::time::Duration;

use tally_ebb::Event;

use crate::code::spin;
use crate::counting::whole;
use crate::promise::{Seen, Verdict, equal, holds, note_slowly};

static SEEN: Seen = Seen::nothing();
const PERIOD: u64 = 100_000;

/// The registers are the thread's own words: they keep their values, and no event is needed to use them.
pub fn registers() -> Verdict {
    let branches = SEEN.branched()?;
    let mut seen = [true; 2];
    for enabled in [true, false] {
        if enabled {
            branches.enable();
        } else {
            branches.disable();
        }
        thread::sleep(Duration::from_millis(1));
        seen[usize::from(enabled)] = branches.is_enabled();
    }
    equal("enabled", seen, [false, true])?;
    Ok("written and read".into())
}

/// An overflow while the handler runs is handled after it, not in it.
pub fn back_to_back() -> Verdict {
    let branches = SEEN.handled_by(note_slowly)?;
    branches.enable();
    let counter = branches.open(Event::INSTRUCTIONS, PERIOD)?;
    counter.enable()?;
    while SEEN.branches() < 200 {
        spin(10);
    }
    counter.disable()?;
    whole(&counter, PERIOD)?;
    equal("handlers at once", SEEN.deepest.load(Relaxed), 1)?;
    // Two overflows while one is handled are one branch.
    holds("no overflow is forgotten", counter.overflows() >= SEEN.branches())?;
    Ok(format!("{} overflows, {} branches", counter.overflows(), SEEN.branches()))
}

/// Overflows wait while branches are disabled, and one branch follows.
pub fn masked() -> Verdict {
    let branches = SEEN.branched()?;
    let counter = branches.open(Event::INSTRUCTIONS, PERIOD)?;
    counter.enable()?;
    spin(5 * PERIOD);
    equal("branches while disabled", (SEEN.branches(), branches.is_pending()), (0, true))?;
    branches.enable();
    equal("branches once enabled", (SEEN.branches(), branches.is_pending()), (1, false))?;
    spin(PERIOD);
    counter.disable()?;
    holds("they go on", SEEN.branches() >= 3)?;
    whole(&counter, PERIOD)?;
    Ok(format!("{} overflows, {} branches", counter.overflows(), SEEN.branches()))
}

pub fn masked_across_switches() -> Verdict {
    let branches = SEEN.branched()?;
    let counter = branches.open(Event::INSTRUCTIONS, PERIOD)?;
    counter.enable()?;
    for _ in 0..10 {
        spin(PERIOD);
        thread::sleep(Duration::from_millis(1));
    }
    equal("branches while disabled", (SEEN.branches(), branches.is_pending()), (0, true))?;
    branches.enable();
    equal("branches once enabled", SEEN.branches(), 1)?;
    counter.disable()?;
    whole(&counter, PERIOD)?;
    Ok(format!("{} overflows", counter.overflows()))
}

/// Without a handler nothing is branched, the overflow waits, and there is no other until the counter starts anew.
pub fn no_handler() -> Verdict {
    let branches = SEEN.branched()?;
    // SAFETY: there is no code at 0.
    unsafe { branches.set_entry(0) };
    branches.enable();
    let counter = branches.open(Event::INSTRUCTIONS, PERIOD)?;
    counter.enable()?;
    spin(5 * PERIOD);
    counter.disable()?;
    equal("branches", (SEEN.branches(), branches.is_pending()), (0, true))?;
    equal("overflows", counter.overflows(), 1)?;
    Ok(format!("{} instructions", counter.count()?.unwrap_or(0)))
}

/// An address that no program can execute at is no handler.
pub fn invalid_handlers() -> Verdict {
    for address in [0xffff_ffff_8100_0000, 0x0000_8000_0000_0000, u64::MAX, 1 << 63] {
        let branches = SEEN.branched()?;
        branches.enable();
        // SAFETY: no program can have code there.
        unsafe { branches.set_entry(address) };
        let counter = branches.open(Event::INSTRUCTIONS, PERIOD)?;
        counter.enable()?;
        spin(5 * PERIOD);
        counter.disable()?;
        equal("branches", (SEEN.branches(), counter.overflows()), (0, 1))?;
    }
    Ok("ignored".into())
}
