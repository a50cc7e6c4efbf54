//! A console device with several ports (section 5.3 of the specification): byte streams between guest and host.
//!
//! A port has a guest end and a host end. Bytes are transferred while both are open. After the host has closed its end,
//! the guest reads the remaining input and then end-of-file, as from a pipe.

use std::collections::VecDeque;
use std::io::{Read, Write};

use serde::{Deserialize, Serialize};

use super::{Device, Queues};
use crate::state::{Mismatch, check};

const MULTIPORT: u64 = 1 << 1;
/// Number of entries of each queue. The driver provides one page per entry as a receive buffer.
const QUEUE_SIZE: u16 = 16;
/// Maximum number of bytes that are copied from one request, more than any driver sends at once. The copy is kept until
/// it has been consumed.
const MAX_REQUEST: u64 = 1 << 20;
/// Maximum number of control messages that are processed per call.
const MAX_CONTROL: usize = 256;
/// Maximum number of messages for each port that the driver has not received: that it is there, open, and closed.
const MAX_PENDING: usize = 3;
/// The control queues, which follow the two queues of port 0.
const CONTROL_RECEIVEQ: usize = 2;
const CONTROL_TRANSMITQ: usize = 3;

mod event {
    pub const DEVICE_READY: u16 = 0;
    pub const PORT_ADD: u16 = 1;
    pub const PORT_READY: u16 = 3;
    pub const PORT_OPEN: u16 = 6;
}

/// A control message, `struct virtio_console_control`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Control {
    port: u32,
    event: u16,
    value: u16,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Port {
    /// The driver has announced that the port is ready.
    is_ready: bool,
    /// A program in the guest has the port open.
    is_guest_open: bool,
    /// The host end is closed.
    is_host_closed: bool,
    /// Output of the guest's last request.
    output: Vec<u8>,
    /// Number of bytes of `output` that have been consumed.
    consumed: usize,
}

/// The virtio console device.
pub struct Console(ConsoleState);

/// What the driver has told a console, and what it has not been told yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConsoleState {
    ports: Vec<Port>,
    /// The driver has announced that the device is ready.
    is_ready: bool,
    /// Control messages for which the driver has not provided buffers yet. Bounded, because each message is sent at
    /// most once between two resets.
    pending: VecDeque<Control>,
}

impl Console {
    /// Creates a console whose ports are open at the host end.
    pub fn new(ports: usize) -> Self {
        let ports = std::iter::repeat_with(Port::default).take(ports).collect();
        Self(ConsoleState { ports, is_ready: false, pending: VecDeque::new() })
    }

    /// Returns the state, for a snapshot.
    pub fn save(&self) -> ConsoleState {
        self.0.clone()
    }

    /// Restores the state of a console with as many ports.
    pub fn restore(&mut self, saved: &ConsoleState) -> Result<(), Mismatch> {
        let ConsoleState { ports, pending, .. } = saved;
        check(ports.len() == self.0.ports.len(), "number of ports")?;
        check(ports.iter().all(|port| port.consumed <= port.output.len()), "output")?;
        check(pending.len() <= MAX_PENDING * ports.len(), "number of messages")?;
        self.0 = saved.clone();
        Ok(())
    }

    /// Returns output of a port that has not been consumed yet. Takes the next request if there is none.
    pub fn output(&mut self, queues: &mut Queues, port: usize) -> &[u8] {
        let Some(state) = self.0.ports.get_mut(port) else { return &[] };
        // Limits the number of empty requests, which a guest could submit without end.
        for _ in 0..QUEUE_SIZE {
            if state.consumed < state.output.len() {
                break;
            }
            let Some(request) = queues.pop(transmitq(port)) else { break };
            state.output.clear();
            state.consumed = 0;
            // Fails only if the driver has reset the device. The output is dropped then.
            let _ = request.reader.take(MAX_REQUEST).read_to_end(&mut state.output);
            queues.complete(request.head, 0);
        }
        &state.output[state.consumed..]
    }

    /// Marks `count` bytes of the output as consumed.
    pub fn consume(&mut self, port: usize, count: usize) {
        if let Some(port) = self.0.ports.get_mut(port) {
            port.consumed = port.output.len().min(port.consumed.saturating_add(count));
        }
    }

    /// Returns true if the guest can receive input: both ends are open, and there is a receive buffer.
    pub fn has_room(&self, queues: &mut Queues, port: usize) -> bool {
        self.0.ports.get(port).is_some_and(|port| port.is_guest_open && !port.is_host_closed)
            && queues.has_request(receiveq(port))
    }

