//! The requests that read and set inode attributes.

use rustix::fs::{Statx, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno;
use vm_memory::ByteValued;

use super::Server;
use super::host::{self, Host, OpenMode, PathFd, Writable};
use super::message::{Body, Reply};
use super::wire::{Attr, AttrOut, EntryOut, GETATTR_FH, GetattrIn, SetattrIn, StatfsOut, fattr};

/// Number of seconds for which the guest may cache names and attributes.
const CACHE_SECONDS: u64 = 1;
/// The same for names that always refer to the same node ([`Nodes::are_places`](super::nodes::Nodes::are_places)):
/// years. Whether something has the name, and what, the guest is told with the attributes.
const NAME_CACHE_SECONDS: u64 = 1 << 28;

/// To whom the guest sees files belong: those of this process's effective user and group are root's.
#[derive(Debug, Clone)]
pub struct Owner {
    pub user: u32,
    pub group: u32,
    kept: Option<KeptOwners>,
}

/// Owners that are kept elsewhere than the files.
#[derive(Debug, Clone)]
struct KeptOwners {
    /// The file system with these files.
    on: (u32, u32),
    /// In the order of the inodes' numbers.
    inodes: Vec<(u64, FileOwner)>,
}

/// The owner, the group and the permissions of a file as the guest sees them, whatever they are on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileOwner {
    /// The user.
    pub user: u32,
    /// The group.
    pub group: u32,
    /// The permissions, with the bits for set-user-ID and the like.
    pub mode: u32,
}

impl Owner {
    pub fn current() -> Self {
        let (user, group) = host::owner();
        Self { user: user.as_raw(), group: group.as_raw(), kept: None }
    }

    /// Has files on the file system of this directory have these owners, if they are among them.
    pub fn keep(&mut self, directory: &PathFd, mut kept: Vec<(u64, FileOwner)>) -> Result<(), Errno> {
        if !kept.is_empty() {
            kept.sort_unstable_by_key(|(inode, _)| *inode);
            let stat = host::stat(directory)?;
            self.kept = Some(KeptOwners { on: (stat.stx_dev_major, stat.stx_dev_minor), inodes: kept });
        }
        Ok(())
    }

    /// Returns the owner and the group that the guest sees, and the type and the permissions.
    fn guests(&self, stat: &Statx) -> (u32, u32, u32) {
        const PERMISSIONS: u32 = 0o7777;
        let mode = u32::from(stat.stx_mode);
        let kept = self.kept.as_ref().filter(|kept| kept.on == (stat.stx_dev_major, stat.stx_dev_minor));
        let kept = kept.and_then(|KeptOwners { inodes, .. }| {
            let at = inodes.binary_search_by_key(&stat.stx_ino, |(inode, _)| *inode).ok()?;
            inodes.get(at).map(|(_, kept)| kept)
        });
        if let Some(kept) = kept {
            return (kept.user, kept.group, mode & !PERMISSIONS | kept.mode & PERMISSIONS);
        }
        let guest_id = |id, own| if id == own { 0 } else { id };
        (guest_id(stat.stx_uid, self.user), guest_id(stat.stx_gid, self.group), mode)
    }
}

