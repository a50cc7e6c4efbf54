//! Other tasks: on the same CPU, children, and threads.

use std::io::{Read, Write, pipe};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use tally_ebb::{Event, check};

use crate::code::spin;
use crate::counting::whole;
use crate::event::{self, DISABLE, ENABLE, request};
use crate::promise::{Failure, PERIOD, Seen, Verdict, equal, holds, number};

static SEEN: Seen = Seen::nothing();

/// Many branches, while the CPU is shared with others. The number can be given.
pub fn switches() -> Verdict {
    let wanted = number().unwrap_or(2000);
    let others: Vec<_> = (0..2)
        .map(|_| {
            Child::spawn(|| {
                loop {
                    spin(1000);
                    yield_now();
                }
            })
        })
        .collect::<Result<_, _>>()?;
    let branches = SEEN.branched()?;
    branches.enable();
    let counter = branches.open(Event::INSTRUCTIONS, PERIOD)?;
    counter.enable()?;
    while SEEN.branches() < wanted {
        spin(5 * PERIOD);
        yield_now();
    }
    counter.disable()?;
    drop(others);
    whole(&counter, PERIOD)?;
    SEEN.all_taken(&branches, &counter)?;
    Ok(format!("{} branches", SEEN.branches()))
}

/// Several processes on one CPU, each with its own branches. Each checks itself.
pub fn processes() -> Verdict {
    let children: Vec<Child> = (1..=4)
        .map(|number| Child::spawn(move || end(count_for(number * PERIOD))))
        .collect::<Result<_, _>>()?;
    for child in children {
        equal("status of a child", child.wait()?, 0)?;
    }
    Ok("four processes".into())
}

/// The same for the threads of one process: each has a block of its own.
pub fn threads() -> Verdict {
    let threads: Vec<_> =
        (1..=4).map(|number| thread::spawn(move || count_in_thread(number * PERIOD))).collect();
    for thread in threads {
        thread.join().map_err(|_| Failure("a thread has panicked".into()))??;
    }
    // One that has asked for nothing inherits GS, and not the block.
    let branches = SEEN.branched()?;
    branches.enable();
    let before = SEEN.branches();
    let _wanted = branches.want(Event::INSTRUCTIONS, PERIOD)?;
    thread::spawn(|| {
        let event = open_for(0)?;
        request(&event, ENABLE, 0)?;
        spin(100_000);
        request(&event, DISABLE, 0)
    })
    .join()
    .map_err(|_| Failure("a thread has panicked".into()))??;
    equal("branches for another thread", SEEN.branches() - before, 0)?;
    Ok("four threads".into())
}

fn count_in_thread(period: u64) -> Result<(), Failure> {
    let seen: &'static Seen = Box::leak(Box::new(Seen::nothing()));
    count_with(seen, period)
}

fn count_for(period: u64) -> Result<(), Failure> {
    count_with(&SEEN, period)
}

fn count_with(seen: &'static Seen, period: u64) -> Result<(), Failure> {
    let branches = seen.branched()?;
    branches.enable();
    let counter = branches.open(Event::INSTRUCTIONS, period)?;
    counter.enable()?;
    for _ in 0..100 {
        spin(10_000);
        yield_now();
    }
    counter.disable()?;
    whole(&counter, period)?;
    seen.all_taken(&branches, &counter)?;
    holds("there were branches", seen.branches() >= 2_000_000 / period)
}

/// An event that the parent opens for a child, which wants branches for it.
pub fn child_that_asked() -> Verdict {
    let (mut go, mut done) = (pipe()?, pipe()?);
    let child = Child::spawn(move || {
        let counted = (|| {
            let branches = SEEN.branched()?;
            branches.enable();
            let wanted = branches.want(Event::INSTRUCTIONS, PERIOD)?;
            done.1.write_all(&[0])?;
            go.0.read_exact(&mut [0])?;
            spin(11 * PERIOD);
            let taken = SEEN.branches() + u64::from(branches.is_pending());
            equal("branches", taken, wanted.overflows())?;
            holds("there were branches", SEEN.branches() >= 20)
        })();
        end(counted);
    })?;
    done.0.read_exact(&mut [0])?;
    let event = open_for(child.0)?;
    request(&event, ENABLE, 0)?;
    go.1.write_all(&[0])?;
    equal("status of the child", child.wait()?, 0)?;
    Ok("branched".into())
}

