//! Takes counters away from guests, as root on the host can: Linux schedules events of a CPU, which this program opens,
//! before any events of a thread, pinned or not.
//!
//! Usage: `counter-thief COUNTERS[,CYCLES] [--for SECONDS] [--times TIMES] [--every SECONDS]`
//!
//! The program takes COUNTERS counters of each CPU for instructions, and CYCLES for cycles: Intel's processors have a
//! fixed counter for each of these two, which no other event can take. It gives them back after `--for` SECONDS, or at
//! SIGTERM, which also ends the program. It repeats this `--times` TIMES, with `--every` SECONDS from the start of one
//! theft to the start of the next. Every line of its output ends with a `CLOCK_MONOTONIC` time in nanoseconds: before
//! the first counter is taken, or after the last one is given back. So the interval in which other events may not count
//! is between these two times.
//!
//! ```text
//! holds 6 of 6 counters on CPU 0 since 1234567890
//! gave back 6 counters on CPU 0 at 1334567890
//! ```

use std::fs;
use std::io::{self, Write};
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
    #[error("usage: counter-thief COUNTERS[,CYCLES] [--for SECONDS] [--times TIMES] [--every SECONDS]")]
    Usage,
    #[error("`{argument}` is not a number of {what}")]
    Number { argument: String, what: &'static str },
    #[error("cannot {action}: {source}")]
    System { action: String, source: io::Error },
    #[error("CPU {cpu}: took only {held} of {wanted} counters; other events of this CPU hold the rest")]
    Taken { cpu: i32, held: usize, wanted: usize },
}

/// The command line.
struct Plan {
    /// Events for which to take a counter of each CPU.
    events: Vec<Event>,
    /// Duration of each theft; `None` is until SIGTERM.
    length: Option<Duration>,
    /// Number of thefts.
    times: u32,
    /// Time from the start of one theft to the start of the next.
    every: Duration,
}

/// An event of `PERF_TYPE_HARDWARE`.
type Event = bindings::perf_hw_id;

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
    let counters = arguments.next().ok_or(Error::Usage)?;
    let (instructions, cycles) = counters.split_once(',').unwrap_or((&counters, "0"));
    let events = [
        vec![bindings::PERF_COUNT_HW_INSTRUCTIONS; number(instructions, "counters")?],
        vec![bindings::PERF_COUNT_HW_CPU_CYCLES; number(cycles, "counters")?],
    ];
    let mut plan = Plan { events: events.concat(), length: None, times: 1, every: Duration::ZERO };
    while let Some(option) = arguments.next() {
        let value = arguments.next().ok_or(Error::Usage)?;
        match option.as_str() {
            "--for" => plan.length = Some(seconds(&value)?),
            "--times" => plan.times = number(&value, "times")?,
            "--every" => plan.every = seconds(&value)?,
            _ => return Err(Error::Usage),
        }
    }
    // Without `--for`, SIGTERM ends the first theft and the program, so there cannot be another one.
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
    block_sigterm()?;
    let cpus = online_cpus()?;
    for time in 1..=plan.times {
        let begun = now();
        let all_held =
            cpus.iter().map(|&cpu| Held::take(cpu, &plan.events)).collect::<Result<Vec<_>, _>>()?;
        for Held { cpu, counters } in &all_held {
            print_line(&format!(
                "holds {0} of {0} counters on CPU {cpu} since {1}",
                counters.len(),
                begun.as_nanos()
            ))?;
        }
        let terminated = wait_for_sigterm(plan.length.map(|length| until(begun + length)))?;
        drop(all_held);
        let over = now().as_nanos();
        for cpu in &cpus {
            print_line(&format!("gave back {} counters on CPU {cpu} at {over}", plan.events.len()))?;
        }
        if terminated || time < plan.times && wait_for_sigterm(Some(until(begun + plan.every)))? {
            break;
        }
    }
    Ok(())
}

/// Returns the time until `then`.
fn until(then: Duration) -> Duration {
    then.saturating_sub(now())
}

