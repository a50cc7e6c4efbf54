//! The host's side of the default guest's agent: the command's streams, and the control messages beside them.
//!
//! One thread waits for all of it: the guest's queues, the command's input on the host, and room for its output. A
//! stream that nobody reads holds up neither other streams nor signals.

mod handle;
mod pause;
mod sink;

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use devices::virtio::{Console, ConsoleState, Device, Queues, Transport};
use guest_agent::protocol::{
    self, Decoder, Entropy, Message, Restored, Size, Start, Terminals, ToGuest, ToHost,
};
use log::{debug, info, warn};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::protocol::ending::{Ending, Reporter};
use crate::run::event_loop::{EventLoop, Next, Ready, Subscriber, input_of, room_in};
use crate::run::streams::input::{CHUNK as INPUT_CHUNK, Input};
use crate::sandbox::{self, Thread};

pub use handle::Handle;
pub use pause::{AgentPauser, AgentState, PauseRequests, PausedAgent};
pub use sink::{OnClose, Sink};

/// Number of ports of the agent's console.
const PORTS: usize = protocol::REPORT as usize + 1;
const CONTROL: usize = protocol::CONTROL as usize;
/// Maximum size of the part of a control stream that is decoded at a time.
const CHUNK: usize = 4096;
/// Number of bytes of one stream that are passed on before the other streams and the main thread's orders have their
/// turn: a guest may fill its queues as fast as they are emptied.
const TURN: usize = 1 << 20;
/// Time after which the user is told that the guest is not up yet.
const BOOT_WARNING: Duration = Duration::from_mins(1);
/// Interval at which room for the rest of the output is looked for when the machine has ended.
const ENDING_POLL: Duration = Duration::from_millis(10);
/// Number of bytes that are passed on after the machine's end: all that its queues can hold, but not what a vCPU that
/// still runs goes on to write.
const MAX_REST: usize = 64 << 20;

/// Creates the device by which the agent is reached.
pub fn console() -> Console {
    Console::new(PORTS)
}

/// The host's ends of a command's streams.
#[derive(Default)]
pub struct Streams {
    /// The command's input, and its port.
    pub input: Option<(usize, Input)>,
    /// Sinks for the command's output, by port. Output to a port without a sink is lost.
    pub outputs: Vec<(usize, Sink)>,
}

/// What is done when the guest waits for its command.
pub enum FirstTask {
    /// The guest has booted, or is going to: it says when it is ready, and then is told its command.
    WhenReady(Start),
    /// The guest was restored, and waits for its command.
    Restored(Start),
    /// The guest says when it is ready, and then is saved.
    Save(TemplateSaver),
    /// The guest was restored, and goes on with its command. The state is not the console's alone.
    Continued(Box<AgentState>, Option<Size>),
}

/// Saves a machine whose agent has a console in this state.
pub type TemplateSaver = Box<dyn FnOnce(&ConsoleState) -> Result<(), String> + Send>;

/// The thread's state.
pub struct Agent {
    transport: Arc<Transport>,
    console: Console,
    /// The guest's agent waits for its command, or has been told it.
    is_ready: bool,
    /// The guest was restored: it has to be told how much time has passed.
    is_restored: bool,
    start: Option<Start>,
    save: Option<TemplateSaver>,
    streams: Streams,
    pause_requests: PauseRequests,
    /// Which of the command's streams are terminals.
    terminals: Terminals,
    shared: Arc<handle::Shared>,
    reporter: Reporter,
    /// Decoder of the agent's messages; none after an invalid message.
    decoder: Option<Decoder<ToHost>>,
    /// Encoded messages that wait for room in the guest's queue.
    outgoing: Vec<u8>,
    /// The command's status, once it has ended. Its output may still be in the queues.
    status: Option<u8>,
    /// Number of bytes of output that were passed on.
    passed: usize,
    /// The most of them that are passed on, once the machine has ended.
    max_passed: Option<usize>,
    /// When the user is told that the guest is not up yet; none if that was told.
    warn_at: Option<Instant>,
}

/// What another thread wants of the agent's.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Directive {
    /// To go on.
    Work,
    /// To pass on what the guest has said, for the machine has ended.
    End,
    /// To end at once, for the machine was saved and goes on elsewhere.
    Leave,
}

impl Agent {
    /// Creates the agent's thread state, and a handle on it.
    pub fn new(
        transport: Arc<Transport>,
        console: Console,
        first_task: FirstTask,
        streams: Streams,
        pause_requests: PauseRequests,
        reporter: Reporter,
    ) -> io::Result<(Self, Handle)> {
        let (handle, shared) = Handle::new(pause_requests.wake.try_clone()?);
        let mut agent = Self {
            transport,
            console,
            start: None,
            save: None,
            is_ready: false,
            is_restored: false,
            streams,
            pause_requests,
            terminals: Terminals::default(),
            shared,
            reporter,
            decoder: Some(Decoder::new()),
            outgoing: Vec::new(),
            status: None,
            passed: 0,
            max_passed: None,
            warn_at: Some(Instant::now() + BOOT_WARNING),
        };
        match first_task {
            FirstTask::WhenReady(start) => agent.set_start(start),
            FirstTask::Restored(start) => {
                agent.set_start(start);
                (agent.is_ready, agent.is_restored) = (true, true);
            }
            FirstTask::Save(save) => agent.save = Some(save),
            FirstTask::Continued(state, size) => agent.continue_from(*state, size)?,
        }
        Ok((agent, handle))
    }

