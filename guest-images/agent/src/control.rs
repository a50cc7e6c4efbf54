//! The agent's end of the control port.

use std::fs::File;
use std::io::{Error, Read, Result, Write};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::slice;
use std::thread;

use guest_agent::protocol::{Decoder, Message, Start, ToGuest, ToHost};
use libc::{POLLHUP, POLLIN, POLLOUT, pollfd};

use crate::flow::{State, is_peer_closed, try_io};
use crate::ports::POLL_INTERVAL;
use crate::sys;

/// Maximum number of bytes read at once. Nothing is read while there are unsent messages, so those are limited too.
const CHUNK: usize = 4 << 10;

/// The control port: messages from and to the host.
pub struct Control {
    port: Rc<File>,
    state: State,
    decoder: Decoder<ToGuest>,
    unsent: Vec<u8>,
}

impl Control {
    /// Creates the message stream of this port.
    pub fn new(port: &Rc<File>) -> Self {
        Self { port: Rc::clone(port), state: State::Open, decoder: Decoder::new(), unsent: Vec::new() }
    }

    /// Announces the agent and waits for the command to run.
    pub fn start(&mut self) -> Result<Start> {
        self.send(&ToHost::Ready)?;
        loop {
            let polled = self.wait()?;
            match self.next()? {
                Some(ToGuest::Start(start)) => return Ok(start),
                Some(_) => return Err(Error::other("the host's first message is not Start")),
                // Before the host has opened the port, poll returns the same as after the host has closed it.
                None if polled.revents & POLLHUP != 0 => {
                    thread::sleep(POLL_INTERVAL);
                    self.state = State::Open;
                }
                None => {}
            }
        }
    }

    /// Queues a message. It is sent as soon as the port accepts it.
    pub fn send(&mut self, message: &ToHost) -> Result<()> {
        self.unsent.extend(message.encode().map_err(Error::other)?);
        Ok(())
    }

    /// Waits until all messages have been sent.
    pub fn flush(&mut self) -> Result<()> {
        while self.state == State::Open && !self.unsent.is_empty() {
            self.wait()?;
        }
        Ok(())
    }

    /// Returns the descriptor and events to poll for. The descriptor is -1 once the host has closed the port.
    pub fn poll_fd(&self) -> pollfd {
        let fd = if self.state == State::Open { self.port.as_raw_fd() } else { -1 };
        pollfd { fd, events: if self.unsent.is_empty() { POLLIN } else { POLLOUT }, revents: 0 }
    }

    /// Reads or writes, as the result of poll allows.
    pub fn handle(&mut self, polled: pollfd) -> Result<()> {
        if polled.revents == 0 {
            return Ok(());
        }
        if is_peer_closed(polled) {
            self.state = State::Ended;
        } else if polled.events == POLLOUT {
            if let Some(length) = try_io(|| (&*self.port).write(&self.unsent))? {
                self.unsent.drain(..length);
            }
        } else {
            let mut chunk = [0; CHUNK];
            match try_io(|| (&*self.port).read(&mut chunk))? {
                Some(0) => self.state = State::Ended,
                Some(length) => self.decoder.feed(&chunk[..length]),
                None => {}
            }
        }
        Ok(())
    }

    /// Returns the next complete message, if there is one.
    pub fn next(&mut self) -> Result<Option<ToGuest>> {
        self.decoder.next().map_err(Error::other)
    }

    fn wait(&mut self) -> Result<pollfd> {
        let mut waiting = self.poll_fd();
        sys::poll(slice::from_mut(&mut waiting))?;
        self.handle(waiting)?;
        Ok(waiting)
    }
}
