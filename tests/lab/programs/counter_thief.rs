//! Takes counters away from guests, as a host's root can: its events belong to a CPU, and Linux serves these before any that
//! belong to a thread, pinned or not.
//!
//! Usage: `counter-thief COUNTERS [--for SECONDS] [--times TIMES] [--every SECONDS]`
//!
//! It takes that many counters of each CPU, and gives them back after SECONDS, or at SIGTERM, which ends it. With `--times` it
//! does so again, and it is so many seconds from one theft to the next. Every line that it prints ends with a time on
//! `CLOCK_MONOTONIC` in nanoseconds: before the first counter is taken, or after the last is given back. So a gap in what
//! others count lies between the two.
//!
//! ```text
//! holds 6 of 6 counters on CPU 0 since 1234567890
//! gave back 6 counters on CPU 0 at 1334567890
//! ```

use std::fs;
use std::io::{self, Write};
use std::iter;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::ExitCode;
use std::ptr;
use std::str::FromStr;
use std::time::Duration;

use perf_event_open_sys as sys;
use sys::bindings::{self, perf_event_attr};
use thiserror::Error;

#[derive(Debug, Error)]
enum Error {
    #[error("usage: counter-thief COUNTERS [--for SECONDS] [--times TIMES] [--every SECONDS]")]
    Usage,
    #[error("`{argument}` is not a number of {what}")]
    Number { argument: String, what: &'static str },
    #[error("cannot {action}: {source}")]
    System { action: String, source: io::Error },
    #[error(
        "CPU {cpu}: {held} of {wanted} counters could be taken; others of this CPU's events hold the rest"
    )]
    Taken { cpu: i32, held: usize, wanted: usize },
}

/// What is to be stolen, and when.
struct Plan {
    counters: usize,
    /// For how long each time; without, until SIGTERM.
    length: Option<Duration>,
    times: u32,
    /// From one theft to the next.
    every: Duration,
}

fn main() -> ExitCode {
    match plan(std::env::args().skip(1)).and_then(|plan| carry_out(&plan)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("counter-thief: {error}");
            ExitCode::FAILURE
        }
    }
}

fn plan(mut arguments: impl Iterator<Item = String>) -> Result<Plan, Error> {
    let counters = number(&arguments.next().ok_or(Error::Usage)?, "counters")?;
    let mut plan = Plan { counters, length: None, times: 1, every: Duration::ZERO };
    while let Some(option) = arguments.next() {
        let value = arguments.next().ok_or(Error::Usage)?;
        match option.as_str() {
            "--for" => plan.length = Some(seconds(&value)?),
            "--times" => plan.times = number(&value, "times")?,
            "--every" => plan.every = seconds(&value)?,
            _ => return Err(Error::Usage),
        }
    }
    // Whoever holds them until it is told to end does so once.
    if plan.length.is_none() && plan.times > 1 { Err(Error::Usage) } else { Ok(plan) }
}

fn number<T: FromStr>(argument: &str, what: &'static str) -> Result<T, Error> {
    argument.parse().map_err(|_| Error::Number { argument: argument.to_owned(), what })
}

fn seconds(argument: &str) -> Result<Duration, Error> {
    Duration::try_from_secs_f64(number(argument, "seconds")?)
        .map_err(|_| Error::Number { argument: argument.to_owned(), what: "seconds" })
}

fn carry_out(plan: &Plan) -> Result<(), Error> {
    hold_back_sigterm()?;
    let cpus = online_cpus()?;
    for time in 1..=plan.times {
        let begun = now();
        let all_held =
            cpus.iter().map(|&cpu| Held::take(cpu, plan.counters)).collect::<Result<Vec<_>, _>>()?;
        for Held { cpu, counters } in &all_held {
            say(&format!(
                "holds {0} of {0} counters on CPU {cpu} since {1}",
                counters.len(),
                begun.as_nanos()
            ))?;
        }
        let told = told_to_end(plan.length.map(|length| left(begun + length)))?;
        drop(all_held);
        let over = now().as_nanos();
        for cpu in &cpus {
            say(&format!("gave back {} counters on CPU {cpu} at {over}", plan.counters))?;
        }
        if told || time < plan.times && told_to_end(Some(left(begun + plan.every)))? {
            break;
        }
    }
    Ok(())
}

