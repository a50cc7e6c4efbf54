//! Writes the event log. Records wait in a buffer until it is full ([`Writer::is_due`]), somebody flushes it, or the
//! machine ends.
//!
//! Records that cannot be written stay in the buffer while it has room, so that no record in the middle of the file is
//! torn. Records for which there is no room are lost and counted. When writing works again, the file says where how
//! many are missing.
//!
//! A file that could become larger than its maximum with the next write is kept as the older one. Its successor begins
//! with the same header and a [`What::Continued`]. If that fails, it is a failed write.

use std::fmt::Display;
use std::io;
use std::mem;
use std::time::Duration;

use super::file::Output;
use crate::protocol::record::{self, Header, LEAST_SIZE, Location, MAX_NUMBERS, MAX_TEXT, What};

/// Size of the buffer: it is written when it has this many bytes.
const FULL: usize = 64 << 10;
/// Maximum size of the buffer: it is less than full, and then has a record more, with one about a gap before it.
const MAX_BUFFER: usize = FULL + MAX_TEXT + 2 * MAX_NUMBERS;
const _: () = assert!((MAX_BUFFER + Header::SIZE + MAX_NUMBERS) as u64 <= LEAST_SIZE);
/// Time from a failed write to the next attempt, unless somebody flushes the log.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// Buffers records and writes them to a file.
pub struct Writer<W> {
    file: W,
    header: Header,
    /// Number of the file, from 1 on.
    number: u64,
    size: u64,
    /// Number of records in this file and those before it, without [`What::Continued`].
    records: u64,
    /// Number of records in the buffer.
    waiting: u64,
    /// Records that wait; the first `written` bytes are in the file.
    buffer: Vec<u8>,
    written: usize,
    /// Offset of the first record in the buffer: at the beginning, the header is before it.
    first: usize,
    lost: Lost,
    error: WriteError,
    ended: bool,
}

/// Records that were added while another thread had the writer.
#[derive(Debug, Default)]
pub struct Records {
    bytes: Vec<u8>,
    number: u64,
}

impl Records {
    /// Returns the buffer, for one record to be added.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        self.number += 1;
        &mut self.bytes
    }

    /// Returns true if there is no room for more.
    pub fn are_full(&self) -> bool {
        self.bytes.len() >= FULL
    }
}

/// Numbers of records that found no room.
#[derive(Debug, Default)]
struct Lost {
    /// Since the last record that is in the buffer.
    here: u64,
    /// Since the last flush reported them.
    unreported: u64,
    /// Since the beginning.
    all: u64,
}

/// State of failed writes.
#[derive(Debug, Default)]
struct WriteError {
    cause: Option<String>,
    /// Time of the next attempt, while writing fails.
    again: Option<Duration>,
    told: bool,
}

/// Not all records are in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// Number of lost records. If it is zero, the buffer may still be written later.
    pub lost: u64,
    pub cause: String,
}

impl<W: Output> Writer<W> {
    /// Creates a writer, whose file begins with a header.
    pub fn new(file: W, header: Header) -> Self {
        let buffer = header.encode();
        let first = buffer.len();
        Self {
            file,
            header,
            number: 1,
            size: 0,
            records: 0,
            waiting: 0,
            buffer,
            written: 0,
            first,
            lost: Lost::default(),
            error: WriteError::default(),
            ended: false,
        }
    }

    pub fn file(&mut self) -> &mut W {
        &mut self.file
    }

    /// Adds a record, if there is room.
    pub fn add<T: Display>(&mut self, time: Duration, location: Location, what: &What<T>) {
        if let Some(buffer) = self.buffer(time) {
            what.encode(time, location, buffer);
        }
    }

    /// Returns the buffer, for one record of this time to be added. If there is no room, it is lost.
    pub fn buffer(&mut self, time: Duration) -> Option<&mut Vec<u8>> {
        if self.ended {
            self.lost.unreported += 1;
            return None;
        }
        if self.is_full() {
            self.lose(1);
            return None;
        }
        self.add_gap(time);
        self.waiting += 1;
        Some(&mut self.buffer)
    }

    /// Adds the records of others since this time, if there is room.
    pub fn add_all(&mut self, since: Duration, records: &Records) {
        let Records { bytes, number } = records;
        if self.ended {
            self.lost.unreported += number;
        } else if self.buffer.len() + MAX_NUMBERS + bytes.len() > MAX_BUFFER {
            self.lose(*number);
        } else if *number > 0 {
            self.add_gap(since);
            self.buffer.extend(bytes);
            self.waiting += number;
        }
    }

