//! The system calls that find, open or change something in a shared directory.
//!
//! No function here takes a path, except for the one that opens the shared directory itself. Each inode is represented
//! by a [`PathFd`], an `O_PATH` descriptor that was opened with one [`Name`] relative to the descriptor of its parent
//! directory. Concurrent renames on the host therefore cannot lead a call outside of the directories that were walked
//! through. To read or write an inode, it is opened again through `/proc/self/fd`, which always refers to the same
//! inode as the descriptor.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    self as sys, AtFlags, FileType, FsWord, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Statx, StatxFlags,
    Timestamps, Uid,
};
use rustix::io::Errno;

use super::message::Name;
use crate::access::Access;

/// An `O_PATH` descriptor of the shared directory or of an inode in it.
pub type PathFd = OwnedFd;

/// A token that only exists for a writable share. Every function that changes something requires it.
#[derive(Debug, Clone, Copy)]
pub struct Writable(());

impl Writable {
    /// Returns the token, or the error for the guest if the share is read-only.
    pub fn from_access(access: Access) -> Result<Self, Errno> {
        match access {
            Access::ReadOnly => Err(Errno::ROFS),
            Access::ReadWrite => Ok(Self(())),
        }
    }
}

/// The access mode with which a file is opened.
#[derive(Debug, Clone, Copy)]
pub enum OpenMode {
    Read,
    Write(Writable),
    ReadWrite(Writable),
}

impl OpenMode {
    fn flags(self) -> OFlags {
        match self {
            Self::Read => OFlags::RDONLY,
            Self::Write(_) => OFlags::WRONLY,
            Self::ReadWrite(_) => OFlags::RDWR,
        }
    }
}

/// Flags of every open that is not `O_PATH`. It must not block, and must not acquire a controlling terminal.
const OPEN_FLAGS: OFlags = OFlags::CLOEXEC.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);
const PATH_FLAGS: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const NO_ESCAPE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);
/// With these bits, a program written by the guest would run with the IDs of the user who runs this program.
const SET_ID: Mode = Mode::SUID.union(Mode::SGID);

/// What is asked of each inode.
const ATTRIBUTES: StatxFlags = StatxFlags::BASIC_STATS.union(StatxFlags::BTIME).union(StatxFlags::MNT_ID);

/// Access to the host's system calls.
#[derive(Debug)]
pub struct Host {
    /// `/proc/self/fd`.
    descriptors: OwnedFd,
}

