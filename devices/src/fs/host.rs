//! The host's side: every system call that finds, opens or changes something in a shared folder.
//!
//! The one thing to know: nothing here takes a path. A thing is a [`Place`], an `O_PATH` descriptor of it that was found from
//! its folder's by one [`Name`]; so whatever is renamed meanwhile, no call ends outside the folders that were walked
//! through. What is open for more than that is opened through `/proc/self/fd`, which leads to the very same thing.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{
    self as sys, AtFlags, FileType, Gid, Mode, OFlags, RenameFlags, ResolveFlags, Statx, StatxFlags,
    Timestamps, Uid,
};
use rustix::io::Errno;

use super::message::Name;
use crate::Access;

/// Something in a shared folder, or the folder: named, but not open for anything.
pub type Place = OwnedFd;

/// The proof that the guest may change what is shared. Each call that changes something asks for it.
#[derive(Debug, Clone, Copy)]
pub struct Writable(());

impl Writable {
    /// The proof, or the error that the guest gets.
    pub fn by(access: Access) -> Result<Self, Errno> {
        match access {
            Access::ReadOnly => Err(Errno::ROFS),
            Access::ReadWrite => Ok(Self(())),
        }
    }
}

/// How a file is opened.
#[derive(Debug, Clone, Copy)]
pub enum Open {
    Read,
    Write(Writable),
    ReadWrite(Writable),
}

impl Open {
    fn flags(self) -> OFlags {
        match self {
            Self::Read => OFlags::RDONLY,
            Self::Write(_) => OFlags::WRONLY,
            Self::ReadWrite(_) => OFlags::RDWR,
        }
    }
}

/// In every open: nothing may wait for somebody else, become the controlling terminal or be inherited.
const ALWAYS: OFlags = OFlags::CLOEXEC.union(OFlags::NONBLOCK).union(OFlags::NOCTTY);
const PLACE: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
const NO_ESCAPE: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);
/// Those bits would make a program that a guest wrote run as whoever runs this one.
const SET_ID: Mode = Mode::SUID.union(Mode::SGID);

