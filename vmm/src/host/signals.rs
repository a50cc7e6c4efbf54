//! Signal masks, and what single signals do.

use std::io;
use std::ptr;
use std::sync::atomic::AtomicBool;

use tally_machine::signals::{block, set_of, unblock, while_blocked};

/// Signals that are events. All but the last three end the machine, unless they are passed on to a command.
const EVENTS: [libc::c_int; 12] = [
    libc::SIGTERM,
    libc::SIGINT,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGALRM,
    libc::SIGVTALRM,
    libc::SIGPROF,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGWINCH,
    libc::SIGTSTP,
    libc::SIGCONT,
];

/// True once SIGBUS has a handler of this program's. Rust's own, for overflows of the stack, is not meant.
pub static HAS_HANDLER_OF_BUS: AtomicBool = AtomicBool::new(false);

/// Signals that are passed on to a running command.
pub const FOR_THE_COMMAND: [libc::c_int; 4] = [libc::SIGINT, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2];

/// Returns [`EVENTS`] without the signals that this process was started to ignore, as by `nohup`. Blocked, these would
/// arrive.
pub fn events() -> Vec<libc::c_int> {
    EVENTS.into_iter().filter(|signal| !is_ignored(*signal)).collect()
}

/// Blocks the signals in this thread, and in those that it starts from now on, until [`unblock_events`].
pub fn block_events() -> io::Result<()> {
    block(&set_of(&events())).map(drop)
}

/// Unblocks the signals, which have their default actions.
pub fn unblock_events() -> io::Result<()> {
    unblock(&set_of(&EVENTS))
}

/// Does something that no signal may end half-way.
pub fn while_events_wait<T>(action: impl FnOnce() -> T) -> io::Result<T> {
    while_blocked(&set_of(&events()), action)
}

/// Signals by which users and systems end a command.
const ENDS: [libc::c_int; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];

/// Blocks the signals that end a command, so that it can end by itself.
pub fn block_ends() -> io::Result<()> {
    block(&set_of(&ENDS)).map(drop)
}

/// Returns true if a signal that [`block_ends`] has blocked has arrived.
pub fn is_end_pending() -> bool {
    // SAFETY: all-zero is a valid set, and the call fills it.
    let mut pending: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: as above.
    unsafe { libc::sigpending(&raw mut pending) };
    // SAFETY: the set is valid, and the signals exist.
    ENDS.into_iter().any(|signal| unsafe { libc::sigismember(&raw const pending, signal) } == 1)
}

/// Stops this process as SIGTSTP does by default, which [`block_events`] has blocked. Returns when it is continued, or
/// at once if no shell could continue it (its process group is orphaned).
pub fn stop() {
    let stop = set_of(&[libc::SIGTSTP]);
    // Without the signal unblocked there is no stop, and nothing to do about that.
    if unblock(&stop).is_ok() {
        // SAFETY: the call takes a number. The signal goes to this thread, so the one that waits for signals cannot
        // take it, and its default action runs nothing of ours.
        unsafe { libc::raise(libc::SIGTSTP) };
        let _ = block(&stop);
    }
}

/// Ignores SIGXFSZ: a write beyond the limit of a file's size (`ulimit -f`) fails, and does not end the process.
pub fn ignore_sigxfsz() {
    // SAFETY: ignoring a signal runs no code.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: all-zero is a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: no action is set, and `action` is valid for the answer.
    let failed = unsafe { libc::sigaction(signal, ptr::null(), &raw mut action) } != 0;
    !failed && action.sa_sigaction == libc::SIG_IGN
}
