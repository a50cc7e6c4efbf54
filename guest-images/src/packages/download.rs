//! Downloads files that a signed index names.
//!
//! A file arrives under the name of its hash, and gets its own name when it is complete and the hash is right. After a
//! break the rest of it is fetched, also by a later process. No more is written than the index says.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, Write};
use std::path::{Path, PathBuf};

use super::listed::{Listed, hash};
use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::http::{Client, Failure, Url};

/// Number of times that a download is begun or continued.
const ATTEMPTS: u32 = 4;
/// Maximum size of an `InRelease`. Debian's have 200 kB.
const MAX_INDEX: u64 = 4 << 20;
const BLOCK: usize = 1 << 16;

/// Downloads into a cache.
pub struct Downloads {
    client: Client,
    arriving: PathBuf,
}

impl Downloads {
    pub fn new(cache: &Cache, client: Client) -> Result<Self> {
        Ok(Self { client, arriving: cache.folder("downloads/arriving")? })
    }

    /// Returns a text of unknown size, which has to be verified.
    pub fn text(&self, uri: &str) -> Result<Vec<u8>> {
        let mut attempt = 1;
        loop {
            match self.read_text(uri) {
                Ok(text) => return Ok(text),
                Err(failure) if failure.is_interruption() && attempt < ATTEMPTS => attempt += 1,
                Err(failure) => return Err(failed(uri, failure)),
            }
        }
    }

    fn read_text(&self, uri: &str) -> std::result::Result<Vec<u8>, Failure> {
        let response = self.client.get(&Url::parse(uri)?, 0)?;
        let mut text = Vec::new();
        response.body.take(MAX_INDEX + 1).read_to_end(&mut text).map_err(Failure::Broken)?;
        if text.len() as u64 > MAX_INDEX { Err(Failure::TooLarge(MAX_INDEX)) } else { Ok(text) }
    }

    /// Downloads a file to a path in the cache. Calls `report` with the number of bytes that are there.
    pub fn file(&self, uri: &str, listed: Listed, to: &Path, report: &mut dyn FnMut(u64)) -> Result<()> {
        let path = self.arriving.join(listed.hex());
        let mut options = OpenOptions::new();
        let mut file =
            options.create(true).append(true).read(true).open(&path).map_err(Error::io("create", &path))?;
        // Another process may be downloading the same file.
        file.lock().map_err(Error::io("lock", &path))?;
        if listed.is(to) {
            return Ok(());
        }
        let mut attempt = 1;
        loop {
            let outcome = self.attempt(uri, listed, &mut file, &path, report);
            match outcome {
                Ok(()) => break,
                Err(Error::Download { failure, .. }) if failure.is_interruption() && attempt < ATTEMPTS => {}
                Err(Error::WrongHash { is_continued: true, .. }) if attempt < ATTEMPTS => {}
                Err(error) => {
                    // What is no use is removed, and so is what fills the disk.
                    let is_of_use =
                        matches!(&error, Error::Download { failure, .. } if failure.is_interruption());
                    if !is_of_use {
                        let _ = fs::remove_file(&path);
                    }
                    return Err(error);
                }
            }
            attempt += 1;
        }
        fs::rename(&path, to).map_err(Error::io("create", to))
    }

    /// Fetches what is missing of a file.
    fn attempt(
        &self,
        uri: &str,
        listed: Listed,
        file: &mut File,
        path: &Path,
        report: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let mut here = file.metadata().map_err(Error::io("read", path))?.len();
        if here > listed.size {
            file.set_len(0).map_err(Error::io("write", path))?;
            here = 0;
        }
        let is_continued = here > 0;
        if here < listed.size || here == 0 {
            let url = Url::parse(uri).map_err(|failure| failed(uri, failure))?;
            let mut response = self.client.get(&url, here).map_err(|failure| failed(uri, failure))?;
            let left = listed.size - response.from;
            if let Some(sent) = response.length.filter(|sent| *sent != left) {
                return Err(failed(uri, Failure::OtherSize { sent, expected: left }));
            }
            if response.from < here {
                file.set_len(response.from).map_err(Error::io("write", path))?;
            }
            let mut copy = Copy { from: &mut response.body, size: listed.size, here: response.from };
            copy.to(file, uri, path, report)?;
        }
        file.rewind().map_err(Error::io("read", path))?;
        if hash(&mut *file).map_err(Error::io("read", path))? == listed.sha256 {
            return Ok(());
        }
        file.set_len(0).map_err(Error::io("write", path))?;
        Err(Error::WrongHash { uri: uri.to_owned(), is_continued })
    }
}

/// Copies a body to the end of a file.
struct Copy<R> {
    from: R,
    /// The size of the whole file.
    size: u64,
    /// How much of it is there.
    here: u64,
}

impl<R: Read> Copy<R> {
    fn to(&mut self, file: &mut File, uri: &str, path: &Path, report: &mut dyn FnMut(u64)) -> Result<()> {
        let mut block = vec![0; BLOCK];
        loop {
            let length = match self.from.read(&mut block) {
                Ok(0) if self.here == self.size => return Ok(()),
                Ok(0) => return Err(failed(uri, Failure::Broken(ErrorKind::UnexpectedEof.into()))),
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(failed(uri, Failure::Broken(error))),
            };
            if length as u64 > self.size - self.here {
                return Err(failed(uri, Failure::TooLarge(self.size)));
            }
            file.write_all(&block[..length]).map_err(Error::io("write", path))?;
            self.here += length as u64;
            report(self.here);
        }
    }
}

fn failed(uri: &str, failure: Failure) -> Error {
    Error::Download { uri: uri.to_owned(), failure }
}
