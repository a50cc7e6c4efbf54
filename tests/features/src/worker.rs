//! Other tasks to count: a second thread, which waits in the kernel for jobs, and children.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::failure::{Failure, checked};

type Job = Box<dyn FnOnce() -> Result<(), Failure> + Send>;

/// A thread that runs jobs one after the other.
pub struct Worker {
    /// Its thread ID.
    pub thread: i32,
    jobs: Sender<Job>,
    done: Receiver<Result<(), Failure>>,
    handle: JoinHandle<()>,
}

impl Worker {
    pub fn start() -> Self {
        let (jobs, next_job) = channel::<Job>();
        let (report, done) = channel();
        let (send_id, receive_id) = channel();
        let handle = thread::spawn(move || {
            send_id.send(this_thread()).expect("the receiver exists");
            for job in next_job {
                report.send(job()).expect("the receiver exists");
            }
        });
        let id = receive_id.recv().expect("the thread sends its ID");
        // In this time the thread gets to where it waits for a job.
        thread::sleep(Duration::from_millis(1));
        Self { thread: id, jobs, done, handle }
    }

    /// Starts a job.
    pub fn begin(&self, job: impl FnOnce() -> Result<(), Failure> + Send + 'static) {
        self.jobs.send(Box::new(job)).expect("the thread has not ended");
    }

    /// Waits for the end of a job, and returns the job's result.
    pub fn finish(&self) -> Result<(), Failure> {
        self.done.recv().expect("the thread has not ended")
    }

    /// Runs a job and waits for its end.
    pub fn run(&self, job: impl FnOnce() -> Result<(), Failure> + Send + 'static) -> Result<(), Failure> {
        self.begin(job);
        self.finish()
    }

    /// Ends the thread.
    pub fn end(self) {
        drop(self.jobs);
        self.handle.join().expect("jobs do not panic");
    }
}

/// Returns the thread ID of the caller.
pub fn this_thread() -> i32 {
    // The standard library refers to libc's `gettid` weakly, which can leave a static program without it.
    // SAFETY: the call takes no arguments and cannot fail.
    let id = unsafe { libc::syscall(libc::SYS_gettid) };
    i32::try_from(id).expect("thread IDs are below 2^22")
}

/// Forks a child that runs `job` and exits with its result. Returns the wait status of the child.
pub fn in_child(job: impl FnOnce() -> i32) -> Result<i32, Failure> {
    // SAFETY: the callers have no other threads, so the child inherits no lock that is held.
    let child = unsafe { libc::fork() };
    if checked("fork", child)? == 0 {
        let status = job();
        // SAFETY: the call ends the child at once, without running the parent's exit handlers.
        unsafe { libc::_exit(status) };
    }
    let mut status = 0;
    // SAFETY: the status can be written to.
    checked("wait for a child", unsafe { libc::waitpid(child, &raw mut status, 0) })?;
    Ok(status)
}
