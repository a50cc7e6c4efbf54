//! Directories of control sockets: one for each user, with a socket for each running VM, named for its process.
//!
//! Such a directory may be in `/tmp`, where anybody can create one. So it is opened once, without following symbolic
//! links, and used only if no other user can access it. All further operations are relative to the open directory,
//! whatever its path leads to then.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Suffix of the sockets' names.
const SUFFIX: &str = ".sock";

/// A user's directory of control sockets.
#[derive(Debug)]
pub struct Place {
    folder: OwnedFd,
    path: PathBuf,
    owner: u32,
}

/// A directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// The directory cannot be created or opened.
    #[error("{0}: {1}")]
    Refused(PathBuf, io::Error),
    /// Other users can access the directory.
    #[error("{0} is not a folder of this user's alone")]
    NotPrivate(PathBuf),
    /// The thread that serves the socket cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),
}

/// A VM's socket, which is removed when this is dropped.
#[derive(Debug)]
pub struct Socket {
    place: Place,
    name: String,
}

/// Result of connecting to a VM's socket.
#[derive(Debug)]
pub enum Reached {
    /// The VM accepts the connection.
    Vm(UnixStream),
    /// Nobody listens: the process was killed.
    Nobody,
    /// The queue of connections is full.
    Busy,
}

impl Place {
    /// Opens this user's directory, and creates it if it does not exist.
    pub fn own() -> Result<Self, PlaceError> {
        let mut refusal = None;
        for path in candidates(user(), runtime_folder().as_deref()) {
            match Self::make(&path) {
                Ok(place) => return Ok(place),
                // The error is that of the first candidate, the best one.
                Err(error) => refusal = refusal.or(Some(error)),
            }
        }
        Err(refusal.expect("there are candidates"))
    }

    /// Opens all directories with VMs that this user may use: root may use everybody's.
    pub fn all() -> Vec<Self> {
        let mine = candidates(user(), runtime_folder().as_deref());
        let theirs = if user() == 0 { of_all_users() } else { Vec::new() };
        let mut places: Vec<Self> = Vec::new();
        for path in mine.into_iter().chain(theirs) {
            if !places.iter().any(|place| place.path == path)
                && let Ok(place) = Self::open(&path)
            {
                places.push(place);
            }
        }
        places
    }

    fn make(path: &Path) -> Result<Self, PlaceError> {
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {
                let place = Self::open(path)?;
                if place.owner == user() { Ok(place) } else { Err(PlaceError::NotPrivate(path.to_owned())) }
            }
            Err(error) => Err(PlaceError::Refused(path.to_owned(), error.into())),
        }
    }

    fn open(path: &Path) -> Result<Self, PlaceError> {
        let refused = |error: Errno| PlaceError::Refused(path.to_owned(), error.into());
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Mode::empty()).map_err(refused)?;
        let found = rustix::fs::fstat(&folder).map_err(refused)?;
        let is_ours = found.st_uid == user() || user() == 0;
        let others = Mode::RWXG | Mode::RWXO;
        if !is_ours || Mode::from_raw_mode(found.st_mode).intersects(others) {
            return Err(PlaceError::NotPrivate(path.to_owned()));
        }
        Ok(Self { folder, path: path.to_owned(), owner: found.st_uid })
    }

    /// Creates a socket for this process and listens on it. The socket gets its name only then, so that no client takes
    /// it for one that a killed process has left behind.
    pub fn listen(self, process: u32) -> Result<(UnixListener, Socket), PlaceError> {
        let (name, temporary) = (format!("{process}{SUFFIX}"), format!("{process}.new"));
        let refused = |error: io::Error| PlaceError::Refused(self.path.join(&name), error);
        // An earlier process with this process id may have left it behind.
        let _ = rustix::fs::unlinkat(&self.folder, &temporary, AtFlags::empty());
        let listener = UnixListener::bind(path_of_open(&self.folder).join(&temporary)).map_err(refused)?;
        rustix::fs::renameat(&self.folder, &temporary, &self.folder, &name)
            .map_err(|error| refused(error.into()))?;
        Ok((listener, Socket { place: self, name }))
    }

    /// Returns the ids of the processes that have sockets here.
    pub fn processes(&self) -> Vec<u32> {
        let Ok(entries) = Dir::read_from(&self.folder) else { return Vec::new() };
        let names = entries.filter_map(Result::ok).map(|entry| entry.file_name().to_owned());
        names.filter_map(|name| name.to_str().ok()?.strip_suffix(SUFFIX)?.parse().ok()).collect()
    }

    /// Connects to the VM of a process.
    pub fn reach(&self, process: u32) -> io::Result<Reached> {
        let name = format!("{process}{SUFFIX}");
        // The socket that is checked is the one that is connected to.
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let socket = match rustix::fs::openat(&self.folder, &name, flags, Mode::empty()) {
            Ok(socket) => socket,
            // The VM has just ended.
            Err(Errno::NOENT) => return Ok(Reached::Nobody),
            Err(error) => return Err(error.into()),
        };
        let found = rustix::fs::fstat(&socket)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket || found.st_uid != self.owner {
            return Err(io::Error::other("it is no socket of its user's"));
        }
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let stream = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&stream, &SocketAddrUnix::new(path_of_open(&socket))?) {
            Ok(()) => {
                let stream = UnixStream::from(stream);
                stream.set_nonblocking(false)?;
                Ok(Reached::Vm(stream))
            }
            Err(Errno::CONNREFUSED) => Ok(Reached::Nobody),
            Err(Errno::AGAIN) => Ok(Reached::Busy),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes the socket of a process that does not exist any more.
    pub fn forget(&self, process: u32) {
        // Another client may have removed it.
        let _ = rustix::fs::unlinkat(&self.folder, format!("{process}{SUFFIX}"), AtFlags::empty());
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = rustix::fs::unlinkat(&self.place.folder, &self.name, AtFlags::empty());
    }
}

