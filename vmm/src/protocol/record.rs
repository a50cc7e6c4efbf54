//! The format of an event log: a header, then records. All numbers are little-endian.
//!
//! | bytes | the header |
//! |---|---|
//! | 8 | `TALLYLOG` |
//! | 4 | version of the format, 1 |
//! | 8, 8 | time of the log's beginning, in nanoseconds: since 1970, and by the host's `CLOCK_MONOTONIC` |
//!
//! | bytes | a record |
//! |---|---|
//! | 2 | number of the bytes that follow |
//! | 1 | kind of the record: which [`What`] it is |
//! | 1 | parts of the [`Location`] that are present: 1 for a vCPU, 2 for a RIP, 3 for both |
//! | 8 | nanoseconds since the log's beginning |
//! | 1, 8 | vCPU, RIP |
//! | the rest | content: numbers, then text |

use std::fmt::Display;
use std::io::Write;
use std::time::Duration;

const MAGIC: [u8; 8] = *b"TALLYLOG";
const VERSION: u32 = 1;
/// Least maximum size of a file: it has room for the largest buffer of its writer, and for its beginning.
pub const LEAST_SIZE: u64 = 128 << 10;
/// Maximum size of a record's text; a longer text is cut.
pub const MAX_TEXT: usize = 8 << 10;
/// Size of a record's length.
pub const LENGTH: usize = 2;
/// Maximum size of a record without its text: length, kind, parts, time, vCPU, RIP, and two numbers.
pub const MAX_NUMBERS: usize = LENGTH + 2 + 8 + 1 + 8 + 16;

const VCPU: u8 = 1;
const RIP: u8 = 2;

/// Header of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Time of the log's beginning, since 1970.
    pub wall: Duration,
    /// Time of the log's beginning by the host's `CLOCK_MONOTONIC`.
    pub monotonic: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record<T> {
    /// Time since the log's beginning.
    pub time: Duration,
    pub location: Location,
    pub what: What<T>,
}

/// Location of an event.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Location {
    /// vCPU, for events of a vCPU.
    pub vcpu: Option<u8>,
    /// Guest's RIP, for events of the guest.
    pub rip: Option<u64>,
}

/// An event, with texts and perf events' names of type `T`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What<T> {
    /// Tally's message about the counters.
    Message(T),
    /// The user's note, written by `tally log VM TEXT`.
    Note(T),
    /// This number of records is missing here, because they could not be written.
    Lost(u64),
    /// The machine has ended in this way; no record follows.
    End(T),
    /// The log continues here: this is its file of this number, from 1 on, and so many records are in those before it.
    Continued {
        file: u64,
        before: u64,
    },
    Configured {
        counter: u8,
        interrupts: bool,
        event: T,
    },
    /// The guest has configured a counter to count nothing.
    Unconfigured {
        counter: u8,
    },
    /// These counters have overflowed (a mask).
    Overflowed {
        counters: u64,
        interrupts: bool,
    },
    /// A counter has lost its hardware.
    Starved {
        counter: u8,
        event: T,
    },
    /// A starved counter has hardware again.
    Recovered {
        counter: u8,
        missed: Duration,
        event: T,
    },
    /// The guest does not use a starved counter any more.
    GivenUp {
        counter: u8,
        missed: Duration,
        event: T,
    },
}

/// Bytes that are no header or no record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("not an event log of `tally run --pmu-log`")]
    NotALog,
    #[error("an event log of version {0}: this program reads version {VERSION}")]
    Version(u32),
    #[error("the record is damaged")]
    Record,
}

impl Header {
    pub const SIZE: usize = MAGIC.len() + 4 + 8 + 8;

    pub fn encode(&self) -> Vec<u8> {
        let times = [self.wall, self.monotonic].map(|time| nanoseconds(time).to_le_bytes());
        [&MAGIC[..], &VERSION.to_le_bytes(), times.as_flattened()].concat()
    }

    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<Self, DecodeError> {
        let mut rest = Rest(bytes);
        if rest.take() != Ok(MAGIC) {
            return Err(DecodeError::NotALog);
        }
        match u32::from_le_bytes(rest.take()?) {
            VERSION => Ok(Self { wall: rest.time()?, monotonic: rest.time()? }),
            other => Err(DecodeError::Version(other)),
        }
    }
}