impl Host {
    pub fn new() -> Result<Self, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let descriptors = sys::open("/proc/self/fd", flags, Mode::empty())?;
        if is_proc(&descriptors)? { Ok(Self { descriptors }) } else { Err(Errno::NOENT) }
    }

    /// Opens the directory to be shared. The path comes from the user and may contain symbolic links.
    pub fn open_root(path: &Path) -> Result<PathFd, Errno> {
        sys::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    }

    /// Finds a name in a directory. Does not follow symbolic links, and does nothing that `not` forbids beyond that.
    pub fn find(parent: &PathFd, name: Name, not: ResolveFlags) -> Result<PathFd, Errno> {
        sys::openat2(parent, name.as_c_str(), PATH_FLAGS, Mode::empty(), NO_ESCAPE | not)
    }

    /// Fails if the kernel of the host does not support what [`Self::find`] needs.
    pub fn check_openat2(directory: &PathFd) -> Result<(), Errno> {
        sys::openat2(directory, c".", PATH_FLAGS, Mode::empty(), NO_ESCAPE).map(drop)
    }

    /// Returns a path descriptor of an open file.
    pub fn path_fd_of(&self, file: &File) -> Result<PathFd, Errno> {
        sys::openat(&self.descriptors, fd_name(file), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
    }

    /// Opens a regular file. Refuses other types, because opening a device or a FIFO can block or have side effects.
    pub fn open(&self, file: &PathFd, open_mode: OpenMode) -> Result<File, Errno> {
        self.open_regular(FileType::from_raw_mode(stat(file)?.stx_mode.into()), file, open_mode)
    }

    /// Does the same with an inode whose type is known.
    pub fn open_regular(&self, kind: FileType, file: &PathFd, open_mode: OpenMode) -> Result<File, Errno> {
        match kind {
            FileType::RegularFile => {}
            FileType::Directory => return Err(Errno::ISDIR),
            _ => return Err(Errno::ACCESS),
        }
        // A set-user-ID program must lose the bit before a guest changes it. Linux does not clear the bit when root
        // writes.
        if let OpenMode::Write(writable) | OpenMode::ReadWrite(writable) = open_mode {
            let mode = Mode::from_raw_mode(stat(file)?.stx_mode.into());
            if mode.intersects(SET_ID) {
                self.set_mode(writable, file, mode.bits())?;
            }
        }
        let flags = open_mode.flags() | OPEN_FLAGS;
        sys::openat(&self.descriptors, fd_name(file), flags, Mode::empty()).map(File::from)
    }

    /// Opens a directory to read its entries. Linux refuses other types before it opens them.
    pub fn open_directory(&self, directory: &PathFd) -> Result<OwnedFd, Errno> {
        sys::openat(&self.descriptors, fd_name(directory), OPEN_FLAGS | OFlags::DIRECTORY, Mode::empty())
    }

    /// Creates and opens a regular file. Fails if the name exists.
    pub fn create(
        parent: &PathFd,
        name: Name,
        mode: u32,
        open_mode: OpenMode,
        _: Writable,
    ) -> Result<File, Errno> {
        let flags = open_mode.flags() | OPEN_FLAGS | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        sys::openat2(parent, name.as_c_str(), flags, permissions(mode), NO_ESCAPE).map(File::from)
    }

    /// Creates a regular file or a FIFO. Refuses other types, device nodes in particular.
    pub fn make_node(_: Writable, parent: &PathFd, name: Name, mode: u32) -> Result<(), Errno> {
        let kind = FileType::from_raw_mode(mode);
        // A file type of zero means a regular file (mknod(2)).
        let kind = if kind.as_raw_mode() == 0 { FileType::RegularFile } else { kind };
        match kind {
            FileType::RegularFile | FileType::Fifo => {
                sys::mknodat(parent, name.as_c_str(), kind, permissions(mode), 0)
            }
            _ => Err(Errno::PERM),
        }
    }

    pub fn make_directory(_: Writable, parent: &PathFd, name: Name, mode: u32) -> Result<(), Errno> {
        sys::mkdirat(parent, name.as_c_str(), permissions(mode))
    }

    pub fn make_symlink(
        _: Writable,
        parent: &PathFd,
        name: Name,
        target: &std::ffi::CStr,
    ) -> Result<(), Errno> {
        sys::symlinkat(target, parent, name.as_c_str())
    }

    pub fn make_link(&self, _: Writable, what: &PathFd, parent: &PathFd, name: Name) -> Result<(), Errno> {
        // Follows the link in /proc to `what`. If `what` is a symbolic link itself, that link is not followed.
        sys::linkat(&self.descriptors, fd_name(what), parent, name.as_c_str(), AtFlags::SYMLINK_FOLLOW)
    }

    pub fn remove(_: Writable, parent: &PathFd, name: Name) -> Result<(), Errno> {
        sys::unlinkat(parent, name.as_c_str(), AtFlags::empty())
    }

    pub fn remove_directory(_: Writable, parent: &PathFd, name: Name) -> Result<(), Errno> {
        sys::unlinkat(parent, name.as_c_str(), AtFlags::REMOVEDIR)
    }

    pub fn rename(
        _: Writable,
        from: (&PathFd, Name),
        to: (&PathFd, Name),
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        sys::renameat_with(from.0, from.1.as_c_str(), to.0, to.1.as_c_str(), flags)
    }

    pub fn read_link(link: &PathFd) -> Result<std::ffi::CString, Errno> {
        match sys::readlinkat(link, c"", Vec::new()) {
            // With an empty path, Linux returns ENOENT if the descriptor is not a symbolic link.
            Err(Errno::NOENT) => Err(Errno::INVAL),
            text => text,
        }
    }

    pub fn set_mode(&self, writable: Writable, what: &PathFd, mode: u32) -> Result<(), Errno> {
        sys::fchmod(self.open_to_set(writable, what)?, permissions(mode))
    }

    pub fn set_times(&self, writable: Writable, what: &PathFd, times: &Timestamps) -> Result<(), Errno> {
        sys::futimens(self.open_to_set(writable, what)?, times)
    }

    /// Opens an inode to set its mode or times, for which a path descriptor is not enough. By a path these could be set
    /// of any inode, whatever Landlock says. Refuses what opening could have an effect on.
    fn open_to_set(&self, writable: Writable, what: &PathFd) -> Result<File, Errno> {
        let open = |mode: OpenMode| {
            let flags = mode.flags() | OPEN_FLAGS;
            sys::openat(&self.descriptors, fd_name(what), flags, Mode::empty()).map(File::from)
        };
        match FileType::from_raw_mode(stat(what)?.stx_mode.into()) {
            FileType::Directory | FileType::Fifo => open(OpenMode::Read),
            FileType::RegularFile => match open(OpenMode::Read) {
                Err(Errno::ACCESS) => open(OpenMode::Write(writable)),
                result => result,
            },
            _ => Err(Errno::OPNOTSUPP),
        }
    }

    pub fn set_size(_: Writable, file: &File, size: u64) -> Result<(), Errno> {
        sys::ftruncate(file, checked_offset(size, 0)?)
    }

    /// Fails if the user who runs this program does not have these permissions.
    pub fn access(&self, what: &PathFd, access: sys::Access) -> Result<(), Errno> {
        sys::accessat(&self.descriptors, fd_name(what), access, AtFlags::empty())
    }
}