/// Returns a path to an open file that is short enough for a socket address and leads nowhere else.
fn path_of_open(file: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn user() -> u32 {
    rustix::process::geteuid().as_raw()
}

fn runtime_folder() -> Option<PathBuf> {
    std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute())
}

/// Returns the paths of a user's directory, the best first: a login session has a runtime directory, a service or a
/// container may have none.
fn candidates(user: u32, runtime: Option<&Path>) -> Vec<PathBuf> {
    let mut places: Vec<PathBuf> = runtime.map(|folder| folder.join("tally")).into_iter().collect();
    if user == 0 {
        places.push("/run/tally".into());
    }
    places.extend([format!("/run/user/{user}/tally").into(), format!("/tmp/tally-{user}").into()]);
    places.dedup();
    places
}

/// Returns the paths at which other users' directories may be.
fn of_all_users() -> Vec<PathBuf> {
    let entries = |folder| fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let logins = entries("/run/user").map(|entry| entry.path().join("tally"));
    let others = entries("/tmp").filter(|entry| {
        let name = entry.file_name();
        let user = name.to_str().and_then(|name| name.strip_prefix("tally-"));
        user.is_some_and(|user| user.parse::<u32>().is_ok())
    });
    logins.chain(others.map(|entry| entry.path())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn place(folder: &Path) -> Place {
        Place::make(&folder.join("tally")).unwrap()
    }

    #[test]
    fn a_vm_is_found_while_it_listens_and_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let (_listener, socket) = place(folder.path()).listen(71).unwrap();
        let seen = place(folder.path());
        assert_eq!(seen.processes(), [71]);
        assert!(matches!(seen.reach(71), Ok(Reached::Vm(_))));
        drop(socket);
        assert_eq!(fs::read_dir(folder.path().join("tally")).unwrap().count(), 0);
        assert!(matches!(seen.reach(71), Ok(Reached::Nobody)));
    }

    #[test]
    fn a_vm_that_was_killed_is_told_from_one_that_runs() {
        let folder = tempfile::tempdir().unwrap();
        let (listener, socket) = place(folder.path()).listen(71).unwrap();
        std::mem::forget(socket);
        drop(listener);
        let seen = place(folder.path());
        assert_eq!(seen.processes(), [71]);
        assert!(matches!(seen.reach(71), Ok(Reached::Nobody)));
        // A later process with this process id replaces it.
        let (_listener, _socket) = place(folder.path()).listen(71).unwrap();
        assert!(matches!(seen.reach(71), Ok(Reached::Vm(_))));
        seen.forget(71);
        assert_eq!(seen.processes(), [0; 0]);
    }

    #[test]
    fn a_folder_that_others_could_write_to_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tally");
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
        let said = Place::make(&path).unwrap_err().to_string();
        assert_eq!(said, format!("{} is not a folder of this user's alone", path.display()));
    }

    #[test]
    fn a_link_in_its_place_is_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (_listener, _socket) = place(folder.path()).listen(71).unwrap();
        let link = folder.path().join("link");
        symlink(folder.path().join("tally"), &link).unwrap();
        assert!(matches!(Place::make(&link), Err(PlaceError::Refused(..))));
        // A link in place of a socket is not followed either.
        symlink("71.sock", folder.path().join("tally/72.sock")).unwrap();
        assert!(place(folder.path()).reach(72).is_err());
    }

    #[test]
    fn a_path_may_be_longer_than_an_address() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("d".repeat(200));
        fs::create_dir(&deep).unwrap();
        let (_listener, _socket) = place(&deep).listen(71).unwrap();
        assert!(matches!(place(&deep).reach(71), Ok(Reached::Vm(_))));
    }

    #[test]
    fn a_login_uses_its_runtime_directory_and_a_service_another() {
        let of = |user, runtime: Option<&str>| {
            let places = candidates(user, runtime.map(Path::new));
            places.iter().map(|path| path.display().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(of(7, Some("/run/user/7")), ["/run/user/7/tally", "/tmp/tally-7"]);
        assert_eq!(of(7, None), ["/run/user/7/tally", "/tmp/tally-7"]);
        assert_eq!(of(0, None), ["/run/tally", "/run/user/0/tally", "/tmp/tally-0"]);
    }
}
