//! The folder of a snapshot: `state`, a line about both files and then the state as JSON, and `memory`, in which what
//! the guest never touched takes no space.
//!
//! The folder appears under its name when it is complete and on the disk. Its checksums find damage, not forgery: what
//! is in it is not trusted beyond that.

use std::fs::{File, Permissions};
use std::io::{self, BufRead, BufReader, Read};
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use crc32fast::Hasher;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use serde::{Deserialize, Serialize};
use tally_machine::{Size, extents};
use tempfile::TempDir;

use super::GuestState;
use crate::protocol::stream::MAX_STATE;

/// Version of the format. To be raised when a state cannot be read by an older Tally, or means something else.
const VERSION: u32 = 1;
const STATE: &str = "state";
const MEMORY: &str = "memory";
const PAGE: usize = 4096;
/// Longest first line.
const MAX_LINE: u64 = 4096;

/// The first line.
#[derive(Debug, Serialize, Deserialize)]
struct About {
    /// The format's version.
    #[serde(rename = "tally-snapshot")]
    version: u32,
    state: Sum,
    memory: Sum,
}

/// Length and CRC-32 of a file's content.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Sum {
    bytes: u64,
    crc32: u32,
}

/// The checksum of a memory: of its pages that are not zero, and where they are.
#[derive(Default)]
struct MemorySum(Hasher);

impl MemorySum {
    fn add(&mut self, offset: u64, bytes: &[u8]) {
        for (page, at) in bytes.chunks(PAGE).zip((offset..).step_by(PAGE)) {
            if page.iter().any(|byte| *byte != 0) {
                self.0.update(&at.to_le_bytes());
                self.0.update(page);
            }
        }
    }

    fn finish(self, bytes: u64) -> Sum {
        Sum { bytes, crc32: self.0.finalize() }
    }
}

/// A snapshot that is written.
pub struct Writer {
    /// Where it is until it is complete. It is removed when this is dropped.
    unfinished: TempDir,
    folder: PathBuf,
    memory: File,
    /// Size of the guest's memory.
    size: u64,
    /// The next part begins here, or behind this.
    next: u64,
    sum: MemorySum,
}

impl Writer {
    /// Begins a snapshot of a guest with a memory of this size, in a folder that does not exist. What says it is a VM
    /// may announce any size: one from which no guest could continue here is refused.
    pub fn create(folder: &Path, size: u64) -> Result<Self> {
        if !size.is_multiple_of(PAGE as u64) || Size::of(size).check_here().is_err() {
            bail!("the VM says that it has {size} bytes of memory, with which no guest could continue here");
        }
        let create = || -> Result<Self> {
            if folder.symlink_metadata().is_ok() {
                bail!("it exists already");
            }
            let above =
                folder.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."));
            let mut unfinished = tempfile::Builder::new();
            unfinished.prefix(".tally-snapshot-").permissions(Permissions::from_mode(0o700));
            let unfinished = unfinished.tempdir_in(above)?;
            let memory = new_file(&unfinished.path().join(MEMORY))?;
            let folder = folder.to_owned();
            Ok(Self { unfinished, folder, memory, size, next: 0, sum: MemorySum::default() })
        };
        create().with_context(|| folder.display().to_string())
    }

    /// Writes a part of the memory. Parts ascend and do not overlap, so that what says it is a VM cannot send more than
    /// the size that it has announced.
    pub fn put(&mut self, offset: u64, bytes: &[u8]) -> Result<()> {
        let end = offset.checked_add(bytes.len() as u64).filter(|end| *end <= self.size);
        let Some(end) = end.filter(|_| offset >= self.next) else {
            bail!("the VM sends a part of its memory that it does not have, or has sent already");
        };
        self.next = end;
        self.sum.add(offset, bytes);
        self.memory.write_all_at(bytes, offset).with_context(|| self.folder.display().to_string())
    }

