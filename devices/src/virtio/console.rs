//! A console of several ports (section 5.3 of the specification): streams of bytes between a guest and whoever holds this.
//!
//! A port has two ends. Bytes go through while both are open; when ours closes, the guest reads what came before and then
//! the end, as from a pipe.

use std::collections::VecDeque;
use std::io::{Read, Write};

use super::{Device, Queues};

const MULTIPORT: u64 = 1 << 1;
/// How many requests a queue has. The driver gives each port that many pages to receive into.
const ENTRIES: u16 = 16;
/// How much of one request is taken, which is more than any driver sends at once: what is taken is kept until it is read.
const LONGEST: u64 = 1 << 20;
/// How many control messages are heard at a time.
const MOST_CONTROL: usize = 256;
/// The queues of control messages, behind those of the first port.
const CONTROL_IN: usize = 2;
const CONTROL_OUT: usize = 3;

mod event {
    pub const DEVICE_READY: u16 = 0;
    pub const PORT_ADD: u16 = 1;
    pub const PORT_READY: u16 = 3;
    pub const PORT_OPEN: u16 = 6;
}

/// What the ends tell each other of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Control {
    port: u32,
    event: u16,
    value: u16,
}

#[derive(Default)]
struct Port {
    /// Whether the driver knows it.
    known: bool,
    /// Whether a program in the guest has it open.
    open: bool,
    /// Whether our end is closed.
    closed: bool,
    /// What the guest has sent, and how much of that was read.
    sent: Vec<u8>,
    read: usize,
}

/// The device.
pub struct Console {
    ports: Vec<Port>,
    greeted: bool,
    /// Waits until the driver has room for it. Bounded: each message is said once, or answers an act of ours.
    to_say: VecDeque<Control>,
}

impl Console {
    /// A console of that many ports, our ends open.
    pub fn new(ports: usize) -> Self {
        let ports = std::iter::repeat_with(Port::default).take(ports).collect();
        Self { ports, greeted: false, to_say: VecDeque::new() }
    }

    /// What the guest has sent to a port and nobody has read yet.
    pub fn output(&mut self, queues: &mut Queues, port: usize) -> &[u8] {
        let Some(state) = self.ports.get_mut(port) else { return &[] };
        // Of requests without a byte in them only so many are looked at: a guest may make them without end.
        for _ in 0..ENTRIES {
            if state.read < state.sent.len() {
                break;
            }
            let Some(request) = queues.next(to_us(port)) else { break };
            state.sent.clear();
            state.read = 0;
            // Memory cannot fail to be read; were it so, there would be less.
            let _ = request.reader.take(LONGEST).read_to_end(&mut state.sent);
            queues.done(request.head, 0);
        }
        &state.sent[state.read..]
    }

    /// Takes note that so much of the output was read.
    pub fn consume(&mut self, port: usize, count: usize) {
        if let Some(port) = self.ports.get_mut(port) {
            port.read = port.sent.len().min(port.read.saturating_add(count));
        }
    }

    /// Whether the guest has room for input.
    pub fn has_room(&self, queues: &mut Queues, port: usize) -> bool {
        self.ports.get(port).is_some_and(|port| port.open && !port.closed) && queues.has(to_guest(port))
    }

    /// Gives the guest input; says how much there was room for.
    pub fn give(&mut self, queues: &mut Queues, port: usize, mut bytes: &[u8]) -> usize {
        let mut given = 0;
        for _ in 0..ENTRIES {
            if bytes.is_empty() || !self.has_room(queues, port) {
                break;
            }
            let Some(mut request) = queues.next(to_guest(port)) else { break };
            let count = request.writer.write(bytes).unwrap_or(0);
            queues.done(request.head, u32::try_from(count).unwrap_or(u32::MAX));
            bytes = &bytes[count..];
            given += count;
        }
        given
    }

    /// Closes our end of a port: the guest reads what it was given, and then the end.
    pub fn close(&mut self, queues: &mut Queues, port: usize) {
        if let Some(state) = self.ports.get_mut(port)
            && !std::mem::replace(&mut state.closed, true)
            && state.known
        {
            self.say(port, event::PORT_OPEN, 0);
        }
        self.pass_on(queues);
    }