impl<T: Display> What<T> {
    /// Appends a record with this content.
    pub fn encode(&self, time: Duration, location: Location, to: &mut Vec<u8>) {
        let begin = to.len();
        let parts = location.vcpu.map_or(0, |_| VCPU) | location.rip.map_or(0, |_| RIP);
        to.extend([0, 0, self.kind(), parts]);
        to.extend(nanoseconds(time).to_le_bytes());
        to.extend(location.vcpu);
        to.extend(location.rip.map(u64::to_le_bytes).iter().flatten());
        match self {
            Self::Message(words) | Self::Note(words) | Self::End(words) => text(to, words),
            Self::Lost(records) => to.extend(records.to_le_bytes()),
            Self::Continued { file, before } => {
                to.extend([file, before].map(|number| number.to_le_bytes()).as_flattened());
            }
            Self::Configured { counter, interrupts, event } => {
                to.extend([*counter, u8::from(*interrupts)]);
                text(to, event);
            }
            Self::Unconfigured { counter } => to.push(*counter),
            Self::Overflowed { counters, interrupts } => {
                to.extend(counters.to_le_bytes());
                to.push(u8::from(*interrupts));
            }
            Self::Starved { counter, event } => {
                to.push(*counter);
                text(to, event);
            }
            Self::Recovered { counter, missed, event } | Self::GivenUp { counter, missed, event } => {
                to.push(*counter);
                to.extend(nanoseconds(*missed).to_le_bytes());
                text(to, event);
            }
        }
        let length = u16::try_from(to.len() - begin - LENGTH).expect("words are cut");
        to[begin..begin + LENGTH].copy_from_slice(&length.to_le_bytes());
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Message(_) => 1,
            Self::Note(_) => 2,
            Self::Lost(_) => 3,
            Self::End(_) => 4,
            Self::Configured { .. } => 5,
            Self::Unconfigured { .. } => 6,
            Self::Overflowed { .. } => 7,
            Self::Starved { .. } => 8,
            Self::Recovered { .. } => 9,
            Self::GivenUp { .. } => 10,
            Self::Continued { .. } => 11,
        }
    }
}

impl Record<String> {
    /// Decodes a record, without its length.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut rest = Rest(bytes);
        let [kind, parts] = rest.take()?;
        let time = rest.time()?;
        let vcpu = (parts & VCPU != 0).then(|| rest.byte()).transpose()?;
        let rip = (parts & RIP != 0).then(|| rest.number()).transpose()?;
        let what = match kind {
            1 => What::Message(rest.text()?),
            2 => What::Note(rest.text()?),
            3 => What::Lost(rest.number()?),
            4 => What::End(rest.text()?),
            5 => What::Configured { counter: rest.byte()?, interrupts: rest.flag()?, event: rest.text()? },
            6 => What::Unconfigured { counter: rest.byte()? },
            7 => What::Overflowed { counters: rest.number()?, interrupts: rest.flag()? },
            8 => What::Starved { counter: rest.byte()?, event: rest.text()? },
            9 => What::Recovered { counter: rest.byte()?, missed: rest.time()?, event: rest.text()? },
            10 => What::GivenUp { counter: rest.byte()?, missed: rest.time()?, event: rest.text()? },
            11 => What::Continued { file: rest.number()?, before: rest.number()? },
            _ => return Err(DecodeError::Record),
        };
        let is_whole = rest.0.is_empty() && parts & !(VCPU | RIP) == 0;
        is_whole.then_some(Self { time, location: Location { vcpu, rip }, what }).ok_or(DecodeError::Record)
    }
}

/// Returns the number of records in these bytes that end after `written`. The first record begins at `first`.
pub fn unwritten(bytes: &[u8], first: usize, written: usize) -> u64 {
    let (mut at, mut count) = (first, 0);
    while let Some(length) = bytes.get(at..).and_then(|rest| rest.first_chunk()) {
        at += LENGTH + usize::from(u16::from_le_bytes(*length));
        count += u64::from(at > written);
    }
    count
}

fn text(to: &mut Vec<u8>, words: &impl Display) {
    let begin = to.len();
    write!(to, "{words}").expect("memory takes everything");
    if to.len() - begin > MAX_TEXT {
        let is_inside = |byte: u8| byte & 0xc0 == 0x80;
        let end = (begin..=begin + MAX_TEXT).rev().find(|at| !is_inside(to[*at]));
        to.truncate(end.unwrap_or(begin));
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The bytes that are still to be decoded.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (first, rest) = self.0.split_first_chunk().ok_or(DecodeError::Record)?;
        self.0 = rest;
        Ok(*first)
    }

    fn byte(&mut self) -> Result<u8, DecodeError> {
        self.take().map(|[byte]| byte)
    }

    fn number(&mut self) -> Result<u64, DecodeError> {
        self.take().map(u64::from_le_bytes)
    }

    fn time(&mut self) -> Result<Duration, DecodeError> {
        self.number().map(Duration::from_nanos)
    }

    fn flag(&mut self) -> Result<bool, DecodeError> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(DecodeError::Record),
        }
    }

    fn text(&mut self) -> Result<String, DecodeError> {
        str::from_utf8(std::mem::take(&mut self.0)).map(str::to_owned).map_err(|_| DecodeError::Record)
    }
}