    /// Writes the state. The snapshot is complete then.
    pub fn finish(self, state: &[u8]) -> Result<()> {
        let Self { unfinished, folder, memory, size, next: _, sum } = self;
        let finish = || -> Result<()> {
            memory.set_len(size)?;
            let of_state = Sum { bytes: state.len() as u64, crc32: crc32fast::hash(state) };
            let about = About { version: VERSION, state: of_state, memory: sum.finish(size) };
            let mut content = serde_json::to_vec(&about)?;
            content.push(b'\n');
            content.extend(state);
            let state = new_file(&unfinished.path().join(STATE))?;
            state.write_all_at(&content, 0)?;
            state.sync_all()?;
            memory.sync_all()?;
            // Not over a folder that has come meanwhile.
            renameat_with(CWD, unfinished.path(), CWD, &folder, RenameFlags::NOREPLACE)?;
            Ok(())
        };
        finish().with_context(|| folder.display().to_string())?;
        // It is at another place now.
        let _ = unfinished.keep();
        Ok(())
    }
}

/// Creates a file for this user only: it has the guest's secrets.
fn new_file(path: &Path) -> io::Result<File> {
    File::options().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// A snapshot that a guest continues from.
#[derive(Debug)]
pub struct Opened {
    pub state: GuestState,
    pub memory: File,
}

/// Opens and checks a snapshot.
pub fn open(folder: &Path) -> Result<Opened> {
    let open = || -> Result<Opened> {
        let mut state = BufReader::new(open_file(&folder.join(STATE)).context(STATE)?);
        let about = about(&mut state).context(STATE)?;
        let state = content(state, &about.state).context(STATE)?;
        let memory = open_file(&folder.join(MEMORY)).context(MEMORY)?;
        check(&memory, &about.memory).context(MEMORY)?;
        let state = serde_json::from_slice(&state).context("the state cannot be understood")?;
        Ok(Opened { state, memory })
    };
    open().with_context(|| format!("--restore {}", folder.display()))
}

/// Opens a file for reading. All but regular files are refused, and not waited for.
fn open_file(path: &Path) -> Result<File> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { bail!("it is not a regular file") }
}

fn about(state: &mut impl BufRead) -> Result<About> {
    #[derive(Deserialize)]
    struct Version {
        #[serde(rename = "tally-snapshot")]
        version: u32,
    }
    let mut line = Vec::new();
    state.take(MAX_LINE).read_until(b'\n', &mut line)?;
    let Ok(Version { version }) = serde_json::from_slice(&line) else { bail!("not a snapshot") };
    if version != VERSION {
        bail!("a snapshot of version {version}: this Tally continues those of version {VERSION}");
    }
    serde_json::from_slice(&line).context("damaged")
}

fn content(mut from: impl Read, sum: &Sum) -> Result<Vec<u8>> {
    if sum.bytes > MAX_STATE {
        bail!(DAMAGED);
    }
    let mut content = Vec::new();
    // One byte more, to see whether there is one.
    from.by_ref().take(sum.bytes + 1).read_to_end(&mut content)?;
    let found = Sum { bytes: content.len() as u64, crc32: crc32fast::hash(&content) };
    if found == *sum { Ok(content) } else { bail!(DAMAGED) }
}

const DAMAGED: &str = "damaged: it is not what was saved";

