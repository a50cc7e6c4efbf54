//! A process that opens perf events for the process that it was forked from.
//!
//! Who may count a guest's kernel may count every process of the host: that takes `CAP_PERFMON`, or `CAP_SYS_ADMIN`
//! where a distribution's kernel asks for it (Debian's and Ubuntu's do if `kernel.perf_event_paranoid` is above 2). A
//! thread that runs a guest should have neither. So [`start`] forks a process that keeps them, before there is a guest.
//! From then on, all events of this crate are opened there: for threads of the first process only, and with no other
//! attributes than this crate's events have. Their file descriptors come back over a socket. Everything that happens
//! often (a read, a period, an overflow) stays between a thread and its event.

mod server;

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::thread;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SocketFlags, SocketType, recvmsg,
    socketpair,
};
use rustix::process::{Pid, WaitOptions, getpid, waitpid};

use crate::request::{Purpose, Request, WORDS};
use server::Server;

/// The broker of this process, once it was started.
static BROKER: OnceLock<Broker> = OnceLock::new();

/// Size of an encoded request, which is a packet.
const REQUEST: usize = WORDS * size_of::<u64>();
/// A packet that ends the broker.
const END: u8 = 0;
/// Size of an answer: an error number. If that is 0, the file descriptor comes with it.
const ANSWER: usize = size_of::<i32>();

/// This process's ends of the channels, each a pair of sockets. A thread takes one to open an event, so that it waits
/// for no other thread as long as there are enough.
pub struct Broker {
    process: Pid,
    free: Mutex<Vec<OwnedFd>>,
    returned: Condvar,
    /// This process is about to end.
    is_ending: AtomicBool,
}

/// Starts the broker of this process, if it has none. At most `channels` threads open events at the same time. In the
/// new process, `confine` is called before anything is read from this one: it gives up what opening events does not
/// need ([`calls`]). The new process ends when this one does.
///
/// Fails if this process has other threads, because locks that they hold would stay locked in the new process.
pub fn start(channels: usize, confine: impl FnOnce()) -> io::Result<()> {
    if BROKER.get().is_some() {
        return Ok(());
    }
    if std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() > 1) {
        return Err(io::Error::other("there are threads already"));
    }
    let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let pairs = (0..channels.max(1)).map(|_| pair()).collect::<Result<Vec<_>, _>>()?;
    let (ours, theirs): (Vec<OwnedFd>, Vec<OwnedFd>) = pairs.into_iter().unzip();
    let process = getpid();
    // SAFETY: this thread is the only one, as was checked, so that the new process is a whole copy of this one.
    match unsafe { libc::fork() } {
        ..0 => Err(io::Error::last_os_error()),
        0 => {
            drop(ours);
            Server::new(process, theirs).run(confine)
        }
        child => {
            BROKER.get_or_init(|| Broker {
                process: Pid::from_raw(child).expect("it is no other number"),
                free: Mutex::new(ours),
                returned: Condvar::new(),
                is_ending: AtomicBool::new(false),
            });
            Ok(())
        }
    }
}

/// Ends the broker of this process, if it has one, and waits for that. This process has to end then: a thread that
/// opens an event waits for that. If it ends without this, the broker follows by itself.
pub fn end() {
    let Some(broker) = BROKER.get() else { return };
    broker.is_ending.store(true, Ordering::Relaxed);
    let channel = broker.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
    // Without a free channel, it is busy for a thread of this process, and ends with it.
    if channel.is_some_and(|channel| rustix::io::write(&channel, &[END]).is_ok()) {
        let _ = rustix::io::retry_on_intr(|| waitpid(Some(broker.process), WaitOptions::empty()));
    }
}

impl Request {
    /// Opens the event: through the broker if this process has one, or else directly.
    pub fn open(&self) -> io::Result<OwnedFd> {
        BROKER.get().map_or_else(|| self.open_directly(), |broker| broker.open(self))
    }

    /// Returns the number of system calls of this thread that [`Self::open`] makes.
    pub fn system_calls(&self) -> u64 {
        match self.purpose {
            _ if BROKER.get().is_some() => 2,
            Purpose::Counter { .. } => 3,
            Purpose::Sampling { .. } => 4,
            _ => 1,
        }
    }
}

impl Broker {
    /// Has an event opened.
    pub(crate) fn open(&self, request: &Request) -> io::Result<OwnedFd> {
        let channel = self.take();
        let opened = ask(&channel, request);
        while self.is_ending.load(Ordering::Relaxed) {
            thread::park();
        }
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(channel);
        self.returned.notify_one();
        opened
    }

    fn take(&self) -> OwnedFd {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let mut free =
            self.returned.wait_while(free, |free| free.is_empty()).unwrap_or_else(PoisonError::into_inner);
        free.pop().expect("the wait is over")
    }
}

/// Sends a request and waits for the answer.
fn ask(channel: &OwnedFd, request: &Request) -> io::Result<OwnedFd> {
    let gone = || io::Error::new(io::ErrorKind::BrokenPipe, "the process that opens perf events has ended");
    let packet = request.to_words().map(u64::to_ne_bytes);
    match rustix::io::retry_on_intr(|| rustix::io::write(channel, packet.as_flattened())) {
        Ok(REQUEST) => {}
        Ok(_) | Err(rustix::io::Errno::PIPE) => return Err(gone()),
        Err(error) => return Err(error.into()),
    }
    let mut answer = [0; ANSWER];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(channel, &mut [IoSliceMut::new(&mut answer)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let event = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    match (received.bytes, i32::from_ne_bytes(answer), event) {
        (ANSWER, 0, Some(event)) => Ok(event),
        (ANSWER, error @ 1.., None) => Err(io::Error::from_raw_os_error(error)),
        _ => Err(gone()),
    }
}

/// The system calls that the broker makes, beside those that the memory of any program needs.
pub mod calls {
    /// Calls with any arguments: waiting, reading requests, and answering them.
    pub const ANY: [i64; 5] =
        [libc::SYS_ppoll, libc::SYS_read, libc::SYS_sendmsg, libc::SYS_close, libc::SYS_exit_group];
    /// Commands of `fcntl`: whom an event signals, and that it does.
    pub const FCNTL: [i32; 2] = [crate::request::F_SETOWN_EX, libc::F_SETFL];
    /// The command of `fcntl` by which an event sends another signal than `SIGIO`, and the only signal that it takes.
    pub const FCNTL_SIGNAL: (i32, i32) = (crate::request::F_SETSIG, crate::request::SAMPLE_SIGNAL);
    /// Requests of `ioctl`: what a tracepoint's event counts.
    pub const IOCTL: [u32; 1] = [perf_event_open_sys::bindings::SET_FILTER];
}
