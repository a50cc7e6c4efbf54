//! What the user types, and a terminal that a shell shares with this process.

use std::env;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, Signal, WaitOptions, WaitStatus, ioctl_tiocsctty, kill_process, setsid, waitpid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcsetpgrp};

use tally_machine::signals::{block, set_of};

use super::*;
use crate::protocol::ending::Ending;
use crate::run::event_loop::EventLoop;
use crate::run::signal_thread::Signals;
use crate::run::signals::SignalHandler;

fn type_in(chunks: &[&[u8]]) -> (Vec<u8>, bool) {
    let (mut escape, mut guest) = (Escape::default(), Vec::new());
    let quit = chunks.iter().any(|chunk| escape.feed(chunk, &mut guest));
    (guest, quit)
}

#[test]
fn ctrl_a_x_ends_even_when_it_comes_in_two_reads() {
    assert_eq!(type_in(&[b"ls\x01x"]), (b"ls".to_vec(), true));
    assert_eq!(type_in(&[b"\x01", b"X"]), (vec![], true));
}

#[test]
fn everything_else_reaches_the_guest() {
    assert_eq!(type_in(&[b"\x03\x04x"]), (b"\x03\x04x".to_vec(), false));
    assert_eq!(type_in(&[b"\x01\x01x"]), (b"\x01x".to_vec(), false));
    assert_eq!(type_in(&[b"\x01c"]), (b"\x01c".to_vec(), false));
}

/// Environment variable with the part that this program plays in the test below.
const PART: &str = "TALLY_TEST_PART";
const TEST: &str = "terminal::tests::a_machine_that_was_stopped_gets_its_terminal_back";

#[test]
fn a_machine_that_was_stopped_gets_its_terminal_back() {
    match env::var(PART).as_deref() {
        Ok("machine") => machine(),
        Ok(_) => shell(),
        Err(_) => {
            let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
            grantpt(&master).unwrap();
            unlockpt(&master).unwrap();
            let name = ptsname(&master, Vec::new()).unwrap();
            let terminal =
                rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty())
                    .unwrap();
            let output = part("shell").stdin(terminal).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        }
    }
}

/// This test in a process of its own.
fn part(name: &str) -> Command {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", TEST, "--nocapture"]).env(PART, name);
    command
}

/// A machine that waits for signals while the terminal is raw.
fn machine() {
    let signals = Signals::start().unwrap();
    let mut events = EventLoop::default();
    events.add(SignalHandler::new(signals, None));
    // The shell puts it into the foreground when it runs already.
    let raw = loop {
        if let Some(raw) = Raw::enter().unwrap() {
            break raw;
        }
        thread::sleep(PAUSE);
    };
    let ending = events.run().unwrap();
    drop(raw);
    assert!(matches!(ending, Ending::Signal(libc::SIGTERM)), "{ending}");
}

/// A shell with a machine as its job.
fn shell() {
    setsid().unwrap();
    let terminal = stdin().as_fd().try_clone_to_owned().unwrap();
    ioctl_tiocsctty(&terminal).unwrap();
    // As shells do, so that the terminal can be taken back. SAFETY: ignoring a signal runs no code.
    unsafe { libc::signal(libc::SIGTTOU, libc::SIG_IGN) };
    let before = tcgetattr(&terminal).unwrap();
    let mut machine = part("machine");
    // A test is not on the main thread, which would take the signals.
    let signals = set_of(&[libc::SIGTERM, libc::SIGTSTP, libc::SIGCONT]);
    // SAFETY: between fork and exec, blocking signals is allowed.
    unsafe { machine.pre_exec(move || block(&signals).map(drop)) };
    let mut child = machine.process_group(0).stdout(Stdio::null()).spawn().unwrap();
    let job = Job { pid: Pid::from_child(&child), terminal };

    job.to_foreground();
    job.wait_for_raw();

    // Nothing can be done before SIGSTOP: the shell sets the terminal as it needs it.
    job.stop(Signal::STOP);
    assert!(job.is_raw());
    tcsetattr(&job.terminal, OptionalActions::Now, &before).unwrap();
    job.to_foreground();
    job.send(Signal::CONT);
    job.wait_for_raw();

    job.stop(Signal::TSTP);
    assert!(!job.is_raw(), "a shell that sets nothing can be used");
    job.to_foreground();
    job.send(Signal::CONT);
    job.wait_for_raw();

    job.send(Signal::TERM);
    assert!(child.wait().unwrap().success());
    assert!(!job.is_raw());
}

/// How long to wait before looking again.
const PAUSE: Duration = Duration::from_millis(1);

/// A shell's job, and the terminal of both.
struct Job {
    pid: Pid,
    terminal: OwnedFd,
}

impl Job {
    fn send(&self, signal: Signal) {
        kill_process(self.pid, signal).unwrap();
    }

    /// Stops the job, and takes the terminal back.
    fn stop(&self, signal: Signal) {
        self.send(signal);
        let (_, status) = waitpid(Some(self.pid), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(WaitStatus::stopped(status), "{status:?}");
        tcsetpgrp(&self.terminal, getpgrp()).unwrap();
    }

    fn to_foreground(&self) {
        tcsetpgrp(&self.terminal, self.pid).unwrap();
    }

    fn is_raw(&self) -> bool {
        !tcgetattr(&self.terminal).unwrap().local_modes.contains(LocalModes::ICANON)
    }

    /// Waits for the machine, which is given a minute: a slow host is no failure.
    fn wait_for_raw(&self) {
        let end = Instant::now() + Duration::from_mins(1);
        while !self.is_raw() {
            assert!(Instant::now() < end, "the terminal is not raw");
            thread::sleep(PAUSE);
        }
    }
}
