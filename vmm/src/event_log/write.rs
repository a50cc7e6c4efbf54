//! Writing the log: records wait in a buffer until there are many, somebody asks, or the machine ends.
//!
//! What cannot be written goes on to wait while the buffer has room, so that the file never has a torn record in its
//! middle; records that find no room are lost, and counted. How many is said where they are missing, once writing works again.

use std::fmt::Display;
use std::io::{self, Write};
use std::mem;
use std::time::Duration;

use super::record::{self, Header, Place, What};

/// When so many bytes wait, they are written.
const FULL: usize = 64 << 10;
/// How long nobody tries again to write what could not be written, unless somebody asks for it.
const PAUSE: Duration = Duration::from_millis(100);

/// What takes records and writes them to a file.
pub struct Writer<W> {
    file: W,
    /// What waits; the first so many bytes of it are written.
    buffer: Vec<u8>,
    written: usize,
    /// Where in it the first record begins: there is a header before the very first.
    first: usize,
    lost: Lost,
    trouble: Trouble,
    ended: bool,
}

/// Records that found no room.
#[derive(Debug, Default)]
struct Lost {
    /// Since writing last worked.
    here: u64,
    /// Since somebody was last told.
    untold: u64,
    /// Ever.
    all: u64,
}

/// How writing goes wrong.
#[derive(Debug, Default)]
struct Trouble {
    /// What the host said last.
    cause: Option<String>,
    /// While it goes on: when to try again.
    again: Option<Duration>,
    told: bool,
}

/// Not everything is in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// How many records are lost. If none, what waits may still get there.
    pub lost: u64,
    /// What the host said.
    pub cause: String,
}

impl<W: Write> Writer<W> {
    /// One that begins with a header.
    pub fn new(file: W, header: &Header) -> Self {
        let buffer = header.encode();
        let first = buffer.len();
        let (lost, trouble) = (Lost::default(), Trouble::default());
        Self { file, buffer, written: 0, first, lost, trouble, ended: false }
    }

    /// Takes a record.
    pub fn add<T: Display>(&mut self, time: Duration, place: Place, what: &What<T>) {
        if self.ended {
            self.lost.untold += 1;
            return;
        }
        if self.buffer.len() >= FULL {
            self.write_again(time);
        }
        if self.buffer.len() >= FULL {
            self.lost.here += 1;
            self.lost.untold += 1;
            self.lost.all += 1;
            return;
        }
        self.tell_of_gap(time);
        what.encode(time, place, &mut self.buffer);
        if self.buffer.len() >= FULL {
            self.write_again(time);
        }
    }

    /// Writes what waits. Records that were lost since this was last asked are a failure, too.
    pub fn flush(&mut self, time: Duration) -> Result<(), Failure> {
        if self.write(time) {
            self.tell_of_gap(time);
            self.write(time);
        }
        let lost = mem::take(&mut self.lost.untold);
        self.outcome(lost)
    }

    /// Writes what waits, and a last record, and takes no more. All records that are not in the file are a failure.
    pub fn end(&mut self, time: Duration, how: &dyn Display) -> Result<(), Failure> {
        if mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        let outcome = if self.write(time) {
            self.tell_of_gap(time);
            What::End(how).encode(time, Place::default(), &mut self.buffer);
            self.write(time);
            self.outcome(self.lost.all)
        } else {
            self.outcome(self.lost.all + record::unwritten(&self.buffer, self.first, self.written))
        };
        // From here on that is why a record is lost, and it is no news.
        self.trouble = Trouble { cause: Some("the machine has ended".to_owned()), again: None, told: true };
        self.lost.untold = 0;
        outcome
    }

    /// Why writing failed, when it does so for the first time.
    pub fn take_first_failure(&mut self) -> Option<String> {
        let cause = self.trouble.cause.as_ref().filter(|_| !self.trouble.told)?;
        self.trouble.told = true;
        Some(cause.clone())
    }

    fn outcome(&self, lost: u64) -> Result<(), Failure> {
        let waits = self.trouble.again.is_some();
        match &self.trouble.cause {
            Some(cause) if lost > 0 || waits => Err(Failure { lost, cause: cause.clone() }),
            _ => Ok(()),
        }
    }

    /// Says how many records are missing here, if any are.
    fn tell_of_gap(&mut self, time: Duration) {
        let lost = mem::take(&mut self.lost.here);
        if lost > 0 {
            What::<&str>::Lost(lost).encode(time, Place::default(), &mut self.buffer);
        }
    }

    fn write_again(&mut self, time: Duration) {
        if self.trouble.again.is_none_or(|again| time >= again) {
            self.write(time);
        }
    }

    /// Says whether all of it is written.
    fn write(&mut self, time: Duration) -> bool {
        while self.written < self.buffer.len() {
            match self.file.write(&self.buffer[self.written..]) {
                Ok(0) => return self.failed(time, &io::ErrorKind::WriteZero.into()),
                Ok(count) => self.written += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return self.failed(time, &error),
            }
        }
        self.buffer.clear();
        (self.written, self.first) = (0, 0);
        self.trouble.again = None;
        true
    }

    fn failed(&mut self, time: Duration, error: &io::Error) -> bool {
        self.trouble.cause = Some(error.to_string());
        self.trouble.again = Some(time + PAUSE);
        false
    }
}

#[cfg(test)]
mod tests;
