//! A second thread, which waits in the kernel until it is given something to do.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::failure::Failure;

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
