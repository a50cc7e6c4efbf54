//! The event loop of a thread: waits until a file is ready, and lets those go on that wait for one.
//!
//! Two threads of a run have one. The main thread's has signals, the console, and the machine's end; the agent's has
//! the streams of the guest's command. One thread cannot do both:
//! - The agent's thread reads what a guest says, and may open, remove and signal nothing. The main thread may, for the
//!   run's end.
//! - The agent's thread stands still while the machine is saved, and writes the rest of the command's output when the
//!   main thread's loop has ended. Signals and the keys that end the machine wait for neither.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use crate::protocol::ending::{Ending, Endings};

/// What waits for files.
pub trait Subscriber {
    /// What ends the loop.
    type End;

    /// Returns the files that this waits for now, made by [`input_of`] and [`room_in`].
    fn files(&self) -> Vec<libc::pollfd>;

    /// Does all that is possible without waiting. It is called at the beginning, when no file is known to be ready, and
    /// after each wait.
    fn process(&mut self, ready: &Ready) -> Next<Self::End>;
}

/// What a subscriber wants the loop to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next<End> {
    /// Wait for its files.
    Wait,
    /// Wait for its files, at most for this time.
    WaitAtMost(Duration),
    /// Go on: it has stopped only to let others have their turn.
    Continue,
    /// End.
    End(End),
}

/// The files that are ready.
#[derive(Debug, Default)]
pub struct Ready(Vec<RawFd>);

impl Ready {
    /// Returns true if this file is ready, or if it has failed.
    pub fn has(&self, file: &impl AsRawFd) -> bool {
        self.0.contains(&file.as_raw_fd())
    }
}

/// Waits for input of this file.
pub fn input_of(file: &impl AsRawFd) -> libc::pollfd {
    libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLIN, revents: 0 }
}

/// Waits for room in this file.
pub fn room_in(file: &impl AsRawFd) -> libc::pollfd {
    libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLOUT, revents: 0 }
}

/// An event loop.
pub struct EventLoop<End>(Vec<Box<dyn Subscriber<End = End>>>);

impl<End> Default for EventLoop<End> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<End> EventLoop<End> {
    /// Adds a subscriber, after those that are there. It lives as long as the loop.
    pub fn add(&mut self, subscriber: impl Subscriber<End = End> + 'static) {
        self.0.push(Box::new(subscriber));
    }

    /// Runs until a subscriber ends it. Those after it are not asked any more.
    pub fn run(&mut self) -> io::Result<End> {
        let mut ready = Ready::default();
        loop {
            let mut limit: Option<Duration> = None;
            for subscriber in &mut self.0 {
                match subscriber.process(&ready) {
                    Next::Wait => {}
                    Next::WaitAtMost(time) => limit = Some(limit.map_or(time, |limit| limit.min(time))),
                    Next::Continue => limit = Some(Duration::ZERO),
                    Next::End(end) => return Ok(end),
                }
            }
            ready = wait(self.0.iter().flat_map(|subscriber| subscriber.files()).collect(), limit)?;
        }
    }
}

/// Waits until one of these files is ready, at most for this time.
pub fn wait(mut files: Vec<libc::pollfd>, limit: Option<Duration>) -> io::Result<Ready> {
    let count = libc::nfds_t::try_from(files.len()).expect("there are few files");
    // Rounded up, so that the time has passed afterwards.
    let limit = limit.map_or(-1, |limit| {
        libc::c_int::try_from(limit.as_nanos().div_ceil(1_000_000)).unwrap_or(libc::c_int::MAX)
    });
    // SAFETY: the array has this many entries.
    if unsafe { libc::poll(files.as_mut_ptr(), count, limit) } < 0 {
        let error = io::Error::last_os_error();
        return if error.kind() == io::ErrorKind::Interrupted { Ok(Ready::default()) } else { Err(error) };
    }
    Ok(Ready(files.iter().filter(|file| file.revents != 0).map(|file| file.fd).collect()))
}

/// The first ending that a thread reports ends the loop.
impl Subscriber for Endings {
    type End = Ending;

    fn files(&self) -> Vec<libc::pollfd> {
        vec![input_of(self)]
    }

    fn process(&mut self, ready: &Ready) -> Next<Ending> {
        if ready.has(self)
            && let Some(ending) = self.next()
        {
            return Next::End(ending);
        }
        Next::Wait
    }
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, PipeWriter, Read, Write, pipe};

    use super::*;
    use crate::protocol::ending::Reporter;

    /// Ends the loop at a byte of its pipe.
    struct Byte(PipeReader);

    impl Subscriber for Byte {
        type End = Ending;

        fn files(&self) -> Vec<libc::pollfd> {
            vec![input_of(&self.0)]
        }

        fn process(&mut self, ready: &Ready) -> Next<Ending> {
            let mut byte = [0];
            if ready.has(&self.0) && self.0.read(&mut byte).unwrap() == 1 {
                return Next::End(Ending::Command(byte[0]));
            }
            Next::Wait
        }
    }

    /// Counts the times that it was asked, and writes a byte at the third.
    struct Third(u8, PipeWriter);

    impl Subscriber for Third {
        type End = Ending;

        fn files(&self) -> Vec<libc::pollfd> {
            Vec::new()
        }

        fn process(&mut self, _ready: &Ready) -> Next<Ending> {
            self.0 += 1;
            if self.0 == 3 {
                self.1.write_all(&[7]).unwrap();
                return Next::Wait;
            }
            Next::WaitAtMost(Duration::from_micros(1))
        }
    }

    #[test]
    fn a_subscriber_that_waits_at_most_for_a_time_is_asked_again() {
        let (arrived, arrivals) = pipe().unwrap();
        let mut events = EventLoop::default();
        events.add(Byte(arrived));
        events.add(Third(0, arrivals));
        assert!(matches!(events.run().unwrap(), Ending::Command(7)));
    }

    #[test]
    fn only_the_first_ending_counts_and_nothing_is_read_after_it() {
        let (reporter, endings) = Reporter::new().unwrap();
        let (mut arrived, mut arrivals) = pipe().unwrap();
        let mut events = EventLoop::default();
        events.add(endings);
        events.add(Byte(arrived.try_clone().unwrap()));
        arrivals.write_all(&[1]).unwrap();
        reporter.clone().report(Ending::Quit);
        reporter.report(Ending::Saved);
        assert!(matches!(events.run().unwrap(), Ending::Quit));
        arrived.read_exact(&mut [0]).unwrap();
    }
}
