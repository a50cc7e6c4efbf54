//! A disk that fills up, and is given room again.

use std::io::Write;

use super::*;
use crate::commands::log::read::Reader;
use crate::protocol::record::Record;

/// A disk with room for this many bytes.
#[derive(Default)]
struct Disk {
    bytes: Vec<u8>,
    /// Files that were full.
    older: Vec<Vec<u8>>,
    max_size: Option<u64>,
    room: usize,
    writes: u32,
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.writes += 1;
        let count = bytes.len().min(self.room);
        if count == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.room -= count;
        self.bytes.extend(&bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Output for Disk {
    fn max_size(&self) -> Option<u64> {
        self.max_size
    }

    fn begin_next(&mut self) -> io::Result<()> {
        self.older.push(mem::take(&mut self.bytes));
        Ok(())
    }
}

fn writer(room: usize) -> Writer<Disk> {
    let header = Header { wall: Duration::ZERO, monotonic: Duration::ZERO };
    Writer::new(Disk { room, ..Disk::default() }, header)
}

fn ms(time: u64) -> Duration {
    Duration::from_millis(time)
}

fn add(writer: &mut Writer<Disk>, time: u64, number: u64) {
    let location = Location { vcpu: Some(0), rip: Some(number) };
    write_if_due(writer, time);
    writer.add(ms(time), location, &What::<&str>::Overflowed { counters: 1, interrupts: true });
    write_if_due(writer, time);
}

fn write_if_due(writer: &mut Writer<Disk>, time: u64) {
    if writer.is_due(ms(time)) {
        writer.write(ms(time));
    }
}

fn read(writer: &Writer<Disk>) -> Vec<Record<String>> {
    let (_, reader) = Reader::new(&*writer.file.bytes).unwrap();
    reader.collect::<Result<_, _>>().unwrap()
}

/// Returns the numbers of the records on the disk, and between them how many are lost.
fn numbers(writer: &Writer<Disk>) -> Vec<Result<u64, u64>> {
    let number = |record: Record<String>| match record.what {
        What::Overflowed { .. } => Some(Ok(record.location.rip.unwrap())),
        What::Lost(records) => Some(Err(records)),
        _ => None,
    };
    read(writer).into_iter().filter_map(number).collect()
}

const PLENTY: usize = 1 << 30;

#[test]
fn records_wait_until_the_buffer_is_full_or_flushed() {
    let mut writer = writer(PLENTY);
    add(&mut writer, 0, 0);
    assert_eq!(writer.file.writes, 0);
    assert_eq!(writer.flush(ms(0)), Ok(()));
    assert_eq!(numbers(&writer), [Ok(0)]);
    for number in 1..10_000 {
        add(&mut writer, 0, number);
    }
    let in_file = numbers(&writer).len();
    assert!((1000..10_000).contains(&in_file) && writer.file.writes < 10, "{in_file}");
    assert_eq!(writer.end(ms(0), &"over"), Ok(()));
    assert_eq!(numbers(&writer), (0..10_000).map(Ok).collect::<Vec<_>>());
    assert_eq!(read(&writer).last().unwrap().what, What::End("over".to_owned()));
}

#[test]
fn a_disk_that_gets_room_in_time_loses_no_record() {
    let mut writer = writer(100);
    for number in 0..100 {
        add(&mut writer, number, number);
    }
    let failure = Failure { lost: 0, cause: "no storage space".to_owned() };
    assert_eq!(writer.flush(ms(100)), Err(failure));
    writer.file.room = PLENTY;
    assert_eq!(writer.flush(ms(101)), Ok(()));
    assert_eq!(numbers(&writer), (0..100).map(Ok).collect::<Vec<_>>());
    assert_eq!(writer.end(ms(102), &"over"), Ok(()));
}

#[test]
fn records_without_room_are_counted_reported_and_logged() {
    let mut writer = writer(100);
    for number in 0..10_000 {
        add(&mut writer, 0, number);
    }
    let kept = u64::try_from(record_count(&writer)).unwrap();
    let lost = 10_000 - kept;
    let failure = Failure { lost, cause: "no storage space".to_owned() };
    assert_eq!(writer.flush(ms(1)), Err(failure.clone()));
    assert_eq!(writer.flush(ms(2)), Err(Failure { lost: 0, ..failure.clone() }), "that was told");
    writer.file.room = PLENTY;
    add(&mut writer, 3, 0);
    assert_eq!(
        writer.flush(ms(4)),
        Err(Failure { lost: 1, ..failure.clone() }),
        "one more, before the pause is over"
    );
    add(&mut writer, 200, 10_001);
    assert_eq!(writer.flush(ms(201)), Ok(()));
    let expected: Vec<_> = (0..kept).map(Ok).chain([Err(lost + 1), Ok(10_001)]).collect();
    assert_eq!(numbers(&writer), expected);
    assert_eq!(writer.end(ms(202), &"over"), Err(Failure { lost: lost + 1, ..failure }));
}

/// Returns the number of records on the disk or in the buffer.
fn record_count(writer: &Writer<Disk>) -> usize {
    let unwritten = record::unwritten(&writer.buffer, writer.first, writer.written);
    let on_disk = writer.file.bytes.len().saturating_sub(Header::SIZE) / 29;
    usize::try_from(unwritten).unwrap() + on_disk
}

#[test]
fn records_in_the_buffer_at_the_end_of_a_full_disk_are_lost_too() {
    let mut writer = writer(0);
    for number in 0..3 {
        add(&mut writer, 0, number);
    }
    let failure = Failure { lost: 3, cause: "no storage space".to_owned() };
    assert_eq!(writer.end(ms(1), &"over"), Err(failure));
    let mut torn = self::writer(Header::SIZE + 40);
    for number in 0..3 {
        add(&mut torn, 0, number);
    }
    assert_eq!(torn.end(ms(1), &"over").unwrap_err().lost, 2, "one is there, and a part of another");
}

#[test]
fn a_full_disk_is_reported_once_and_not_written_to_all_the_time() {
    let mut writer = writer(0);
    assert_eq!(writer.take_first_failure(), None);
    for number in 0..100_000 {
        add(&mut writer, 0, number);
    }
    assert_eq!(writer.file.writes, 1);
    assert_eq!(writer.take_first_failure(), Some("no storage space".to_owned()));
    assert_eq!(writer.take_first_failure(), None);
    add(&mut writer, 100, 0);
    assert_eq!(writer.file.writes, 2);
}

#[test]
fn a_note_for_a_machine_that_has_ended_is_lost() {
    let mut writer = writer(PLENTY);
    assert_eq!(writer.end(ms(0), &"over"), Ok(()));
    writer.add(ms(1), Location::default(), &What::Note("late"));
    let failure = Failure { lost: 1, cause: "the machine has ended".to_owned() };
    assert_eq!(writer.flush(ms(1)), Err(failure));
    assert_eq!(writer.take_first_failure(), None, "what vCPUs still do is no news");
}

#[test]
fn each_file_says_how_many_records_are_in_those_before_it() {
    let mut writer = writer(PLENTY);
    writer.file.max_size = Some(LEAST_SIZE);
    for number in 0..10_000 {
        add(&mut writer, 0, number);
        if number % 1000 == 0 {
            // Files change only between records, wherever a flush comes.
            assert_eq!(writer.flush(ms(0)), Ok(()));
        }
    }
    assert_eq!(writer.end(ms(1), &"over"), Ok(()));
    let Disk { bytes, older, .. } = &writer.file;
    assert!(older.len() > 2, "{}", older.len());
    let (mut number, mut before) = (1, 0);
    for file in older.iter().chain([bytes]) {
        assert!(file.len() as u64 <= LEAST_SIZE, "{}", file.len());
        let (header, records) = Reader::new(&**file).unwrap();
        assert_eq!(header, writer.header);
        let mut records = records.map(Result::unwrap).peekable();
        let continued = What::Continued { file: number, before };
        let begins = records.next_if(|record| record.what == continued);
        assert_eq!(begins.is_some(), number > 1);
        before += records.count() as u64;
        number += 1;
    }
    assert_eq!(before, 10_001, "all of them and the end");
}

#[test]
fn a_write_that_fails_does_not_tear_a_record_between_two_files() {
    let mut writer = writer(usize::try_from(LEAST_SIZE / 2).unwrap() + 10);
    writer.file.max_size = Some(LEAST_SIZE);
    for number in 0..10_000 {
        add(&mut writer, 0, number);
    }
    assert!(writer.written > 0 && writer.lost.all > 0);
    writer.file.room = PLENTY;
    assert_eq!(writer.flush(ms(200)).unwrap_err().lost, writer.lost.all);
    for number in 0..10_000 {
        add(&mut writer, 300, number);
    }
    assert_eq!(writer.end(ms(301), &"over").unwrap_err().lost, writer.lost.all);
    for file in writer.file.older.iter().chain([&writer.file.bytes]) {
        let (_, mut records) = Reader::new(&**file).unwrap();
        assert!(records.all(|record| record.is_ok()));
    }
}
