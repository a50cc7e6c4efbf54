//! Reads an event log: all whole records come out, whatever follows them.

use std::io::{self, Read};

use crate::protocol::record::{DecodeError, Header, LENGTH, Record};

/// Iterator over the records of a log, in their order. An error is the last item.
pub struct Reader<R> {
    file: R,
    /// Offset of the next record; none after the end or an error.
    at: Option<u64>,
}

/// Reading cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("cannot be read")]
    File(#[from] io::Error),
    #[error("empty: nothing has been written to it yet")]
    Empty,
    /// The file has no header that can be read.
    #[error(transparent)]
    Header(DecodeError),
    #[error("the log breaks off in the record at byte {0}: it was cut, or is being written")]
    Cut(u64),
    #[error("the log is damaged from byte {0} on")]
    Damaged(u64),
}

impl<R: Read> Reader<R> {
    pub fn new(mut file: R) -> Result<(Header, Self), ReadError> {
        let bytes = read(&mut file, Header::SIZE)?;
        if bytes.is_empty() {
            return Err(ReadError::Empty);
        }
        let bytes = bytes.first_chunk().ok_or(ReadError::Header(DecodeError::NotALog))?;
        let header = Header::decode(bytes).map_err(ReadError::Header)?;
        Ok((header, Self { file, at: Some(Header::SIZE as u64) }))
    }

    fn read(&mut self, at: u64) -> Result<Option<(Record<String>, u64)>, ReadError> {
        let length = read(&mut self.file, LENGTH)?;
        if length.is_empty() {
            return Ok(None);
        }
        let length = u16::from_le_bytes(*length.first_chunk().ok_or(ReadError::Cut(at))?);
        let bytes = read(&mut self.file, length.into())?;
        if bytes.len() < length.into() {
            return Err(ReadError::Cut(at));
        }
        let record = Record::decode(&bytes).map_err(|_| ReadError::Damaged(at))?;
        Ok(Some((record, at + LENGTH as u64 + u64::from(length))))
    }
}

impl<R: Read> Iterator for Reader<R> {
    type Item = Result<Record<String>, ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        let at = self.at.take()?;
        match self.read(at) {
            Ok(Some((record, next))) => {
                self.at = Some(next);
                Some(Ok(record))
            }
            Ok(None) => None,
            Err(error) => Some(Err(error)),
        }
    }
}

/// Reads this many bytes, or fewer at the end of the file.
fn read(file: &mut impl Read, count: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(count);
    file.take(count as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::record::{Location, What};
    use proptest::prelude::*;
    use std::time::Duration;

    const NOTES: u64 = 3;

    /// A log of some notes.
    fn log() -> Vec<u8> {
        let header = Header { wall: Duration::ZERO, monotonic: Duration::ZERO };
        let mut bytes = header.encode();
        for number in 0..NOTES {
            What::Note(number).encode(Duration::from_nanos(number), Location::default(), &mut bytes);
        }
        bytes
    }

    /// How many records come out of these bytes, and what is then said.
    fn read(bytes: &[u8]) -> (u64, Option<String>) {
        match Reader::new(bytes) {
            Ok((_, reader)) => reader.fold((0, None), |(count, said), record| match record {
                Ok(_) => (count + 1, said),
                Err(error) => (count, Some(error.to_string())),
            }),
            Err(error) => (0, Some(error.to_string())),
        }
    }

    #[test]
    fn a_log_is_read_to_its_end() {
        assert_eq!(read(&log()), (NOTES, None));
        assert_eq!(read(&log()[..Header::SIZE]), (0, None));
    }

    #[test]
    fn what_is_before_a_cut_is_read_and_the_cut_is_told() {
        let log = log();
        let record = (log.len() - Header::SIZE) / usize::try_from(NOTES).unwrap();
        for cut in 1..record {
            let (count, said) = read(&log[..log.len() - cut]);
            let at = log.len() - record;
            assert_eq!(count, NOTES - 1);
            assert!(said.unwrap().starts_with(&format!("the log breaks off in the record at byte {at}:")));
        }
    }

    #[test]
    fn what_is_before_damage_is_read_and_the_damage_is_told() {
        let mut log = log();
        let record = (log.len() - Header::SIZE) / usize::try_from(NOTES).unwrap();
        log[Header::SIZE + record + LENGTH] = 0xee;
        let at = Header::SIZE + record;
        assert_eq!(read(&log), (1, Some(format!("the log is damaged from byte {at} on"))));
    }

    #[test]
    fn what_is_no_log_is_told_so() {
        assert_eq!(read(b""), (0, Some("empty: nothing has been written to it yet".to_owned())));
        for bytes in [&b"TALLY"[..], b"vCPU 0: counter 0 (rc0:u) is starved: the host has no hardware for it"]
        {
            assert_eq!(read(bytes), (0, Some("not an event log of `tally run --pmu-log`".to_owned())));
        }
    }

    proptest! {
        #[test]
        fn any_file_can_be_looked_at(bytes in any::<Vec<u8>>()) {
            let (count, said) = read(&[log(), bytes.clone()].concat());
            prop_assert!(count >= NOTES && (said.is_some() || count > NOTES || bytes.is_empty()));
        }
    }
}
