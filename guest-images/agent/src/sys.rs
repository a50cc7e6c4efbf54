//! System calls for which the standard library has no functions.

use std::ffi::CStr;
use std::fs::File;
use std::io::{Error, Result};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::time::Duration;

use guest_agent::protocol::{Entropy, Size};
use libc::{c_int, pid_t, pollfd};

/// Waits until one of these descriptors is ready.
pub fn poll(waiting: &mut [pollfd]) -> Result<()> {
    let count = waiting.len() as libc::nfds_t;
    loop {
        // SAFETY: the pointer and the count are those of the slice, which is borrowed for the call.
        match check(unsafe { libc::poll(waiting.as_mut_ptr(), count, -1) }) {
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            outcome => return outcome.map(drop),
        }
    }
}

/// Makes a descriptor non-blocking.
pub fn set_nonblocking(file: &impl AsRawFd) -> Result<()> {
    // SAFETY: Reading the flags of a descriptor does not access memory.
    let flags = check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) })?;
    // SAFETY: Setting the flags does not access memory either.
    check(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK) }).map(drop)
}

/// Sets the size of a terminal. Its foreground process group gets SIGWINCH.
pub fn set_size(terminal: &File, size: Size) -> Result<()> {
    let size = libc::winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: this request reads a `winsize`.
    check(unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) }).map(drop)
}

/// Opens the slave of a pseudoterminal.
pub fn open_slave(master: &File) -> Result<File> {
    let unlocked: c_int = 0;
    // SAFETY: this request reads an `int`.
    check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked) })?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: this request takes flags and returns a descriptor.
    let slave = check(unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) })?;
    // SAFETY: the descriptor is new, so nobody else owns it.
    Ok(unsafe { File::from_raw_fd(slave) })
}

/// Makes this process a user's, in these groups only, for ever.
pub fn become_user(user: u32, group: u32, groups: &[u32]) -> Result<()> {
    // SAFETY: the pointer and the count are those of the slice.
    check(unsafe { libc::setgroups(groups.len(), groups.as_ptr()) })?;
    // SAFETY: has no preconditions.
    check(unsafe { libc::setgid(group) })?;
    // SAFETY: has no preconditions.
    check(unsafe { libc::setuid(user) }).map(drop)
}

/// Sets the clock to a time since 1970.
pub fn set_clock(time: Duration) -> Result<()> {
    let seconds = time.as_secs().try_into().map_err(Error::other)?;
    let time = libc::timespec { tv_sec: seconds, tv_nsec: time.subsec_nanos().into() };
    // SAFETY: the call reads a `timespec`.
    check(unsafe { libc::clock_settime(libc::CLOCK_REALTIME, &raw const time) }).map(drop)
}

/// Adds random bytes to the kernel's random generator, which begins anew with them (`random(4)`).
pub fn reseed(entropy: &Entropy) -> Result<()> {
    const ADD_ENTROPY: libc::Ioctl = 0x4008_5203;
    const RESEED: libc::Ioctl = 0x5207;
    /// `struct rand_pool_info`.
    #[repr(C)]
    struct Pool {
        bits: c_int,
        len: c_int,
        bytes: Entropy,
    }
    let len = c_int::try_from(entropy.len()).expect("it is short");
    let pool = Pool { bits: 8 * len, len, bytes: *entropy };
    let generator = File::open("/dev/urandom")?;
    // SAFETY: the request reads a `rand_pool_info`, and as many bytes behind it as that says.
    check(unsafe { libc::ioctl(generator.as_raw_fd(), ADD_ENTROPY, &raw const pool) })?;
    // SAFETY: the request has no argument.
    check(unsafe { libc::ioctl(generator.as_raw_fd(), RESEED) }).map(drop)
}

/// Makes this process the leader of a new session.
pub fn new_session() -> Result<()> {
    // SAFETY: setsid has no arguments.
    check(unsafe { libc::setsid() }).map(drop)
}