/// Any records, for property tests.
#[cfg(test)]
pub mod testing {
    use super::*;
    use proptest::prelude::*;

    pub fn time() -> impl Strategy<Value = Duration> {
        any::<u64>().prop_map(Duration::from_nanos)
    }

    pub fn location() -> impl Strategy<Value = Location> {
        any::<(Option<u8>, Option<u64>)>().prop_map(|(vcpu, rip)| Location { vcpu, rip })
    }

    pub fn what() -> impl Strategy<Value = What<String>> {
        let words = || any::<String>();
        let gap = || (any::<u8>(), time(), words());
        prop_oneof![
            words().prop_map(What::Message),
            words().prop_map(What::Note),
            words().prop_map(What::End),
            any::<u64>().prop_map(What::Lost),
            any::<(u64, u64)>().prop_map(|(file, before)| What::Continued { file, before }),
            (any::<(u8, bool)>(), words()).prop_map(|((counter, interrupts), event)| What::Configured {
                counter,
                interrupts,
                event
            }),
            any::<u8>().prop_map(|counter| What::Unconfigured { counter }),
            any::<(u64, bool)>().prop_map(|(counters, interrupts)| What::Overflowed { counters, interrupts }),
            (any::<u8>(), words()).prop_map(|(counter, event)| What::Starved { counter, event }),
            gap().prop_map(|(counter, missed, event)| What::Recovered { counter, missed, event }),
            gap().prop_map(|(counter, missed, event)| What::GivenUp { counter, missed, event }),
        ]
    }

    pub fn any_record() -> impl Strategy<Value = Record<String>> {
        (time(), location(), what()).prop_map(|(time, location, what)| Record { time, location, what })
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{location, time, what};
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(time in time(), location in location(), what in what()) {
            let mut bytes = vec![7];
            what.encode(time, location, &mut bytes);
            let length = usize::from(u16::from_le_bytes([bytes[1], bytes[2]]));
            prop_assert_eq!(length, bytes.len() - 1 - LENGTH);
            prop_assert_eq!(Record::decode(&bytes[1 + LENGTH..]), Ok(Record { time, location, what }));
        }

        #[test]
        fn a_record_that_lacks_bytes_is_nonsense(counters in any::<u64>(), location in location(), cut in 0..20_usize) {
            let mut bytes = Vec::new();
            What::<&str>::Overflowed { counters, interrupts: true }.encode(Duration::ZERO, location, &mut bytes);
            let end = bytes.len() - 1;
            prop_assert_eq!(Record::decode(&bytes[LENGTH..end.min(LENGTH + cut)]), Err(DecodeError::Record));
        }

        #[test]
        fn any_bytes_can_be_looked_at(bytes in any::<Vec<u8>>()) {
            // What matters is that it comes back.
            let decoded = Record::decode(&bytes);
            prop_assert!(decoded.is_ok() || decoded == Err(DecodeError::Record));
        }
    }

    #[test]
    fn long_words_are_cut_between_characters() {
        let words = format!("x{}", "é".repeat(MAX_TEXT));
        let mut bytes = Vec::new();
        What::Note(&words).encode(Duration::ZERO, Location::default(), &mut bytes);
        let record = Record::decode(&bytes[LENGTH..]).unwrap();
        assert_eq!(record.what, What::Note(words[..MAX_TEXT - 1].to_owned()));
    }

    #[test]
    fn a_header_says_when_the_log_began() {
        let header = Header { wall: Duration::from_nanos(1 << 60), monotonic: Duration::from_secs(9) };
        let mut bytes: [u8; Header::SIZE] = header.encode().try_into().unwrap();
        assert_eq!(Header::decode(&bytes), Ok(header));
        bytes[8] = 2;
        assert_eq!(Header::decode(&bytes), Err(DecodeError::Version(2)));
        bytes[0] = b'x';
        assert_eq!(Header::decode(&bytes), Err(DecodeError::NotALog));
    }
}
