//! The broker's own side: it reads requests, checks them, and opens the events. Whoever sends requests may have been
//! taken over by a guest.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::Pid;

use super::{END, REQUEST};
use crate::entries::tracepoint;
use crate::host;
use crate::request::{Encoded, Purpose, Request, WORDS};
use crate::sampling::Sampling;

/// The process that opens events.
pub struct Server {
    /// The process for whose threads it opens them.
    process: Pid,
    /// The values of `type` that an event may have.
    types: Vec<u32>,
    /// The tracepoint of entries into guests.
    entries: Option<Encoded>,
    /// Its ends of the channels.
    channels: Vec<OwnedFd>,
}

/// What follows an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum After {
    /// The next request.
    Next,
    /// Nothing more on this channel.
    Closed,
    /// The end of this process.
    End,
}

/// Ends this process when it is dropped: what called [`Server::run`] must not go on in two processes.
struct End;

impl Drop for End {
    fn drop(&mut self) {
        // SAFETY: takes no pointer. Nothing of this process is to be written or removed.
        unsafe { libc::_exit(0) }
    }
}

impl Server {
    pub fn new(process: Pid, channels: Vec<OwnedFd>) -> Self {
        let types = host::event_types(Path::new(host::DEVICES));
        Self { process, types, entries: tracepoint(), channels }
    }

    /// Answers requests until nobody can send any. Never returns.
    pub fn run(mut self, confine: impl FnOnce()) -> ! {
        let end = End;
        self.close_everything_else();
        ignore_signals();
        confine();
        while !self.channels.is_empty() {
            self.answer_next();
        }
        // Nothing is freed one by one.
        drop(end);
        unreachable!("the process has ended")
    }

    /// Closes all files but the channels: whoever waits for the end of a stream does not wait for this process.
    fn close_everything_else(&mut self) {
        if let Ok(null) = rustix::fs::open("/dev/null", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
            let _ = rustix::stdio::dup2_stdin(&null);
            let _ = rustix::stdio::dup2_stdout(&null);
            let _ = rustix::stdio::dup2_stderr(&null);
        }
        self.channels.sort_by_key(AsRawFd::as_raw_fd);
        let kept = self.channels.iter().map(AsRawFd::as_raw_fd).chain([i32::MAX]);
        let mut first = libc::STDERR_FILENO + 1;
        for next in kept {
            if first < next {
                // SAFETY: takes numbers. Nothing in this process uses the files between the channels: it began as a
                // copy of a process of one thread, of which only this function and its callers go on.
                unsafe { libc::syscall(libc::SYS_close_range, first, next - 1, 0) };
            }
            first = next.saturating_add(1);
        }
    }

    /// Waits for requests, and answers one of each channel that has one.
    fn answer_next(&mut self) {
        let ready: Vec<bool> = {
            let mut all: Vec<PollFd> =
                self.channels.iter().map(|channel| PollFd::new(channel, PollFlags::IN)).collect();
            if poll(&mut all, None).is_err() {
                return;
            }
            all.iter().map(|one| !one.revents().is_empty()).collect()
        };
        let mut closed = Vec::new();
        for (number, _) in ready.into_iter().enumerate().filter(|(_, is_ready)| *is_ready) {
            match self.answer(self.channels[number].as_fd()) {
                After::Next => {}
                After::Closed => closed.push(number),
                After::End => return self.channels.clear(),
            }
        }
        for number in closed.into_iter().rev() {
            self.channels.remove(number);
        }
    }

    /// Answers a request.
    fn answer(&self, channel: BorrowedFd) -> After {
        let mut words = [[0; size_of::<u64>()]; WORDS];
        let request = match rustix::io::read(channel, words.as_flattened_mut()) {
            Ok(REQUEST) => Request::from_words(words.map(u64::from_ne_bytes)),
            Ok(1) if words[0][0] == END => return After::End,
            Ok(0) | Err(_) => return After::Closed,
            Ok(_) => None,
        };
        let opened = request.ok_or(libc::EINVAL).and_then(|request| {
            self.open(&request).map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL))
        });
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let event = opened.as_ref().ok().map(AsFd::as_fd);
        if let Some(event) = &event {
            control.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(event)));
        }
        let answer = opened.as_ref().err().copied().unwrap_or(0).to_ne_bytes();
        // Who does not read his answers is not waited for.
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = sendmsg(channel, &[IoSlice::new(&answer)], &mut control, flags);
        if sent.is_ok() { After::Next } else { After::Closed }
    }

    /// Opens an event if this process may be asked for it.
    fn open(&self, request: &Request) -> io::Result<OwnedFd> {
        let refused = || io::Error::from_raw_os_error(libc::EACCES);
        if !self.is_for_guests(request) || !self.has(request.thread) {
            return Err(refused());
        }
        let event = request.open_directly()?;
        // The thread may have ended, and another process's thread may have its number.
        if self.has(request.thread) { Ok(event) } else { Err(refused()) }
    }

    /// Returns whether the event is one of the processor's, or the tracepoint of entries or the clock, each for what it
    /// is for.
    fn is_for_guests(&self, request: &Request) -> bool {
        match request.purpose {
            Purpose::Entries => Some(request.event) == self.entries,
            Purpose::Sampling { .. } if request.event == Sampling::CLOCK => true,
            _ => is_of_processor(request.event, &self.types),
        }
    }

    /// Returns whether the process has this thread. Signal 0 only asks.
    fn has(&self, thread: libc::pid_t) -> bool {
        let process = self.process.as_raw_pid();
        // SAFETY: takes numbers.
        thread > 0 && unsafe { libc::syscall(libc::SYS_tgkill, process, thread, 0) } == 0
    }
}

