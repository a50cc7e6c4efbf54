//! The file of an event log, and the older file beside it.
//!
//! A file that has reached its maximum size is renamed to `FILE.1`, which replaces the one before it, and a new file is
//! begun. While a guest runs, a thread of its own does that ([`LogFile::rotate_on_thread`]): no other thread of a run
//! may rename or create files there.
//!
//! Nothing is written through a name that somebody else may have put there: the new file must not exist before, and a
//! symbolic link at `FILE.1` is replaced, not followed.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};

use rustix::fs::{AtFlags, Mode, OFlags, openat, renameat, statat};
use rustix::io::Errno;

use crate::sandbox::{self, Access, Reach, Thread};

/// What the name of the older file has in addition.
pub const OLDER: &str = ".1";

/// An output that can begin anew when it has reached its maximum size.
pub trait Output: Write {
    /// Returns the maximum size in bytes, if there is one.
    fn max_size(&self) -> Option<u64>;

    /// Keeps what was written as the older file, and begins a new one.
    fn begin_next(&mut self) -> io::Result<()>;
}

#[derive(Debug)]
pub struct LogFile {
    file: File,
    /// `None` for a pipe, a terminal or another device, which keeps nothing.
    rotation: Option<Rotator>,
}

/// Who begins the next file.
#[derive(Debug)]
enum Rotator {
    /// The thread that writes.
    Writer(Rotation),
    /// A thread of its own. It is sent a request, and answers with the next file.
    Thread { requests: Sender<()>, files: Receiver<io::Result<File>>, max_size: u64 },
}

/// Where a regular file is, and how large it may be.
#[derive(Debug)]
struct Rotation {
    folder: OwnedFd,
    name: OsString,
    older: OsString,
    /// Permissions of the first file. The next ones have no more.
    mode: Mode,
    max_size: u64,
}

impl LogFile {
    /// Creates the file, or empties it.
    pub fn create(path: &Path, max_size: u64) -> io::Result<Self> {
        let file = File::create(path)?;
        let rotation = Rotation::of(&file, path, max_size)?.map(Rotator::Writer);
        Ok(Self { file, rotation })
    }

    /// Starts the thread that begins the next files, if there are any.
    pub fn rotate_on_thread(&mut self) -> io::Result<()> {
        let Some(Rotator::Writer(rotation)) = self.rotation.take() else { return Ok(()) };
        let reach = vec![Reach { folder: rotation.folder.try_clone()?, access: Access::Create }];
        let (requests, requested) = channel();
        let (sender, files) = channel();
        let max_size = rotation.max_size;
        // The thread ends when the log is dropped.
        let work = move || {
            for () in requested {
                if sender.send(rotation.begin_next()).is_err() {
                    break;
                }
            }
        };
        sandbox::spawn("log", Thread::Log, reach, work)?;
        self.rotation = Some(Rotator::Thread { requests, files, max_size });
        Ok(())
    }
}

impl Rotation {
    /// Returns the place of an open file, or `None` if it is no regular file.
    fn of(file: &File, path: &Path, max_size: u64) -> io::Result<Option<Self>> {
        let found = file.metadata()?;
        if !found.is_file() {
            return Ok(None);
        }
        // A symbolic link stays where it is: what it leads to is renamed.
        let path = fs::canonicalize(path)?;
        let nameless = || io::Error::other("it has no name under which it could be renamed");
        let (folder, name) = path.parent().zip(path.file_name()).ok_or_else(nameless)?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(folder, flags, Mode::empty())?;
        // A descriptor's link in /proc may lead to a file that has another name by now, or none.
        let named = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW).map_err(|_| nameless())?;
        if (named.st_dev, named.st_ino) != (found.dev(), found.ino()) {
            return Err(nameless());
        }
        let mode = Mode::from_raw_mode(found.mode() & 0o666);
        Ok(Some(Self { folder, name: name.to_owned(), older: older_name(name), mode, max_size }))
    }

    fn begin_next(&self) -> io::Result<File> {
        let Self { folder, name, older, mode, .. } = self;
        match renameat(folder, name, folder, older) {
            // It was renamed already, here before a failure or by the user.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => {
                let (older, error) = (older.display(), io::Error::from(error));
                return Err(io::Error::other(format!(
                    "it is full and cannot be renamed to {older}: {error}"
                )));
            }
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(folder, name, flags, *mode).map_err(|error| {
            let error = io::Error::from(error);
            io::Error::other(format!("the next file cannot be created: {error}"))
        })?;
        Ok(file.into())
    }
}

