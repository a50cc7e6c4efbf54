//! How a program hears of overflows: `poll`, and signals.

use std::mem;
use std::ptr;

use perf_event_open_sys::bindings;

use crate::code::{self, instructions};
use crate::event::{Counter, Event, Target};
use crate::failure::{Failure, Verdict, checked, equal, within};
use crate::handler::{self, overflow, send_to, signal};
use crate::ring::Ring;
use crate::worker::{Worker, this_thread};

const ROUNDS: u64 = 10_000_000;
const TOTAL: u64 = instructions(ROUNDS);
const PERIOD: u64 = 1_000_000;

/// What `poll` says of a counter, after at most so many milliseconds; 0 for nothing.
fn poll(counter: &Counter, milliseconds: i32) -> Result<i16, Failure> {
    let mut wait = libc::pollfd { fd: counter.fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: there is one entry.
    checked("poll", unsafe { libc::poll(&raw mut wait, 1, milliseconds) })?;
    Ok(wait.revents)
}

/// So many rounds of the loop have this many instructions with what is around it.
const fn rounds_of(instructions: u64) -> u64 {
    (instructions - code::instructions(0)) / 2
}

/// `poll` hears of every fourth sample, if every fourth is asked for.
pub fn wakeup_events() -> Verdict {
    let counter = Event::instructions().every(PERIOD).with(|attr| attr.wakeup_events = 4).open()?;
    let mut ring = Ring::map(&counter, 1)?;
    // From here on every call below has its overflow in the middle of the loop.
    counter.over(rounds_of(PERIOD / 2))?;
    let mut heard = Vec::new();
    for _ in 0..12 {
        counter.over(rounds_of(PERIOD))?;
        heard.push(poll(&counter, 0)?);
    }
    equal("what poll says", heard, [0, 0, 0, libc::POLLIN].repeat(3))?;
    equal("samples", ring.samples()?.len(), 12)?;
    Ok("3 wake-ups for 12 samples".into())
}

/// `poll` waits until there are samples of another thread, and says when that has ended.
pub fn poll_waits() -> Verdict {
    let worker = Worker::start();
    let event = Event::instructions().every(PERIOD).with(|attr| attr.wakeup_events = 10);
    let counter = event.open_for(Target::Task(worker.thread))?;
    let mut ring = Ring::map(&counter, 8)?;
    let (begin, end) = (counter.call(bindings::ENABLE, 0), counter.call(bindings::DISABLE, 0));
    worker.begin(move || code::run(begin, ROUNDS, end).map(drop));
    equal("what poll says", poll(&counter, 20_000)?, libc::POLLIN)?;
    let first = ring.samples()?.len() as u64;
    within("samples by then", first, 10..=TOTAL / PERIOD)?;
    worker.finish()?;
    let samples = first + ring.samples()?.len() as u64;
    equal("samples", samples, TOTAL / PERIOD)?;
    worker.end();
    equal("what poll says when the thread has ended", poll(&counter, 20_000)?, libc::POLLHUP)?;
    Ok(format!("{samples} samples, the first {first} when poll came back"))
}

/// Every overflow sends a signal, that names the counter.
pub fn signals() -> Verdict {
    // SAFETY: all-zero is a valid set of signals.
    let mut set: libc::sigset_t = unsafe { mem::zeroed() };
    // SAFETY: the set is valid.
    checked("name a signal", unsafe { libc::sigaddset(&raw mut set, signal()) })?;
    // Held back, all of them can be counted.
    // SAFETY: the set is valid.
    checked("hold signals back", unsafe {
        libc::sigprocmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut())
    })?;
    let counter = Event::instructions().every(PERIOD).open()?;
    let _ring = Ring::map(&counter, 8)?;
    send_to(&counter, this_thread())?;
    counter.over(ROUNDS)?;
    let mut signals = 0;
    while let Some(fd) = next(&set)? {
        equal("the counter that a signal names", fd, counter.fd())?;
        signals += 1;
    }
    equal("signals", signals, TOTAL / PERIOD)?;
    equal("the count", counter.value()?, TOTAL)?;
    Ok(format!("{signals} signals"))
}

/// The descriptor that the next of the signals names which were held back.
fn next(set: &libc::sigset_t) -> Result<Option<i32>, Failure> {
    // SAFETY: all-zero is a valid `siginfo_t`, a plain C structure.
    let mut info: libc::siginfo_t = unsafe { mem::zeroed() };
    let at_once = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: set, place and time are valid.
    let result = unsafe { libc::sigtimedwait(set, &raw mut info, &raw const at_once) };
    match checked("take a signal", result) {
        Ok(_) => Ok(Some(handler::descriptor(&info))),
        Err(Failure::System { source, .. }) if source.raw_os_error() == Some(libc::EAGAIN) => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// A counter that is to stop after so many overflows stops at once, with a signal that says it was the last.
pub fn refresh() -> Verdict {
    handler::install()?;
    let counter = Event::instructions().every(PERIOD).open()?;
    send_to(&counter, this_thread())?;
    for times in 1..=5 {
        overflow(&counter, PERIOD, times)?;
    }
    Ok(format!("{} instructions in 5 overflows", counter.value()?))
}