    /// Returns true if the buffer is full.
    pub fn is_full(&self) -> bool {
        self.buffer.len() >= FULL
    }

    /// Returns true if the buffer is full and is to be written at this time.
    pub fn is_due(&self, now: Duration) -> bool {
        self.is_full() && self.error.again.is_none_or(|again| now >= again)
    }

    fn lose(&mut self, records: u64) {
        self.lost.here += records;
        self.lost.unreported += records;
        self.lost.all += records;
    }

    /// Writes the buffer. Records lost since the last flush are a failure too.
    pub fn flush(&mut self, time: Duration) -> Result<(), Failure> {
        if self.write(time) {
            self.add_gap(time);
            self.write(time);
        }
        let lost = mem::take(&mut self.lost.unreported);
        self.outcome(lost)
    }

    /// Writes the buffer and a last record, and refuses further records. All records that are not in the file are a
    /// failure.
    pub fn end(&mut self, time: Duration, how: &dyn Display) -> Result<(), Failure> {
        if mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        let outcome = if self.write(time) {
            self.add_gap(time);
            self.append(time, Location::default(), &What::End(how));
            self.write(time);
            self.outcome(self.lost.all)
        } else {
            self.outcome(self.lost.all + record::unwritten(&self.buffer, self.first, self.written))
        };
        // From here on, this is why a record is lost. Nobody needs to be told.
        self.error = WriteError { cause: Some("the machine has ended".to_owned()), again: None, told: true };
        self.lost.unreported = 0;
        outcome
    }

    /// Returns why writing failed, at the first failure only.
    pub fn take_first_failure(&mut self) -> Option<String> {
        let cause = self.error.cause.as_ref().filter(|_| !self.error.told)?;
        self.error.told = true;
        Some(cause.clone())
    }

    fn outcome(&self, lost: u64) -> Result<(), Failure> {
        let waits = self.error.again.is_some();
        match &self.error.cause {
            Some(cause) if lost > 0 || waits => Err(Failure { lost, cause: cause.clone() }),
            _ => Ok(()),
        }
    }

    /// Adds a record that says how many records are missing here, if any are.
    fn add_gap(&mut self, time: Duration) {
        let lost = mem::take(&mut self.lost.here);
        if lost > 0 {
            self.append(time, Location::default(), &What::<&str>::Lost(lost));
        }
    }

    fn append<T: Display>(&mut self, time: Duration, location: Location, what: &What<T>) {
        what.encode(time, location, &mut self.buffer);
        self.waiting += 1;
    }

    /// Writes the buffer. Returns true if all of it is written.
    pub fn write(&mut self, time: Duration) -> bool {
        if self.is_file_full()
            && let Err(error) = self.begin_next(time)
        {
            return self.failed(time, &error);
        }
        while self.written < self.buffer.len() {
            match self.file.write(&self.buffer[self.written..]) {
                Ok(0) => return self.failed(time, &io::ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.written += count;
                    self.size += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return self.failed(time, &error),
            }
        }
        self.buffer.clear();
        (self.written, self.first) = (0, 0);
        self.records += mem::take(&mut self.waiting);
        self.error.again = None;
        true
    }

    /// Returns true if the buffer has to go to the next file. A buffer that is partly written stays in its file.
    fn is_file_full(&self) -> bool {
        let has_room = |max| self.size + MAX_BUFFER as u64 <= max;
        let starts = self.written == 0 && !self.buffer.is_empty();
        starts && !self.file.max_size().is_none_or(has_room)
    }

    fn begin_next(&mut self, time: Duration) -> io::Result<()> {
        self.file.begin_next()?;
        self.number += 1;
        self.size = 0;
        let mut beginning = self.header.encode();
        let continued = What::<&str>::Continued { file: self.number, before: self.records };
        continued.encode(time, Location::default(), &mut beginning);
        self.first = beginning.len();
        self.buffer.splice(..0, beginning);
        Ok(())
    }

    fn failed(&mut self, time: Duration, error: &io::Error) -> bool {
        self.error.cause = Some(error.to_string());
        self.error.again = Some(time + RETRY_AFTER);
        false
    }
}

#[cfg(test)]
mod tests;
