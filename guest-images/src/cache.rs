//! The cache for built images, outside of the work tree.
//!
//! An entry is a directory named after its key, which is a hash of all inputs. It is built in a temporary directory and
//! renamed when it is complete. An existing entry is therefore always complete, even if a build was interrupted. Each
//! entry has a lock, so that a second builder waits for the first. The kernel releases the lock when the process ends.
//!
//! Nobody but this user and root can change the cache ([`ownership`]), whatever the umask is: what is not complete is
//! in directories for this user alone. That protects what is built. Packages are also compared with the signed index
//! whenever they are used.

mod ownership;

use std::env;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::progress::Progress;

/// Number of entries of a kind that are kept, enough for a few work trees.
const KEPT: usize = 6;

/// The kind of an entry, and a hash of everything that its content depends on.
pub struct Key {
    name: String,
    hash: Sha256,
    /// Number of entries of this kind that are kept.
    kept: usize,
}

impl Key {
    /// Creates a key for entries of the kind `name`, without inputs.
    pub fn new(name: &str) -> Self {
        Self { name: name.to_owned(), hash: Sha256::new(), kept: KEPT }
    }

    /// Keeps no more than this many entries of the kind, which are large.
    #[must_use]
    pub fn keep(mut self, entries: usize) -> Self {
        self.kept = entries;
        self
    }

    /// Adds an input. Its length is hashed too, so that "ab", "c" differs from "a", "bc".
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

/// The cache's directory.
#[derive(Clone)]
pub struct Cache {
    root: PathBuf,
}

/// Holds a lock of the cache until it is dropped.
pub struct Guard {
    _file: File,
}

impl Cache {
    /// Opens the cache in `$TALLY_CACHE`, else `$XDG_CACHE_HOME/tally`, else `~/.cache/tally`.
    pub fn open() -> Result<Self> {
        let set = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = set("TALLY_CACHE")
            .or_else(|| set("XDG_CACHE_HOME").map(|home| home.join("tally")))
            .or_else(|| set("HOME").map(|home| home.join(".cache/tally")))
            .ok_or(Error::NoCacheFolder)?;
        Self::at(root)
    }

    /// Opens the cache in `root`. Creates the directory if necessary. Fails if others can change what is in it.
    pub fn at(root: impl Into<PathBuf>) -> Result<Self> {
        Ok(Self { root: ownership::open(&root.into())? })
    }

    /// Returns the cache's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the entry of a key, if it exists and others cannot change it.
    pub fn find(&self, key: &Key) -> Option<PathBuf> {
        let path = self.root.join(key.folder());
        ownership::is_trusted(&path).then_some(path)
    }

    /// Returns the entry of a key. If it does not exist, calls `make` with an empty directory to fill.
    pub fn entry<E: From<Error>>(
        &self,
        key: &Key,
        progress: &mut Progress,
        make: impl FnOnce(&mut Progress, &Path) -> std::result::Result<(), E>,
    ) -> std::result::Result<PathBuf, E> {
        if let Some(path) = self.find(key) {
            return Ok(path);
        }
        let name = key.folder();
        let _guard = self.lock(&name, progress)?;
        if let Some(path) = self.find(key) {
            return Ok(path);
        }
        // Only the holder of the lock uses this directory. If it exists, it is left over from an interrupted build.
        let unfinished = self.folder("unfinished")?.join(&name);
        remove_folder(&unfinished)?;
        ownership::create(&unfinished).map_err(Error::io("create", &unfinished))?;
        let outcome = make(progress, &unfinished);
        progress.done();
        if let Err(error) = outcome {
            let _ = fs::remove_dir_all(&unfinished);
            return Err(error);
        }
        if let Err(error) = ownership::publish(&unfinished) {
            let _ = fs::remove_dir_all(&unfinished);
            return Err(Error::io("change the mode of", &unfinished)(error).into());
        }
        let path = self.root.join(&name);
        // There may be an entry that others could change.
        remove_folder(&path)?;
        fs::rename(&unfinished, &path).map_err(Error::io("create", &path))?;
        self.remove_old(key);
        Ok(path)
    }

    /// Keeps an entry from being removed as an old one, until the file is closed.
    pub fn hold(entry: &Path) -> Result<File> {
        let folder = File::open(entry).map_err(Error::io("open", entry))?;
        folder.try_lock_shared().map_err(|error| Error::io("lock", entry)(error.into()))?;
        Ok(folder)
    }

