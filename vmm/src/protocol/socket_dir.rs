//! Directories of control sockets: one for each user, with a socket for each running VM, named for its process.
//!
//! Such a directory may be in `/tmp`, where anybody can create one. So it is opened once, without following symbolic
//! links, and used only if no other user can access it. All further operations are relative to the open directory,
//! whatever its path leads to then.
//!
//! Root's commands look into the directories of all users, whatever those have put there: what is read of them is
//! bounded.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

const SUFFIX: &str = ".sock";
/// Maximum number of a directory's entries that are read.
const MAX_ENTRIES: usize = 4096;
/// Maximum number of other users' directories.
const MAX_DIRS: usize = 256;

/// A user's directory of control sockets.
#[derive(Debug)]
pub struct SocketDir {
    folder: OwnedFd,
    path: PathBuf,
    owner: u32,
}

/// A directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SocketDirError {
    /// The directory cannot be created or opened.
    #[error("{0}: {1}")]
    Refused(PathBuf, io::Error),
    #[error("{0} belongs to user {1}, who must remove it")]
    Taken(PathBuf, u32),
    #[error("{0} is not a folder of this user's alone: `chmod 700 {0}`")]
    NotPrivate(PathBuf),
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

impl SocketDirError {
    /// Returns whether this host could have such a directory, and somebody has seen to it that it cannot be used. The
    /// other errors are those of hosts without one.
    pub fn is_somebodys_fault(&self) -> bool {
        matches!(self, Self::Taken(..) | Self::NotPrivate(_))
    }
}

/// A VM's socket, which is removed when this is dropped.
#[derive(Debug)]
pub struct Socket {
    dir: SocketDir,
    name: String,
}

/// Result of connecting to a VM's socket.
#[derive(Debug)]
pub enum Connection {
    Vm(UnixStream),
    /// Nobody listens: the process was killed.
    Stale,
    /// The queue of connections is full.
    Busy,
}

impl SocketDir {
    /// Opens this user's directory, and creates it if it does not exist.
    pub fn own() -> Result<Self, SocketDirError> {
        Self::first_of(&candidates(user(), runtime_folder(user()).as_deref()))
    }

    /// Returns the directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the first of these directories that can be used. The error is that of a directory that somebody could have
    /// prevented from being used, or else that of the first one, the best.
    fn first_of(candidates: &[PathBuf]) -> Result<Self, SocketDirError> {
        let mut errors = Vec::new();
        for path in candidates {
            match Self::make(path) {
                Ok(dir) => return Ok(dir),
                Err(error) => errors.push(error),
            }
        }
        let worst = errors.iter().position(SocketDirError::is_somebodys_fault).unwrap_or(0);
        Err(errors.swap_remove(worst))
    }

    /// Opens all directories with VMs that this user may use: root may use everybody's. This user's come first; the
    /// search for others ends at this time.
    pub fn all(end: Instant) -> Vec<Self> {
        let mut dirs: Vec<Self> = Vec::new();
        let mut add = |path: PathBuf, of: u32| {
            if !dirs.iter().any(|dir| dir.path == path)
                && let Ok(dir) = Self::open(&path)
                && dir.owner == of
            {
                dirs.push(dir);
            }
            dirs.len()
        };
        let mine = candidates(user(), runtime_folder(user()).as_deref());
        let most = mine.len() + MAX_DIRS;
        for path in mine {
            add(path, user());
        }
        if user() == 0 {
            for (path, of) in of_all_users() {
                if add(path, of) >= most || Instant::now() >= end {
                    break;
                }
            }
        }
        dirs
    }

