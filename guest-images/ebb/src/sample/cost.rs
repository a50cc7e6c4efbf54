//! What a branch costs, beside a signal: a loop with overflows of both kinds, and without.

use std::arch::asm;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use crate::{Attr, Branch, Branches, Error, Event};

const PERIOD: u64 = 100_000;
/// Enough that it hardly matters whether the kernel has one tick more or less in a run.
const LOOPS: u64 = 25_000_000;

static TAKEN: AtomicU64 = AtomicU64::new(0);

/// What a run of the loop took.
#[derive(Clone, Copy)]
struct Run {
    nanoseconds: u64,
    /// Instructions of the program.
    instructions: u64,
    overflows: u64,
}

/// Prints the cost of each overflow: its time, and the instructions of the program for the handler and the return.
pub fn print() -> Result<(), Error> {
    let plain = counted()?;
    println!("{:<8} {:>12} {:>26}", "", "nanoseconds", "instructions of the program");
    let line = |name: &str, run: Run| {
        let each = |with: u64, without: u64| with.saturating_sub(without) / run.overflows.max(1);
        let nanoseconds = each(run.nanoseconds, plain.nanoseconds);
        println!("{name:<8} {nanoseconds:>12} {:>26}", each(run.instructions, plain.instructions));
    };
    line("signal", with_signals()?);
    line("branch", with_branches()?);
    Ok(())
}

fn run(
    start: impl FnOnce() -> Result<(), Error>,
    stop: impl FnOnce() -> Result<u64, Error>,
) -> Result<Run, Error> {
    TAKEN.store(0, Relaxed);
    start()?;
    let began = Instant::now();
    // SAFETY: changes one register only.
    unsafe { asm!("2: dec {0}", "jnz 2b", inout(reg) LOOPS => _) };
    let nanoseconds = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let instructions = stop()?;
    Ok(Run { nanoseconds, instructions, overflows: TAKEN.load(Relaxed) })
}

extern "C" fn on_branch(_: &Branch, _: usize) {
    TAKEN.fetch_add(1, Relaxed);
}

fn with_branches() -> Result<Run, Error> {
    // SAFETY: the handler only counts.
    let branches = unsafe { Branches::new(on_branch, 0) }?;
    branches.enable();
    let counter = branches.open(Event::INSTRUCTIONS, PERIOD)?;
    run(
        || counter.enable(),
        || {
            counter.disable()?;
            Ok(counter.count()?.unwrap_or(0))
        },
    )
}

extern "C" fn on_signal(_: i32) {
    TAKEN.fetch_add(1, Relaxed);
}

fn with_signals() -> Result<Run, Error> {
    const F_SETSIG: i32 = 10;
    // SAFETY: the handler only counts.
    unsafe { libc::signal(libc::SIGIO, on_signal as *const () as usize) };
    let file = open(|attr| attr.__bindgen_anon_1.sample_period = PERIOD)?;
    let owner = std::process::id().cast_signed();
    for (command, argument) in
        [(libc::F_SETFL, libc::O_ASYNC), (F_SETSIG, libc::SIGIO), (libc::F_SETOWN, owner)]
    {
        // SAFETY: these commands take a number.
        let status = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
        checked("have the event send signals", status.into())?;
    }
    run(|| request(&file, ENABLE), || stop(&file))
}

/// The loop with a counter that does not overflow.
fn counted() -> Result<Run, Error> {
    let file = open(|_| ())?;
    run(|| request(&file, ENABLE), || stop(&file))
}

const ENABLE: u64 = 0x2400;
const DISABLE: u64 = 0x2401;

/// Opens an event of instructions without branches.
fn open(change: impl FnOnce(&mut Attr)) -> Result<OwnedFd, Error> {
    let mut attr = Event::INSTRUCTIONS.attr();
    attr.config = Event::INSTRUCTIONS.0;
    change(&mut attr);
    // SAFETY: `attr` is a valid description of its own size.
    let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const attr, 0, -1, -1, 0) };
    let fd = i32::try_from(checked("open an event", fd)?).expect("file descriptors are small");
    // SAFETY: the kernel has just returned this file.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn request(file: &OwnedFd, request: u64) -> Result<(), Error> {
    // SAFETY: the request takes no argument.
    let status = unsafe { libc::ioctl(file.as_raw_fd(), request, 0) };
    checked("switch an event", status.into()).map(|_| ())
}

fn stop(file: &OwnedFd) -> Result<u64, Error> {
    request(file, DISABLE)?;
    let mut count = 0_u64;
    // SAFETY: `count` has room for what is read.
    let read = unsafe { libc::read(file.as_raw_fd(), (&raw mut count).cast(), size_of::<u64>()) };
    checked("read an event", i64::try_from(read).unwrap_or(-1)).map(|_| count)
}

fn checked(action: &'static str, status: i64) -> Result<i64, Error> {
    if status >= 0 {
        return Ok(status);
    }
    Err(Error::System { action, source: std::io::Error::last_os_error() })
}
