//! Keeps what was built, outside the work tree and by what it was built from.
//!
//! An entry is a folder named after its key. It is built beside its place and moved there when it is complete, so an
//! entry that exists is whole, whenever the build before it was interrupted. A lock per entry, which the kernel drops
//! with the process that holds it, makes a second builder wait for the first.

use std::env;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::{Error, Progress, Result};

/// How many entries of a kind are kept: those of a few work trees.
const KEPT: usize = 6;

/// The name of an entry and everything that its content depends on.
pub struct Key {
    name: String,
    hash: Sha256,
}

impl Key {
    /// A key for entries of the kind `name`.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), hash: Sha256::new() }
    }

    /// Adds an input. Lengths are hashed too, so that inputs cannot run into each other.
    #[must_use]
    pub fn with(mut self, input: impl AsRef<[u8]>) -> Self {
        let input = input.as_ref();
        self.hash.update((input.len() as u64).to_le_bytes());
        self.hash.update(input);
        self
    }

    fn folder(&self) -> String {
        let digest = self.hash.clone().finalize();
        let start: [u8; 8] = digest[..8].try_into().expect("a SHA-256 has 32 bytes");
        format!("{}-{:016x}", self.name, u64::from_be_bytes(start))
    }
}

/// The folder that everything built is kept in.
#[derive(Clone)]
pub struct Cache {
    root: PathBuf,
}

/// Held while something in the cache is worked on.
pub struct Guard {
    _file: File,
}

impl Cache {
    /// `$TALLY_CACHE`, else `$XDG_CACHE_HOME/tally`, else `~/.cache/tally`.
    pub fn open() -> Result<Self> {
        let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = set("TALLY_CACHE")
            .or_else(|| set("XDG_CACHE_HOME").map(|home| home.join("tally")))
            .or_else(|| set("HOME").map(|home| home.join(".cache/tally")))
            .ok_or(Error::NoCacheFolder)?;
        Self::at(root)
    }

    /// A cache in the folder `root`, which is created.
    pub fn at(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        fs::create_dir_all(&root).map_err(Error::io("create", &root))?;
        let root = fs::canonicalize(&root).map_err(Error::io("find", &root))?;
        Ok(Self { root })
    }

    /// Where the cache is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The entry of this key if it has been built.
    pub fn find(&self, key: &Key) -> Option<PathBuf> {
        let place = self.root.join(key.folder());
        place.is_dir().then_some(place)
    }

    /// The entry of this key. If it does not exist, `make` fills the empty folder that it is given.
    pub fn entry<E: From<Error>>(
        &self,
        key: &Key,
        progress: &mut Progress,
        make: impl FnOnce(&mut Progress, &Path) -> std::result::Result<(), E>,
    ) -> std::result::Result<PathBuf, E> {
        if let Some(place) = self.find(key) {
            return Ok(place);
        }
        let name = key.folder();
        let _guard = self.lock(&name, progress)?;
        if let Some(place) = self.find(key) {
            return Ok(place);
        }
        // Only the holder of the lock touches this folder: what is there is left from a build that was interrupted.
        let begun = self.folder("unfinished")?.join(&name);
        remove_folder(&begun)?;
        fs::create_dir(&begun).map_err(Error::io("create", &begun))?;
        let outcome = make(progress, &begun);
        progress.done();
        if let Err(error) = outcome {
            let _ = fs::remove_dir_all(&begun);
            return Err(error);
        }
        let place = self.root.join(&name);
        fs::rename(&begun, &place).map_err(Error::io("create", &place))?;
        self.remove_old(&key.name);
        Ok(place)
    }

    /// Removes all but the newest entries of a kind. Those in use lately are among the newest, or are open.
    fn remove_old(&self, kind: &str) {
        let is_of_kind = |path: &Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let hash = name.strip_prefix(kind).and_then(|rest| rest.strip_prefix('-'));
            hash.is_some_and(|hash| hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()))
        };
        let Ok(folder) = fs::read_dir(&self.root) else { return };
        let mut entries: Vec<_> = folder
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| is_of_kind(path))
            .filter_map(|path| Some((fs::metadata(&path).and_then(|entry| entry.modified()).ok()?, path)))
            .collect();
        entries.sort();
        entries.truncate(entries.len().saturating_sub(KEPT));
        for (_, path) in entries {
            // Tidying up is no reason to fail.
            let _ = fs::remove_dir_all(path);
        }
    }

    /// A folder that is kept between builds, such as one for downloads.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.root.join(name);
        fs::create_dir_all(&folder).map_err(Error::io("create", &folder))?;
        Ok(folder)
    }

    /// Waits until no other process works on `name`.
    pub fn lock(&self, name: &str, progress: &mut Progress) -> Result<Guard> {
        let path = self.folder("locks")?.join(name);
        let file = File::create(&path).map_err(Error::io("create", &path))?;
        if file.try_lock().is_err() {
            progress.long_step(format!("waiting for another process to finish {name}"));
            file.lock().map_err(Error::io("lock", &path))?;
        }
        Ok(Guard { _file: file })
    }
}

