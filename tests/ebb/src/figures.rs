//! What a branch costs, beside a signal: in virtual time, in which an instruction takes a nanosecond.

use std::io;
use std::time::Instant;

use tally_ebb::Event;

use crate::code::spin;
use crate::promise::{Failure, Seen, Verdict, equal};

static SEEN: Seen = Seen::nothing();
static SIGNALS: Seen = Seen::nothing();
const PERIOD: u64 = 100_000;
const LOOPS: u64 = 5_000_000;

/// Prints nanoseconds for a signal of the kernel's, and for a branch if there are any.
pub fn figures() -> Verdict {
    let plain = nanoseconds();
    let (with_signals, signals) = with_signals()?;
    let each = |with: u64, number: u64| with.saturating_sub(plain) / number.max(1);
    let signal = format!("signal {}", each(with_signals, signals));
    let Ok((with_branches, branches)) = with_branches() else { return Ok(signal) };
    equal("branches", branches, signals)?;
    Ok(format!("{signal} branch {}", each(with_branches, branches)))
}

fn nanoseconds() -> u64 {
    let start = Instant::now();
    spin(LOOPS);
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

fn with_branches() -> Result<(u64, u64), Failure> {
    let branches = SEEN.branched()?;
    branches.enable();
    let counter = branches.open(Event::INSTRUCTIONS, PERIOD)?;
    counter.enable()?;
    let time = nanoseconds();
    counter.disable()?;
    Ok((time, SEEN.branches()))
}

extern "C" fn on_signal(_: i32) {
    SIGNALS.branches.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
}

fn with_signals() -> Result<(u64, u64), Failure> {
    const F_SETSIG: i32 = 10;
    let check = |status: i64| if status < 0 { Err(io::Error::last_os_error()) } else { Ok(status) };
    let mut attr = Event::INSTRUCTIONS.attr();
    attr.config = 0xc0;
    attr.__bindgen_anon_1.sample_period = PERIOD;
    // SAFETY: the handler only counts.
    unsafe { libc::signal(libc::SIGIO, on_signal as *const () as usize) };
    // SAFETY: `attr` is a valid description of its own size.
    let fd = check(unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const attr, 0, -1, -1, 0) })?;
    let fd = i32::try_from(fd)?;
    let owner = std::process::id().cast_signed();
    for (command, argument) in
        [(libc::F_SETFL, libc::O_ASYNC), (F_SETSIG, libc::SIGIO), (libc::F_SETOWN, owner)]
    {
        // SAFETY: these commands take a number.
        check(unsafe { libc::fcntl(fd, command, argument) }.into())?;
    }
    // SAFETY: the request takes no argument.
    check(unsafe { libc::ioctl(fd, 0x2400, 0) }.into())?;
    let time = nanoseconds();
    // SAFETY: as above; the file is this function's own.
    unsafe { libc::close(fd) };
    Ok((time, SIGNALS.branches()))
}
