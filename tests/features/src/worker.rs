//! Others to count: a second thread, which waits in the kernel until it is given something to do, and children.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::failure::{Failure, checked};

type Job = Box<dyn FnOnce() -> Result<(), Failure> + Send>;

/// A thread that does one job after the other.
pub struct Worker {
    /// Its number.
    pub thread: i32,
    jobs: Sender<Job>,
    done: Receiver<Result<(), Failure>>,
    handle: JoinHandle<()>,
}

impl Worker {
    pub fn start() -> Self {
        let (jobs, to_do) = channel::<Job>();
        let (tell, done) = channel();
        let (introduce, introduced) = channel();
        let handle = thread::spawn(move || {
            introduce.send(this_thread()).expect("somebody waits for it");
            for job in to_do {
                tell.send(job()).expect("somebody waits for it");
            }
        });
        let number = introduced.recv().expect("a thread that starts says so");
        // Long enough for it to get to where it waits.
        thread::sleep(Duration::from_millis(1));
        Self { thread: number, jobs, done, handle }
    }

    /// Gives it something to do.
    pub fn begin(&self, job: impl FnOnce() -> Result<(), Failure> + Send + 'static) {
        self.jobs.send(Box::new(job)).expect("the thread has not ended");
    }

    /// Waits until it has done it.
    pub fn finish(&self) -> Result<(), Failure> {
        self.done.recv().expect("the thread has not ended")
    }

    /// Gives it something to do and waits.
    pub fn run(&self, job: impl FnOnce() -> Result<(), Failure> + Send + 'static) -> Result<(), Failure> {
        self.begin(job);
        self.finish()
    }

    /// Ends it.
    pub fn end(self) {
        drop(self.jobs);
        self.handle.join().expect("its jobs do not panic");
    }
}

/// The caller's number.
pub fn this_thread() -> i32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::gettid() }
}

/// Forks a child that does this and exits with what it gives; the status that `waitpid` then has.
pub fn in_child(job: impl FnOnce() -> i32) -> Result<i32, Failure> {
    // SAFETY: those who call this have no other threads, so the child is as whole as its parent.
    let child = unsafe { libc::fork() };
    if checked("fork", child)? == 0 {
        let status = job();
        // SAFETY: ends the child without running anything of its parent's.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: the status is a valid place.
    checked("wait for a child", unsafe { libc::waitpid(child, &raw mut status, 0) })?;
    Ok(status)
}
