//! Reads files that the user names: directly into the guest's memory, or into Tally's memory up to a maximum size.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::Path;

use vm_memory::{Bytes, GuestAddress};

use super::error::{LoadError, Problem};
use crate::memory::GuestRam;

/// A file that the user has named, open for reading.
pub struct UserFile<'a> {
    path: &'a Path,
    pub file: File,
    /// Length of the file when it was opened.
    pub len: u64,
}

impl<'a> UserFile<'a> {
    /// Opens a file. Returns an error if it is not a regular file.
    pub fn open(path: &'a Path) -> Result<Self, LoadError> {
        let open = || {
            let metadata = std::fs::metadata(path)?;
            if !metadata.is_file() {
                return Err(Problem::NotAFile);
            }
            Ok((File::open(path)?, metadata.len()))
        };
        let (file, len) = open().map_err(|problem| problem.with(path))?;
        Ok(Self { path, file, len })
    }

    /// Reads the whole file into the guest's memory at `at`. The caller has checked that the file fits there.
    pub fn place(mut self, ram: &GuestRam, at: u64) -> Result<(), LoadError> {
        let mut place = || {
            let len = usize::try_from(self.len).map_err(io::Error::other)?;
            ram.mapped
                .read_exact_volatile_from(GuestAddress(at), &mut self.file, len)
                .map_err(io::Error::other)?;
            Ok(())
        };
        place().map_err(|problem: Problem| problem.with(self.path))
    }

    /// Returns an error that names this file.
    pub fn error(&self, problem: Problem) -> LoadError {
        problem.with(self.path)
    }
}

/// Reads a range of a file. Returns an error if it is larger than [`super::LARGEST`] or ends after the file does.
pub fn read_range(file: &mut (impl Read + Seek), range: Range<u64>) -> Result<Vec<u8>, Problem> {
    let len = range.end.saturating_sub(range.start);
    if len > super::LARGEST {
        return Err(Problem::TooLarge { size: len, limit: super::LARGEST });
    }
    let mut bytes = vec![0; usize::try_from(len).map_err(io::Error::other)?];
    file.seek(SeekFrom::Start(range.start))?;
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}