    fn set_start(&mut self, start: Start) {
        self.terminals = start.terminals;
        self.start = Some(start);
    }

    /// Starts the thread.
    pub fn spawn(mut self) -> io::Result<JoinHandle<()>> {
        let kind = if self.save.is_some() { Thread::Saver } else { Thread::Agent };
        sandbox::spawn("agent", kind, Vec::new(), move || {
            if self.is_restored {
                self.tell_command();
            }
            let reporter = self.reporter.clone();
            let mut events = EventLoop::default();
            events.add(self);
            if let Err(error) = events.run() {
                reporter.report(Ending::Agent(format!("cannot wait for the guest's agent: {error}")));
            }
        })
    }

    /// Returns what another thread wants now, and pauses if the machine is saved.
    pub fn directive(&mut self) -> Directive {
        if self.pause_if_requested() {
            return Directive::Leave;
        }
        if self.shared.is_over() { Directive::End } else { Directive::Work }
    }

    /// Returns true if all that is to be passed on after the machine's end was passed on.
    fn has_passed_rest(&mut self) -> bool {
        self.passed > *self.max_passed.get_or_insert(self.passed + MAX_REST) || self.is_done()
    }

    /// Returns how long the guest may still take to boot. When that is over, the user is told once.
    fn time_to_boot(&mut self) -> Option<Duration> {
        let left = self.warn_at.filter(|_| !self.is_ready)?.saturating_duration_since(Instant::now());
        if left.is_zero() {
            warn!("the guest is not up yet; with -v its console is shown, and Ctrl-A X or SIGTERM ends it");
            self.warn_at = None;
            return None;
        }
        Some(left)
    }

    fn is_done(&mut self) -> bool {
        let (console, streams) = (&mut self.console, &self.streams);
        let waits = self.transport.serve(console, |console, queues| {
            streams.outputs.iter().any(|(port, _)| !console.output(queues, *port).is_empty())
        });
        !waits.unwrap_or(false)
    }

    /// Does all work that is possible without waiting.
    pub fn work(&mut self) -> Next<()> {
        let transport = Arc::clone(&self.transport);
        let mut console = std::mem::replace(&mut self.console, Console::new(0));
        let next = transport.serve(&mut console, |console, queues| {
            console.serve(queues);
            let mut next = self.receive(console, queues);
            self.pass_input(console, queues);
            let mut pending = false;
            for port in (0..PORTS).filter(|port| *port != CONTROL) {
                match self.pass_output(console, queues, port) {
                    Passed::All => {}
                    Passed::Blocked => pending = true,
                    Passed::Turn => (pending, next) = (true, Next::Continue),
                }
            }
            self.take_orders();
            let sent = console.give(queues, CONTROL, &self.outgoing);
            self.outgoing.drain(..sent);
            // The guest does not notify for room in a queue that it had before: go on while there is room and something
            // for it.
            let input =
                self.streams.input.as_mut().is_some_and(|(port, input)| {
                    !input.waiting().is_empty() && console.has_room(queues, *port)
                });
            let messages = !self.outgoing.is_empty() || !self.shared.orders().is_empty();
            if input || messages && console.has_room(queues, CONTROL) {
                next = Next::Continue;
            }
            match self.status {
                Some(status) if !pending => {
                    self.reporter.report(Ending::Command(status));
                    Next::End(())
                }
                _ => next,
            }
        });
        self.console = console;
        next.unwrap_or(Next::Wait)
    }

    /// Sends the main thread's orders, after all that the guest was sent before.
    fn take_orders(&mut self) {
        if self.outgoing.is_empty() {
            let orders = std::mem::take(&mut *self.shared.orders());
            for message in orders.messages() {
                self.send(&message);
            }
        }
    }

    fn send(&mut self, message: &ToGuest) {
        match message.encode() {
            Ok(frame) => self.outgoing.extend(frame),
            Err(error) => self.reporter.report(Ending::Agent(error.to_string())),
        }
    }

    fn receive(&mut self, console: &mut Console, queues: &mut Queues) -> Next<()> {
        let mut received = 0;
        while received < TURN {
            let bytes = console.output(queues, CONTROL);
            if bytes.is_empty() {
                return Next::Wait;
            }
            // In chunks: the decoder moves the rest of its bytes for each message.
            let chunk = &bytes[..bytes.len().min(CHUNK)];
            let count = chunk.len();
            if let Some(decoder) = &mut self.decoder {
                decoder.feed(chunk);
            }
            console.consume(CONTROL, count);
            received += count;
            self.decode();
        }
        Next::Continue
    }

