//! The files of an event log: the one that is named, and the older one before it.

use std::fs::{self, File};
use std::io::{BufReader, Read};
use std::iter::Peekable;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::read::Reader;
use crate::protocol::record::{Header, Record, What};
use crate::run::event_log::file::older_name;

/// A log's files.
pub struct Files {
    pub header: Header,
    /// The files, the oldest first.
    pub parts: Vec<LogPart>,
    /// Message for the user if the file before the first of these is not there.
    pub missing: Option<String>,
}

pub struct LogPart<R: Read = BufReader<File>> {
    pub path: PathBuf,
    pub records: Peekable<Reader<R>>,
}

impl Files {
    /// Opens a log.
    pub fn open(path: &Path) -> Result<Self> {
        let (header, mut newest) = LogPart::open(path)?;
        let Some((number, before)) = newest.continued() else {
            return Ok(Self { header, parts: vec![newest], missing: None });
        };
        let path = older_path(path);
        let missing = |why: &str| {
            Some(format!("{}: {why}: {before} records before those here are not shown", path.display()))
        };
        let (part, missing) = match LogPart::open(&path) {
            Ok((same, mut older)) => {
                let is_previous = same == header && older.number().checked_add(1) == Some(number);
                if is_previous { (Some(older), None) } else { (None, missing("not the log's previous file")) }
            }
            Err(error) => (None, missing(&error.root_cause().to_string())),
        };
        Ok(Self { header, parts: part.into_iter().chain([newest]).collect(), missing })
    }
}

impl LogPart {
    fn open(path: &Path) -> Result<(Header, Self)> {
        let name = || path.display().to_string();
        let file = File::open(path).with_context(name)?;
        let (header, records) = Reader::new(BufReader::new(file)).with_context(name)?;
        Ok((header, Self { path: path.to_owned(), records: records.peekable() }))
    }

    /// Returns the file's number and the number of records before it. Returns `None` for a log's first file.
    fn continued(&mut self) -> Option<(u64, u64)> {
        match self.records.peek() {
            Some(Ok(Record { what: What::Continued { file, before }, .. })) => Some((*file, *before)),
            _ => None,
        }
    }

    fn number(&mut self) -> u64 {
        self.continued().map_or(1, |(number, _)| number)
    }
}

/// Returns the path of the older file. It is beside the file itself, wherever a link to that is.
fn older_path(path: &Path) -> PathBuf {
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    path.with_file_name(older_name(path.file_name().unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::record::LEAST_SIZE;
    use crate::run::event_log::EventLog;
    use std::os::unix::fs::symlink;

    /// Writes a log of so many records, the last of which is its end.
    fn write(path: &Path, records: u64) {
        let log = EventLog::create(path, LEAST_SIZE).unwrap();
        for number in 1..records {
            log.message(&number.to_string());
        }
        log.end(&"over").unwrap();
    }

    /// Returns the number of records that a log's files have, without those that say that it continues.
    fn count(files: Files) -> usize {
        let records = files.parts.into_iter().flat_map(|part| part.records).map(Result::unwrap);
        records.filter(|record| !matches!(record.what, What::Continued { .. })).count()
    }

    #[test]
    fn a_log_in_two_files_is_read_as_one() {
        let folder = tempfile::tempdir().unwrap();
        let (path, older) = (folder.path().join("log"), folder.path().join("log.1"));
        write(&path, 5000);
        assert!(older.exists());
        let link = folder.path().join("link");
        symlink("log", &link).unwrap();
        for path in [&path, &link] {
            let files = Files::open(path).unwrap();
            assert_eq!((files.parts.len(), files.missing.clone()), (2, None));
            assert_eq!(count(files), 5000);
        }
        assert_eq!(Files::open(&older).unwrap().parts.len(), 1, "the older one alone can be read too");
    }

    #[test]
    fn an_older_file_that_is_missing_or_of_another_run_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let (path, older) = (folder.path().join("log"), folder.path().join("log.1"));
        write(&path, 5000);
        let kept = fs::read(&older).unwrap();
        let missing = || Files::open(&path).unwrap().missing.unwrap();
        fs::remove_file(&older).unwrap();
        let begins = format!("{}: No such file or directory (os error 2): ", older.display());
        assert!(missing().starts_with(&begins), "{}", missing());
        assert!(missing().ends_with(" records before those here are not shown"));
        write(&older, 2);
        assert!(missing().contains(": not the log's previous file: "), "{}", missing());
        // The same file twice is no previous file either: it may change while it is read.
        fs::copy(&path, &older).unwrap();
        assert!(missing().contains(": not the log's previous file: "), "{}", missing());
        fs::write(&older, kept).unwrap();
        assert_eq!(Files::open(&path).unwrap().missing, None);
        // A new run's first file has nothing to do with what an earlier run has left.
        write(&path, 2);
        let files = Files::open(&path).unwrap();
        assert_eq!((files.parts.len(), files.missing), (1, None));
    }
}