    fn make(path: &Path) -> Result<Self, SocketDirError> {
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) => {}
            Err(Errno::EXIST) => match rustix::fs::lstat(path) {
                Ok(found) if found.st_uid != user() => {
                    return Err(SocketDirError::Taken(path.to_owned(), found.st_uid));
                }
                _ => {}
            },
            Err(error) => return Err(SocketDirError::Refused(path.to_owned(), error.into())),
        }
        // What is opened may be another directory than the one of above.
        let dir = Self::open(path)?;
        if dir.owner == user() { Ok(dir) } else { Err(SocketDirError::Taken(path.to_owned(), dir.owner)) }
    }

    fn open(path: &Path) -> Result<Self, SocketDirError> {
        let refused = |error: Errno| SocketDirError::Refused(path.to_owned(), error.into());
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Mode::empty()).map_err(refused)?;
        let found = rustix::fs::fstat(&folder).map_err(refused)?;
        let is_ours = found.st_uid == user() || user() == 0;
        let others = Mode::RWXG | Mode::RWXO;
        if !is_ours || Mode::from_raw_mode(found.st_mode).intersects(others) {
            return Err(SocketDirError::NotPrivate(path.to_owned()));
        }
        Ok(Self { folder, path: path.to_owned(), owner: found.st_uid })
    }

    /// Creates a socket for this process and listens on it. The socket gets its name only then, so that no client takes
    /// it for one that a killed process has left behind.
    pub fn listen(self, process: u32) -> Result<(UnixListener, Socket), SocketDirError> {
        let (name, temporary) = (format!("{process}{SUFFIX}"), format!("{process}.new"));
        let refused = |error: io::Error| SocketDirError::Refused(self.path.join(&name), error);
        // An earlier process with this process id may have left it behind.
        let _ = rustix::fs::unlinkat(&self.folder, &temporary, AtFlags::empty());
        let listener = UnixListener::bind(path_of_open(&self.folder).join(&temporary)).map_err(refused)?;
        rustix::fs::renameat(&self.folder, &temporary, &self.folder, &name)
            .map_err(|error| refused(error.into()))?;
        Ok((listener, Socket { dir: self, name }))
    }

    /// Returns the user whose VMs have sockets here.
    pub fn owner(&self) -> u32 {
        self.owner
    }

    /// Returns the ids of the processes that have sockets here, which are those of its first [`MAX_ENTRIES`] entries.
    pub fn processes(&self) -> Vec<u32> {
        let Ok(entries) = Dir::read_from(&self.folder) else { return Vec::new() };
        let entries = entries.take(MAX_ENTRIES).filter_map(Result::ok);
        let names = entries.map(|entry| entry.file_name().to_owned());
        let process = |name: &str| number(name.strip_suffix(SUFFIX)?);
        names.filter_map(|name| process(name.to_str().ok()?)).collect()
    }

    /// Connects to the VM of a process.
    pub fn connect(&self, process: u32) -> io::Result<Connection> {
        let name = format!("{process}{SUFFIX}");
        // The socket that is checked is the one that is connected to.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let socket = match rustix::fs::openat(&self.folder, &name, flags, Mode::empty()) {
            Ok(socket) => socket,
            // The VM has just ended.
            Err(Errno::NOENT) => return Ok(Connection::Stale),
            Err(error) => return Err(error.into()),
        };
        let found = rustix::fs::fstat(&socket)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket || found.st_uid != self.owner {
            return Err(io::Error::other("it is no socket of its user's"));
        }
        match connect_at_once(path_of_open(&socket)) {
            Ok(stream) => {
                // A socket may be named after any process: the kernel says which one has made it.
                let (maker, user) = maker(&stream)?;
                if (maker, user) != (process, self.owner) {
                    return Err(io::Error::other(format!(
                        "process {maker} of user {user} has made its socket"
                    )));
                }
                let stream = UnixStream::from(stream);
                stream.set_nonblocking(false)?;
                Ok(Connection::Vm(stream))
            }
            Err(Errno::CONNREFUSED) => Ok(Connection::Stale),
            Err(Errno::AGAIN) => Ok(Connection::Busy),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes the socket of a process that does not exist any more.
    pub fn remove_stale(&self, process: u32) {
        // Another client may have removed it.
        let _ = rustix::fs::unlinkat(&self.folder, format!("{process}{SUFFIX}"), AtFlags::empty());
    }
}

impl Socket {
    /// Returns the open directory.
    pub fn folder(&self) -> io::Result<OwnedFd> {
        self.dir.folder.try_clone()
    }
}

/// Connects to a socket. Fails instead of waiting while its queue of connections is full ([`Errno::AGAIN`]).
pub fn connect_at_once(path: impl AsRef<Path>) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&stream, &SocketAddrUnix::new(path.as_ref())?)?;
    Ok(stream)
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = rustix::fs::unlinkat(&self.dir.folder, &self.name, AtFlags::empty());
    }
}