/// The ways to the host's system calls.
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

    /// The folder at a path of the user's own, which may lead through symbolic links.
    pub fn folder(path: &Path) -> Result<Place, Errno> {
        sys::open(path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
    }

    /// What has this name in a folder; of a symbolic link, the link.
    pub fn find(folder: &Place, name: Name) -> Result<Place, Errno> {
        sys::openat2(folder, name.as_c_str(), PLACE, Mode::empty(), NO_ESCAPE)
    }

    /// Whether this host's kernel has what [`Self::find`] needs.
    pub fn can_find(folder: &Place) -> Result<(), Errno> {
        sys::openat2(folder, c".", PLACE, Mode::empty(), NO_ESCAPE).map(drop)
    }

    /// The place of an open file.
    pub fn place_of(&self, file: &File) -> Result<Place, Errno> {
        sys::openat(&self.descriptors, number(file), OFlags::PATH | OFlags::CLOEXEC, Mode::empty())
    }

    /// Opens a regular file. Nothing else: to open a device or a pipe does something, or waits.
    pub fn open(&self, file: &Place, how: Open) -> Result<File, Errno> {
        let stat = stat(file)?;
        match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::RegularFile => {}
            FileType::Directory => return Err(Errno::ISDIR),
            _ => return Err(Errno::ACCESS),
        }
        // A program that belongs to root must not keep its bit when a guest changes it; of root's writes Linux allows that.
        let mode = Mode::from_raw_mode(stat.stx_mode.into());
        if let (Open::Write(writable) | Open::ReadWrite(writable), true) = (how, mode.intersects(SET_ID)) {
            self.set_mode(writable, file, mode.bits())?;
        }
        let flags = how.flags() | ALWAYS;
        sys::openat(&self.descriptors, number(file), flags, Mode::empty()).map(File::from)
    }

    /// Opens a folder, to read its entries.
    pub fn open_folder(&self, folder: &Place) -> Result<OwnedFd, Errno> {
        if FileType::from_raw_mode(stat(folder)?.stx_mode.into()) != FileType::Directory {
            return Err(Errno::NOTDIR);
        }
        sys::openat(&self.descriptors, number(folder), ALWAYS | OFlags::DIRECTORY, Mode::empty())
    }

    /// Creates a regular file that does not exist yet, and opens it.
    pub fn create(folder: &Place, name: Name, mode: u32, how: Open, _: Writable) -> Result<File, Errno> {
        let flags = how.flags() | ALWAYS | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW;
        sys::openat2(folder, name.as_c_str(), flags, permissions(mode), NO_ESCAPE).map(File::from)
    }

    /// Creates a regular file or a named pipe; nothing else, and least of all a device.
    pub fn make_node(_: Writable, folder: &Place, name: Name, mode: u32) -> Result<(), Errno> {
        let kind = FileType::from_raw_mode(mode);
        // No kind at all means a regular file (mknod(2)).
        let kind = if kind.as_raw_mode() == 0 { FileType::RegularFile } else { kind };
        match kind {
            FileType::RegularFile | FileType::Fifo => {
                sys::mknodat(folder, name.as_c_str(), kind, permissions(mode), 0)
            }
            _ => Err(Errno::PERM),
        }
    }

    pub fn make_folder(_: Writable, folder: &Place, name: Name, mode: u32) -> Result<(), Errno> {
        sys::mkdirat(folder, name.as_c_str(), permissions(mode))
    }

    pub fn make_symlink(
        _: Writable,
        folder: &Place,
        name: Name,
        target: &std::ffi::CStr,
    ) -> Result<(), Errno> {
        sys::symlinkat(target, folder, name.as_c_str())
    }

    pub fn make_link(&self, _: Writable, what: &Place, folder: &Place, name: Name) -> Result<(), Errno> {
        // What is followed is /proc's link to `what`; if that is a symbolic link, it is linked itself.
        sys::linkat(&self.descriptors, number(what), folder, name.as_c_str(), AtFlags::SYMLINK_FOLLOW)
    }

    pub fn remove(_: Writable, folder: &Place, name: Name) -> Result<(), Errno> {
        sys::unlinkat(folder, name.as_c_str(), AtFlags::empty())
    }

    pub fn remove_folder(_: Writable, folder: &Place, name: Name) -> Result<(), Errno> {
        sys::unlinkat(folder, name.as_c_str(), AtFlags::REMOVEDIR)
    }

    pub fn rename(
        _: Writable,
        from: (&Place, Name),
        to: (&Place, Name),
        flags: RenameFlags,
    ) -> Result<(), Errno> {
        sys::renameat_with(from.0, from.1.as_c_str(), to.0, to.1.as_c_str(), flags)
    }

    pub fn read_link(link: &Place) -> Result<std::ffi::CString, Errno> {
        match sys::readlinkat(link, c"", Vec::new()) {
            // Linux says of what is no link that it does not exist, for there was no name to find.
            Err(Errno::NOENT) => Err(Errno::INVAL),
            text => text,
        }
    }

    pub fn set_mode(&self, _: Writable, what: &Place, mode: u32) -> Result<(), Errno> {
        if FileType::from_raw_mode(stat(what)?.stx_mode.into()) == FileType::Symlink {
            return Err(Errno::OPNOTSUPP);
        }
        sys::chmodat(&self.descriptors, number(what), permissions(mode), AtFlags::empty())
    }

    pub fn set_times(&self, _: Writable, what: &Place, times: &Timestamps) -> Result<(), Errno> {
        sys::utimensat(&self.descriptors, number(what), times, AtFlags::empty())
    }

    pub fn set_size(_: Writable, file: &File, size: u64) -> Result<(), Errno> {
        sys::ftruncate(file, within_a_file(size, 0)?)
    }

    /// Whether this program's user may do that.
    pub fn access(&self, what: &Place, access: sys::Access) -> Result<(), Errno> {
        sys::accessat(&self.descriptors, number(what), access, AtFlags::empty())
    }
}

/// What the host says of a thing.
pub fn stat(place: &Place) -> Result<Statx, Errno> {
    sys::statx(
        place,
        c"",
        AtFlags::EMPTY_PATH,
        StatxFlags::BASIC_STATS | StatxFlags::BTIME | StatxFlags::MNT_ID,
    )
}

/// Whether this lies in the kernel's table of processes, whose files mean another thing to each process that opens them.
pub fn is_proc(place: &Place) -> Result<bool, Errno> {
    Ok(sys::fstatfs(place)?.f_type == sys::PROC_SUPER_MAGIC)
}

/// The user and group as whom this program acts.
pub fn owner() -> (Uid, Gid) {
    (rustix::process::geteuid(), rustix::process::getegid())
}

/// An offset, if as many bytes there are within what a file can have.
pub fn within_a_file(offset: u64, len: usize) -> Result<u64, Errno> {
    let end = offset.checked_add(len as u64).ok_or(Errno::INVAL)?;
    if i64::try_from(end).is_ok() { Ok(offset) } else { Err(Errno::INVAL) }
}

fn permissions(mode: u32) -> Mode {
    Mode::from_raw_mode(mode & 0o7777).difference(SET_ID)
}

fn number(descriptor: &impl std::os::fd::AsRawFd) -> String {
    descriptor.as_raw_fd().to_string()
}
