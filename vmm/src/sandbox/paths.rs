//! Restricts the paths that a thread can open, by Landlock.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetError,
};

use rustix::fs::{Mode, OFlags};

/// The newest version of Landlock whose restrictions are known here. Version 6 is in Linux 6.12. Its scopes are not
/// used: before Linux 6.15, that of signals would also keep a thread from signalling the others of its process.
const KNOWN: ABI = ABI::V6;

/// A folder that a thread may use, with all that is in it.
#[derive(Debug)]
pub struct Reach {
    pub folder: OwnedFd,
    /// What may be done with files and folders in it.
    pub access: Access,
}

impl Reach {
    /// Opens a folder for a thread that is to use it.
    pub fn to(folder: &Path, access: Access) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { folder: rustix::fs::open(folder, flags, Mode::empty())?, access })
    }
}

/// What may be done in a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reading files and folders.
    Read,
    /// Reading, writing, creating, renaming and removing them.
    Write,
    /// Removing files and sockets.
    Remove,
    /// Creating and writing files, and replacing others by them.
    Create,
}

impl Access {
    fn rights(self) -> BitFlags<AccessFs> {
        let read = AccessFs::ReadFile | AccessFs::ReadDir;
        match self {
            Self::Read => read,
            Self::Write => AccessFs::from_all(KNOWN) & !(AccessFs::Execute | AccessFs::IoctlDev),
            Self::Remove => AccessFs::RemoveFile.into(),
            Self::Create => {
                AccessFs::MakeReg | AccessFs::RemoveFile | AccessFs::WriteFile | AccessFs::Truncate | read
            }
        }
    }
}

/// What this kernel's Landlock cannot restrict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Missing {
    /// Everything can be restricted.
    Nothing,
    /// This cannot be restricted; all else can.
    Some(&'static str),
    /// Nothing can be restricted, for this reason.
    All(&'static str),
}

/// Returns what this kernel's Landlock cannot restrict (`landlock(7)`, "Landlock ABI versions").
pub fn missing() -> Missing {
    match version() {
        Ok(1) => Missing::Some("writable shares, truncation, TCP and devices (all can from Linux 6.10)"),
        Ok(2) => Missing::Some("truncation, TCP and devices (all can from Linux 6.10)"),
        Ok(3) => Missing::Some("TCP and devices (both can from Linux 6.10)"),
        Ok(4) => Missing::Some("devices (it can from Linux 6.10)"),
        Ok(_) => Missing::Nothing,
        Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => Missing::All(
            "Landlock is switched off in this kernel (its parameter `lsm=landlock,...` switches it on)",
        ),
        Err(_) => Missing::All("this kernel has no Landlock, which is in Linux 5.13 and later"),
    }
}

/// Returns the version of Landlock's interface.
fn version() -> io::Result<libc::c_long> {
    const VERSION: u32 = 1;
    // SAFETY: with this flag the kernel only returns a number; it reads nothing through the null pointer.
    let version =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0_usize, VERSION) };
    if version > 0 { Ok(version) } else { Err(io::Error::last_os_error()) }
}

/// Returns false if this kernel can restrict a thread only so far that it could not do its work: the first version
/// forbids renaming between folders, and cannot allow it.
fn can_restrict(reach: &[Reach]) -> bool {
    let is_written = reach.iter().any(|reach| reach.access == Access::Write);
    !is_written || version().is_ok_and(|version| version > 1)
}

/// Restricts this thread to what it may reach. It can neither connect nor bind a TCP socket.
pub fn restrict(reach: &[Reach]) -> Result<(), RulesetError> {
    if !can_restrict(reach) {
        return Ok(());
    }
    let mut rules = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(KNOWN))?
        .handle_access(AccessNet::from_all(KNOWN))?
        .create()?;
    for Reach { folder, access } in reach {
        rules = rules.add_rule(PathBeneath::new(folder.as_fd(), access.rights()))?;
    }
    rules.restrict_self().map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::thread;

    /// Runs `look` on a thread that reaches these folders only. Returns false if this kernel cannot restrict it.
    fn restricted(reach: &[Reach], look: impl FnOnce() + Send) -> bool {
        if let Missing::All(why) = missing() {
            eprintln!("skipped: {why}");
            return false;
        }
        thread::scope(|scope| {
            let work = || {
                rustix::thread::set_no_new_privs(true).unwrap();
                restrict(reach).unwrap();
                look();
            };
            scope.spawn(work).join().unwrap();
        });
        true
    }

    fn is_denied<T>(result: io::Result<T>) -> bool {
        result.err().is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
    }

    #[test]
    fn a_thread_opens_only_what_it_was_given() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let [read, other] = [&inside, &outside].map(|folder| folder.path().join("file"));
        for file in [&read, &other] {
            fs::write(file, "content").unwrap();
        }
        let reach = [Reach::to(inside.path(), Access::Read).unwrap()];
        restricted(&reach, || {
            assert_eq!(fs::read_to_string(&read).unwrap(), "content");
            assert!(is_denied(File::options().write(true).open(&read)), "it is to be read only");
            assert!(is_denied(fs::write(inside.path().join("new"), "")));
            assert!(is_denied(File::open(&other)) && is_denied(fs::read_dir(outside.path())));
        });
        restricted(&[], || assert!(is_denied(File::open(&read))));
    }

    #[test]
    fn a_writable_folder_takes_everything_and_others_nothing() {
        let (inside, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let reach = [Reach::to(inside.path(), Access::Write).unwrap()];
        restricted(&reach, || {
            let path = |name: &str| inside.path().join(name);
            fs::create_dir(path("folder")).unwrap();
            fs::write(path("file"), "content").unwrap();
            fs::rename(path("file"), path("folder/renamed")).unwrap();
            fs::hard_link(path("folder/renamed"), path("link")).unwrap();
            fs::remove_file(path("link")).unwrap();
            let out = outside.path().join("file");
            assert!(fs::rename(path("folder/renamed"), out).is_err());
        });
    }

    #[test]
    fn a_file_can_be_replaced_or_removed_where_that_was_allowed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("picture"), "old").unwrap();
        restricted(&[Reach::to(folder.path(), Access::Create).unwrap()], || {
            fs::write(path("temporary"), "new").unwrap();
            fs::rename(path("temporary"), path("picture")).unwrap();
            assert!(is_denied(fs::create_dir(path("folder"))));
        });
        restricted(&[Reach::to(folder.path(), Access::Remove).unwrap()], || {
            assert!(is_denied(File::open(path("picture"))));
            fs::remove_file(path("picture")).unwrap();
        });
    }

    #[test]
    fn no_thread_connects_to_the_network() {
        if !matches!(missing(), Missing::Nothing) {
            eprintln!("skipped: this kernel's Landlock cannot restrict TCP");
            return;
        }
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        restricted(&[], || {
            assert!(is_denied(std::net::TcpStream::connect(address)));
            assert!(is_denied(std::net::TcpListener::bind("127.0.0.1:0")));
        });
    }
}
