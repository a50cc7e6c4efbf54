//! What the agent in the guest says to the host, and the host to the agent.
//!
//! Messages are the same however their bytes arrive in pieces, and a message that was decoded can be encoded again. The
//! host's side passes on what the guest writes to its standard output: these bytes, in this order, and nothing else.
//! What waits for the guest is bounded.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};

use arbitrary::Arbitrary;
use devices::virtio::testing::Driver;
use guest_agent::protocol::{self, Decoder, Error, Message, ToGuest, ToHost};
use tally::untrusted::Agent;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const PORTS: usize = protocol::REPORT as usize + 1;
const QUEUES: usize = (PORTS + 1) * 2;
const CONTROL_QUEUE: usize = 3;
/// Most bytes that wait for the guest: the message that starts the command, or else each signal once and a size.
const MAX_WAITING: usize = 512;
/// Requests that each ring of the driver has room for, and its buffers.
const MAX_REQUESTS: usize = 8;
const MAX_ALL_REQUESTS: usize = 32;

#[derive(Debug, Arbitrary)]
enum Input {
    /// A stream of messages, which arrives in pieces of these lengths.
    Messages {
        is_to_guest: bool,
        pieces: Vec<u8>,
        bytes: Vec<u8>,
    },
    Guest {
        opens_ports: bool,
        steps: Vec<Step>,
    },
}

#[derive(Debug, Arbitrary)]
enum Step {
    /// The guest writes bytes to a port.
    Write {
        port: u8,
        bytes: Vec<u8>,
    },
    /// The agent sends a message.
    Say {
        kind: u8,
        payload: Vec<u8>,
    },
    /// The guest has room for bytes of a port.
    Receive {
        port: u8,
        len: u16,
    },
    /// A control message of the console.
    Control {
        port: u8,
        event: u8,
        value: u8,
    },
    Turn,
    Signal(u8),
    Resize(u16, u16),
    End,
}

/// Decodes all messages of a stream that arrives in pieces.
fn decode<M: Message>(pieces: impl Iterator<Item = Vec<u8>>) -> (Vec<M>, Option<Error>) {
    let (mut decoder, mut messages) = (Decoder::new(), Vec::new());
    for piece in pieces {
        decoder.feed(&piece);
        loop {
            match decoder.next() {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(error) => return (messages, Some(error)),
            }
        }
    }
    (messages, None)
}

fn messages<M: Message + PartialEq + std::fmt::Debug>(bytes: &[u8], lengths: &[u8]) {
    let whole = decode::<M>(std::iter::once(bytes.to_vec()));
    let mut rest = bytes;
    let pieces = lengths.iter().map(|len| usize::from(*len)).chain(std::iter::once(usize::MAX)).map(|len| {
        let (piece, others) = rest.split_at(len.min(rest.len()));
        rest = others;
        piece.to_vec()
    });
    assert_eq!(decode(pieces), whole);
    for message in whole.0 {
        let frame = message.encode().expect("it came in a frame");
        assert_eq!(decode(std::iter::once(frame)), (vec![message], None));
    }
}

/// Returns the queue of a port that carries what the guest writes.
fn transmit_queue(port: usize) -> usize {
    if port == 0 { 1 } else { 3 + 2 * port }
}

fn temporary() -> File {
    tempfile::tempfile().expect("temporary files can be made")
}

struct Guest {
    driver: Driver,
    agent: Agent,
    requests: [usize; QUEUES],
    /// What the guest has written to its standard output.
    written: Vec<u8>,
    output: File,
}

impl Guest {
    fn new() -> Self {
        let mut input = temporary();
        input.write_all(b"what the user types\n").and_then(|()| input.rewind()).expect("it can be written");
        let output = temporary();
        let memory = Driver::memory();
        let outputs = [output.try_clone().expect("descriptors are left"), temporary()];
        let (agent, transport) = Agent::new(memory.clone(), input, outputs).expect("descriptors are left");
        let interrupt = EventFd::new(EFD_NONBLOCK).expect("descriptors are left");
        let driver = Driver::of(transport, memory, interrupt, QUEUES);
        driver.set_up(1 << 32);
        Self { driver, agent, requests: [0; QUEUES], written: Vec::new(), output }
    }