/// Makes a terminal the controlling terminal of this process.
pub fn control_terminal(terminal: RawFd) -> Result<()> {
    // SAFETY: this request takes an integer.
    check(unsafe { libc::ioctl(terminal, libc::TIOCSCTTY, 0) }).map(drop)
}

/// Restores the default signal actions and an empty signal mask. Does not allocate.
pub fn default_signals() -> Result<()> {
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: No handler is installed. The call fails for SIGKILL and SIGSTOP, which always have the default
        // action.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    mask(libc::SIG_SETMASK, &[])
}

/// Blocks SIGCHLD. Returns a signalfd that is readable when a child of this process has ended.
pub fn child_signals() -> Result<File> {
    mask(libc::SIG_BLOCK, &[libc::SIGCHLD])?;
    let signals = signal_set(&[libc::SIGCHLD])?;
    let flags = libc::SFD_CLOEXEC | libc::SFD_NONBLOCK;
    // SAFETY: the set is initialised, and only read.
    let descriptor = check(unsafe { libc::signalfd(-1, &raw const signals, flags) })?;
    // SAFETY: the descriptor is new, so nobody else owns it.
    Ok(unsafe { File::from_raw_fd(descriptor) })
}

fn mask(how: c_int, signals: &[c_int]) -> Result<()> {
    let signals = signal_set(signals)?;
    // SAFETY: the set is initialised, and the old set is not requested.
    check(unsafe { libc::sigprocmask(how, &raw const signals, ptr::null_mut()) }).map(drop)
}

fn signal_set(signals: &[c_int]) -> Result<libc::sigset_t> {
    // SAFETY: a set is an array of integers, for which zero is a valid value.
    let mut set = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer refers to the local set.
    check(unsafe { libc::sigemptyset(&raw mut set) })?;
    for &signal in signals {
        // SAFETY: the pointer refers to the local set, which is initialised.
        check(unsafe { libc::sigaddset(&raw mut set, signal) })?;
    }
    Ok(set)
}

/// Returns a child that has ended and has not been reaped, without reaping it.
pub fn ended_child() -> Result<Option<pid_t>> {
    // SAFETY: the structure consists of integers and pointers, for which zero is a valid value.
    let mut found: libc::siginfo_t = unsafe { std::mem::zeroed() };
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the pointer refers to the local structure, which waitid fills in.
    check(unsafe { libc::waitid(libc::P_ALL, 0, &raw mut found, flags) })?;
    // SAFETY: waitid has set the field or left it zero.
    let child = unsafe { found.si_pid() };
    Ok((child != 0).then_some(child))
}

/// Waits until a child has ended (any child if `child` is -1), and reaps it.
pub fn reap(child: pid_t) -> Result<()> {
    // SAFETY: the status is not requested, so no memory is written.
    check(unsafe { libc::waitpid(child, ptr::null_mut(), 0) }).map(drop)
}

/// Returns a process's pidfd, which is readable once the process has ended.
pub fn pidfd_open(process: pid_t) -> Result<OwnedFd> {
    // SAFETY: the call takes two integers.
    let returned = unsafe { libc::syscall(libc::SYS_pidfd_open, process, 0) };
    // SAFETY: it is new.
    unsafe { new_descriptor(returned) }
}

/// Returns a duplicate of another process's descriptor.
pub fn pidfd_getfd(process: &OwnedFd, fd: RawFd) -> Result<OwnedFd> {
    // SAFETY: the call takes three integers.
    let returned = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) };
    // SAFETY: it is new.
    unsafe { new_descriptor(returned) }
}