/// Counters of a CPU, which are held until this is dropped.
struct Held {
    cpu: i32,
    counters: Vec<OwnedFd>,
}

impl Held {
    fn take(cpu: i32, events: &[Event]) -> Result<Self, Error> {
        let wanted = events.len();
        let counters = events.iter().map(|event| open(cpu, *event)).collect::<io::Result<Vec<_>>>();
        let system = |action: &str| {
            let action = format!("{action} a counter on CPU {cpu}");
            |source| Error::System { action, source }
        };
        let counters = counters.map_err(system("open"))?;
        // A pinned event that could not be scheduled is in the error state, and a read of it returns end of file.
        let mut held = 0;
        for counter in &counters {
            held += usize::from(is_counting(counter).map_err(system("read"))?);
        }
        if held == wanted { Ok(Self { cpu, counters }) } else { Err(Error::Taken { cpu, held, wanted }) }
    }
}

fn open(cpu: i32, event: Event) -> io::Result<OwnedFd> {
    let mut attr = perf_event_attr {
        type_: bindings::PERF_TYPE_HARDWARE,
        size: u32::try_from(size_of::<perf_event_attr>()).expect("the size is about a hundred bytes"),
        config: event.into(),
        ..Default::default()
    };
    attr.set_pinned(1);
    let all_tasks = -1;
    // SAFETY: the attributes are valid for the whole call.
    let fd = unsafe {
        sys::perf_event_open(&raw mut attr, all_tasks, cpu, -1, bindings::PERF_FLAG_FD_CLOEXEC.into())
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just returned this file descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn is_counting(counter: &OwnedFd) -> io::Result<bool> {
    let mut value = 0_u64;
    // SAFETY: the buffer has the length that is passed, and any bytes are a valid number.
    match unsafe { libc::read(counter.as_raw_fd(), (&raw mut value).cast(), size_of::<u64>()) } {
        0 => Ok(false),
        1.. => Ok(true),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the numbers of the online CPUs. The file has a list such as `0-3,5`.
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

/// Waits for SIGTERM. Returns false after the timeout; `None` is no timeout.
fn wait_for_sigterm(timeout: Option<Duration>) -> Result<bool, Error> {
    let timeout = timeout.map(|length| libc::timespec {
        tv_sec: length.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: length.subsec_nanos().into(),
    });
    let timeout = timeout.as_ref().map_or(ptr::null(), ptr::from_ref);
    let signals = sigterm();
    // SAFETY: the set is valid, and the timeout is valid or null. A null pointer is allowed for the signal's
    // information.
    if unsafe { libc::sigtimedwait(&raw const signals, ptr::null_mut(), timeout) } >= 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
        source => Err(Error::System { action: "wait".into(), source }),
    }
}

/// Blocks SIGTERM, so it stays pending until [`wait_for_sigterm`] takes it.
fn block_sigterm() -> Result<(), Error> {
    let signals = sigterm();
    // SAFETY: the set is valid, and a null pointer is allowed for the previous set.
    match unsafe { libc::sigprocmask(libc::SIG_BLOCK, &raw const signals, ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(Error::System { action: "block SIGTERM".into(), source: io::Error::last_os_error() }),
    }
}

fn sigterm() -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: the call initialises the set as an empty one.
    unsafe { libc::sigemptyset(set.as_mut_ptr()) };
    // SAFETY: the set is initialised, and the signal exists.
    unsafe { libc::sigaddset(set.as_mut_ptr(), libc::SIGTERM) };
    // SAFETY: the set is initialised.
    unsafe { set.assume_init() }
}

/// Returns the time of `CLOCK_MONOTONIC`.
fn now() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the time can be written to.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).expect("less than a second"))
}

/// Prints a line. Standard output is line-buffered, so a reader gets the line at once.
fn print_line(line: &str) -> Result<(), Error> {
    writeln!(io::stdout(), "{line}").map_err(|source| Error::System { action: "write".into(), source })
}