    /// Passes input to the guest. Returns the number of bytes that fitted into its receive buffers.
    pub fn give(&mut self, queues: &mut Queues, port: usize, mut bytes: &[u8]) -> usize {
        let mut given = 0;
        for _ in 0..QUEUE_SIZE {
            if bytes.is_empty() || !self.has_room(queues, port) {
                break;
            }
            let Some(mut request) = queues.pop(receiveq(port)) else { break };
            let count = request.writer.write(bytes).unwrap_or(0);
            queues.complete(request.head, u32::try_from(count).unwrap_or(u32::MAX));
            bytes = &bytes[count..];
            given += count;
        }
        given
    }

    /// Closes the host end of a port. The guest reads the remaining input and then end-of-file.
    pub fn close(&mut self, queues: &mut Queues, port: usize) {
        if let Some(state) = self.0.ports.get_mut(port)
            && !std::mem::replace(&mut state.is_host_closed, true)
            && state.is_ready
        {
            self.send(port, event::PORT_OPEN, 0);
        }
        self.flush(queues);
    }

    fn send(&mut self, port: usize, event: u16, value: u16) {
        let port = u32::try_from(port).expect("a console has few ports");
        self.0.pending.push_back(Control { port, event, value });
    }

    fn handle(&mut self, control: Control) {
        let Ok(number) = usize::try_from(control.port) else { return };
        match (control.event, self.0.ports.get_mut(number)) {
            (event::DEVICE_READY, _)
                if control.value == 1 && !std::mem::replace(&mut self.0.is_ready, true) =>
            {
                (0..self.0.ports.len()).for_each(|port| self.send(port, event::PORT_ADD, 1));
            }
            (event::PORT_READY, Some(port)) if control.value == 1 && !port.is_ready => {
                port.is_ready = true;
                if !port.is_host_closed {
                    self.send(number, event::PORT_OPEN, 1);
                }
            }
            (event::PORT_OPEN, Some(port)) => port.is_guest_open = control.value == 1,
            _ => {}
        }
    }

    /// Sends pending control messages, as far as the driver has provided buffers.
    fn flush(&mut self, queues: &mut Queues) {
        while let Some(control) = self.0.pending.front() {
            let Some(mut request) = queues.pop(CONTROL_RECEIVEQ) else { return };
            let count = request.writer.write(&control.bytes()).unwrap_or(0);
            queues.complete(request.head, u32::try_from(count).unwrap_or(0));
            self.0.pending.pop_front();
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
        // `cols` and `rows`, which are unused without `VIRTIO_CONSOLE_F_SIZE`, then `max_nr_ports`.
        let ports = u32::try_from(self.0.ports.len()).expect("a console has few ports");
        [[0; 4], ports.to_le_bytes()].concat()
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; (self.0.ports.len() + 1) * 2]
    }

    /// Processes control messages only. The owner of the console transfers the ports' data with the methods above.
    fn serve(&mut self, queues: &mut Queues) {
        // More than any driver sends at once.
        for _ in 0..MAX_CONTROL {
            let Some(mut request) = queues.pop(CONTROL_TRANSMITQ) else { break };
            let mut bytes = [0; 8];
            if request.reader.read_exact(&mut bytes).is_ok() {
                self.handle(Control::from_bytes(bytes));
            }
            queues.complete(request.head, 0);
        }
        self.flush(queues);
    }