/// How long it is until then.
fn left(then: Duration) -> Duration {
    then.saturating_sub(now())
}

/// Counters of a CPU, until it is dropped.
struct Held {
    cpu: i32,
    counters: Vec<OwnedFd>,
}

impl Held {
    fn take(cpu: i32, wanted: usize) -> Result<Self, Error> {
        let counters = iter::repeat_with(|| open(cpu)).take(wanted).collect::<io::Result<Vec<_>>>();
        let system = |action: &str| {
            let action = format!("{action} a counter on CPU {cpu}");
            |source| Error::System { action, source }
        };
        let counters = counters.map_err(system("make"))?;
        // One that found no place is in the error state, which a read finds out.
        let mut held = 0;
        for counter in &counters {
            held += usize::from(is_counting(counter).map_err(system("read"))?);
        }
        if held == wanted { Ok(Self { cpu, counters }) } else { Err(Error::Taken { cpu, held, wanted }) }
    }
}

fn open(cpu: i32) -> io::Result<OwnedFd> {
    let mut attr = perf_event_attr {
        type_: bindings::PERF_TYPE_HARDWARE,
        size: u32::try_from(size_of::<perf_event_attr>()).expect("it is a hundred bytes or so"),
        config: bindings::PERF_COUNT_HW_INSTRUCTIONS.into(),
        ..Default::default()
    };
    attr.set_pinned(1);
    let everybody = -1;
    // SAFETY: the description is valid for as long as the call reads it.
    let fd = unsafe {
        sys::perf_event_open(&raw mut attr, everybody, cpu, -1, bindings::PERF_FLAG_FD_CLOEXEC.into())
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn is_counting(counter: &OwnedFd) -> io::Result<bool> {
    let mut value = 0_u64;
    // SAFETY: the buffer is as long as is said, and any bytes are a valid number.
    match unsafe { libc::read(counter.as_raw_fd(), (&raw mut value).cast(), size_of::<u64>()) } {
        0 => Ok(false),
        1.. => Ok(true),
        _ => Err(io::Error::last_os_error()),
    }
}

/// CPUs by number, from a list such as `0-3,5`.
fn online_cpus() -> Result<Vec<i32>, Error> {
    const PATH: &str = "/sys/devices/system/cpu/online";
    let system = |source| Error::System { action: format!("read {PATH}"), source };
    let text = fs::read_to_string(PATH).map_err(system)?;
    let mut cpus = Vec::new();
    for range in text.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(number::<i32>(first, "a CPU")?..=number(last, "a CPU")?);
    }
    Ok(cpus)
}

/// Waits for SIGTERM, for so long or without end. Says whether it came.
fn told_to_end(within: Option<Duration>) -> Result<bool, Error> {
    let timeout = within.map(|length| libc::timespec {
        tv_sec: length.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: length.subsec_nanos().into(),
    });
    let timeout = timeout.as_ref().map_or(ptr::null(), ptr::from_ref);
    let signals = sigterm();
    // SAFETY: the set is valid, and so is the timeout, or absent; nobody wants to know more of the signal.
    if unsafe { libc::sigtimedwait(&raw const signals, ptr::null_mut(), timeout) } >= 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
        source => Err(Error::System { action: "wait".into(), source }),
    }
}

/// Keeps SIGTERM for [`told_to_end`], which then misses none.
fn hold_back_sigterm() -> Result<(), Error> {
    let signals = sigterm();
    // SAFETY: the set is valid, and nobody wants the one before.
    match unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const signals, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(Error::System { action: "block SIGTERM".into(), source: io::Error::last_os_error() }),
    }
}

fn sigterm() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: this makes it a set, of no signals.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: it is a set now, and the signal exists.
    unsafe { libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM) };
    // SAFETY: as before.
    unsafe { set.assume_init() }
}

/// `CLOCK_MONOTONIC`.
fn now() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time is written where it can be.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).expect("less than a second"))
}

/// A line that whoever reads it has at once.
fn say(line: &str) -> Result<(), Error> {
    writeln!(io::stdout(), "{line}").map_err(|source| Error::System { action: "write".into(), source })
}