/// Removes a folder, if it exists, that a program of an interrupted build may still be writing to for a moment.
pub fn remove_folder(folder: &Path) -> Result<()> {
    const ATTEMPTS: u32 = 50;
    let mut attempt = 1;
    loop {
        match fs::remove_dir_all(folder) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty && attempt < ATTEMPTS => {}
            Err(error) => return Err(Error::io("remove", folder)(error)),
        }
        attempt += 1;
        thread::sleep(Duration::from_millis(100));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    fn write(text: &'static str) -> impl FnOnce(&mut Progress, &Path) -> Result<()> {
        move |_, folder| fs::write(folder.join("file"), text).map_err(Error::io("write", folder))
    }

    #[test]
    fn a_second_build_of_the_same_inputs_does_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path()).unwrap();
        let key = Key::new("thing").with("inputs");
        let first = cache.entry(&key, &mut Progress::silent(), write("one")).unwrap();
        let second = cache.entry(&key, &mut Progress::silent(), write("two")).unwrap();
        assert_eq!(first, second);
        assert_eq!(fs::read_to_string(first.join("file")).unwrap(), "one");
    }

    #[test]
    fn other_inputs_give_another_entry() {
        let folders: Vec<String> = [
            Key::new("t").with("ab").with("c"),
            Key::new("t").with("a").with("bc"),
            Key::new("t").with("abc"),
        ]
        .iter()
        .map(Key::folder)
        .collect();
        assert!(folders[0] != folders[1] && folders[1] != folders[2] && folders[0] != folders[2]);
    }

    #[test]
    fn a_failed_build_leaves_no_entry_and_the_next_one_starts_afresh() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path()).unwrap();
        let key = Key::new("thing");
        let failed: Result<_> = cache.entry(&key, &mut Progress::silent(), |_, begun| {
            fs::write(begun.join("half"), "").unwrap();
            Err(Error::NoArchive)
        });
        assert!(failed.is_err());
        let entry = cache.entry(&key, &mut Progress::silent(), write("whole")).unwrap();
        assert!(!entry.join("half").exists() && entry.join("file").exists());
    }

    #[test]
    fn a_build_that_was_killed_is_begun_again() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path()).unwrap();
        let key = Key::new("thing");
        let begun = cache.folder("unfinished").unwrap().join(key.folder());
        fs::create_dir(&begun).unwrap();
        fs::write(begun.join("half"), "").unwrap();
        let entry = cache.entry(&key, &mut Progress::silent(), write("whole")).unwrap();
        assert!(!entry.join("half").exists());
    }

    #[test]
    fn old_entries_make_room_and_other_kinds_stay() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path()).unwrap();
        let other = cache.entry(&Key::new("thing-else"), &mut Progress::silent(), write("one")).unwrap();
        let build = |input: usize| {
            // File systems tell times apart only so finely.
            thread::sleep(Duration::from_millis(10));
            let key = Key::new("thing").with(input.to_string());
            cache.entry(&key, &mut Progress::silent(), write("one")).unwrap()
        };
        let entries: Vec<PathBuf> = (0..KEPT + 2).map(build).collect();
        let kept: Vec<bool> = entries.iter().map(|path| path.exists()).collect();
        assert_eq!(kept[..2], [false, false]);
        assert!(kept[2..].iter().all(|kept| *kept) && other.exists());
    }

    #[test]
    fn builders_at_the_same_time_build_once() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::at(folder.path()).unwrap();
        let built = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let key = Key::new("thing");
                    cache
                        .entry(&key, &mut Progress::silent(), |progress, begun| {
                            built.fetch_add(1, Ordering::Relaxed);
                            thread::sleep(Duration::from_millis(20));
                            write("one")(progress, begun)
                        })
                        .unwrap();
                });
            }
        });
        assert_eq!(built.into_inner(), 1);
    }
}
