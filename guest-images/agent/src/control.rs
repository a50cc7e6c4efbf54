//! The agent's end of the control port.

use std::fs::File;
use std::io::{Error, Read, Result, Write};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::slice;
use std::thread;

use guest_agent::protocol::{Decoder, Message, Start, ToGuest, ToHost};
use libc::{POLLHUP, POLLIN, POLLOUT, pollfd};

use crate::flow::{State, is_cut_off, now};
use crate::ports::PAUSE;
use crate::sys;

/// How much is read at once. Answers are sent before more is read, so they never pile up.
const CHUNK: usize = 4 << 10;

/// Messages from the host, and to it.
pub struct Control {
    port: Rc<File>,
    state: State,
    arrived: Decoder<ToGuest>,
    unsent: Vec<u8>,
}

impl Control {
    /// The messages of this port.
    pub fn new(port: &Rc<File>) -> Self {
        Self { port: Rc::clone(port), state: State::Open, arrived: Decoder::new(), unsent: Vec::new() }
    }

    /// Says that the agent is there, and waits for what to run.
    pub fn start(&mut self) -> Result<Start> {
        self.send(&ToHost::Ready)?;
        loop {
            let happened = self.wait()?;
            match self.next()? {
                Some(ToGuest::Start(start)) => return Ok(start),
                Some(_) => return Err(Error::other("the host must say first what to run")),
                // Until the host opens the port, it looks as if it had closed it.
                None if happened.revents & POLLHUP != 0 => {
                    thread::sleep(PAUSE);
                    self.state = State::Open;
                }
                None => {}
            }
        }
    }

    /// Sends a message, as soon as the port takes it.
    pub fn send(&mut self, message: &ToHost) -> Result<()> {
        self.unsent.extend(message.encode().map_err(Error::other)?);
        Ok(())
    }

    /// Waits until everything has been sent.
    pub fn flush(&mut self) -> Result<()> {
        while self.state == State::Open && !self.unsent.is_empty() {
            self.wait()?;
        }
        Ok(())
    }

    /// What it waits for: nothing, once the host has closed the port.
    pub fn waits_for(&self) -> pollfd {
        let fd = if self.state == State::Open { self.port.as_raw_fd() } else { -1 };
        pollfd { fd, events: if self.unsent.is_empty() { POLLIN } else { POLLOUT }, revents: 0 }
    }

    /// Goes on, if what it waited for has happened.
    pub fn go_on(&mut self, happened: pollfd) -> Result<()> {
        if happened.revents == 0 {
            return Ok(());
        }
        if is_cut_off(happened) {
            self.state = State::Over;
        } else if happened.events == POLLOUT {
            if let Some(length) = now(|| (&*self.port).write(&self.unsent))? {
                self.unsent.drain(..length);
            }
        } else {
            let mut chunk = [0; CHUNK];
            match now(|| (&*self.port).read(&mut chunk))? {
                Some(0) => self.state = State::Over,
                Some(length) => self.arrived.feed(&chunk[..length]),
                None => {}
            }
        }
        Ok(())
    }

    /// The next message that has arrived.
    pub fn next(&mut self) -> Result<Option<ToGuest>> {
        self.arrived.next().map_err(Error::other)
    }

    fn wait(&mut self) -> Result<pollfd> {
        let mut waiting = self.waits_for();
        sys::poll(slice::from_mut(&mut waiting))?;
        self.go_on(waiting)?;
        Ok(waiting)
    }
}
