//! The event log of a run: everything that happens to the guest's counters, in a file.
//!
//! The file is what `tally run --pmu-log FILE` writes ([`EventLog`]) and `tally log --show FILE` reads
//! ([`crate::commands::log`]): a header, then records ([`crate::protocol::record`]), in the order in which they
//! happened. A guest decides how many there are, so the file has a maximum size, and one older [`mod@file`] is kept
//! beside it. Call chains of samples are not in it: those are perf's.

pub mod file;
mod queue;
mod write;

use std::fmt::{self, Display};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, clock_gettime};
use tally_machine::Journal;
use tally_machine::pmu::Pmu;
use vpmu::event::Selection;
use vpmu::journal::Entry;
use vpmu::notice::Notice;

use crate::host::printer;
use crate::protocol::record::{Header, Location, What};
use file::LogFile;
use queue::Queue;
use write::Writer;

/// The event log of a running machine. All threads write into it.
pub struct EventLog {
    path: PathBuf,
    queue: Queue<LogFile>,
}

/// A vCPU's access to the event log.
pub struct VcpuLog {
    log: Arc<EventLog>,
    vcpu: u8,
    /// The vCPU's PMU, which names events.
    pmu: Pmu,
}

/// Not all that was logged is in the file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path}: {what}: {cause}")]
pub struct Error {
    path: String,
    what: Missing,
    /// Error of the last write.
    cause: String,
}

/// What is missing in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Missing {
    /// Records that wait to be written.
    NotYet,
    /// This number of records, for good.
    Lost(u64),
}

impl Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotYet => write!(f, "the log cannot be written"),
            Self::Lost(1) => write!(f, "1 record is lost"),
            Self::Lost(records) => write!(f, "{records} records are lost"),
        }
    }
}

impl EventLog {
    /// Creates the file, or empties it. It gets no larger than `max_size`, which is
    /// [`LEAST_SIZE`](crate::protocol::record::LEAST_SIZE) or more. If it cannot be written, the user is told, and the
    /// guest runs all the same.
    pub fn create(path: &Path, max_size: u64) -> io::Result<Self> {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let header = Header { wall, monotonic: monotonic() };
        let queue = Queue::new(Writer::new(LogFile::create(path, max_size)?, header));
        let log = Self { path: path.to_owned(), queue };
        // Writes the header now: a reader finds a log from the beginning, and a full disk is reported at once.
        let _ = log.flush();
        Ok(log)
    }

    /// Starts the thread that begins the next file when one is full.
    pub fn start_thread(&self) -> io::Result<()> {
        self.with(|writer, _| writer.file().rotate_on_thread())
    }

    /// Logs a message about the counters that the user is shown.
    pub fn message(&self, text: &str) {
        self.add(Location::default(), [What::Message(text)]);
    }

    /// Logs the user's note, and flushes the log.
    pub fn note(&self, text: &str) -> Result<(), Error> {
        self.with(|writer, now| {
            writer.add(now, Location::default(), &What::Note(text));
            writer.flush(now)
        })
        .map_err(|lost| self.error(lost))
    }

    /// Writes all records to the file. Records lost since the last call are an error.
    pub fn flush(&self) -> Result<(), Error> {
        self.with(Writer::flush).map_err(|lost| self.error(lost))
    }

    /// Logs how the machine ended, flushes the log and closes it to further records. Any lost record is an error.
    pub fn end(&self, how: &dyn Display) -> Result<(), Error> {
        self.with(|writer, now| writer.end(now, how)).map_err(|lost| self.error(lost))
    }

    /// Flushes the log before the process ends suddenly, unless a thread uses it: that may be this one.
    pub fn flush_if_unlocked(&self) {
        self.queue.work_if_unlocked(|writer, now| {
            let _ = writer.flush(now);
        });
    }

    fn add<T: Display>(&self, location: Location, records: impl IntoIterator<Item = What<T>>) {
        self.tell(self.queue.add(location, records));
    }

    fn with<T>(&self, work: impl FnOnce(&mut Writer<LogFile>, Duration) -> T) -> T {
        let (result, failure) = self.queue.work(work);
        self.tell(failure);
        result
    }

    /// Tells the user that the log cannot be written.
    fn tell(&self, failure: Option<String>) {
        if let Some(cause) = failure {
            printer::say(&self.error(write::Failure { lost: 0, cause }));
        }
    }

    fn error(&self, write::Failure { lost, cause }: write::Failure) -> Error {
        let what = if lost == 0 { Missing::NotYet } else { Missing::Lost(lost) };
        Error { path: self.path.display().to_string(), what, cause }
    }
}

impl VcpuLog {
    /// Returns a vCPU's access to the log.
    pub fn new(log: Arc<EventLog>, vcpu: u8, pmu: Pmu) -> Self {
        Self { log, vcpu, pmu }
    }
}

impl Journal for VcpuLog {
    fn append(&self, rip: u64, entries: &[Entry]) {
        let location = Location { vcpu: Some(self.vcpu), rip: Some(rip) };
        let words = |selection| self.pmu.describe(selection);
        self.log.add(location, entries.iter().map(|entry| what(entry, &words)));
    }
}