/// Returns the name of the older file.
pub fn older_name(name: &OsStr) -> OsString {
    let mut older = name.to_owned();
    older.push(OLDER);
    older
}

impl Output for LogFile {
    fn max_size(&self) -> Option<u64> {
        self.rotation.as_ref().map(|rotator| match rotator {
            Rotator::Writer(Rotation { max_size, .. }) | Rotator::Thread { max_size, .. } => *max_size,
        })
    }

    fn begin_next(&mut self) -> io::Result<()> {
        let gone = || io::Error::other("its thread has ended");
        self.file = match &self.rotation {
            None => return Ok(()),
            Some(Rotator::Writer(rotation)) => rotation.begin_next()?,
            Some(Rotator::Thread { requests, files, .. }) => {
                requests.send(()).map_err(|_| gone())?;
                files.recv().map_err(|_| gone())??
            }
        };
        Ok(())
    }
}

impl Write for LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    /// A log's file in a folder of its own, with `old` written to it.
    fn log() -> (tempfile::TempDir, LogFile) {
        let folder = tempfile::tempdir().unwrap();
        let mut file = LogFile::create(&folder.path().join("log"), 1).unwrap();
        file.write_all(b"old").unwrap();
        (folder, file)
    }

    /// Returns what is in the file and in the older one.
    fn contents(folder: &Path) -> [String; 2] {
        ["log", "log.1"].map(|name| fs::read_to_string(folder.join(name)).unwrap())
    }

    #[test]
    fn a_thread_of_its_own_begins_the_next_file() {
        let (folder, mut file) = log();
        file.rotate_on_thread().unwrap();
        assert_eq!(file.max_size(), Some(1));
        next(&mut file);
        assert_eq!(contents(folder.path()), ["new", "old"]);
    }

    fn next(file: &mut LogFile) {
        file.begin_next().unwrap();
        file.write_all(b"new").unwrap();
    }

    #[test]
    fn a_full_file_is_kept_as_the_older_one() {
        let (folder, mut file) = log();
        next(&mut file);
        assert_eq!(contents(folder.path()), ["new", "old"]);
        next(&mut file);
        assert_eq!(contents(folder.path()), ["new", "new"], "the oldest is gone");
    }

    #[test]
    fn what_a_link_in_the_older_files_place_leads_to_is_left_alone() {
        let (folder, mut file) = log();
        let precious = folder.path().join("precious");
        fs::write(&precious, "precious").unwrap();
        symlink(&precious, folder.path().join("log.1")).unwrap();
        next(&mut file);
        assert_eq!(contents(folder.path()), ["new", "old"]);
        assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
        // In the file's own place, it is renamed and not followed.
        fs::remove_file(folder.path().join("log")).unwrap();
        symlink(&precious, folder.path().join("log")).unwrap();
        next(&mut file);
        assert_eq!(fs::read_to_string(folder.path().join("log")).unwrap(), "new");
        assert_eq!(fs::read_to_string(&precious).unwrap(), "precious");
    }

    #[test]
    fn an_older_file_that_cannot_be_replaced_is_an_error() {
        let (folder, mut file) = log();
        fs::create_dir(folder.path().join("log.1")).unwrap();
        let said = file.begin_next().unwrap_err().to_string();
        assert_eq!(said, "it is full and cannot be renamed to log.1: Is a directory (os error 21)");
        file.write_all(b", still").unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("log")).unwrap(), "old, still");
    }

    #[test]
    fn a_file_that_the_user_has_moved_away_stays_there() {
        let (folder, mut file) = log();
        fs::rename(folder.path().join("log"), folder.path().join("log-monday")).unwrap();
        next(&mut file);
        assert_eq!(fs::read_to_string(folder.path().join("log-monday")).unwrap(), "old");
        assert_eq!(fs::read_to_string(folder.path().join("log")).unwrap(), "new");
    }

    #[test]
    fn a_link_to_the_file_stays_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        symlink(folder.path().join("log"), &link).unwrap();
        let mut file = LogFile::create(&link, 1).unwrap();
        next(&mut file);
        assert_eq!(fs::read_link(&link).unwrap(), folder.path().join("log"));
        assert_eq!(contents(folder.path()), ["new", ""]);
    }

    #[test]
    fn the_next_file_is_as_private_as_the_first() {
        let (folder, _) = log();
        let path = folder.path().join("log");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        next(&mut LogFile::create(&path, 1).unwrap());
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn a_device_has_no_maximum_size() {
        assert_eq!(LogFile::create(Path::new("/dev/null"), 1).unwrap().max_size(), None);
    }
}