impl Server {
    pub(super) fn attributes(&mut self, stat: &Statx) -> Attr {
        let (uid, gid, mode) = self.owner.guests(stat);
        // FUSE carries times before 1970 in two's complement.
        let seconds = i64::cast_unsigned;
        Attr {
            ino: self.nodes.guest_inode((stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino),
            size: stat.stx_size,
            blocks: stat.stx_blocks,
            atime: seconds(stat.stx_atime.tv_sec),
            mtime: seconds(stat.stx_mtime.tv_sec),
            ctime: seconds(stat.stx_ctime.tv_sec),
            atimensec: stat.stx_atime.tv_nsec,
            mtimensec: stat.stx_mtime.tv_nsec,
            ctimensec: stat.stx_ctime.tv_nsec,
            mode,
            nlink: stat.stx_nlink,
            uid,
            gid,
            rdev: device_number(stat.stx_rdev_major, stat.stx_rdev_minor),
            blksize: stat.stx_blksize,
            flags: 0,
        }
    }

    pub(super) fn entry(&mut self, nodeid: u64, stat: &Statx) -> EntryOut {
        let attr = self.attributes(stat);
        EntryOut {
            nodeid,
            entry_valid: if self.nodes.are_places() { NAME_CACHE_SECONDS } else { CACHE_SECONDS },
            attr_valid: CACHE_SECONDS,
            attr,
            ..EntryOut::default()
        }
    }

    pub(super) fn get_attributes(
        &mut self,
        node: u64,
        body: &mut Body,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let input: GetattrIn = body.take()?;
        if input.flags & GETATTR_FH != 0 {
            self.handles.file(input.fh, node)?;
        }
        // The handle of an open file keeps the inode's path descriptor open, so this works even if the name is gone.
        let stat = self.nodes.stat(node)?;
        self.put_attributes(&stat, reply)
    }

    fn put_attributes(&mut self, stat: &Statx, reply: &mut Reply) -> Result<(), Errno> {
        let attr = self.attributes(stat);
        reply.put(AttrOut { attr_valid: CACHE_SECONDS, attr, ..AttrOut::default() }.as_slice())
    }

    pub(super) fn set_attributes(
        &mut self,
        node: u64,
        body: &mut Body,
        reply: &mut Reply,
    ) -> Result<(), Errno> {
        let writable = self.writable()?;
        let input: SetattrIn = body.take()?;
        let has = |bit| input.valid & bit != 0;
        let path_fd = self.nodes.path_fd(node)?;
        let (user, group, _) = self.owner.guests(&host::stat(&path_fd)?);
        if has(fattr::UID) && input.uid != user || has(fattr::GID) && input.gid != group {
            return Err(Errno::PERM);
        }
        if has(fattr::MODE) {
            self.host.set_mode(writable, &path_fd, input.mode)?;
        }
        if has(fattr::SIZE) {
            if has(fattr::FH) {
                Host::set_size(writable, &*self.handles.file(input.fh, node)?, input.size)?;
            } else {
                let file = self.host.open(&path_fd, OpenMode::Write(writable))?;
                Host::set_size(writable, &file, input.size)?;
            }
        }
        self.set_times(writable, &path_fd, &input)?;
        self.put_attributes(&host::stat(&path_fd)?, reply)
    }

    fn set_times(&self, writable: Writable, path_fd: &PathFd, input: &SetattrIn) -> Result<(), Errno> {
        let time = |set, now, seconds: u64, nanoseconds: u32| {
            if input.valid & now != 0 {
                Timespec { tv_sec: 0, tv_nsec: UTIME_NOW }
            } else if input.valid & set != 0 {
                Timespec { tv_sec: seconds.cast_signed(), tv_nsec: nanoseconds.into() }
            } else {
                Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT }
            }
        };
        let times = Timestamps {
            last_access: time(fattr::ATIME, fattr::ATIME_NOW, input.atime, input.atimensec),
            last_modification: time(fattr::MTIME, fattr::MTIME_NOW, input.mtime, input.mtimensec),
        };
        let any = fattr::ATIME | fattr::ATIME_NOW | fattr::MTIME | fattr::MTIME_NOW;
        if input.valid & any == 0 { Ok(()) } else { self.host.set_times(writable, path_fd, &times) }
    }

    pub(super) fn stat_file_system(&mut self, node: u64, reply: &mut Reply) -> Result<(), Errno> {
        let stat = rustix::fs::fstatvfs(&*self.nodes.path_fd(node)?)?;
        let word = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let output = StatfsOut {
            blocks: stat.f_blocks,
            bfree: stat.f_bfree,
            bavail: stat.f_bavail,
            files: stat.f_files,
            ffree: stat.f_ffree,
            bsize: word(stat.f_bsize),
            namelen: word(stat.f_namemax),
            frsize: word(stat.f_frsize),
            ..StatfsOut::default()
        };
        reply.put(output.as_slice())
    }
}

/// Encodes a device number as Linux's `new_encode_dev` does.
fn device_number(major: u32, minor: u32) -> u32 {
    minor & 0xff | (major & 0xfff) << 8 | (minor & !0xff) << 12
}