/// Returns the process that called `listen` for the other end of a connection, and its user. The process is 0 if it is
/// in a PID namespace that this process does not see.
fn maker(stream: &OwnedFd) -> io::Result<(u32, u32)> {
    // rustix' `socket_peercred` cannot return a process of 0.
    let mut peer = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len = libc::socklen_t::try_from(size_of_val(&peer)).expect("the structure is small");
    // SAFETY: both pointers are to variables of this function, and the length is that of the structure, all of whose
    // values are valid.
    let result = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((peer.pid.cast_unsigned(), peer.uid))
}

/// Returns a path to an open file that is short enough for a socket address and leads nowhere else.
fn path_of_open(file: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

/// Returns the user of this process.
pub fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Returns the folder that the variable names, if it belongs to this user: with `sudo` or `su`, the variable may still
/// be another user's.
fn runtime_folder(user: u32) -> Option<PathBuf> {
    let path = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute())?;
    belongs_to(&path, user).then_some(path)
}

fn belongs_to(folder: &Path, user: u32) -> bool {
    fs::symlink_metadata(folder).is_ok_and(|folder| folder.is_dir() && folder.uid() == user)
}

/// Returns the paths of a user's directory, the best first: a login session has a runtime directory, a service or a
/// container may have none. Root's is at the same place for all.
fn candidates(user: u32, runtime: Option<&Path>) -> Vec<PathBuf> {
    let mut dirs: Vec<PathBuf> = if user == 0 { vec!["/run/tally".into()] } else { Vec::new() };
    dirs.extend(runtime.map(|folder| folder.join("tally")));
    dirs.extend([format!("/run/user/{user}/tally").into(), format!("/tmp/tally-{user}").into()]);
    dirs.dedup();
    dirs
}

/// Returns the paths at which other users' directories may be, and the users to whom these must belong.
fn of_all_users() -> impl Iterator<Item = (PathBuf, u32)> {
    let entries = |folder| fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let logins = entries("/run/user").filter_map(|entry| {
        let user = number(entry.file_name().to_str()?)?;
        Some((entry.path().join("tally"), user))
    });
    let others = entries("/tmp").filter_map(|entry| {
        let user = number(entry.file_name().to_str()?.strip_prefix("tally-")?)?;
        Some((entry.path(), user))
    });
    logins.chain(others)
}

