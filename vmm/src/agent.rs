//! The host's side of the default guest's agent: a command's streams, and the messages that go beside them.
//!
//! All of it is one thread that waits for whatever can go on: the guest's requests, the command's input on this side, room
//! for its output. A stream that nobody reads holds up no other one, nor a signal.

mod handle;
mod streams;

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use devices::virtio::{Console, Device, Queues, Transport};
use guest_agent::protocol::{self, Decoder, Message, Start, ToGuest, ToHost};
use log::{debug, info, warn};
use vmm_sys_util::eventfd::EventFd;

use crate::ending::{Ending, Reporter};

pub use handle::Handle;
pub use streams::{Input, OnClose, Sink};

/// How many ports the agent's console has.
const PORTS: usize = protocol::REPORT as usize + 1;
const CONTROL: usize = protocol::CONTROL as usize;
/// How much of what the agent says is looked at at once.
const PIECE: usize = 4096;
/// How much of one stream is passed on before the others, and whoever waits for this thread, have their turn: a guest may
/// fill its queues as fast as they are emptied.
const TURN: usize = 1 << 20;
/// How long the guest may take to come up before its user is told that it has not.
const PATIENCE: Duration = Duration::from_mins(1);
/// How long to wait, when the machine has ended, for room in what takes the guest's last words.
const PAUSE: Duration = Duration::from_millis(10);
/// How much more is passed on when the machine has ended: all that its queues can hold at once, but not what a vCPU that
/// still runs goes on to say.
const LAST_WORDS: usize = 64 << 20;

/// The device that the agent is reached by.
pub fn console() -> Console {
    Console::new(PORTS)
}

/// What the streams of a command are on this side.
#[derive(Default)]
pub struct Streams {
    /// What it reads, and through which port.
    pub input: Option<(usize, Input)>,
    /// What takes what it writes, by port. Where there is nothing, it is lost.
    pub outputs: Vec<(usize, Sink)>,
}

/// The thread's state.
pub struct Agent {
    transport: Arc<Transport>,
    console: Console,
    start: Option<Start>,
    streams: Streams,
    orders: Receiver<ToGuest>,
    wake: EventFd,
    shared: Arc<handle::Shared>,
    reporter: Reporter,
    /// What is heard of the agent; nothing more once it has talked nonsense.
    heard: Option<Decoder<ToHost>>,
    /// Messages on their way to the guest.
    to_say: Vec<u8>,
    /// The command's status, once it has ended: what it wrote may still be on its way.
    status: Option<u8>,
    /// How much has been passed on.
    passed: usize,
}

/// What the thread does next.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    /// Waits until something can go on.
    Wait,
    /// Goes on: it has stopped only to let others have their turn.
    Go,
    End,
}

impl Agent {
    /// Someone to talk to the agent behind these registers, who tells it to do what `start` says, and a handle on it.
    pub fn new(
        transport: Arc<Transport>,
        console: Console,
        start: Start,
        streams: Streams,
        reporter: Reporter,
    ) -> io::Result<(Self, Handle)> {
        let wake = EventFd::new(libc::EFD_NONBLOCK)?;
        let (handle, orders, shared) = Handle::new(wake.try_clone()?);
        let agent = Self {
            transport,
            console,
            start: Some(start),
            streams,
            orders,
            wake,
            shared,
            reporter,
            heard: Some(Decoder::new()),
            to_say: Vec::new(),
            status: None,
            passed: 0,
        };
        Ok((agent, handle))
    }

    /// Begins to talk, on a thread of its own.
    pub fn spawn(mut self) -> io::Result<JoinHandle<()>> {
        thread::Builder::new().name("agent".to_owned()).spawn(move || self.run())
    }