/// Returns a journal entry as a record's content.
fn what(entry: &Entry, words: &impl Fn(Selection) -> String) -> What<String> {
    match *entry {
        Entry::Configured { counter, selection: Some(event), interrupts } => {
            What::Configured { counter: number(counter), interrupts, event: words(event) }
        }
        Entry::Configured { counter, selection: None, .. } => What::Unconfigured { counter: number(counter) },
        Entry::Overflowed { counters, interrupts } => What::Overflowed { counters, interrupts },
        Entry::Branched { counters, handler } => What::Message(branched(counters, handler)),
        Entry::Noticed(Notice::Starved { counter, selection, .. }) => {
            What::Starved { counter: number(counter), event: words(selection) }
        }
        Entry::Noticed(Notice::Recovered { counter, selection, missed }) => {
            What::Recovered { counter: number(counter), missed, event: words(selection) }
        }
        Entry::Noticed(Notice::GivenUp { counter, selection, missed }) => {
            What::GivenUp { counter: number(counter), missed, event: words(selection) }
        }
        Entry::Noticed(ref other) => What::Message(other.to_string()),
    }
}

/// Describes an overflow for event-based branches.
fn branched(counters: u64, handler: Option<u64>) -> String {
    match handler {
        Some(handler) => {
            format!("overflow for a branch, counters {counters:#x}: the program goes on at {handler:#x}")
        }
        None => format!("overflow for a branch, counters {counters:#x}: the program is not branched now"),
    }
}

fn number(counter: usize) -> u8 {
    u8::try_from(counter).expect("a vCPU has at most 64 counters")
}

/// Returns the host's `CLOCK_MONOTONIC`, with which other programs can compare.
fn monotonic() -> Duration {
    clock_gettime(ClockId::Monotonic).try_into().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::log::read::Reader;
    use crate::protocol::record::LEAST_SIZE;
    use std::fs::{self, File};

    /// Returns the records of a file as text, without their times.
    fn shown(path: &Path) -> Vec<String> {
        let (_, records) = Reader::new(File::open(path).unwrap()).unwrap();
        records.map(|record| record.unwrap()).map(|record| record.what.to_string()).collect()
    }

    #[test]
    fn a_note_is_in_the_file_at_once_and_a_message_when_it_is_flushed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let log = EventLog::create(&path, LEAST_SIZE).unwrap();
        assert_eq!(shown(&path), [""; 0], "it is a log from the first moment on");
        log.note("the experiment begins").unwrap();
        log.message("RDPMC became RDMSR");
        assert_eq!(shown(&path), ["note: the experiment begins"]);
        log.flush().unwrap();
        assert_eq!(shown(&path), ["note: the experiment begins", "RDPMC became RDMSR"]);
        log.end(&"the guest reset").unwrap();
        assert_eq!(shown(&path).last().unwrap(), "end: the guest reset");
        assert_eq!(
            log.note("late").unwrap_err().to_string(),
            format!("{}: 1 record is lost: the machine has ended", path.display())
        );
    }

    #[test]
    fn a_full_disk_is_an_error_at_each_flush_and_at_the_end() {
        let log = EventLog::create(Path::new("/dev/full"), LEAST_SIZE).unwrap();
        let full = "No space left on device (os error 28)";
        for _ in 0..2 {
            log.message("something");
            let error = log.flush().unwrap_err().to_string();
            assert_eq!(error, format!("/dev/full: the log cannot be written: {full}"));
        }
        let error = log.end(&"over").unwrap_err().to_string();
        assert_eq!(error, format!("/dev/full: 2 records are lost: {full}"));
    }

    #[test]
    fn a_guest_that_causes_many_events_does_not_fill_the_disk() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let log = EventLog::create(&path, LEAST_SIZE).unwrap();
        let records = 20_000_u64;
        for number in 0..records {
            log.message(&number.to_string());
        }
        log.end(&"over").unwrap();
        let files = [path.with_extension("1"), path];
        for file in &files {
            let size = fs::metadata(file).unwrap().len();
            assert!(size <= LEAST_SIZE, "{}: {size}", file.display());
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), files.len());
        let kept: Vec<u64> =
            files.iter().flat_map(|file| shown(file)).filter_map(|text| text.parse().ok()).collect();
        let first = kept[0];
        assert!(first > 0, "the oldest are gone");
        assert_eq!(kept, (first..records).collect::<Vec<_>>(), "and none of the others");
    }

    #[test]
    fn a_log_that_cannot_begin_a_new_file_says_so_and_counts_what_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        fs::create_dir(path.with_extension("1")).unwrap();
        let log = EventLog::create(&path, LEAST_SIZE).unwrap();
        for number in 0..20_000 {
            log.message(&number.to_string());
        }
        let error = log.end(&"over").unwrap_err().to_string();
        let why = "it is full and cannot be renamed to log.1: Is a directory (os error 21)";
        assert!(error.ends_with(&format!(" records are lost: {why}")), "{error}");
        assert!(fs::metadata(&path).unwrap().len() <= LEAST_SIZE);
    }

    #[test]
    fn events_are_named_as_the_guests_perf_does() {
        use vpmu::event::{Event, Filter, GenericEvent, Scope};
        let words = |selection: Selection| selection.to_string();
        let selection = Some(Selection {
            event: Event::Generic(GenericEvent::Instructions),
            filter: Filter::User,
            scope: Scope::Guest,
        });
        let configured = what(&Entry::Configured { counter: 3, selection, interrupts: true }, &words);
        assert_eq!(configured.to_string(), "counter 3 counts instructions:u, and interrupts");
        let unconfigured = what(&Entry::Configured { counter: 3, selection: None, interrupts: true }, &words);
        assert_eq!(unconfigured.to_string(), "counter 3 counts nothing");
        let told = what(&Entry::Noticed(Notice::RateFloor { period: 10_000, times: 1 }), &words);
        assert!(told.to_string().starts_with("rate floor: "), "{told}");
    }
}