    /// Removes all but the newest entries of a kind, and those that are [held](Self::hold).
    fn remove_old(&self, key: &Key) {
        let is_of_kind = |path: &Path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let hash = name.strip_prefix(key.name.as_str()).and_then(|rest| rest.strip_prefix('-'));
            hash.is_some_and(|hash| hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()))
        };
        let Ok(folder) = fs::read_dir(&self.root) else { return };
        let mut entries: Vec<_> = folder
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| is_of_kind(path))
            .filter_map(|path| Some((fs::metadata(&path).and_then(|entry| entry.modified()).ok()?, path)))
            .collect();
        entries.sort();
        entries.truncate(entries.len().saturating_sub(key.kept));
        for (_, path) in entries {
            let Ok(folder) = File::open(&path) else { continue };
            if folder.try_lock().is_ok() {
                // A failure to remove an old entry is not an error.
                let _ = fs::remove_dir_all(path);
            }
        }
    }

    /// Returns a directory that is kept between builds, such as one for downloads. Creates it if necessary. If others
    /// can change it, removes it first with everything in it.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let mut directory = self.root.clone();
        for part in Path::new(name) {
            directory.push(part);
            if ownership::is_trusted(&directory) {
                continue;
            }
            remove_folder(&directory)?;
            match ownership::create(&directory) {
                // Another thread or process has just created it.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                created => created.map_err(Error::io("create", &directory))?,
            }
        }
        Ok(directory)
    }

    /// Takes the lock `name`. Waits while another process holds it, and says so where a person reads it: nobody else
    /// can do anything about it.
    pub fn lock(&self, name: &str, progress: &mut Progress) -> Result<Guard> {
        let path = self.folder("locks")?.join(name);
        let file = File::create(&path).map_err(Error::io("create", &path))?;
        if file.try_lock().is_err() {
            progress.step(format!("waiting for another process to finish {name}"));
            file.lock().map_err(Error::io("lock", &path))?;
        }
        Ok(Guard { _file: file })
    }
}

/// Removes a directory, if it exists. Retries for a few seconds, because a program of an interrupted build may still be
/// writing to the directory.
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