/// Takes over the descriptor that a system call has returned.
///
/// # Safety
///
/// It is new, so that nobody else owns it, or negative after an error.
unsafe fn new_descriptor(returned: libc::c_long) -> Result<OwnedFd> {
    let descriptor = RawFd::try_from(returned).ok().filter(|descriptor| *descriptor >= 0);
    let descriptor = descriptor.ok_or_else(Error::last_os_error)?;
    // SAFETY: as the caller promises.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Resets a TCP connection to another machine: whoever uses it sees ECONNRESET, or the end of file if it waits for
/// input (Linux refuses a reset then).
pub fn reset_connection(socket: &OwnedFd) -> Result<()> {
    let is_tcp = option(socket, libc::SO_PROTOCOL)? == libc::IPPROTO_TCP;
    if !is_tcp || is_to_this_machine(socket)? {
        return Ok(());
    }
    let nobody = libc::sockaddr { sa_family: 0, sa_data: [0; 14] };
    const { assert!(libc::AF_UNSPEC == 0) };
    let length = length_of::<libc::sockaddr>();
    // SAFETY: the call reads a `sockaddr` of this length.
    let reset = check(unsafe { libc::connect(socket.as_raw_fd(), &raw const nobody, length) });
    // SAFETY: the call takes two integers.
    reset.or_else(|_| check(unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) })).map(drop)
}

/// Returns the value of an option of a socket.
fn option(socket: &OwnedFd, name: c_int) -> Result<c_int> {
    let (mut value, mut length) = (0, length_of::<c_int>());
    let (at, size) = ((&raw mut value).cast(), &raw mut length);
    // SAFETY: the call writes an `int`.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, at, size) })?;
    Ok(value)
}

fn length_of<T>() -> libc::socklen_t {
    libc::socklen_t::try_from(size_of::<T>()).expect("it is small")
}

/// Returns true if the other end of a connection is on a loopback address. Fails if there is no connection.
fn is_to_this_machine(socket: &OwnedFd) -> Result<bool> {
    let stream = TcpStream::from(socket.try_clone()?);
    Ok(stream.peer_addr()?.ip().to_canonical().is_loopback())
}

/// Sends a signal to a process group.
pub fn signal_group(group: pid_t, signal: u8) -> Result<()> {
    // SAFETY: the call takes two integers.
    check(unsafe { libc::kill(-group, signal.into()) }).map(drop)
}

/// Mounts a file system without file-system-specific options.
pub fn mount(source: &CStr, target: &CStr, kind: &CStr, flags: libc::c_ulong) -> Result<()> {
    mount_with(source, target, kind, flags, c"")
}

/// Mounts a file system with its own options.
pub fn mount_with(
    source: &CStr,
    target: &CStr,
    kind: &CStr,
    flags: libc::c_ulong,
    options: &CStr,
) -> Result<()> {
    let [source, target, kind, options] = [source, target, kind, options].map(CStr::as_ptr);
    // SAFETY: the strings are NUL-terminated.
    check(unsafe { libc::mount(source, target, kind, flags, options.cast()) }).map(drop)
}

/// Makes a directory the root of this process. Does not allocate.
pub fn change_root(root: &CStr) -> Result<()> {
    // SAFETY: the string is NUL-terminated.
    check(unsafe { libc::chroot(root.as_ptr()) }).map(drop)
}

/// Changes to an open directory. Does not allocate.
pub fn change_directory(directory: RawFd) -> Result<()> {
    // SAFETY: the call takes a descriptor.
    check(unsafe { libc::fchdir(directory) }).map(drop)
}

/// Waits until the console has transmitted all output.
pub fn drain_console() {
    // SAFETY: the call takes a descriptor and does not access memory.
    unsafe { libc::tcdrain(libc::STDERR_FILENO) };
}

/// Powers off the virtual machine after the console has transmitted all output.
pub fn power_off() {
    drain_console();
    // SAFETY: sync has no arguments.
    unsafe { libc::sync() };
    // SAFETY: the call takes an integer.
    unsafe { libc::reboot(libc::RB_POWER_OFF) };
}

fn check(result: c_int) -> Result<c_int> {
    if result < 0 { Err(Error::last_os_error()) } else { Ok(result) }
}