    fn say(&mut self, port: usize, event: u16, value: u16) {
        let port = u32::try_from(port).expect("a console has few ports");
        self.to_say.push_back(Control { port, event, value });
    }

    fn hear(&mut self, control: Control) {
        let Ok(number) = usize::try_from(control.port) else { return };
        match (control.event, self.ports.get_mut(number)) {
            (event::DEVICE_READY, _) if control.value == 1 && !std::mem::replace(&mut self.greeted, true) => {
                (0..self.ports.len()).for_each(|port| self.say(port, event::PORT_ADD, 1));
            }
            (event::PORT_READY, Some(port)) if control.value == 1 && !port.known => {
                port.known = true;
                if !port.closed {
                    self.say(number, event::PORT_OPEN, 1);
                }
            }
            (event::PORT_OPEN, Some(port)) => port.open = control.value == 1,
            _ => {}
        }
    }

    /// Says what waits to be said, as far as there is room.
    fn pass_on(&mut self, queues: &mut Queues) {
        while let Some(control) = self.to_say.front() {
            let Some(mut request) = queues.next(CONTROL_IN) else { return };
            let count = request.writer.write(&control.bytes()).unwrap_or(0);
            queues.done(request.head, u32::try_from(count).unwrap_or(0));
            self.to_say.pop_front();
        }
    }
}

impl Device for Console {
    fn id(&self) -> u32 {
        3
    }

    fn features(&self) -> u64 {
        MULTIPORT
    }

    fn config(&self) -> Vec<u8> {
        // Columns and rows, which only a port that is a console has; the number of ports.
        let ports = u32::try_from(self.ports.len()).expect("a console has few ports");
        [[0; 4], ports.to_le_bytes()].concat()
    }

    fn queues(&self) -> Vec<u16> {
        vec![ENTRIES; (self.ports.len() + 1) * 2]
    }

    /// Hears and says what concerns the ports; the streams are for whoever holds this.
    fn serve(&mut self, queues: &mut Queues) {
        // More than any driver has to say at once.
        for _ in 0..MOST_CONTROL {
            let Some(mut request) = queues.next(CONTROL_OUT) else { break };
            let mut bytes = [0; 8];
            if request.reader.read_exact(&mut bytes).is_ok() {
                self.hear(Control::from_bytes(bytes));
            }
            queues.done(request.head, 0);
        }
        self.pass_on(queues);
    }

    fn reset(&mut self) {
        for port in &mut self.ports {
            // Our ends stay as they are.
            *port = Port { closed: port.closed, ..Port::default() };
        }
        self.greeted = false;
        self.to_say.clear();
    }
}

impl Control {
    fn bytes(self) -> [u8; 8] {
        (u64::from(self.port) | u64::from(self.event) << 32 | u64::from(self.value) << 48).to_le_bytes()
    }

    fn from_bytes(bytes: [u8; 8]) -> Self {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        Self { port: u32::from(word(0)) | u32::from(word(2)) << 16, event: word(4), value: word(6) }
    }
}

/// The queue that a port's input goes through.
fn to_guest(port: usize) -> usize {
    if port == 0 { 0 } else { 2 + 2 * port }
}