/// Returns a temporary directory that can be a cache whatever the process's umask is.
#[cfg(test)]
pub(crate) fn folder_of_ours() -> tempfile::TempDir {
    use std::os::unix::fs::PermissionsExt;
    tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o700)).tempdir().unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
    use std::sync::atomic::{AtomicU32, Ordering};

    fn write(text: &'static str) -> impl FnOnce(&mut Progress, &Path) -> Result<()> {
        move |_, folder| fs::write(folder.join("file"), text).map_err(Error::io("write", folder))
    }

    #[test]
    fn a_second_build_of_the_same_inputs_does_nothing() {
        let folder = folder_of_ours();
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
    fn a_failed_build_leaves_no_entry_and_the_next_one_starts_again() {
        let folder = folder_of_ours();
        let cache = Cache::at(folder.path()).unwrap();
        let key = Key::new("thing");
        let failed: Result<_> = cache.entry(&key, &mut Progress::silent(), |_, begun| {
            fs::write(begun.join("half"), "").unwrap();
            Err(Error::NoCacheFolder)
        });
        assert!(failed.is_err());
        let entry = cache.entry(&key, &mut Progress::silent(), write("whole")).unwrap();
        assert!(!entry.join("half").exists() && entry.join("file").exists());
    }

    #[test]
    fn a_build_that_was_killed_is_started_again() {
        let folder = folder_of_ours();
        let cache = Cache::at(folder.path()).unwrap();
        let key = Key::new("thing");
        let begun = cache.folder("unfinished").unwrap().join(key.folder());
        fs::create_dir(&begun).unwrap();
        fs::write(begun.join("half"), "").unwrap();
        let entry = cache.entry(&key, &mut Progress::silent(), write("whole")).unwrap();
        assert!(!entry.join("half").exists());
    }

    #[test]
    fn old_entries_of_the_same_kind_are_removed() {
        let folder = folder_of_ours();
        let cache = Cache::at(folder.path()).unwrap();
        let other = cache.entry(&Key::new("thing-else"), &mut Progress::silent(), write("one")).unwrap();
        let build = |input: usize| {
            // File systems have a limited resolution of times.
            thread::sleep(Duration::from_millis(10));
            let key = Key::new("thing").with(input.to_string());
            cache.entry(&key, &mut Progress::silent(), write("one")).unwrap()
        };
        let entries: Vec<PathBuf> = (0..KEPT + 2).map(build).collect();
        let kept: Vec<bool> = entries.iter().map(|path| path.exists()).collect();
        assert_eq!(kept[..2], [false, false]);
        assert!(kept[2..].iter().all(|kept| *kept) && other.exists());
        let held = Cache::hold(&entries[2]).unwrap();
        build(KEPT + 2);
        assert!(entries[2].exists());
        drop(held);
        build(KEPT + 3);
        assert!(!entries[2].exists());
    }

    fn allow(path: &Path, mode: u32) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }

    fn refusal(path: &Path) -> String {
        Cache::at(path).err().expect("others can change it").to_string()
    }

    #[test]
    fn a_cache_that_others_can_write_to_is_refused_with_the_command_that_mends_it() {
        let folder = folder_of_ours();
        let root = fs::canonicalize(folder.path()).unwrap().join("cache");
        Cache::at(&root).unwrap();
        assert_eq!(fs::metadata(&root).unwrap().mode() & 0o7777, 0o700);
        for mode in [0o775, 0o757, 0o1777] {
            allow(&root, mode);
            let said = refusal(&root);
            let command = format!("(mode {mode:o}): `chmod go-w {}`", root.display());
            assert!(said.contains(&command) && said.contains("TALLY_CACHE"), "{said}");
        }
        allow(&root, 0o755);
        Cache::at(&root).unwrap();
        // Whoever can write to the directory above can put another one in its place, unless that one is sticky.
        allow(folder.path(), 0o777);
        assert!(refusal(&root).contains(&format!("`chmod go-w {}`", root.parent().unwrap().display())));
        allow(folder.path(), 0o1777);
        Cache::at(&root).unwrap();
    }

    #[test]
    fn root_refuses_another_users_cache_and_says_whose_it_is() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can make another user's folder");
            return;
        }
        let folder = folder_of_ours();
        let root = fs::canonicalize(folder.path()).unwrap().join("cache");
        Cache::at(&root).unwrap();
        let link = folder.path().join("link");
        symlink(&root, &link).unwrap();
        chown(&root, Some(1234), None).unwrap();
        for path in [&root, &root.join("inside"), &link] {
            let said = refusal(path);
            let whose = format!("{} belongs to user 1234", root.display());
            assert!(said.contains(&whose) && said.contains("TALLY_CACHE"), "{said}");
        }
        assert!(!root.join("inside").exists(), "nothing of root's is left there");
    }

    #[test]
    fn what_others_could_change_in_a_cache_is_built_again() {
        let folder = folder_of_ours();
        let cache = Cache::at(folder.path()).unwrap();
        let key = Key::new("thing");
        let entry = cache.entry(&key, &mut Progress::silent(), write("ours")).unwrap();
        fs::write(entry.join("file"), "theirs").unwrap();
        allow(&entry, 0o777);
        assert_eq!(cache.find(&key), None);
        let entry = cache.entry(&key, &mut Progress::silent(), write("ours")).unwrap();
        assert_eq!(fs::read_to_string(entry.join("file")).unwrap(), "ours");

        let tree = cache.folder("tree/source").unwrap();
        fs::write(tree.join("file"), "theirs").unwrap();
        allow(&cache.root().join("tree"), 0o775);
        assert!(!cache.folder("tree/source").unwrap().join("file").exists());
        fs::remove_dir_all(cache.root().join("tree")).unwrap();
        symlink(&entry, cache.root().join("tree")).unwrap();
        cache.folder("tree/source").unwrap();
        assert!(!entry.join("source").exists(), "a link in its place is not followed");
    }

    /// A umask belongs to the whole process, so another one runs the test below with it.
    const LAX: &str = "TALLY_TEST_WITH_UMASK_0";

    #[test]
    fn nobody_else_can_write_to_what_is_built_whatever_the_umask_is() {
        if env::var_os(LAX).is_none() {
            let mut again = std::process::Command::new("sh");
            again.args(["-c", "umask 0 && exec \"$0\" \"$@\""]).arg(env::current_exe().unwrap()).args([
                "--exact",
                "cache::tests::nobody_else_can_write_to_what_is_built_whatever_the_umask_is",
            ]);
            let output = again.env(LAX, "1").output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let folder = folder_of_ours();
        let cache = Cache::at(folder.path()).unwrap();
        let mode = |path: &Path| fs::symlink_metadata(path).unwrap().mode() & 0o777;
        let entry = cache.entry::<Error>(&Key::new("thing"), &mut Progress::silent(), |_, begun| {
            assert_eq!(mode(begun), 0o700, "nobody can open a file before it has its mode");
            fs::create_dir(begun.join("folder")).unwrap();
            fs::write(begun.join("folder/file"), "").unwrap();
            fs::write(begun.join("program"), "").unwrap();
            allow(&begun.join("program"), 0o777);
            fs::write(begun.join("secret"), "").unwrap();
            allow(&begun.join("secret"), 0o600);
            symlink("/", begun.join("link")).unwrap();
            Ok(())
        });
        let entry = entry.unwrap();
        let modes = ["", "folder", "folder/file", "program", "secret"].map(|name| mode(&entry.join(name)));
        assert_eq!(modes, [0o755, 0o755, 0o644, 0o755, 0o600]);
        for name in ["locks", "unfinished", "downloads/arriving"] {
            assert_eq!(mode(&cache.folder(name).unwrap()), 0o700, "{name}");
        }
        assert_eq!(mode(&cache.root().join("downloads")), 0o700);
    }

    #[test]
    fn concurrent_builders_build_once() {
        let folder = folder_of_ours();
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