    fn decode(&mut self) {
        while let Some(decoder) = &mut self.decoder {
            match decoder.next() {
                Ok(Some(message)) => self.act(message),
                Ok(None) => return,
                Err(error) => {
                    self.decoder = None;
                    self.reporter.report(Ending::Agent(format!("the guest's agent: {error}")));
                }
            }
        }
    }

    fn act(&mut self, message: ToHost) {
        debug!("the guest's agent says {message:?}");
        match message {
            ToHost::Ready => {
                info!("the guest's agent is ready");
                self.is_ready = true;
                self.tell_command();
            }
            ToHost::SignalSent(_) => self.shared.signal_taken(),
            ToHost::Exited(status) => self.status = Some(status),
            ToHost::Failed(text) => self.reporter.report(Ending::Agent(one_line(&text))),
        }
    }

    /// Tells the guest its command, once.
    fn tell_command(&mut self) {
        if let Some(mut start) = self.start.take() {
            if self.is_restored {
                match since_saved() {
                    Ok(restored) => start.restored = Some(restored),
                    Err(error) => {
                        let why = format!("cannot draw random numbers for the guest: {error}");
                        return self.reporter.report(Ending::Agent(why));
                    }
                }
            }
            debug!("the guest's agent is told: {start:?}");
            if !start.command.is_empty() {
                self.shared.command_started();
            }
            self.send(&ToGuest::Start(start));
        }
    }

    fn pass_input(&mut self, console: &mut Console, queues: &mut Queues) {
        if !self.is_ready {
            // The agent waits until all ports are open, so none may close before it is ready.
            return;
        }
        let Some((port, input)) = &mut self.streams.input else {
            // A command without input reads the end of file.
            return console.close(queues, protocol::STDIN as usize);
        };
        let given = console.give(queues, *port, input.waiting());
        input.consume(given);
        if input.is_over() {
            console.close(queues, *port);
            self.streams.input = None;
        } else {
            input.set_guest_has_room(console.has_room(queues, *port));
        }
    }

    /// Writes output of a port as far as its sink has room.
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
                Some(sink) => sink.write(bytes),
                // Without a sink, the output is lost.
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

    /// Reads the command's input, if the guest has room for it.
    pub fn read_input(&mut self) {
        if let Some((_, input)) = &mut self.streams.input
            && input.wanted
            && let Some(ending) = input.read(INPUT_CHUNK)
        {
            self.reporter.report(ending);
        }
    }

    /// Returns the number of bytes that wait for room in the guest's queue.
    pub fn waiting(&self) -> usize {
        self.outgoing.len()
    }
}

impl Subscriber for Agent {
    type End = ();

    fn files(&self) -> Vec<libc::pollfd> {
        let mut files = vec![input_of(&self.pause_requests.wake), input_of(self.transport.kick())];
        let input = self.streams.input.iter().filter(|(_, input)| input.wanted);
        files.extend(input.map(|(_, input)| input_of(input)));
        let outputs = self.streams.outputs.iter().filter(|(_, sink)| sink.wanted);
        files.extend(outputs.map(|(_, sink)| room_in(sink)));
        files
    }

    fn process(&mut self, ready: &Ready) -> Next<()> {
        if self.streams.input.as_ref().is_some_and(|(_, input)| ready.has(input)) {
            self.read_input();
        }
        for eventfd in [&self.pause_requests.wake, self.transport.kick()] {
            if ready.has(eventfd) {
                let _ = eventfd.read();
            }
        }
        let directive = self.directive();
        if directive == Directive::Leave {
            return Next::End(());
        }
        let next = self.work();
        if next == Next::End(()) {
            return next;
        }
        if let Some(save) = self.save.take_if(|_| self.is_ready) {
            let saved = save(&self.console.save());
            self.reporter.report(saved.map_or_else(Ending::Agent, |()| Ending::Saved));
            return Next::End(());
        }
        let is_ending = directive == Directive::End;
        if is_ending && self.has_passed_rest() {
            return Next::End(());
        }
        match next {
            Next::Wait if is_ending => Next::WaitAtMost(ENDING_POLL),
            Next::Wait => self.time_to_boot().map_or(Next::Wait, Next::WaitAtMost),
            next => next,
        }
    }
}

/// Returns what a restored guest has to make up for.
fn since_saved() -> io::Result<Restored> {
    let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let mut entropy = Entropy::default();
    // As few bytes as these come at once.
    getrandom(&mut entropy, GetRandomFlags::empty())?;
    Ok(Restored { time, entropy })
}

/// Result of passing on a stream.
enum Passed {
    All,
    /// The sink has no room.
    Blocked,
    /// Its turn is over.
    Turn,
}

/// Returns a guest's text as one line without control characters.
fn one_line(text: &str) -> String {
    const LONGEST: usize = 1000;
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(LONGEST).collect()
}
