//! The one event loop, on the main thread: the user's input, signals, console output that waits, vCPUs that ended.

use std::collections::VecDeque;
use std::io::{self, IsTerminal};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use devices::Serial;
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use vmm_sys_util::eventfd::EventFd;

use crate::agent::Handle;
use crate::console::{FlushTimer, Output};
use crate::ending::{Ending, Reporter};
use crate::signals::{self, Signals};
use crate::terminal::{self, Escape, TYPE_AHEAD};

type Subscriber = Box<dyn MutEventSubscriber>;

/// The loop. Everything it waits for is added first.
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
    /// A loop that waits for nothing yet.
    pub fn new() -> Result<Self, LoopError> {
        let (sender, endings) = std::sync::mpsc::channel();
        let manager = EventManager::new().map_err(manager_failed("make the event loop"))?;
        Ok(Self { manager, endings, sender })
    }

    fn add(&mut self, subscriber: impl MutEventSubscriber + 'static) {
        self.manager.add_subscriber(Box::new(subscriber));
    }

    /// Something for another thread to report by.
    pub fn reporter(&mut self) -> Result<Reporter, LoopError> {
        let wake = EventFd::new(libc::EFD_NONBLOCK).map_err(failed("make an eventfd"))?;
        self.add(Wake(wake.try_clone().map_err(failed("copy an eventfd"))?));
        Ok(Reporter::new(self.sender.clone(), wake))
    }

    /// Ends when one of the signals arrives, unless the agent passes it on to the command.
    pub fn add_signals(&mut self, signals: Signals, agent: Option<Handle>) {
        let endings = self.sender.clone();
        self.add(SignalArrives { signals, endings, agent });
    }

    /// Flushes the console's output when its timer fires.
    pub fn add_output(&mut self, timer: Arc<FlushTimer>, output: Output) {
        self.add(FlushDue { timer, output });
    }

    /// Feeds standard input to a serial port; `room` says when the port has taken what it was given.
    pub fn add_input(&mut self, serial: Serial, room: EventFd) {
        let endings = self.sender.clone();
        let escape = io::stdin().is_terminal().then(Escape::default);
        let waiting = VecDeque::new();
        let input = Input { serial, room, endings, escape, waiting, stdin: Stdin::Watched };
        self.add(input);
    }

    /// Runs until there is an ending.
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

/// Brings the loop round to look at the endings.
struct Wake(EventFd);

impl MutEventSubscriber for Wake {
    fn process(&mut self, _events: Events, _ops: &mut EventOps) {
        // Non-blocking: an error says that it was read already.
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
    fn arrived(&self, signal: i32) {
        let taken = match &self.agent {
            _ if signal == libc::SIGWINCH => {
                if let (Some(agent), Some(size)) = (&self.agent, terminal::size()) {
                    agent.resize(size);
                }
                true
            }
            Some(agent) if signals::FOR_THE_COMMAND.contains(&signal) => agent.signal(signal),
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

/// What can be known of standard input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stdin {
    /// The loop waits for it.
    Watched,
    /// The guest has not taken what came before.
    Held,
    /// A plain file, which is always ready and cannot be waited for.
    File,
    /// It has ended.
    Ended,
}

struct Input {
    serial: Serial,
    room: EventFd,
    endings: Sender<Ending>,
    /// For what a person types; a file or a pipe has no keys.
    escape: Option<Escape>,
    waiting: VecDeque<u8>,
    stdin: Stdin,
}

impl Input {
    fn read(&mut self, ops: &mut EventOps) {
        let mut typed = [0; 64];
        // SAFETY: the buffer is valid for its length.
        let count = unsafe { libc::read(libc::STDIN_FILENO, typed.as_mut_ptr().cast(), typed.len()) };
        match usize::try_from(count) {
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
            Err(_) => match io::Error::last_os_error().kind() {
                io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => {}
                // The terminal is gone: what the user says next comes as a signal.
                _ => self.end(ops),
            },
        }
    }

    fn end(&mut self, ops: &mut EventOps) {
        self.unwatch(ops);
        self.stdin = Stdin::Ended;
    }

    fn unwatch(&mut self, ops: &mut EventOps) {
        if self.stdin == Stdin::Watched {
            // It was added, so it can be removed.
            let _ = ops.remove(Events::empty_raw(libc::STDIN_FILENO));
        }
    }

    /// Gives the port what waits, and, unless somebody types, reads on only when all of it was taken.
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
                    self.stdin = Stdin::Held;
                    return;
                }
                (Stdin::Held, true) => {
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
            // Non-blocking: an error says that it was read already.
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