/// The queue that a port's output comes through.
fn to_us(port: usize) -> usize {
    to_guest(port) + 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::Driver;
    use super::*;

    fn control(event: u16, port: u32, value: u16) -> [u8; 8] {
        Control { port, event, value }.bytes()
    }

    /// A driver with room for control messages, that knows all ports.
    fn greeted() -> (Console, Driver) {
        let mut console = Console::new(2);
        let mut driver = Driver::ready(&console);
        driver.ask(CONTROL_OUT, &control(event::DEVICE_READY, 0, 1), 0);
        for port in 0..2 {
            driver.ask(CONTROL_OUT, &control(event::PORT_READY, port, 1), 0);
        }
        driver.serve(&mut console);
        (console, driver)
    }

    fn hear(driver: &mut Driver, console: &mut Console) -> Vec<Control> {
        let rooms: Vec<_> = (0..4).map(|_| driver.ask(CONTROL_IN, &[], 16)).collect();
        driver.serve(console);
        rooms
            .into_iter()
            .map_while(|room| {
                let length = driver.answered(CONTROL_IN)?;
                Some(Control::from_bytes(<[u8; 8]>::try_from(driver.bytes(room, length)).unwrap()))
            })
            .collect()
    }

    fn open(driver: &mut Driver, console: &mut Console, port: u32) {
        driver.ask(CONTROL_OUT, &control(event::PORT_OPEN, port, 1), 0);
        driver.serve(console);
    }

    fn with<T>(
        driver: &Driver,
        console: &mut Console,
        work: impl FnOnce(&mut Console, &mut Queues) -> T,
    ) -> T {
        driver.transport.serve(console, work).expect("the driver is ready")
    }

    #[test]
    fn a_driver_is_told_of_every_port_and_that_it_is_open() {
        let (mut console, mut driver) = greeted();
        let heard = hear(&mut driver, &mut console);
        let expected: Vec<Control> =
            [(event::PORT_ADD, 0), (event::PORT_ADD, 1), (event::PORT_OPEN, 0), (event::PORT_OPEN, 1)]
                .map(|(event, port)| Control { port, event, value: 1 })
                .into();
        assert_eq!(heard, expected);
    }

    #[test]
    fn output_waits_until_it_is_read() {
        let (mut console, mut driver) = greeted();
        driver.ask(to_us(1), b"hello", 0);
        driver.ask(to_us(1), b" world", 0);
        for expected in ["hello", "llo", " world"] {
            with(&driver, &mut console, |console, queues| {
                assert_eq!(console.output(queues, 1), expected.as_bytes());
                console.consume(1, if expected == "hello" { 2 } else { expected.len() });
            });
        }
        assert_eq!(with(&driver, &mut console, |console, queues| console.output(queues, 1).len()), 0);
    }

    #[test]
    fn input_waits_until_a_program_has_the_port_open_and_room_in_it() {
        let (mut console, mut driver) = greeted();
        let give = |console: &mut Console, queues: &mut Queues| console.give(queues, 1, b"abcdef");
        let first = driver.ask(to_guest(1), &[], 4);
        assert_eq!(with(&driver, &mut console, give), 0);
        open(&mut driver, &mut console, 1);
        assert_eq!(with(&driver, &mut console, give), 4);
        assert_eq!(driver.answered(to_guest(1)), Some(4));
        assert_eq!(driver.bytes(first, 4), b"abcd");
        assert!(!with(&driver, &mut console, |console, queues| console.has_room(queues, 1)));
    }

    #[test]
    fn the_guest_is_told_when_our_end_closes() {
        let (mut console, mut driver) = greeted();
        hear(&mut driver, &mut console);
        with(&driver, &mut console, |console, queues| console.close(queues, 1));
        let told = hear(&mut driver, &mut console);
        assert_eq!(told, [Control { port: 1, event: event::PORT_OPEN, value: 0 }]);
    }

    #[test]
    fn a_port_that_closes_before_the_driver_knows_it_never_opens() {
        let mut console = Console::new(1);
        let mut driver = Driver::ready(&console);
        with(&driver, &mut console, |console, queues| console.close(queues, 0));
        driver.ask(CONTROL_OUT, &control(event::PORT_READY, 0, 1), 0);
        assert_eq!(hear(&mut driver, &mut console), []);
    }

    proptest! {
        #[test]
        fn whatever_the_driver_says_little_waits(words in proptest::collection::vec(any::<(u8, u8, u8)>(), 0..200)) {
            let (mut console, mut driver) = greeted();
            for (event, port, value) in words {
                driver.ask(CONTROL_OUT, &control(event.into(), port.into(), value.into()), 0);
                driver.serve(&mut console);
            }
            prop_assert!(console.to_say.len() <= 4);
        }
    }
}