/// Returns the number of a process or a user, which has one name.
fn number(digits: &str) -> Option<u32> {
    digits.parse().ok().filter(|number: &u32| number.to_string() == digits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn dir(folder: &Path) -> SocketDir {
        SocketDir::make(&folder.join("tally")).unwrap()
    }

    #[test]
    fn a_vm_is_found_while_it_listens_and_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let this = std::process::id();
        let (_listener, socket) = dir(folder.path()).listen(this).unwrap();
        let seen = dir(folder.path());
        assert_eq!(seen.processes(), [this]);
        assert!(matches!(seen.connect(this), Ok(Connection::Vm(_))));
        drop(socket);
        assert_eq!(fs::read_dir(folder.path().join("tally")).unwrap().count(), 0);
        assert!(matches!(seen.connect(this), Ok(Connection::Stale)));
    }

    #[test]
    fn a_socket_that_is_named_after_another_process_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let (_listener, _socket) = dir(folder.path()).listen(1).unwrap();
        let said = dir(folder.path()).connect(1).unwrap_err().to_string();
        let this = std::process::id();
        assert_eq!(said, format!("process {this} of user {} has made its socket", user()));
        let theirs = SocketDir { owner: user() + 1, ..dir(folder.path()) };
        let (_listener, _socket) = dir(folder.path()).listen(this).unwrap();
        assert!(theirs.connect(this).is_err(), "it is no socket of the folder's owner");
    }

    #[test]
    fn a_vm_that_was_killed_is_told_from_one_that_runs() {
        let folder = tempfile::tempdir().unwrap();
        let this = std::process::id();
        let (listener, socket) = dir(folder.path()).listen(this).unwrap();
        std::mem::forget(socket);
        drop(listener);
        let seen = dir(folder.path());
        for other_name in [format!("0{this}"), format!("+{this}")] {
            fs::write(folder.path().join("tally").join(other_name + SUFFIX), "").unwrap();
        }
        assert_eq!(seen.processes(), [this], "a process has one name");
        assert!(matches!(seen.connect(this), Ok(Connection::Stale)));
        // A later process with this process id replaces it.
        let (_listener, _socket) = dir(folder.path()).listen(this).unwrap();
        assert!(matches!(seen.connect(this), Ok(Connection::Vm(_))));
        seen.remove_stale(this);
        assert_eq!(seen.processes(), [0; 0]);
    }

    #[test]
    fn a_folder_that_others_could_write_to_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tally");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
        let error = SocketDir::make(&path).unwrap_err();
        assert!(error.is_somebodys_fault());
        let path = path.display();
        assert_eq!(
            error.to_string(),
            format!("{path} is not a folder of this user's alone: `chmod 700 {path}`")
        );
    }

    #[test]
    fn a_folder_that_another_user_has_taken_is_named_with_that_user() {
        let folder = tempfile::tempdir().unwrap();
        let (taken, owner) = if user() == 0 {
            let taken = folder.path().join("tally-0");
            fs::create_dir(&taken).unwrap();
            std::os::unix::fs::chown(&taken, Some(65534), None).unwrap();
            (taken, 65534)
        } else {
            ("/usr".into(), 0)
        };
        let missing = folder.path().join("no-login/tally");
        // Where nobody has logged in, there is no such folder, and that is not worth a warning.
        let error = SocketDir::first_of(std::slice::from_ref(&missing)).unwrap_err();
        assert!(!error.is_somebodys_fault(), "{error}");
        let error = SocketDir::first_of(&[missing, taken.clone()]).unwrap_err();
        assert!(error.is_somebodys_fault(), "{error}");
        assert_eq!(
            error.to_string(),
            format!("{} belongs to user {owner}, who must remove it", taken.display())
        );
        assert!(SocketDir::first_of(&[taken, folder.path().join("tally")]).is_ok(), "another one will do");
    }

    #[test]
    fn a_link_in_its_place_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (_listener, _socket) = dir(folder.path()).listen(71).unwrap();
        let link = folder.path().join("link");
        symlink(folder.path().join("tally"), &link).unwrap();
        assert!(matches!(SocketDir::make(&link), Err(SocketDirError::Refused(..))));
        // A link in place of a socket is not followed either.
        symlink("71.sock", folder.path().join("tally/72.sock")).unwrap();
        assert!(dir(folder.path()).connect(72).is_err());
    }

    #[test]
    fn a_path_may_be_longer_than_an_address() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("d".repeat(200));
        fs::create_dir(&deep).unwrap();
        let this = std::process::id();
        let (_listener, _socket) = dir(&deep).listen(this).unwrap();
        assert!(matches!(dir(&deep).connect(this), Ok(Connection::Vm(_))));
    }

    #[test]
    fn a_login_uses_its_runtime_directory_and_a_service_another() {
        let of = |user, runtime: Option<&str>| {
            let dirs = candidates(user, runtime.map(Path::new));
            dirs.iter().map(|path| path.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(of(7, Some("/run/user/7")), ["/run/user/7/tally", "/tmp/tally-7"]);
        assert_eq!(of(7, None), ["/run/user/7/tally", "/tmp/tally-7"]);
        assert_eq!(of(0, None), ["/run/tally", "/run/user/0/tally", "/tmp/tally-0"]);
        assert_eq!(of(0, Some("/run/user/7")).first().unwrap(), "/run/tally", "root's is at one place");
    }

    #[test]
    fn a_runtime_directory_of_another_user_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        assert!(belongs_to(folder.path(), user()));
        assert!(!belongs_to(folder.path(), user() + 1));
        let link = folder.path().join("link");
        symlink(folder.path(), &link).unwrap();
        assert!(!belongs_to(&link, user()), "whoever has the link may change it");
        assert!(!belongs_to(&folder.path().join("none"), user()));
    }

    #[test]
    fn no_more_of_a_directory_is_read_than_a_bounded_number_of_entries() {
        let folder = tempfile::tempdir().unwrap();
        let this = std::process::id();
        let (_listener, _socket) = dir(folder.path()).listen(this).unwrap();
        let folder = folder.path().join("tally");
        // Names of one socket, as many as another user likes to give it.
        for other in (1..).filter(|other| *other != this).take(MAX_ENTRIES + 100) {
            let name = |process: u32| folder.join(format!("{process}{SUFFIX}"));
            fs::hard_link(name(this), name(other)).unwrap();
        }
        let seen = SocketDir::open(&folder).unwrap();
        assert!(seen.processes().len() <= MAX_ENTRIES);
    }
}
