//! A guest that was saved reads its memory from a file. If somebody truncates that file, the pages are gone: an access
//! by Tally is a SIGBUS, and KVM cannot go on. Either ends the VM with a line that says why.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use rustix::fs::fstat;
use tally_machine::GuestRam;

use crate::host::{signals, terminal};
use crate::protocol::ending::FAILURE;

/// What is said.
pub const LOST: &str = "the file of the guest's saved memory was truncated while the guest ran";
/// The same as a line, for a signal handler.
const LINE: &str = "tally: the file of the guest's saved memory was truncated while the guest ran\n";

static WATCHED: OnceLock<Watched> = OnceLock::new();

struct Watched {
    file: File,
    size: u64,
    /// Where the file is mapped.
    mapped: Vec<Range<usize>>,
}

/// From now on an access to a page that the file has no more ends the process with a line.
pub fn watch(ram: &GuestRam, file: &File) -> io::Result<()> {
    let watched = Watched { file: file.try_clone()?, size: ram.size(), mapped: ram.mapped_from_file() };
    if WATCHED.set(watched).is_ok() {
        end_at_lost_pages();
    }
    Ok(())
}

/// Returns whether the guest's memory was in a file that is shorter now.
pub fn is_lost() -> bool {
    WATCHED.get().is_some_and(|Watched { file, size, .. }| {
        fstat(file).is_ok_and(|found| u64::try_from(found.st_size).is_ok_and(|now| now < *size))
    })
}

/// Installs the handler.
fn end_at_lost_pages() {
    extern "C" fn handler(signal: libc::c_int, info: *const libc::siginfo_t, _: *const libc::ucontext_t) {
        terminal::restore();
        // SAFETY: the kernel passes a `siginfo_t` to a handler with SA_SIGINFO.
        let info = unsafe { &*info };
        // SAFETY: a SIGBUS has the address of its fault here. What somebody has sent has other numbers.
        let address = unsafe { info.si_addr() } as usize;
        let is_ours = info.si_code == libc::BUS_ADRERR
            && WATCHED.get().is_some_and(|watched| watched.mapped.iter().any(|part| part.contains(&address)));
        if !is_ours {
            // The handler was reset (SA_RESETHAND), so this ends the process as without one. SAFETY: the call takes a
            // number, and is async-signal-safe.
            unsafe { libc::raise(signal) };
            return;
        }
        // SAFETY: the text is valid for its length, and the call is async-signal-safe.
        unsafe { libc::write(libc::STDERR_FILENO, LINE.as_ptr().cast(), LINE.len()) };
        // SAFETY: takes no pointer, and runs nothing of ours: this thread may be anywhere.
        unsafe { libc::_exit(FAILURE.into()) };
    }
    // SAFETY: all-zero is a valid `sigaction`: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as *const () as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_RESETHAND;
    signals::HAS_HANDLER_OF_BUS.store(true, Ordering::Relaxed);
    // SAFETY: the action is valid, and its handler is async-signal-safe: it allocates nothing and takes no lock.
    unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_say_the_same() {
        assert_eq!(LINE, format!("tally: {LOST}\n"));
    }
}