fn check(memory: &File, sum: &Sum) -> Result<()> {
    let bytes = memory.metadata()?.len();
    if bytes != sum.bytes {
        bail!(DAMAGED);
    }
    let (mut found, mut buffer) = (MemorySum::default(), vec![0; 256 << 10]);
    for Range { mut start, end } in extents(memory, bytes)? {
        while start < end {
            let len = usize::try_from(end - start).unwrap_or(usize::MAX).min(buffer.len());
            memory.read_exact_at(&mut buffer[..len], start)?;
            found.add(start, &buffer[..len]);
            start += len as u64;
        }
    }
    if found.finish(bytes) == *sum { Ok(()) } else { bail!(DAMAGED) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use rustix::fs::Mode;

    use super::*;

    const SIZE: u64 = 64 << 20;

    fn written(dir: &Path) -> PathBuf {
        let folder = dir.join("saved");
        let mut writer = Writer::create(&folder, SIZE).unwrap();
        writer.put(8192, &[7; 2 * PAGE]).unwrap();
        writer.put(32 << 20, &[1; PAGE]).unwrap();
        writer.finish(b"{}").unwrap();
        folder
    }

    /// Returns what is wrong with a folder, whose state is no guest's.
    fn said(folder: &Path) -> String {
        format!("{:#}", open(folder).unwrap_err())
    }

    fn edit(file: &Path, at: u64, bytes: &[u8]) {
        File::options().write(true).open(file).unwrap().write_all_at(bytes, at).unwrap();
    }

    #[test]
    fn a_snapshot_appears_when_it_is_complete_and_holes_take_no_space() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("saved");
        let mut writer = Writer::create(&folder, SIZE).unwrap();
        writer.put(0, &[1; PAGE]).unwrap();
        assert!(!folder.exists());
        drop(writer);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing half-written is left");
        let memory = fs::metadata(written(dir.path()).join(MEMORY)).unwrap();
        assert!(memory.len() == SIZE && memory.blocks() <= 64, "{memory:?}");
        assert_eq!(memory.mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
        assert!(
            said(&folder)
                .ends_with("the state cannot be understood: missing field `setup` at line 1 column 2")
        );
    }

    #[test]
    fn what_is_sent_stays_within_the_memory_and_comes_in_its_order() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::create(&dir.path().join("saved"), SIZE).unwrap();
        for offset in [SIZE, SIZE - 1, u64::MAX, u64::MAX - 1] {
            assert!(writer.put(offset, &[1; 2]).is_err(), "{offset:#x}");
        }
        writer.put(PAGE as u64, &[1; PAGE]).unwrap();
        assert!(writer.put(0, &[1; PAGE]).is_err(), "the same parts could be sent for ever");
        writer.put(SIZE - PAGE as u64, &[1; PAGE]).unwrap();
    }

    #[test]
    fn a_vm_that_announces_more_memory_than_this_host_has_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        for size in [u64::MAX, u64::MAX - 4095, 1 << 60, SIZE + 1, 4096, 0] {
            let error = Writer::create(&dir.path().join("saved"), size).err().expect("no guest has so much");
            assert!(
                error.to_string().starts_with(&format!("the VM says that it has {size} bytes")),
                "{error}"
            );
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_folder_that_exists_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Writer::create(dir.path(), SIZE).is_err());
        let folder = dir.path().join("saved");
        let writer = Writer::create(&folder, SIZE).unwrap();
        fs::create_dir(&folder).unwrap();
        assert!(writer.finish(b"{}").is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn what_was_changed_or_truncated_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let damaged = |file: &str, damage: &dyn Fn(&Path)| {
            let folder = written(dir.path());
            damage(&folder.join(file));
            let said = said(&folder);
            fs::remove_dir_all(folder).unwrap();
            said
        };
        let memory = format!("{MEMORY}: {DAMAGED}");
        let truncate =
            |file: &Path| File::options().write(true).open(file).unwrap().set_len(SIZE - 4096).unwrap();
        assert!(damaged(MEMORY, &truncate).ends_with(&memory));
        assert!(damaged(MEMORY, &|file| edit(file, 8193, b"x")).ends_with(&memory));
        assert!(damaged(MEMORY, &|file| edit(file, 40 << 20, b"x")).ends_with(&memory));
        assert!(damaged(MEMORY, &|file| edit(file, 32 << 20, &[0; PAGE])).ends_with(&memory));
        assert!(damaged(MEMORY, &|file| fs::remove_file(file).unwrap()).contains("No such file"));
        let state = |damage: &dyn Fn(&str) -> String| {
            damaged(STATE, &|file| fs::write(file, damage(&fs::read_to_string(file).unwrap())).unwrap())
        };
        let of_state = format!("{STATE}: {DAMAGED}");
        assert!(state(&|text| text.replace("{}", "[]")).ends_with(&of_state));
        assert!(state(&|text| format!("{text} ")).ends_with(&of_state));
        assert!(state(&|text| text.trim_end_matches("{}").to_owned()).ends_with(&of_state));
        assert!(state(&|_| "text".to_owned()).ends_with("not a snapshot"));
        let older = state(&|text| text.replace("\"tally-snapshot\":1", "\"tally-snapshot\":7"));
        assert!(
            older.ends_with("a snapshot of version 7: this Tally continues those of version 1"),
            "{older}"
        );
        let long = state(&|text| text.replace("\"bytes\":2,", "\"bytes\":18446744073709551615,"));
        assert!(long.ends_with(&of_state), "{long}");
        assert!(said(&dir.path().join("none")).contains("No such file"));
        let folder = written(dir.path());
        fs::remove_file(folder.join(STATE)).unwrap();
        rustix::fs::mkfifoat(CWD, folder.join(STATE), Mode::RUSR).unwrap();
        assert!(said(&folder).ends_with("state: it is not a regular file"), "it is not waited for");
    }
}
