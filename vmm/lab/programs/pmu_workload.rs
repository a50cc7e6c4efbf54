//! Uses counters in the ways whose costs are measured, between marks that the host records. The program runs in a
//! guest, or on the host itself.
//!
//! Each window has few or many units of work. The difference between the two is the cost without that of the mark. The
//! windows are repeated, so some of them have no timer interrupt.

#[cfg(target_arch = "x86_64")]
use std::env;
use std::fs;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use perf_event_open_sys as sys;
use sys::bindings::{
    PERF_COUNT_HW_CPU_CYCLES, PERF_COUNT_HW_INSTRUCTIONS, PERF_SAMPLE_IP, PERF_SAMPLE_PERIOD,
    PERF_SAMPLE_TID, PERF_SAMPLE_TIME, PERF_TYPE_HARDWARE, perf_event_attr,
};
use tally_lab::figures::pmu::{END, Mark, ROUNDS, SPACING, Work, tell_host};
#[cfg(target_arch = "x86_64")]
use tally_lab::figures::pmu::{ON_INTEL, host_is_intel};

fn main() -> io::Result<()> {
    #[cfg(target_arch = "x86_64")]
    if env::args().nth(1).as_deref() == Some(ON_INTEL) {
        host_is_intel();
    }
    // Without this, the kernel would throttle overflows in quick succession.
    fs::write("/proc/sys/kernel/perf_cpu_time_max_percent", "0")?;
    read()?;
    for events in [1, 6] {
        switch(events)?;
        overflow(events)?;
    }
    Ok(())
}

/// Runs `body` with the number of units of each window, and sets the marks.
fn windows(work: Work, events: u8, mut body: impl FnMut(u8) -> io::Result<()>) -> io::Result<()> {
    // The first run is not measured, as it may do one-time work.
    body(work.units()[0])?;
    for _ in 0..ROUNDS {
        for units in work.units() {
            tell_host(Mark { work, events, units }.code());
            body(units)?;
        }
    }
    tell_host(END);
    Ok(())
}

/// Reads a counter.
fn read() -> io::Result<()> {
    let event = count(INSTRUCTIONS)?;
    windows(Work::Read, 1, |units| {
        let mut value = 0_u64;
        for _ in 0..units {
            // SAFETY: `value` is eight bytes long.
            checked(unsafe { libc::read(event.as_raw_fd(), (&raw mut value).cast(), 8) })?;
        }
        Ok(())
    })
}

/// Switches between two tasks, each with this many counters.
fn switch(events: u8) -> io::Result<()> {
    let (from_parent, mut to_child) = io::pipe()?;
    let (mut from_child, to_parent) = io::pipe()?;
    // SAFETY: this process has only one thread.
    let child = checked(unsafe { libc::fork() } as isize)?;
    if child == 0 {
        drop((to_child, from_child));
        let failed = echo(events, from_parent, to_parent).is_err();
        std::process::exit(failed.into());
    }
    drop((from_parent, to_parent));
    let counters = alternating(events).map(count).collect::<io::Result<Vec<_>>>()?;
    windows(Work::Switch, events, |units| {
        for _ in 0..units / 2 {
            to_child.write_all(b"x")?;
            from_child.read_exact(&mut [0])?;
        }
        Ok(())
    })?;
    drop((to_child, counters));
    // SAFETY: a null pointer is allowed for the status.
    unsafe { libc::wait(std::ptr::null_mut()) };
    Ok(())
}

/// Runs the other task, which sends each byte back until the end of file.
fn echo(events: u8, mut from: PipeReader, mut to: PipeWriter) -> io::Result<()> {
    let _counters = alternating(events).map(count).collect::<io::Result<Vec<_>>>()?;
    let mut byte = [0];
    while from.read(&mut byte)? == 1 {
        to.write_all(&byte)?;
    }
    Ok(())
}

