//! The event loop on the main thread: the user's input, signals, the console's flush timer, and the ends of vCPUs.

use std::collections::VecDeque;
use std::io::{self, IsTerminal};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use devices::Serial;
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use rustix::io::Errno;
use rustix::stdio::stdin;
use vmm_sys_util::eventfd::EventFd;

use crate::host::signals;
use crate::host::terminal::{self, Escape, TYPE_AHEAD};
use crate::protocol::ending::{Ending, Reporter};
use crate::run::signal_thread::Signals;
use crate::run::streams::agent::Handle;
use crate::run::streams::console::{FlushTimer, Output};

type Subscriber = Box<dyn MutEventSubscriber>;

/// The event loop. All that it waits for is added before it runs.
pub struct EventLoop {
    manager: EventManager<Subscriber>,
    endings: Receiver<Ending>,
    sender: Sender<Ending>,
}

/// The loop cannot be built or run.
#[derive(Debug, thiserror::Error)]
#[error("cannot {what}: {source}")]
pub struct LoopError {
    what: &'static str,
    source: io::Error,
}

fn failed<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> LoopError {
    move |source| LoopError { what, source: source.into() }
}

fn manager_failed(what: &'static str) -> impl Fn(event_manager::Error) -> LoopError {
    move |source| LoopError { what, source: io::Error::other(source) }
}

impl EventLoop {
    /// Creates a loop that waits for nothing yet.
    pub fn new() -> Result<Self, LoopError> {
        let (sender, endings) = std::sync::mpsc::channel();
        let manager = EventManager::new().map_err(manager_failed("make the event loop"))?;
        Ok(Self { manager, endings, sender })
    }

    fn add(&mut self, subscriber: impl MutEventSubscriber + 'static) {
        self.manager.add_subscriber(Box::new(subscriber));
    }

    /// Returns a reporter for another thread.
    pub fn reporter(&mut self) -> Result<Reporter, LoopError> {
        let wake = EventFd::new(libc::EFD_NONBLOCK).map_err(failed("make an eventfd"))?;
        self.add(Wake(wake.try_clone().map_err(failed("copy an eventfd"))?));
        Ok(Reporter::new(self.sender.clone(), wake))
    }

    /// Adds signals: one that arrives ends the loop, unless the agent passes it on to the command.
    pub fn add_signals(&mut self, signals: Signals, agent: Option<Handle>) {
        let endings = self.sender.clone();
        self.add(SignalArrives { signals, endings, agent });
    }

    /// Adds the console's output: it is flushed when its timer expires.
    pub fn add_output(&mut self, timer: Arc<FlushTimer>, output: Output) {
        self.add(FlushDue { timer, output });
    }

    /// Adds standard input, which goes to a serial port. `room` is signalled when the port has room again.
    pub fn add_input(&mut self, serial: Serial, room: EventFd) {
        let endings = self.sender.clone();
        let escape = io::stdin().is_terminal().then(Escape::default);
        let waiting = VecDeque::new();
        let input = Input { serial, room, endings, escape, waiting, stdin: Stdin::Watched };
        self.add(input);
    }

    /// Runs until an ending is reported.
    pub fn run(&mut self) -> Result<Ending, LoopError> {
        loop {
            if let Ok(ending) = self.endings.try_recv() {
                return Ok(ending);
            }
            self.manager.run().map_err(manager_failed("wait for events"))?;
        }
    }
}

fn watch(ops: &mut EventOps, fd: RawFd) -> bool {
    ops.add(Events::new_raw(fd, EventSet::IN)).is_ok()
}

/// Wakes the loop to look at the endings.
struct Wake(EventFd);

impl MutEventSubscriber for Wake {
    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        // Non-blocking: an error means that it was read already.
        let _ = self.0.read();
    }

    fn init(&mut self, ops: &mut EventOps) {
        watch(ops, self.0.as_raw_fd());
    }
}

struct SignalArrives {
    signals: Signals,
    endings: Sender<Ending>,
    agent: Option<Handle>,
}

impl SignalArrives {
    /// Passes the terminal's size on to the guest. A process in the background is not told when it changes.
    fn resize(&self) {
        if let (Some(agent), Some(size)) = (&self.agent, terminal::size()) {
            agent.resize(size);
        }
    }