    fn reset(&mut self) {
        for port in &mut self.0.ports {
            // A reset by the guest does not affect the host end.
            *port = Port { is_host_closed: port.is_host_closed, ..Port::default() };
        }
        self.0.is_ready = false;
        self.0.pending.clear();
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

/// Returns the index of a port's receive queue, which carries input to the guest.
fn receiveq(port: usize) -> usize {
    if port == 0 { 0 } else { 2 + 2 * port }
}

/// Returns the index of a port's transmit queue, which carries output of the guest.
fn transmitq(port: usize) -> usize {
    receiveq(port) + 1
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::Driver;
    use super::*;

    fn control(event: u16, port: u32, value: u16) -> [u8; 8] {
        Control { port, event, value }.bytes()
    }

    /// Creates a driver that is ready and has announced all ports as ready.
    fn ready_driver() -> (Console, Driver) {
        let mut console = Console::new(2);
        let mut driver = Driver::ready(&console);
        driver.submit(CONTROL_TRANSMITQ, &control(event::DEVICE_READY, 0, 1), 0);
        for port in 0..2 {
            driver.submit(CONTROL_TRANSMITQ, &control(event::PORT_READY, port, 1), 0);
        }
        driver.serve(&mut console);
        (console, driver)
    }

    fn receive(driver: &mut Driver, console: &mut Console) -> Vec<Control> {
        let buffers: Vec<_> = (0..4).map(|_| driver.submit(CONTROL_RECEIVEQ, &[], 16)).collect();
        driver.serve(console);
        buffers
            .into_iter()
            .map_while(|buffer| {
                let length = driver.next_completion(CONTROL_RECEIVEQ)?;
                Some(Control::from_bytes(<[u8; 8]>::try_from(driver.bytes(buffer, length)).unwrap()))
            })
            .collect()
    }

    fn open(driver: &mut Driver, console: &mut Console, port: u32) {
        driver.submit(CONTROL_TRANSMITQ, &control(event::PORT_OPEN, port, 1), 0);
        driver.serve(console);
    }

    fn serve_with<T>(
        driver: &Driver,
        console: &mut Console,
        work: impl FnOnce(&mut Console, &mut Queues) -> T,
    ) -> T {
        driver.transport.serve(console, work).expect("the driver is ready")
    }

    #[test]
    fn a_driver_learns_of_every_port_and_that_it_is_open() {
        let (mut console, mut driver) = ready_driver();
        let received = receive(&mut driver, &mut console);
        let expected: Vec<Control> =
            [(event::PORT_ADD, 0), (event::PORT_ADD, 1), (event::PORT_OPEN, 0), (event::PORT_OPEN, 1)]
                .map(|(event, port)| Control { port, event, value: 1 })
                .into();
        assert_eq!(received, expected);
    }

    #[test]
    fn output_is_kept_until_it_is_consumed() {
        let (mut console, mut driver) = ready_driver();
        driver.submit(transmitq(1), b"hello", 0);
        driver.submit(transmitq(1), b" world", 0);
        for expected in ["hello", "llo", " world"] {
            serve_with(&driver, &mut console, |console, queues| {
                assert_eq!(console.output(queues, 1), expected.as_bytes());
                console.consume(1, if expected == "hello" { 2 } else { expected.len() });
            });
        }
        assert_eq!(serve_with(&driver, &mut console, |console, queues| console.output(queues, 1).len()), 0);
    }

    #[test]
    fn input_needs_an_open_port_and_a_receive_buffer() {
        let (mut console, mut driver) = ready_driver();
        let give = |console: &mut Console, queues: &mut Queues| console.give(queues, 1, b"abcdef");
        let first = driver.submit(receiveq(1), &[], 4);
        assert_eq!(serve_with(&driver, &mut console, give), 0);
        open(&mut driver, &mut console, 1);
        assert_eq!(serve_with(&driver, &mut console, give), 4);
        assert_eq!(driver.next_completion(receiveq(1)), Some(4));
        assert_eq!(driver.bytes(first, 4), b"abcd");
        assert!(!serve_with(&driver, &mut console, |console, queues| console.has_room(queues, 1)));
    }

    #[test]
    fn the_guest_learns_that_the_host_end_was_closed() {
        let (mut console, mut driver) = ready_driver();
        receive(&mut driver, &mut console);
        serve_with(&driver, &mut console, |console, queues| console.close(queues, 1));
        let received = receive(&mut driver, &mut console);
        assert_eq!(received, [Control { port: 1, event: event::PORT_OPEN, value: 0 }]);
    }

    #[test]
    fn a_port_that_was_closed_before_the_driver_was_ready_never_opens() {
        let mut console = Console::new(1);
        let mut driver = Driver::ready(&console);
        serve_with(&driver, &mut console, |console, queues| console.close(queues, 0));
        driver.submit(CONTROL_TRANSMITQ, &control(event::PORT_READY, 0, 1), 0);
        assert_eq!(receive(&mut driver, &mut console), []);
    }

    proptest! {
        #[test]
        fn no_driver_can_make_many_messages_pending(
            messages in proptest::collection::vec(any::<(u8, u8, u8)>(), 0..200),
        ) {
            let (mut console, mut driver) = ready_driver();
            for (event, port, value) in messages {
                driver.submit(CONTROL_TRANSMITQ, &control(event.into(), port.into(), value.into()), 0);
                driver.serve(&mut console);
            }
            prop_assert!(console.0.pending.len() <= 4);
        }
    }
}