/// The same for a child that does not want branches, though its parent has them.
pub fn child_that_did_not() -> Verdict {
    let branches = SEEN.branched()?;
    branches.enable();
    let _wanted = branches.want(Event::INSTRUCTIONS, PERIOD)?;
    let mut go = pipe()?;
    let child = Child::spawn(move || {
        let waited = go.0.read_exact(&mut [0]);
        spin(10 * PERIOD);
        end(waited.map_err(Failure::from).and_then(|()| equal("branches", SEEN.branches(), 0)));
    })?;
    let event = open_for(child.0)?;
    request(&event, ENABLE, 0)?;
    go.1.write_all(&[0])?;
    equal("status of the child", child.wait()?, 0)?;
    equal("branches", SEEN.branches(), 0)?;
    Ok("not branched".into())
}

/// A child has no branches, whatever its parent has; the parent's go on.
pub fn fork() -> Verdict {
    let branches = SEEN.branched()?;
    branches.enable();
    let counter = branches.open(Event::INSTRUCTIONS, PERIOD)?;
    counter.enable()?;
    let child = Child::spawn(|| {
        let before = SEEN.branches();
        spin(10 * PERIOD);
        let event = open_for(0).and_then(|event| {
            request(&event, ENABLE, 0)?;
            spin(10 * PERIOD);
            request(&event, DISABLE, 0)
        });
        end(event.and_then(|()| equal("branches of the child", SEEN.branches(), before)));
    })?;
    equal("status of the child", child.wait()?, 0)?;
    let before = SEEN.branches();
    spin(10 * PERIOD);
    counter.disable()?;
    holds("the parent is branched", SEEN.branches() - before >= 20)?;
    whole(&counter, PERIOD)?;
    Ok(format!("{} branches", SEEN.branches()))
}

/// After `exec` the event counts the new program, which has no block. That checks only that it comes to its end.
pub fn exec() -> Verdict {
    if number().is_some() {
        spin(100 * PERIOD);
        return Ok("not branched".into());
    }
    let branches = SEEN.branched()?;
    branches.enable();
    let _wanted = branches.want(Event::INSTRUCTIONS, PERIOD)?;
    let event = open_for(0)?;
    request(&event, ENABLE, 0)?;
    spin(11 * PERIOD);
    holds("there were branches", SEEN.branches() >= 20)?;
    let error = Command::new(std::env::current_exe()?).args(["exec", "1"]).exec();
    Err(error.into())
}

/// Opens the event of instructions with the flag for a task.
fn open_for(task: i32) -> Result<OwnedFd, Failure> {
    let attr = Event::INSTRUCTIONS.attr();
    check(&attr, task, -1, true)?;
    event::open(&attr, task, -1)
}

pub fn yield_now() {
    thread::yield_now();
}

/// A child process, which is killed when this is dropped.
pub struct Child(pub i32);

impl Child {
    /// Starts a child that runs a function, which ends the process.
    pub fn spawn(run: impl FnOnce()) -> Result<Self, Failure> {
        // SAFETY: this program has one thread when it starts children.
        match unsafe { libc::fork() } {
            -1 => Err(std::io::Error::last_os_error().into()),
            0 => {
                run();
                std::process::exit(3);
            }
            child => Ok(Self(child)),
        }
    }

    /// Waits for its end. Returns its status.
    pub fn wait(self) -> Result<i32, Failure> {
        let mut status = 0;
        let limit = Instant::now() + Duration::from_mins(1);
        loop {
            // SAFETY: `status` has room for what is written.
            match unsafe { libc::waitpid(self.0, &raw mut status, libc::WNOHANG) } {
                0 if Instant::now() < limit => thread::sleep(Duration::from_millis(1)),
                0 => return Err(Failure("a child does not end".into())),
                -1 => return Err(std::io::Error::last_os_error().into()),
                _ => break,
            }
        }
        std::mem::forget(self);
        Ok(if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) })
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: the child was not waited for, so the number is still its own.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // SAFETY: a null pointer says that the status is not wanted.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

/// Ends a child with the status of what it has checked.
pub fn end(checked: Result<(), Failure>) {
    let status = match checked {
        Ok(()) => 0,
        Err(Failure(why)) => {
            println!("in a child: {why}");
            1
        }
    };
    std::process::exit(status);
}
