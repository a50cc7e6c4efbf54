//! The workloads of the benchmark, which run on the host and in guests. The program measures its own time from the
//! first round to the last, so neither its own start nor that of perf is included.
//!
//! It prints pairs of a name and a number: `ticks` of the time-stamp counter, `nanoseconds`, and the number of `units`.
//! `bench-workload run COMMAND...` runs a command, and prints the `total` ticks of the command.

use std::arch::x86_64::_rdtsc;
use std::env;
use std::error::Error;
use std::hint::black_box;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, ExitCode};
use std::time::Instant;

use tally_lab::bench::here::count_instructions;
use tally_lab::bench::{BEGIN, END, READ_EVERY, Way, Workload};
use tally_lab::figures::pmu::{ON_INTEL, host_is_intel, tell_host};
use vpmu_perf::Page;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Options of a workload.
#[derive(Clone, Copy)]
struct Extra {
    /// The loop counts its own instructions, and reads the counter in this way.
    reads: Option<Way>,
    /// Hypercalls mark the start and the end of the rounds.
    marks: bool,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match &*words {
        ["run", program, arguments @ ..] => run(program, arguments),
        [workload, units, extra @ ..] => work(workload, units, extra),
        _ => {
            Err("usage: bench-workload WORKLOAD UNITS [read|rdpmc] [mark [vmcall]], or bench-workload run COMMAND..."
                .into())
        }
    };
    result.unwrap_or_else(|error| {
        eprintln!("bench-workload: {error}");
        ExitCode::FAILURE
    })
}

fn run(program: &str, arguments: &[&str]) -> Result<ExitCode> {
    let begun = ticks();
    let status = Command::new(program).args(arguments).status()?;
    println!("total {}", ticks() - begun);
    let code = status.code().and_then(|code| u8::try_from(code).ok());
    Ok(ExitCode::from(code.unwrap_or(1)))
}

