//! Input of the guest's serial port.

use devices::Serial;
use vmm_sys_util::eventfd::EventFd;

use super::input::Input;
use crate::protocol::ending::Ending;
use crate::run::event_loop::{Next, Ready, Subscriber, input_of};

/// Number of bytes that are read at a time: what the port holds. The rest is left to those who share the file.
const AT_ONCE: usize = 64;

/// Passes standard input on to a serial port.
pub struct ConsoleInput {
    input: Input,
    /// A regular file, which is ready at any time.
    is_file: bool,
    serial: Serial,
    /// Is signalled when the port has room again.
    room: EventFd,
}

impl ConsoleInput {
    /// Creates what passes on an input.
    pub fn new(input: Input, serial: Serial, room: EventFd) -> Self {
        Self { is_file: input.is_regular(), input, serial, room }
    }

    /// Gives the port what has been read. Unless a person types, more is wanted only when the port has taken all of it.
    fn give(&mut self) {
        while !self.input.waiting().is_empty() {
            match self.serial.receive(self.input.waiting()) {
                Ok(0) | Err(_) => break,
                Ok(taken) => self.input.consume(taken),
            }
        }
        self.input.set_guest_has_room(true);
    }
}

impl Subscriber for ConsoleInput {
    type End = Ending;

    fn files(&self) -> Vec<libc::pollfd> {
        let mut files = vec![input_of(&self.room)];
        files.extend(self.input.wanted.then(|| input_of(&self.input)));
        files
    }

    fn process(&mut self, ready: &Ready) -> Next<Ending> {
        if ready.has(&self.room) {
            // Non-blocking: an error means that it was read already.
            let _ = self.room.read();
        }
        let mut has_input = ready.has(&self.input);
        loop {
            if has_input && let Some(ending) = self.input.read(AT_ONCE) {
                return Next::End(ending);
            }
            self.give();
            has_input = self.is_file && self.input.wanted;
            if !has_input {
                return Next::Wait;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write, pipe, sink};
    use std::os::fd::OwnedFd;
    use std::thread;
    use std::time::Duration;

    use devices::PortDevice;

    use super::*;
    use crate::protocol::ending::Reporter;
    use crate::run::event_loop::{EventLoop, wait};

    fn event() -> EventFd {
        EventFd::new(libc::EFD_NONBLOCK).unwrap()
    }

    /// What passes on an input, and its port.
    fn console(input: Input) -> (ConsoleInput, Serial) {
        let room = event();
        let port = Serial::new(event(), room.try_clone().unwrap(), sink());
        (ConsoleInput::new(input, port.clone(), room), port)
    }

    /// Reads bytes of the port as a guest does.
    fn read(port: &Serial, count: usize) -> Vec<u8> {
        let byte = |register| {
            let mut byte = [0];
            port.read(register, &mut byte);
            byte[0]
        };
        let mut bytes = Vec::new();
        while bytes.len() < count {
            // The line status register says whether there is a byte.
            if byte(5) & 1 != 0 { bytes.push(byte(0)) } else { thread::yield_now() }
        }
        bytes
    }

    fn ten_turns(console: &mut ConsoleInput) -> Option<Ending> {
        (0..10).find_map(|_| {
            let ready = wait(console.files(), Some(Duration::ZERO)).unwrap();
            if let Next::End(ending) = console.process(&ready) { Some(ending) } else { None }
        })
    }

    #[test]
    fn a_guest_gets_all_bytes_of_files_and_pipes_in_their_order() {
        let typed: Vec<u8> = (0..10_000).map(|number: u32| number.to_le_bytes()[0]).collect();
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&typed).unwrap();
        let (pipe, mut writer) = pipe().unwrap();
        writer.write_all(&typed).unwrap();
        drop(writer);
        for input in [file.reopen().unwrap(), File::from(OwnedFd::from(pipe))] {
            let (console, port) = console(Input::file(input));
            let (reporter, endings) = Reporter::new().unwrap();
            let events = thread::spawn(|| {
                let mut events = EventLoop::default();
                events.add(endings);
                events.add(console);
                events.run().map(drop)
            });
            assert_eq!(read(&port, typed.len()), typed);
            reporter.report(Ending::Quit);
            events.join().unwrap().unwrap();
        }
    }

    #[test]
    fn what_the_guest_does_not_take_stays_in_the_pipe() {
        let (mut reader, mut writer) = pipe().unwrap();
        writer.write_all(&[b'x'; 1000]).unwrap();
        drop(writer);
        let (mut console, port) =
            console(Input::file(File::from(OwnedFd::from(reader.try_clone().unwrap()))));
        assert!(ten_turns(&mut console).is_none());
        let mut rest = Vec::new();
        reader.read_to_end(&mut rest).unwrap();
        assert!(rest.len() >= 1000 - 2 * AT_ONCE, "{}", rest.len());
        assert_eq!(read(&port, AT_ONCE), [b'x'; AT_ONCE]);
    }

    #[test]
    fn ctrl_a_x_ends_the_machine_of_a_guest_that_reads_nothing() {
        let (reader, mut writer) = pipe().unwrap();
        writer.write_all(&[b'x'; 300]).unwrap();
        writer.write_all(b"\x01x").unwrap();
        let (mut console, _port) = console(Input::terminal(File::from(OwnedFd::from(reader))));
        assert!(matches!(ten_turns(&mut console), Some(Ending::Quit)));
    }
}
