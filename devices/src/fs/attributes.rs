//! What the guest is told of a thing, and what of that it may change.

use rustix::fs::{Statx, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno;
use vm_memory::ByteValued;

use super::Server;
use super::host::{self, Host, Open, Place, Writable};
use super::message::{Body, Reply};
use super::wire::{Attr, AttrOut, EntryOut, GETATTR_FH, GetattrIn, SetattrIn, StatfsOut, fattr};

/// For how many seconds the guest may believe what it was told, of names and of attributes.
const VALID: u64 = 1;

/// The user and group as whom this program acts. To the guest, which runs as root, what is theirs belongs to root.
#[derive(Debug, Clone, Copy)]
pub struct Owner {
    pub user: u32,
    pub group: u32,
}

impl Owner {
    pub fn current() -> Self {
        let (user, group) = host::owner();
        Self { user: user.as_raw(), group: group.as_raw() }
    }

    fn shown(self, stat: &Statx) -> (u32, u32) {
        let shown = |id, own| if id == own { 0 } else { id };
        (shown(stat.stx_uid, self.user), shown(stat.stx_gid, self.group))
    }
}

impl Server {
    pub(super) fn attributes(&mut self, stat: &Statx) -> Attr {
        let (uid, gid) = self.owner.shown(stat);
        // Times before 1970 are negative there too; both sides take the same bits.
        let seconds = i64::cast_unsigned;
        Attr {
            ino: self.nodes.shown_inode((stat.stx_dev_major, stat.stx_dev_minor), stat.stx_ino),
            size: stat.stx_size,
            blocks: stat.stx_blocks,
            atime: seconds(stat.stx_atime.tv_sec),
            mtime: seconds(stat.stx_mtime.tv_sec),
            ctime: seconds(stat.stx_ctime.tv_sec),
            atimensec: stat.stx_atime.tv_nsec,
            mtimensec: stat.stx_mtime.tv_nsec,
            ctimensec: stat.stx_ctime.tv_nsec,
            mode: stat.stx_mode.into(),
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
        EntryOut { nodeid, entry_valid: VALID, attr_valid: VALID, attr, ..EntryOut::default() }
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
        // An open file is not closed as a thing either, so that this is right also when its name is gone.
        let place = self.nodes.place(node)?;
        self.put_attributes(&place, reply)
    }

    fn put_attributes(&mut self, place: &Place, reply: &mut Reply) -> Result<(), Errno> {
        let attr = self.attributes(&host::stat(place)?);
        reply.put(AttrOut { attr_valid: VALID, attr, ..AttrOut::default() }.as_slice())
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
        let place = self.nodes.place(node)?;
        let (user, group) = self.owner.shown(&host::stat(&place)?);
        if has(fattr::UID) && input.uid != user || has(fattr::GID) && input.gid != group {
            return Err(Errno::PERM);
        }
        if has(fattr::MODE) {
            self.host.set_mode(writable, &place, input.mode)?;
        }
        if has(fattr::SIZE) {
            if has(fattr::FH) {
                Host::set_size(writable, &*self.handles.file(input.fh, node)?, input.size)?;
            } else {
                let file = self.host.open(&place, Open::Write(writable))?;
                Host::set_size(writable, &file, input.size)?;
            }
        }
        self.set_times(writable, &place, &input)?;
        self.put_attributes(&place, reply)
    }

    fn set_times(&self, writable: Writable, place: &Place, input: &SetattrIn) -> Result<(), Errno> {
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
        if input.valid & any == 0 { Ok(()) } else { self.host.set_times(writable, place, &times) }
    }

    pub(super) fn file_system(&mut self, node: u64, reply: &mut Reply) -> Result<(), Errno> {
        let stat = rustix::fs::fstatvfs(&*self.nodes.place(node)?)?;
        let word = |value: u64| u32::try_from(value).unwrap_or(u32::MAX);
        let answer = StatfsOut {
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
        reply.put(answer.as_slice())
    }
}

/// As Linux's `new_encode_dev` has it.
fn device_number(major: u32, minor: u32) -> u32 {
    minor & 0xff | (major & 0xfff) << 8 | (minor & !0xff) << 12
}