    fn run(&mut self) {
        let mut most = None;
        let mut patience = Some(PATIENCE);
        loop {
            let ending = self.take_orders();
            let next = self.work();
            if next == Next::End {
                return;
            }
            if ending && (self.passed > *most.get_or_insert(self.passed + LAST_WORDS) || self.is_done()) {
                return;
            }
            patience = patience.filter(|_| self.start.is_some());
            let limit = match next {
                Next::Go => Some(Duration::ZERO),
                _ if ending => Some(PAUSE),
                _ => patience,
            };
            if !self.wait(limit) && limit == Some(PATIENCE) {
                warn!(
                    "the guest is not up yet; with -v its console is shown, and Ctrl-A X or SIGTERM ends it"
                );
                patience = None;
            }
        }
    }

    /// Takes what the event loop wants; says whether the machine has ended.
    fn take_orders(&mut self) -> bool {
        // Non-blocking: an error says that it was read already.
        let _ = (self.wake.read(), self.transport.kick().read());
        loop {
            match self.orders.try_recv() {
                Ok(message) => self.say(&message),
                Err(TryRecvError::Empty) => return false,
                Err(TryRecvError::Disconnected) => return true,
            }
        }
    }

    fn is_done(&mut self) -> bool {
        let (console, streams) = (&mut self.console, &self.streams);
        let waits = self.transport.serve(console, |console, queues| {
            streams.outputs.iter().any(|(port, _)| !console.output(queues, *port).is_empty())
        });
        !waits.unwrap_or(false)
    }

    /// Does all that can be done without waiting.
    fn work(&mut self) -> Next {
        let transport = Arc::clone(&self.transport);
        let mut console = std::mem::replace(&mut self.console, Console::new(0));
        let next = transport.serve(&mut console, |console, queues| {
            console.serve(queues);
            let mut next = self.hear(console, queues);
            self.pass_input(console, queues);
            let mut pending = false;
            for port in (0..PORTS).filter(|port| *port != CONTROL) {
                match self.pass_output(console, queues, port) {
                    Passed::All => {}
                    Passed::Blocked => pending = true,
                    Passed::Turn => (pending, next) = (true, Next::Go),
                }
            }
            let said = console.give(queues, CONTROL, &self.to_say);
            self.to_say.drain(..said);
            // Where there is room again, and something for it, the guest does not say so.
            let input =
                self.streams.input.as_mut().is_some_and(|(port, input)| {
                    !input.waiting().is_empty() && console.has_room(queues, *port)
                });
            if input || !self.to_say.is_empty() && console.has_room(queues, CONTROL) {
                next = Next::Go;
            }
            match self.status {
                Some(status) if !pending => {
                    self.reporter.report(Ending::Command(status));
                    Next::End
                }
                _ => next,
            }
        });
        self.console = console;
        next.unwrap_or(Next::Wait)
    }

    fn say(&mut self, message: &ToGuest) {
        match message.encode() {
            Ok(frame) => self.to_say.extend(frame),
            Err(error) => self.reporter.report(Ending::Agent(error.to_string())),
        }
    }

    fn hear(&mut self, console: &mut Console, queues: &mut Queues) -> Next {
        let mut heard = 0;
        while heard < TURN {
            let bytes = console.output(queues, CONTROL);
            if bytes.is_empty() {
                return Next::Wait;
            }
            // In pieces: of many small messages each is moved out of the way of the next.
            let piece = &bytes[..bytes.len().min(PIECE)];
            let count = piece.len();
            if let Some(decoder) = &mut self.heard {
                decoder.feed(piece);
            }
            console.consume(CONTROL, count);
            heard += count;
            self.understand();
        }
        Next::Go
    }

    fn understand(&mut self) {
        while let Some(decoder) = &mut self.heard {
            match decoder.next() {
                Ok(Some(message)) => self.act(message),
                Ok(None) => return,
                Err(error) => {
                    self.heard = None;
                    self.reporter.report(Ending::Agent(format!("the guest's agent: {error}")));
                }
            }
        }
    }