    fn arrived(&self, signal: i32) {
        let taken = match (signal, &self.agent) {
            (libc::SIGWINCH, _) => {
                self.resize();
                true
            }
            (libc::SIGTSTP, _) => {
                terminal::stop();
                self.resize();
                true
            }
            (libc::SIGCONT, _) => {
                terminal::resume();
                self.resize();
                true
            }
            (_, Some(agent)) if signals::FOR_THE_COMMAND.contains(&signal) => agent.signal(signal),
            _ => false,
        };
        if !taken {
            // The receiver lives as long as the loop that calls this.
            let _ = self.endings.send(Ending::Signal(signal));
        }
    }
}

impl MutEventSubscriber for SignalArrives {
    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        if let Some(signal) = self.signals.next() {
            self.arrived(signal);
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        watch(ops, self.signals.as_raw_fd());
    }
}

struct FlushDue {
    timer: Arc<FlushTimer>,
    output: Output,
}

impl MutEventSubscriber for FlushDue {
    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        self.timer.acknowledge();
        if !self.output.try_flush() {
            self.timer.arm();
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        watch(ops, self.timer.as_raw_fd());
    }
}

/// State of standard input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stdin {
    /// The loop waits for it.
    Watched,
    /// The guest has not taken all input: no more is read.
    WaitsForRoom,
    /// A regular file, which is always ready and cannot be waited for.
    File,
    /// Standard input has ended.
    Ended,
}

struct Input {
    serial: Serial,
    room: EventFd,
    endings: Sender<Ending>,
    /// Finds Ctrl-A X in what a person types; none if standard input is no terminal.
    escape: Option<Escape>,
    waiting: VecDeque<u8>,
    stdin: Stdin,
}

impl Input {
    fn read(&mut self, ops: &mut EventOps) {
        let mut typed = [0; 64];
        match rustix::io::read(stdin(), &mut typed) {
            Ok(0) => self.end(ops),
            Ok(count) => {
                let typed = &typed[..count];
                let Some(escape) = &mut self.escape else {
                    self.waiting.extend(typed);
                    return;
                };
                if escape.feed(typed, &mut self.waiting) {
                    // The receiver lives as long as the loop that calls this.
                    let _ = self.endings.send(Ending::Quit);
                }
                self.waiting.truncate(TYPE_AHEAD);
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            // The terminal is gone, which also sends a signal.
            Err(_) => self.end(ops),
        }
    }

    fn end(&mut self, ops: &mut EventOps) {
        self.unwatch(ops);
        self.stdin = Stdin::Ended;
    }

    fn unwatch(&mut self, ops: &mut EventOps) {
        if self.stdin == Stdin::Watched {
            // This cannot fail: the descriptor was added.
            let _ = ops.remove(Events::empty_raw(libc::STDIN_FILENO));
        }
    }

    /// Gives the waiting input to the port. Unless a person types, more is read only when the port has taken all of it.
    fn pump(&mut self, ops: &mut EventOps) {
        loop {
            while !self.waiting.is_empty() {
                match self.serial.receive(self.waiting.make_contiguous()) {
                    Ok(0) | Err(_) => break,
                    Ok(taken) => drop(self.waiting.drain(..taken)),
                }
            }
            match (self.stdin, self.waiting.is_empty()) {
                (Stdin::File, true) => self.read(ops),
                (Stdin::Watched, false) if self.escape.is_none() => {
                    self.unwatch(ops);
                    self.stdin = Stdin::WaitsForRoom;
                    return;
                }
                (Stdin::WaitsForRoom, true) => {
                    self.stdin = if watch(ops, libc::STDIN_FILENO) { Stdin::Watched } else { Stdin::Ended };
                    return;
                }
                _ => return,
            }
        }
    }
}

impl MutEventSubscriber for Input {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        if events.fd() == self.room.as_raw_fd() {
            // Non-blocking: an error means that it was read already.
            let _ = self.room.read();
        } else {
            self.read(ops);
        }
        self.pump(ops);
    }

    fn init(&mut self, ops: &mut EventOps) {
        watch(ops, self.room.as_raw_fd());
        if !watch(ops, libc::STDIN_FILENO) {
            self.stdin = Stdin::File;
            self.pump(ops);
        }
    }
}
