//! What is in the file: a header, then records. All numbers are little-endian.
//!
//! | bytes | the header |
//! |---|---|
//! | 8 | `TALLYLOG` |
//! | 4 | its version, 1 |
//! | 8, 8 | when it began, in nanoseconds: since 1970, and by the host's `CLOCK_MONOTONIC` |
//!
//! | bytes | a record |
//! |---|---|
//! | 2 | how many bytes follow |
//! | 1 | its kind: which [`What`] it is |
//! | 1 | what there is of its [`Place`]: 1 for a vCPU, 2 for a RIP, 3 for both |
//! | 8 | nanoseconds since the log began |
//! | 1, 8 | the vCPU, the RIP |
//! | the rest | what happened: its numbers, then its words |

use std::fmt::Display;
use std::io::Write;
use std::time::Duration;

const MAGIC: [u8; 8] = *b"TALLYLOG";
const VERSION: u32 = 1;
/// How many bytes of words a record has at most; what is longer is cut.
pub const LONGEST_TEXT: usize = 8 << 10;
/// The bytes that say how long a record is.
pub const LENGTH: usize = 2;

const VCPU: u8 = 1;
const RIP: u8 = 2;

/// What is known of a log as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// When it began, since 1970.
    pub wall: Duration,
    /// When it began, by the host's `CLOCK_MONOTONIC`.
    pub monotonic: Duration,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record<T> {
    /// When, since the log began.
    pub time: Duration,
    /// Where.
    pub place: Place,
    /// What.
    pub what: What<T>,
}

/// Where something happened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Place {
    /// On which vCPU, if on one.
    pub vcpu: Option<u8>,
    /// Where in the guest, if it has to do with that.
    pub rip: Option<u64>,
}

/// What happened. Words and events are a `T`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What<T> {
    /// What Tally says of the counters.
    Said(T),
    /// What the user said, by `tally log PID TEXT`.
    Note(T),
    /// So many records are missing here, because they could not be written.
    Lost(u64),
    /// The machine has ended; nothing follows.
    End(T),
    /// The guest has told a counter what to count.
    Configured { counter: u8, interrupts: bool, event: T },
    /// The guest has told a counter to count nothing.
    Emptied { counter: u8 },
    /// This set of counters has overflowed.
    Overflowed { counters: u64, interrupts: bool },
    /// A counter has lost its hardware.
    Starved { counter: u8, event: T },
    /// It has some again.
    Recovered { counter: u8, missed: Duration, event: T },
    /// The guest has no use for it any more.
    GivenUp { counter: u8, missed: Duration, event: T },
}

/// Bytes that are no header, or no record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Nonsense {
    /// Another kind of file.
    #[error("not an event log of `tally run --pmu-log`")]
    NotALog,
    /// A log of a Tally to come.
    #[error("an event log of version {0}: this program reads version {VERSION}")]
    Version(u32),
    /// A record that cannot be.
    #[error("the record is damaged")]
    Record,
}

impl Header {
    /// How many bytes it has.
    pub const SIZE: usize = MAGIC.len() + 4 + 8 + 8;

    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let times = [self.wall, self.monotonic].map(|time| nanoseconds(time).to_le_bytes());
        [&MAGIC[..], &VERSION.to_le_bytes(), times.as_flattened()].concat()
    }

    /// Reads them.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<Self, Nonsense> {
        let mut rest = Rest(bytes);
        if rest.take() != Ok(MAGIC) {
            return Err(Nonsense::NotALog);
        }
        match u32::from_le_bytes(rest.take()?) {
            VERSION => Ok(Self { wall: rest.time()?, monotonic: rest.time()? }),
            other => Err(Nonsense::Version(other)),
        }
    }
}

impl<T: Display> What<T> {
    /// Appends the record that says so.
    pub fn encode(&self, time: Duration, place: Place, to: &mut Vec<u8>) {
        let begin = to.len();
        let parts = place.vcpu.map_or(0, |_| VCPU) | place.rip.map_or(0, |_| RIP);
        to.extend([0, 0, self.kind(), parts]);
        to.extend(nanoseconds(time).to_le_bytes());
        to.extend(place.vcpu);
        to.extend(place.rip.map(u64::to_le_bytes).iter().flatten());
        match self {
            Self::Said(words) | Self::Note(words) | Self::End(words) => text(to, words),
            Self::Lost(records) => to.extend(records.to_le_bytes()),
            Self::Configured { counter, interrupts, event } => {
                to.extend([*counter, u8::from(*interrupts)]);
                text(to, event);
            }
            Self::Emptied { counter } => to.push(*counter),
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
            Self::Said(_) => 1,
            Self::Note(_) => 2,
            Self::Lost(_) => 3,
            Self::End(_) => 4,
            Self::Configured { .. } => 5,
            Self::Emptied { .. } => 6,
            Self::Overflowed { .. } => 7,
            Self::Starved { .. } => 8,
            Self::Recovered { .. } => 9,
            Self::GivenUp { .. } => 10,
        }
    }
}

