//! Ends the VM when a thread makes a system call that it does not need: the kernel sends the thread a SIGSYS.

use std::ffi::CStr;
use std::mem::MaybeUninit;

use syscalls::Sysno;

use crate::arch::calls as arch;
use crate::host::terminal;
use crate::protocol::ending::FAILURE;

/// `si_code` of a SIGSYS that a seccomp filter has sent (`SYS_SECCOMP` in `asm-generic/siginfo.h`).
const SYS_SECCOMP: i32 = 1;
/// Maximum size of the line.
const LINE: usize = 128;

/// The part of `siginfo_t` that a SIGSYS has.
#[repr(C)]
struct SysInfo {
    signal: i32,
    errno: i32,
    code: i32,
    address: u64,
    call: i32,
}

/// Installs the handler.
pub fn report() {
    extern "C" fn handler(signal: libc::c_int, info: *const SysInfo, context: *const libc::ucontext_t) {
        // SAFETY: the kernel passes a `siginfo_t` to a handler with SA_SIGINFO. It is larger than `SysInfo`.
        let SysInfo { code, call, .. } = unsafe { info.read() };
        terminal::restore();
        if code != SYS_SECCOMP {
            // Somebody has sent the signal. The handler was reset (SA_RESETHAND), so this ends the process as without
            // one. SAFETY: the call takes a number, and is async-signal-safe.
            unsafe { libc::raise(signal) };
            return;
        }
        let mut line = Line::default();
        // SAFETY: the kernel passes the registers to a handler with SA_SIGINFO.
        write_line(&mut line, call, unsafe { &*context });
        // SAFETY: the buffer is valid for its length, and the call is async-signal-safe.
        unsafe { libc::write(libc::STDERR_FILENO, line.text.as_ptr().cast(), line.len) };
        // SAFETY: takes no pointer, and runs nothing of ours: this thread may be anywhere.
        unsafe { libc::_exit(FAILURE.into()) };
    }
    // SAFETY: all-zero is a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESETHAND;
    // SAFETY: the action is valid, and its handler is async-signal-safe: it allocates nothing and takes no lock.
    unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) };
}

fn write_line(line: &mut Line, call: i32, context: &libc::ucontext_t) {
    use std::fmt::Write;

    let mut name: MaybeUninit<[u8; 16]> = MaybeUninit::zeroed();
    // SAFETY: PR_GET_NAME writes at most 16 bytes, the last of which is 0.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    // SAFETY: the array was zeroed, so that all of it is initialised.
    let name = unsafe { name.assume_init() };
    let name = CStr::from_bytes_until_nul(&name).ok().and_then(|name| name.to_str().ok()).unwrap_or("?");
    // What does not fit is cut off.
    let _ = write!(line, "tally: thread {name}: the sandbox forbids the system call ");
    let _ = match usize::try_from(call).ok().and_then(Sysno::new) {
        Some(call @ Sysno::ioctl) => write!(line, "{} {:#x}", call.name(), arch::ioctl_request(context)),
        Some(call) => write!(line, "{}", call.name()),
        None => write!(line, "{call}"),
    };
    let _ = write!(line, "{}", terminal::line_end());
}

/// A line that is written without allocating.
struct Line {
    text: [u8; LINE],
    len: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self { text: [0; LINE], len: 0 }
    }
}

impl std::fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> std::fmt::Result {
        let room = &mut self.text[self.len..];
        let count = room.len().min(text.len());
        room[..count].copy_from_slice(&text.as_bytes()[..count]);
        self.len += count;
        Ok(())
    }
}