/// Returns whether an event is one of these PMUs of the processor. The upper half of a generic event's `config` is the
/// PMU's type, or 0.
fn is_of_processor((kind, config): (u32, u64), types: &[u32]) -> bool {
    /// Intel's `AnyThread` (SDM 21.2.3.1), which counts the other thread of the core, whatever that runs. Others have
    /// no such bit there.
    const ANY_THREAD: u64 = 1 << 21;
    if !types.contains(&kind) {
        return false;
    }
    if host::is_generic(kind) {
        let pmu = config >> 32;
        pmu == 0 || u32::try_from(pmu).is_ok_and(|pmu| types.contains(&pmu))
    } else {
        !cfg!(target_arch = "x86_64") || config & ANY_THREAD == 0
    }
}

/// Blocks all signals: a terminal and a service manager send theirs to all processes, and the first process decides
/// what they mean. This process ends when that one does.
fn ignore_signals() {
    let mut all = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the set is valid for writes.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: the set was filled, and is only read; the old one is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{Rate, this_thread};
    use perf_event_open_sys::bindings::{PERF_COUNT_SW_DUMMY, PERF_TYPE_SOFTWARE};
    use rustix::process::getpid;
    use vpmu::event::Filter;

    /// Answers as the broker of this process would, and has software events, which every host has.
    fn server() -> Server {
        Server { process: getpid(), types: vec![PERF_TYPE_SOFTWARE, 4], entries: None, channels: Vec::new() }
    }

    fn request(thread: libc::pid_t) -> Request {
        let event = (PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY.into());
        Request { event, thread, purpose: Purpose::Reservation }
    }

    fn errno(opened: io::Result<OwnedFd>) -> Option<i32> {
        opened.err().and_then(|error| error.raw_os_error())
    }

    #[test]
    fn only_threads_of_the_own_process_are_counted() {
        let mut other = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let of_other = libc::pid_t::try_from(other.id()).unwrap();
        let server = server();
        let opened = [this_thread(), of_other, 1, 0, -1].map(|thread| server.open(&request(thread)));
        let refused = opened.map(errno);
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(
            refused,
            [None, Some(libc::EACCES), Some(libc::EACCES), Some(libc::EACCES), Some(libc::EACCES)]
        );
    }

    #[test]
    fn a_clock_only_samples() {
        let server = Server { types: vec![4], ..server() };
        let sampling = Purpose::Sampling { filter: Filter::All, rate: Rate::Frequency(999) };
        let is_opened = |purpose| {
            server.is_for_guests(&Request { event: Sampling::CLOCK, thread: this_thread(), purpose })
        };
        assert_eq!([sampling, Purpose::Reservation].map(is_opened), [true, false]);
    }

    #[test]
    fn only_events_of_the_processor_are_opened() {
        const HARDWARE: u32 = 0;
        const TRACEPOINT: u32 = 2;
        const BREAKPOINT: u32 = 5;
        let types = [HARDWARE, 3, 4, 10];
        for event in [(HARDWARE, 1), (HARDWARE, 10 << 32 | 1), (3, 0x1_0003), (4, 0x1c0), (10, 0xc0)] {
            assert!(is_of_processor(event, &types), "{event:x?}");
        }
        for event in [(TRACEPOINT, 1), (BREAKPOINT, 0), (1, 0), (11, 0), (HARDWARE, 11 << 32), (3, 11 << 32)]
        {
            assert!(!is_of_processor(event, &types), "{event:x?}");
        }
        assert!(!is_of_processor((4, 1 << 21 | 0xc0), &types), "the other thread of the core");
    }

    #[test]
    fn of_all_tracepoints_only_that_of_entries_is_opened_and_for_nothing_else() {
        const TRACEPOINT: u32 = 2;
        let server = Server { entries: Some((TRACEPOINT, 71)), ..server() };
        let asks = |event, purpose| Request { event, purpose, ..request(this_thread()) };
        let may_open = |event, purpose| server.is_for_guests(&asks(event, purpose));
        assert!(may_open((TRACEPOINT, 71), Purpose::Entries));
        assert!(!may_open((TRACEPOINT, 72), Purpose::Entries));
        assert!(!may_open((4, 0xc0), Purpose::Entries));
        assert!(!may_open((TRACEPOINT, 71), Purpose::Existence));
    }

    #[test]
    fn what_is_no_request_is_answered_with_an_error_and_a_full_channel_is_given_up() {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::io::write(&ours, b"something else").unwrap();
        assert_eq!(server().answer(theirs.as_fd()), After::Next);
        let mut answer = [0; 4];
        rustix::io::read(&ours, &mut answer).unwrap();
        assert_eq!(i32::from_ne_bytes(answer), libc::EINVAL);
        let answered = (0..100_000).take_while(|_| {
            rustix::io::write(&ours, b"again").unwrap();
            server().answer(theirs.as_fd()) == After::Next
        });
        assert!(answered.count() < 100_000, "nobody reads the answers");
    }

    #[test]
    fn the_end_is_asked_for_or_follows_from_that_of_the_other_process() {
        use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
        let pair =
            || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let ((ours, theirs), (other, their_other)) = (pair(), pair());
        let mut server = Server { channels: vec![theirs, their_other], ..server() };
        drop(ours);
        server.answer_next();
        assert_eq!(server.channels.len(), 1);
        rustix::io::write(&other, &[END]).unwrap();
        server.answer_next();
        assert!(server.channels.is_empty());
    }
}