    /// Submits a request, if there is room. Returns whether there was.
    fn submit(&mut self, queue: usize, bytes: &[u8], room: u16) -> bool {
        let all: usize = self.requests.iter().sum();
        let there_is = self.requests[queue] < MAX_REQUESTS && all < MAX_ALL_REQUESTS && bytes.len() < 0x8000;
        if there_is && (!bytes.is_empty() || room > 0) {
            self.requests[queue] += 1;
            self.driver.submit(queue, bytes, u32::from(room % 0x8000));
        }
        there_is
    }

    fn write(&mut self, port: usize, bytes: &[u8]) {
        if self.submit(transmit_queue(port), bytes, 0) && port == protocol::STDOUT as usize {
            self.written.extend(bytes);
        }
    }

    fn control(&mut self, port: u8, event: u8, value: u8) {
        let words = [u16::from(port), 0, u16::from(event), u16::from(value)].map(u16::to_le_bytes);
        self.submit(CONTROL_QUEUE, words.as_flattened(), 0);
    }

    /// Lets the host work. Returns false if its thread has ended.
    fn turn(&mut self) -> bool {
        let goes_on = self.agent.turn();
        for queue in 0..QUEUES {
            while self.driver.next_completion(queue).is_some() {
                self.requests[queue] -= 1;
            }
        }
        for ending in self.agent.endings() {
            assert!(!ending.contains(char::is_control), "{ending:?}");
        }
        let waiting = self.agent.waiting();
        assert!(waiting <= MAX_WAITING, "{waiting} bytes wait for the guest");
        let mut output = Vec::new();
        let read = self.output.seek(SeekFrom::Start(0)).and_then(|_| self.output.read_to_end(&mut output));
        read.expect("it can be read");
        assert!(self.written.starts_with(&output), "what the guest has not written was passed on");
        goes_on
    }

    fn step(&mut self, step: &Step) -> bool {
        match step {
            Step::Write { port, bytes } => self.write(usize::from(*port) % PORTS, bytes),
            Step::Say { kind, payload } => {
                let kind = if kind % 8 == 7 { *kind } else { 0x80 | (kind % 8) };
                let len = u32::try_from(payload.len()).expect("inputs are short");
                self.write(0, &[&[kind][..], &len.to_le_bytes(), payload].concat());
            }
            Step::Receive { port, len } => {
                // Among the control queues, too.
                let queue = usize::from(*port) % (QUEUES / 2) * 2;
                self.submit(queue, &[], *len);
            }
            Step::Control { port, event, value } => self.control(port % 8, event % 8, value % 3),
            Step::Turn => return self.turn(),
            Step::Signal(signal) => drop(self.agent.signal((signal % 65).into())),
            Step::Resize(rows, columns) => self.agent.resize(*rows, *columns),
            Step::End => self.agent.end(),
        }
        true
    }
}

fn guest(opens_ports: bool, steps: &[Step]) {
    let mut guest = Guest::new();
    if opens_ports {
        guest.control(0, 0, 1);
        for port in 0..6 {
            guest.control(port, 3, 1);
            guest.control(port, 6, 1);
        }
        guest.turn();
    }
    for step in steps {
        if !guest.step(step) {
            return;
        }
    }
    guest.turn();
}

/// Runs the target.
pub fn run(data: &[u8]) {
    match crate::parse(data) {
        Some(Input::Messages { is_to_guest: true, pieces, bytes }) => messages::<ToGuest>(&bytes, &pieces),
        Some(Input::Messages { is_to_guest: false, pieces, bytes }) => messages::<ToHost>(&bytes, &pieces),
        Some(Input::Guest { opens_ports, steps }) => guest(opens_ports, &steps),
        None => {}
    }
}