impl Record<String> {
    /// Reads what follows a record's length.
    pub fn decode(bytes: &[u8]) -> Result<Self, Nonsense> {
        let mut rest = Rest(bytes);
        let [kind, parts] = rest.take()?;
        let time = rest.time()?;
        let vcpu = (parts & VCPU != 0).then(|| rest.byte()).transpose()?;
        let rip = (parts & RIP != 0).then(|| rest.number()).transpose()?;
        let what = match kind {
            1 => What::Said(rest.text()?),
            2 => What::Note(rest.text()?),
            3 => What::Lost(rest.number()?),
            4 => What::End(rest.text()?),
            5 => What::Configured { counter: rest.byte()?, interrupts: rest.flag()?, event: rest.text()? },
            6 => What::Emptied { counter: rest.byte()? },
            7 => What::Overflowed { counters: rest.number()?, interrupts: rest.flag()? },
            8 => What::Starved { counter: rest.byte()?, event: rest.text()? },
            9 => What::Recovered { counter: rest.byte()?, missed: rest.time()?, event: rest.text()? },
            10 => What::GivenUp { counter: rest.byte()?, missed: rest.time()?, event: rest.text()? },
            _ => return Err(Nonsense::Record),
        };
        let is_whole = rest.0.is_empty() && parts & !(VCPU | RIP) == 0;
        is_whole.then_some(Self { time, place: Place { vcpu, rip }, what }).ok_or(Nonsense::Record)
    }
}

/// How many records begin in these bytes, of which the first begins at `first`, and end behind `written`.
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
    if to.len() - begin > LONGEST_TEXT {
        let is_inside = |byte: u8| byte & 0xc0 == 0x80;
        let end = (begin..=begin + LONGEST_TEXT).rev().find(|at| !is_inside(to[*at]));
        to.truncate(end.unwrap_or(begin));
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Bytes that are still to be read.
struct Rest<'a>(&'a [u8]);

impl Rest<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Nonsense> {
        let (first, rest) = self.0.split_first_chunk().ok_or(Nonsense::Record)?;
        self.0 = rest;
        Ok(*first)
    }

    fn byte(&mut self) -> Result<u8, Nonsense> {
        self.take().map(|[byte]| byte)
    }

    fn number(&mut self) -> Result<u64, Nonsense> {
        self.take().map(u64::from_le_bytes)
    }

    fn time(&mut self) -> Result<Duration, Nonsense> {
        self.number().map(Duration::from_nanos)
    }

    fn flag(&mut self) -> Result<bool, Nonsense> {
        match self.byte()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Nonsense::Record),
        }
    }

    fn text(&mut self) -> Result<String, Nonsense> {
        str::from_utf8(std::mem::take(&mut self.0)).map(str::to_owned).map_err(|_| Nonsense::Record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn time() -> impl Strategy<Value = Duration> {
        any::<u64>().prop_map(Duration::from_nanos)
    }

    fn place() -> impl Strategy<Value = Place> {
        any::<(Option<u8>, Option<u64>)>().prop_map(|(vcpu, rip)| Place { vcpu, rip })
    }

    fn what() -> impl Strategy<Value = What<String>> {
        let words = || any::<String>();
        let gap = || (any::<u8>(), time(), words());
        prop_oneof![
            words().prop_map(What::Said),
            words().prop_map(What::Note),
            words().prop_map(What::End),
            any::<u64>().prop_map(What::Lost),
            (any::<(u8, bool)>(), words()).prop_map(|((counter, interrupts), event)| What::Configured {
                counter,
                interrupts,
                event
            }),
            any::<u8>().prop_map(|counter| What::Emptied { counter }),
            any::<(u64, bool)>().prop_map(|(counters, interrupts)| What::Overflowed { counters, interrupts }),
            (any::<u8>(), words()).prop_map(|(counter, event)| What::Starved { counter, event }),
            gap().prop_map(|(counter, missed, event)| What::Recovered { counter, missed, event }),
            gap().prop_map(|(counter, missed, event)| What::GivenUp { counter, missed, event }),
        ]
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(time in time(), place in place(), what in what()) {
            let mut bytes = vec![7];
            what.encode(time, place, &mut bytes);
            let length = usize::from(u16::from_le_bytes([bytes[1], bytes[2]]));
            prop_assert_eq!(length, bytes.len() - 1 - LENGTH);
            prop_assert_eq!(Record::decode(&bytes[1 + LENGTH..]), Ok(Record { time, place, what }));
        }

        #[test]
        fn a_record_that_lacks_bytes_is_nonsense(counters in any::<u64>(), place in place(), cut in 0..20_usize) {
            let mut bytes = Vec::new();
            What::<&str>::Overflowed { counters, interrupts: true }.encode(Duration::ZERO, place, &mut bytes);
            let end = bytes.len() - 1;
            prop_assert_eq!(Record::decode(&bytes[LENGTH..end.min(LENGTH + cut)]), Err(Nonsense::Record));
        }

        #[test]
        fn any_bytes_can_be_looked_at(bytes in any::<Vec<u8>>()) {
            // What matters is that it comes back.
            let decoded = Record::decode(&bytes);
            prop_assert!(decoded.is_ok() || decoded == Err(Nonsense::Record));
        }
    }

    #[test]
    fn long_words_are_cut_between_characters() {
        let words = format!("x{}", "é".repeat(LONGEST_TEXT));
        let mut bytes = Vec::new();
        What::Note(&words).encode(Duration::ZERO, Place::default(), &mut bytes);
        let record = Record::decode(&bytes[LENGTH..]).unwrap();
        assert_eq!(record.what, What::Note(words[..LONGEST_TEXT - 1].to_owned()));
    }

    #[test]
    fn a_header_says_when_the_log_began() {
        let header = Header { wall: Duration::from_nanos(1 << 60), monotonic: Duration::from_secs(9) };
        let mut bytes: [u8; Header::SIZE] = header.encode().try_into().unwrap();
        assert_eq!(Header::decode(&bytes), Ok(header));
        bytes[8] = 2;
        assert_eq!(Header::decode(&bytes), Err(Nonsense::Version(2)));
        bytes[0] = b'x';
        assert_eq!(Header::decode(&bytes), Err(Nonsense::NotALog));
    }
}
