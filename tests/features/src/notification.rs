//! Notification of overflows: `poll` and signals.

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

/// Polls a counter with this timeout. Returns `revents`, which is 0 after a timeout.
fn poll(counter: &Counter, milliseconds: i32) -> Result<i16, Failure> {
    let mut wait = libc::pollfd { fd: counter.fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the array has one entry, as the length says.
    checked("poll", unsafe { libc::poll(&raw mut wait, 1, milliseconds) })?;
    Ok(wait.revents)
}

/// Returns the number of rounds with which `code::run` executes this many instructions.
const fn rounds_of(instructions: u64) -> u64 {
    (instructions - code::instructions(0)) / 2
}

/// With `wakeup_events = 4`, `poll` reports every fourth sample.
pub fn wakeup_events() -> Verdict {
    let counter = Event::instructions().every(PERIOD).with(|attr| attr.wakeup_events = 4).open()?;
    let mut ring = Ring::map(&counter, 1)?;
    // After this half period, each run below overflows in the middle of its loop.
    counter.count_loop(rounds_of(PERIOD / 2))?;
    let mut events = Vec::new();
    for _ in 0..12 {
        counter.count_loop(rounds_of(PERIOD))?;
        events.push(poll(&counter, 0)?);
    }
    equal("what poll reports", events, [0, 0, 0, libc::POLLIN].repeat(3))?;
    equal("samples", ring.samples()?.len(), 12)?;
    Ok("3 wake-ups for 12 samples".into())
}

/// `poll` waits for samples of another thread, and reports the end of that thread.
pub fn poll_waits() -> Verdict {
    let worker = Worker::start();
    let event = Event::instructions().every(PERIOD).with(|attr| attr.wakeup_events = 10);
    let counter = event.open_for(Target::Task(worker.thread))?;
    let mut ring = Ring::map(&counter, 8)?;
    let (begin, end) = (counter.call(bindings::ENABLE, 0), counter.call(bindings::DISABLE, 0));
    worker.begin(move || code::run(begin, ROUNDS, end).map(drop));
    equal("what poll reports", poll(&counter, 20_000)?, libc::POLLIN)?;
    let first = ring.samples()?.len() as u64;
    within("samples by then", first, 10..=TOTAL / PERIOD)?;
    worker.finish()?;
    let samples = first + ring.samples()?.len() as u64;
    equal("samples", samples, TOTAL / PERIOD)?;
    worker.end();
    equal("what poll reports when the thread has ended", poll(&counter, 20_000)?, libc::POLLHUP)?;
    Ok(format!("{samples} samples, the first {first} when poll came back"))
}

/// Every overflow sends a signal with the counter's file descriptor.
pub fn signals() -> Verdict {
    // SAFETY: all-zero is a valid set of signals.
    let mut set: libc::sigset_t = unsafe { mem::zeroed() };
    // SAFETY: the set is valid.
    checked("add a signal to a set", unsafe { libc::sigaddset(&raw mut set, signal()) })?;
    // Blocked signals stay pending, so all of them can be counted.
    // SAFETY: the set is valid.
    checked("block signals", unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const set, ptr::null_mut()) })?;
    let counter = Event::instructions().every(PERIOD).open()?;
    let _ring = Ring::map(&counter, 8)?;
    send_to(&counter, this_thread())?;
    counter.count_loop(ROUNDS)?;
    let mut signals = 0;
    while let Some(fd) = next_pending(&set)? {
        equal("the counter of a signal", fd, counter.fd())?;
        signals += 1;
    }
    equal("signals", signals, TOTAL / PERIOD)?;
    equal("the count", counter.value()?, TOTAL)?;
    Ok(format!("{signals} signals"))
}

/// Takes the next pending signal of the set. Returns its file descriptor, or `None` if no signal is pending.
fn next_pending(set: &libc::sigset_t) -> Result<Option<i32>, Failure> {
    // SAFETY: all-zero is a valid `siginfo_t`, a plain C structure.
    let mut info: libc::siginfo_t = unsafe { mem::zeroed() };
    let timeout = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: set, information and timeout are valid.
    let result = unsafe { libc::sigtimedwait(set, &raw mut info, &raw const timeout) };
    match checked("take a signal", result) {
        Ok(_) => Ok(Some(handler::descriptor(&info))),
        Err(Failure::System { source, .. }) if source.raw_os_error() == Some(libc::EAGAIN) => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// `PERF_EVENT_IOC_REFRESH` with 1 disables a counter at its next overflow, with a signal that says so.
pub fn refresh() -> Verdict {
    handler::install()?;
    let counter = Event::instructions().every(PERIOD).open()?;
    send_to(&counter, this_thread())?;
    for times in 1..=5 {
        overflow(&counter, PERIOD, times)?;
    }
    Ok(format!("{} instructions in 5 overflows", counter.value()?))
}