/// Overflows counters in turn, [`SPACING`] instructions apart.
fn overflow(events: u8) -> io::Result<()> {
    let period = u32::from(events) * SPACING;
    let first = sample(INSTRUCTIONS, period)?;
    let _buffer = Buffer::map(&first)?;
    let mut others = Vec::new();
    for event in alternating(events).skip(1) {
        spin(SPACING);
        let event = sample(event, period)?;
        // SAFETY: the argument is a number.
        checked(unsafe { sys::ioctls::SET_OUTPUT(event.as_raw_fd(), first.as_raw_fd()) } as isize)?;
        others.push(event);
    }
    windows(Work::Overflow, events, |units| {
        spin(u32::from(units) * SPACING);
        Ok(())
    })
}

/// Executes this many instructions in a loop, and a few more before the loop.
fn spin(instructions: u32) {
    let rounds = instructions / 2;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the code changes only the register that is named.
    unsafe {
        std::arch::asm!("2: dec {0:e}", "jnz 2b", inout(reg) rounds => _, options(nomem, nostack));
    }
    #[cfg(target_arch = "riscv64")]
    // SAFETY: the code changes only the register that is named.
    unsafe {
        std::arch::asm!("2: addi {0}, {0}, -1", "bnez {0}, 2b", inout(reg) rounds => _, options(nomem, nostack));
    }
}

const INSTRUCTIONS: u32 = PERF_COUNT_HW_INSTRUCTIONS;

/// Returns this many events, instructions and cycles in turn, which have the same count in the lab. Intel's PMU has a
/// fixed counter for instructions and one for cycles, so both events are needed to fill the PMU.
fn alternating(events: u8) -> impl Iterator<Item = u32> {
    [INSTRUCTIONS, PERF_COUNT_HW_CPU_CYCLES].into_iter().cycle().take(events.into())
}

/// Opens an event that counts.
fn count(event: u32) -> io::Result<OwnedFd> {
    open(event, perf_event_attr::default())
}

/// Opens an event that is sampled in the way of `perf record -c`.
fn sample(event: u32, period: u32) -> io::Result<OwnedFd> {
    let mut attr = perf_event_attr::default();
    attr.__bindgen_anon_1.sample_period = period.into();
    attr.sample_type = u64::from(PERF_SAMPLE_IP | PERF_SAMPLE_TID | PERF_SAMPLE_TIME | PERF_SAMPLE_PERIOD);
    attr.set_exclude_kernel(1);
    open(event, attr)
}

fn open(event: u32, mut attr: perf_event_attr) -> io::Result<OwnedFd> {
    attr.size = u32::try_from(size_of::<perf_event_attr>()).expect("the structure is small");
    attr.type_ = PERF_TYPE_HARDWARE;
    attr.config = event.into();
    // SAFETY: `attr` is initialised and its size is correct. The call writes to no memory of this process.
    let fd = checked(unsafe { sys::perf_event_open(&raw mut attr, 0, -1, -1, 0) } as isize)?;
    // SAFETY: the call has just returned this file descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd).expect("file descriptors are small")) })
}

/// A ring buffer for samples. It is mapped read-only, so the kernel overwrites old samples and nothing has to read
/// them.
struct Buffer(*mut libc::c_void);

impl Buffer {
    const SIZE: usize = 9 * 4096;

    fn map(event: &OwnedFd) -> io::Result<Self> {
        let fd = event.as_raw_fd();
        // SAFETY: the kernel chooses a free range of addresses.
        let buffer =
            unsafe { libc::mmap(std::ptr::null_mut(), Self::SIZE, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
        if buffer == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self(buffer)) }
    }
}

impl Drop for Buffer {
    /// Unmaps the buffer. The event would stay open otherwise, even after its file descriptor is closed.
    fn drop(&mut self) {
        // SAFETY: the buffer was mapped by `map` with this size, and nothing refers to it.
        unsafe { libc::munmap(self.0, Self::SIZE) };
    }
}

fn checked(result: isize) -> io::Result<isize> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