    fn act(&mut self, message: ToHost) {
        debug!("the guest's agent says {message:?}");
        match message {
            ToHost::Ready => {
                if let Some(start) = self.start.take() {
                    info!("the guest's agent is ready");
                    debug!("it is told: {start:?}");
                    if !start.command.is_empty() {
                        self.shared.begun();
                    }
                    self.say(&ToGuest::Start(start));
                }
            }
            ToHost::SignalSent(_) => self.shared.took(),
            ToHost::Exited(status) => self.status = Some(status),
            ToHost::Failed(text) => self.reporter.report(Ending::Agent(one_line(&text))),
        }
    }

    fn pass_input(&mut self, console: &mut Console, queues: &mut Queues) {
        if self.start.is_some() {
            // The agent waits until all ports are open: none may close before.
            return;
        }
        let Some((port, input)) = &mut self.streams.input else {
            // What a command reads that is given nothing has ended.
            return console.close(queues, protocol::STDIN as usize);
        };
        let given = console.give(queues, *port, input.waiting());
        input.given(given);
        if input.is_over() {
            console.close(queues, *port);
            self.streams.input = None;
        } else {
            input.ask(console.has_room(queues, *port));
        }
    }

    /// Writes what there is room for.
    fn pass_output(&mut self, console: &mut Console, queues: &mut Queues, port: usize) -> Passed {
        let mut sink = self.streams.outputs.iter_mut().find_map(|(of, sink)| (*of == port).then_some(sink));
        if let Some(sink) = &mut sink {
            sink.wanted = false;
        }
        let mut passed = 0;
        while passed < TURN {
            let bytes = console.output(queues, port);
            if bytes.is_empty() {
                return Passed::All;
            }
            let taken = match &mut sink {
                Some(sink) => sink.take(bytes),
                // Nobody wants it.
                None => Ok(bytes.len()),
            };
            match taken {
                Ok(0) => {
                    if let Some(sink) = sink {
                        sink.wanted = true;
                    }
                    return Passed::Blocked;
                }
                Ok(count) => {
                    console.consume(port, count);
                    passed += count;
                    self.passed = self.passed.saturating_add(count);
                }
                Err(ending) => {
                    self.reporter.report(ending);
                    return Passed::Turn;
                }
            }
        }
        Passed::Turn
    }

    /// Waits until something can go on, but not longer than that; says whether it can.
    fn wait(&mut self, limit: Option<Duration>) -> bool {
        let mut fds = vec![
            poll_for(self.wake.as_raw_fd(), libc::POLLIN),
            poll_for(self.transport.kick().as_raw_fd(), libc::POLLIN),
        ];
        let input = self.streams.input.as_ref().filter(|(_, input)| input.wanted);
        let has_input = input.is_some();
        fds.extend(input.map(|(_, input)| poll_for(input.as_raw_fd(), libc::POLLIN)));
        let outputs = self.streams.outputs.iter().filter(|(_, sink)| sink.wanted);
        fds.extend(outputs.map(|(_, sink)| poll_for(sink.as_raw_fd(), libc::POLLOUT)));
        let count = libc::nfds_t::try_from(fds.len()).expect("there are few streams");
        let limit =
            limit.map_or(-1, |limit| libc::c_int::try_from(limit.as_millis()).unwrap_or(libc::c_int::MAX));
        // SAFETY: the array has that many entries. An interrupted wait is as good as one that is over.
        let ready = unsafe { libc::poll(fds.as_mut_ptr(), count, limit) };
        if has_input
            && fds[2].revents != 0
            && let Some((_, input)) = &mut self.streams.input
            && let Some(ending) = input.read()
        {
            self.reporter.report(ending);
        }
        ready != 0
    }
}

/// How much of a stream was passed on.
enum Passed {
    All,
    /// What takes it has no room.
    Blocked,
    /// As much as there is in a turn.
    Turn,
}

fn poll_for(fd: RawFd, events: libc::c_short) -> libc::pollfd {
    libc::pollfd { fd, events, revents: 0 }
}

/// What a guest says, as one line that does nothing to a terminal.
fn one_line(text: &str) -> String {
    const LONGEST: usize = 1000;
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(LONGEST).collect()
}