/// Returns the host's attributes of an inode.
pub fn stat(path_fd: &PathFd) -> Result<Statx, Errno> {
    sys::statx(path_fd, c"", AtFlags::EMPTY_PATH, ATTRIBUTES)
}

/// Returns the attributes of what has a name in a directory, without opening it. Like [`Host::find`], it does not
/// follow symbolic links, and mounts nothing by itself.
pub fn stat_name(parent: &PathFd, name: Name) -> Result<Statx, Errno> {
    sys::statx(parent, name.as_c_str(), AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT, ATTRIBUTES)
}

/// Returns true for procfs, where some files depend on the process that opens them.
pub fn is_proc(path_fd: &PathFd) -> Result<bool, Errno> {
    Ok(file_system_type(path_fd)? == sys::PROC_SUPER_MAGIC)
}

/// Returns true for a file system that is in memory, and never written to a disk.
pub fn is_in_memory(file: impl AsFd) -> Result<bool, Errno> {
    /// tmpfs and ramfs (`linux/magic.h`).
    const IN_MEMORY: [FsWord; 2] = [0x0102_1994, 0x8584_58f6];
    Ok(IN_MEMORY.contains(&sys::fstatfs(file)?.f_type))
}

/// Returns true for a directory.
pub fn is_directory(stat: &Statx) -> bool {
    FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory
}

/// Returns the number of a file system's type (`linux/magic.h`).
pub fn file_system_type(path_fd: &PathFd) -> Result<FsWord, Errno> {
    Ok(sys::fstatfs(path_fd)?.f_type)
}

/// Returns the effective user and group of this process.
pub fn owner() -> (Uid, Gid) {
    (rustix::process::geteuid(), rustix::process::getegid())
}

/// Returns `offset`, or EINVAL if a range of `len` bytes there exceeds the maximum size of a file.
pub fn checked_offset(offset: u64, len: usize) -> Result<u64, Errno> {
    let end = offset.checked_add(len as u64).ok_or(Errno::INVAL)?;
    if i64::try_from(end).is_ok() { Ok(offset) } else { Err(Errno::INVAL) }
}

fn permissions(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & 0o7777).difference(SET_ID)
}

fn fd_name(descriptor: &impl std::os::fd::AsRawFd) -> String {
    descriptor.as_raw_fd().to_string()
}
