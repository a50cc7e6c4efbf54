//! A program that prints something else in each run: how its threads interleave, or at which points of its loop a timer
//! interrupts it, and when that was. A debugger that replays a run has to print the same.
//!
//! Usage: `racing threads`, `racing timer`

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

static SHARED: AtomicU64 = AtomicU64::new(0);
static ALARMS: AtomicU64 = AtomicU64::new(0);

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("threads") => threads(),
        Some("timer") => timer(),
        _ => {
            eprintln!("racing: threads, or timer?");
            return ExitCode::FAILURE;
        }
    }
    println!("at {} ns", SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos());
    ExitCode::SUCCESS
}

/// Lets four threads write what they have read a little earlier, so that writes of the others are lost.
fn threads() {
    const ROUNDS: u64 = 100_000;
    let work = |number: u64| {
        let mut seen = number;
        for _ in 0..ROUNDS {
            let value = SHARED.load(Ordering::Relaxed);
            seen = seen.rotate_left(5) ^ value;
            if seen.is_multiple_of(1000) {
                thread::yield_now();
            }
            SHARED.store(value + 1, Ordering::Relaxed);
        }
        seen
    };
    let threads: Vec<_> = (0..4).map(|number| thread::spawn(move || work(number))).collect();
    for thread in threads {
        println!("{:016x}", thread.join().unwrap_or_default());
    }
    println!("{} of {}", SHARED.load(Ordering::Relaxed), 4 * ROUNDS);
}

/// Counts until a timer has interrupted it four times, and prints each count.
fn timer() {
    extern "C" fn count(_signal: libc::c_int) {
        ALARMS.fetch_add(1, Ordering::Relaxed);
    }
    let each = libc::timeval { tv_sec: 0, tv_usec: 1000 };
    let times = libc::itimerval { it_interval: each, it_value: each };
    let handler: extern "C" fn(libc::c_int) = count;
    // SAFETY: the handler only adds to an atomic number.
    unsafe { libc::signal(libc::SIGALRM, handler as libc::sighandler_t) };
    // SAFETY: `times` is valid.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const times, std::ptr::null_mut()) };
    let (mut rounds, mut before) = (0_u64, 0);
    while before < 4 {
        rounds += 1;
        let alarms = ALARMS.load(Ordering::Relaxed);
        if alarms != before {
            println!("alarm {alarms} in round {rounds}");
            before = alarms;
        }
    }
}
