//! What the guest may keep of a file's content from one time that it opens the file to the next.
//!
//! A guest drops what it has cached of a file when it opens it, unless the reply says that nothing has changed. Without
//! that, each program that is started in a guest would read all of its libraries again.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use rustix::fs::{Statx, StatxTimestamp};
use rustix::io::Errno;

use super::host::{self, PathFd};

/// Maximum number of files that are remembered, in some two mebibytes.
const MAX_FILES: usize = 1 << 14;
/// Time after which a file that changes again has another time of its last change. What a program writes by a mapping
/// has that time when it is first written, and another one once it has been written to the disk, half a minute later.
const SETTLED: Duration = Duration::from_mins(2);

type Time = (i64, u32);

/// What changes with a file's content.
#[derive(Debug, PartialEq, Eq)]
struct Version {
    device: (u32, u32),
    inode: u64,
    size: u64,
    modified: Time,
    changed: Time,
    created: Time,
}

/// The files that the guest has opened, by node ID.
#[derive(Debug)]
pub struct Kept {
    files: HashMap<u64, Version>,
    /// Time after which a change is known by its time.
    pub settled: Duration,
}

impl Default for Kept {
    fn default() -> Self {
        Self { files: HashMap::new(), settled: SETTLED }
    }
}

impl Kept {
    /// Returns true if the file is as it was when the guest last opened it.
    pub fn is_unchanged(&mut self, node: u64, path_fd: &PathFd) -> Result<bool, Errno> {
        let stat = host::stat(path_fd)?;
        let version = Version::of(&stat);
        if !is_settled(version.changed, self.settled) {
            self.files.remove(&node);
            return Ok(false);
        }
        if self.files.get(&node) == Some(&version) {
            return Ok(true);
        }
        // There, a mapping's writes do not change the time of the last change.
        if host::is_in_memory(path_fd)? {
            return Ok(false);
        }
        if self.files.len() >= MAX_FILES {
            self.files.clear();
        }
        self.files.insert(node, version);
        Ok(false)
    }

    pub fn clear(&mut self) {
        self.files.clear();
    }
}

impl Version {
    fn of(stat: &Statx) -> Self {
        let time = |time: StatxTimestamp| (time.tv_sec, time.tv_nsec);
        Self {
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            size: stat.stx_size,
            modified: time(stat.stx_mtime),
            changed: time(stat.stx_ctime),
            created: time(stat.stx_btime),
        }
    }
}

/// Returns true if another change could not have the same time.
fn is_settled((seconds, nanoseconds): Time, settled: Duration) -> bool {
    let since = Duration::new(seconds.try_into().unwrap_or(0), nanoseconds);
    let changed = SystemTime::UNIX_EPOCH.checked_add(since);
    changed.and_then(|changed| changed.elapsed().ok()).is_some_and(|age| age > settled)
}