fn work(workload: &str, units: &str, extra: &[&str]) -> Result<ExitCode> {
    let units = units.parse()?;
    let (way, marks) = match extra {
        [way @ .., "mark", ON_INTEL] => {
            host_is_intel();
            (way, true)
        }
        [way @ .., "mark"] => (way, true),
        way => (way, false),
    };
    let reads = match way {
        [] => None,
        ["read"] => Some(Way::Call),
        ["rdpmc"] => Some(Way::Rdpmc),
        _ => return Err("after the units, use `read` or `rdpmc`, and `mark` or `mark vmcall`".into()),
    };
    let extra = Extra { reads, marks };
    match workload.parse()? {
        Workload::Loop if extra.reads == Some(Way::Call) => reads_by_call(units, extra),
        Workload::Loop if extra.reads == Some(Way::Rdpmc) => reads_by_rdpmc(units, extra),
        Workload::Loop => timed(units, extra, || {
            spin(units);
            Ok(())
        }),
        Workload::Syscalls => timed(units, extra, || {
            (0..units).for_each(|_| {
                // SAFETY: the call takes no arguments and cannot fail.
                unsafe { libc::syscall(libc::SYS_getppid) };
            });
            Ok(())
        }),
        Workload::Switches => switches(units, extra),
        Workload::Memory => memory(units, extra),
        Workload::Compile => compile(units, extra),
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Runs the rounds, and prints their time.
fn timed(units: u64, extra: Extra, body: impl FnOnce() -> Result<()>) -> Result<()> {
    if extra.marks {
        tell_host(BEGIN);
    }
    let (instant, begun) = (Instant::now(), ticks());
    body()?;
    let (ticks, time) = (ticks() - begun, instant.elapsed());
    if extra.marks {
        tell_host(END);
    }
    println!("ticks {ticks} nanoseconds {} units {units}", time.as_nanos());
    Ok(())
}

fn ticks() -> u64 {
    // SAFETY: every x86-64 processor has the instruction, and Linux allows it in user mode.
    unsafe { _rdtsc() }
}

/// Executes this many instructions in a loop, and a few more before the loop.
fn spin(instructions: u64) {
    // SAFETY: the code changes only the register that is named.
    unsafe {
        std::arch::asm!("2: dec {0}", "jnz 2b", inout(reg) (instructions / 2).max(1) => _, options(nomem, nostack));
    }
}

/// Runs the loop, and reads a counter of its own instructions by system calls.
fn reads_by_call(instructions: u64, extra: Extra) -> Result<()> {
    let mut counter = count_instructions()?;
    reads(instructions, extra, || {
        let mut value = [0; 8];
        counter.read_exact(&mut value)?;
        Ok(u64::from_ne_bytes(value))
    })
}

/// Runs the loop, and reads a counter of its own instructions by RDPMC.
fn reads_by_rdpmc(instructions: u64, extra: Extra) -> Result<()> {
    let counter = OwnedFd::from(count_instructions()?);
    let page = Page::map(&counter)?;
    let unreadable = "the counter cannot be read by RDPMC";
    reads(instructions, extra, || page.read().ok_or_else(|| unreadable.into()))
}

fn reads(instructions: u64, extra: Extra, mut read: impl FnMut() -> Result<u64>) -> Result<()> {
    timed(instructions, extra, || {
        let mut value = 0;
        for _ in 0..instructions / READ_EVERY {
            spin(READ_EVERY);
            value = read()?;
        }
        if value < instructions / READ_EVERY * READ_EVERY {
            return Err("the counter missed instructions".into());
        }
        Ok(())
    })
}

/// Hands a byte to and fro between two tasks. Each unit is a task switch.
fn switches(units: u64, extra: Extra) -> Result<()> {
    let (from_parent, mut to_child) = io::pipe()?;
    let (mut from_child, to_parent) = io::pipe()?;
    // SAFETY: this process has only one thread.
    match unsafe { libc::fork() } {
        -1 => return Err(io::Error::last_os_error().into()),
        0 => {
            drop((to_child, from_child));
            std::process::exit(echo(from_parent, to_parent).is_err().into());
        }
        _ => drop((from_parent, to_parent)),
    }
    timed(units, extra, || {
        for _ in 0..units / 2 {
            to_child.write_all(b"x")?;
            from_child.read_exact(&mut [0])?;
        }
        Ok(())
    })?;
    drop(to_child);
    // SAFETY: a null pointer is allowed for the status.
    unsafe { libc::wait(std::ptr::null_mut()) };
    Ok(())
}

/// Sends each byte back until the end of file.
fn echo(mut from: PipeReader, mut to: PipeWriter) -> io::Result<()> {
    let mut byte = [0];
    while from.read(&mut byte)? == 1 {
        to.write_all(&byte)?;
    }
    Ok(())
}

/// Follows a chain of loads through more memory than a cache holds, in an order that hardware cannot predict. Each unit
/// is a load on which the next one depends.
fn memory(units: u64, extra: Extra) -> Result<()> {
    /// Number of cache lines of 64 bytes.
    const LINES: usize = 1 << 19;
    /// Number of words in a line.
    const WORDS: usize = 16;
    let mut chain = vec![0_u32; LINES * WORDS];
    // A linear congruential generator with full period visits each line once (Knuth, The Art of Computer Programming,
    // volume 2, 3.2.1.2, theorem A).
    let mut line = 0_usize;
    for _ in 0..LINES {
        let next = (line * 1_664_525 + 1_013_904_223) % LINES;
        chain[line * WORDS] = u32::try_from(next * WORDS)?;
        line = next;
    }
    timed(units, extra, || {
        let mut place = 0;
        for _ in 0..units {
            place = chain[place as usize];
        }
        black_box(place);
        Ok(())
    })
}

/// Imitates a build with busybox's programs: short programs, pipes, text that is searched, small files. Each unit is a
/// run of the script.
fn compile(units: u64, extra: Extra) -> Result<()> {
    const ROUND: &str = "
        mkdir -p objects
        for file in a b c d; do
            seq 300 | sed 's/.*/static int f&(int x) { return x * & + 1; }/' >objects/$file.c
            grep -v 0 objects/$file.c | awk '{ gsub(/static/, \"extern\"); print }' | sort -r >objects/$file.s
            md5sum objects/$file.s >objects/$file.o
        done
        cat objects/*.o | sort | uniq | wc -l
        rm -r objects";
    timed(units, extra, || {
        for _ in 0..units {
            let output = Command::new("sh").args(["-c", ROUND]).output()?;
            if output.stdout.trim_ascii() != b"4" {
                return Err(String::from_utf8_lossy(&output.stderr).into());
            }
        }
        Ok(())
    })
}
