//! What a guest does not see of a shared directory.
//!
//! A guest whose root is a directory of the host, perhaps the host's own root, has file systems of its own at some
//! places, and other things are not its business. These are left out here, where no guest can come by them, and not by
//! mounts in the guest: for the guest, the names do not exist.

use std::ffi::{CString, OsString};
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FsWord, ResolveFlags, Statx};
use rustix::io::Errno;

use super::attributes::FileOwner;
use super::host::{self, Host, PathFd};
use super::message::Name;
use super::wire::ROOT;

/// File systems by which a kernel shows itself, or is controlled (`linux/magic.h`): procfs, sysfs, devpts, cgroup,
/// cgroup2, debugfs, tracefs, securityfs, selinuxfs, bpf, efivarfs, `binfmt_misc`, configfs, pstore, fusectl, smackfs,
/// resctrl, nsfs, `rpc_pipefs`.
const KERNELS: [FsWord; 19] = [
    0x9fa0,
    0x6265_6572,
    0x1cd1,
    0x0027_e0eb,
    0x6367_7270,
    0x6462_6720,
    0x7472_6163,
    0x7363_6673,
    0xf97c_ff8c,
    0xcafe_4a11,
    0xde5e_81e4,
    0x4249_4e4d,
    0x6265_6570,
    0x6165_676c,
    0x6573_5543,
    0x4341_5d53,
    0x0765_5821,
    0x6e73_6673,
    0x6759_6969,
];
/// Returns whether a file is on a file system by which a kernel shows itself, or is controlled: to read it may do more
/// than that.
pub fn is_of_a_kernel(file: impl AsFd) -> Result<bool, Errno> {
    Ok(KERNELS.contains(&rustix::fs::fstatfs(file)?.f_type))
}

/// File systems in memory, by the names that mounts have.
const IN_MEMORY: [&[u8]; 3] = [b"tmpfs", b"devtmpfs", b"ramfs"];

/// What a guest sees of other file systems that are mounted in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mounts {
    /// They are part of the directory.
    Seen,
    /// Neither the mounts nor what is below them. They are not touched, so that one that hangs does no harm.
    Hidden,
}

/// A directory that becomes the root of a guest.
#[derive(Debug, Clone, Copy)]
pub struct Root<'a> {
    /// Where it is.
    pub path: &'a Path,
    /// What the guest sees of mounts in it.
    pub mounts: Mounts,
    /// Names in the directory that the guest has for itself.
    pub own: &'a [&'a str],
    /// Directories of the host that the guest does not see, by whatever path, nor what gets their paths later.
    pub hidden: &'a [PathBuf],
    /// To whom files in it belong, by the numbers of their inodes, if that is not what the host says.
    pub owners: &'a [(u64, FileOwner)],
}

/// A device's number.
type Device = (u32, u32);

/// An inode that is held, so that no other one gets its number.
#[derive(Debug)]
struct Held {
    _inode: PathFd,
    device: Device,
    number: u64,
}

/// A name in a directory, whatever has it.
#[derive(Debug)]
struct Place {
    parent: Held,
    name: CString,
}

/// What is left out.
#[derive(Debug)]
pub struct View {
    mounts: Mounts,
    /// Names in the shared directory itself.
    names: Vec<CString>,
    inodes: Vec<Held>,
    places: Vec<Place>,
    /// All that is on these devices.
    devices: Vec<Device>,
}

impl View {
    /// Leaves out nothing.
    pub fn of_everything() -> Self {
        Self {
            mounts: Mounts::Seen,
            names: Vec::new(),
            inodes: Vec::new(),
            places: Vec::new(),
            devices: Vec::new(),
        }
    }

    /// Leaves out what the root of a guest does not have. `opened` is the directory.
    pub fn of_root(root: &Root, opened: &PathFd) -> Result<Self, Errno> {
        let here = device(&host::stat(opened)?);
        let folders = root.hidden.iter().filter_map(|folder| Host::open_root(folder).ok());
        let inodes = folders.map(Held::of).collect::<Result<_, _>>()?;
        let places = root.hidden.iter().filter_map(|folder| Place::of(folder)).collect();
        // What is in memory there, such as device nodes and sockets, may be mounted elsewhere, too.
        let mut devices = in_memory(root, &fs::read("/proc/self/mountinfo").unwrap_or_default());
        devices.retain(|device| *device != here);
        let names = root.own.iter().filter_map(|name| CString::new(*name).ok()).collect();
        Ok(Self { mounts: root.mounts, names, inodes, places, devices })
    }

    /// Returns true if nothing is left out.
    pub fn is_everything(&self) -> bool {
        self.mounts == Mounts::Seen
            && self.names.is_empty()
            && self.inodes.is_empty()
            && self.places.is_empty()
            && self.devices.is_empty()
    }

    /// Finds a name in the directory with this node ID. What is returned may still be hidden ([`Self::check`]).
    pub fn find(&self, parent: (u64, &PathFd), name: Name) -> Result<PathFd, Errno> {
        let (id, parent) = parent;
        if id == ROOT && self.names.iter().any(|hidden| **hidden == *name.as_c_str()) {
            return Err(Errno::NOENT);
        }
        let mut places = self.places.iter().filter(|place| *place.name == *name.as_c_str()).peekable();
        if places.peek().is_some() {
            let parent = host::stat(parent)?;
            if places.any(|place| place.parent.is(&parent)) {
                return Err(Errno::NOENT);
            }
        }
        match self.mounts {
            Mounts::Seen => Host::find(parent, name, ResolveFlags::empty()),
            Mounts::Hidden => match Host::find(parent, name, ResolveFlags::NO_XDEV) {
                Err(Errno::XDEV) => Err(Errno::NOENT),
                found => found,
            },
        }
    }

    /// Fails if an inode that was found is not seen. `is_mount` is true if it may be on another file system than the
    /// directory in which it was found.
    pub fn check(&self, path_fd: &PathFd, stat: &Statx, is_mount: bool) -> Result<(), Errno> {
        if self.devices.contains(&device(stat)) || self.inodes.iter().any(|inode| inode.is(stat)) {
            return Err(Errno::NOENT);
        }
        if is_mount && !self.is_everything() && KERNELS.contains(&host::file_system_type(path_fd)?) {
            return Err(Errno::NOENT);
        }
        Ok(())
    }
}

impl Held {
    fn of(path_fd: PathFd) -> Result<Self, Errno> {
        let stat = host::stat(&path_fd)?;
        Ok(Self { _inode: path_fd, device: device(&stat), number: stat.stx_ino })
    }

    fn is(&self, stat: &Statx) -> bool {
        (self.device, self.number) == (device(stat), stat.stx_ino)
    }
}

impl Place {
    /// Returns the place of a path, or of the first directory on its way that does not exist.
    fn of(path: &Path) -> Option<Self> {
        path.ancestors().find_map(|path| {
            let parent = Host::open_root(path.parent()?).ok()?;
            let name = CString::new(path.file_name()?.as_bytes()).ok()?;
            Some(Self { parent: Held::of(parent).ok()?, name })
        })
    }
}

/// Returns the devices of file systems in memory that are mounted where the guest has its own, or below, by the list of
/// this process's mounts (proc(5), `/proc/pid/mountinfo`).
fn in_memory(root: &Root, mounts: &[u8]) -> Vec<Device> {
    let own: Vec<PathBuf> = root.own.iter().map(|name| root.path.join(name)).collect();
    let device = |line: &[u8]| {
        let mut fields = line.split(|byte| *byte == b' ');
        let device = std::str::from_utf8(fields.nth(2)?).ok()?;
        let place = unescaped(fields.nth(1)?);
        let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
        let is_own = own.iter().any(|own| place.starts_with(own));
        let (major, minor) = device.split_once(':')?;
        let device = (major.parse().ok()?, minor.parse().ok()?);
        (is_own && IN_MEMORY.contains(&kind)).then_some(device)
    };
    mounts.split(|byte| *byte == b'\n').filter_map(device).collect()
}

/// Returns a path of that list, in which three octal digits after a backslash are a byte.
fn unescaped(path: &[u8]) -> PathBuf {
    let (mut rest, mut bytes) = (path, Vec::new());
    while let Some((first, after)) = rest.split_first() {
        let octal = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &after[3..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes).into()
}

fn device(stat: &Statx) -> Device {
    (stat.stx_dev_major, stat.stx_dev_minor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_systems_in_memory_are_found_where_the_guest_has_its_own() {
        let mounts = b"21 1 0:20 / /my\\040root/run rw,nosuid shared:5 - tmpfs tmpfs rw,size=1024k\n\
            22 21 0:25 / /my\\040root/run/user/1000 rw shared:6 - tmpfs tmpfs rw\n\
            23 21 8:1 / /my\\040root/run/media rw - ext4 /dev/sda1 rw\n\
            24 1 0:26 / /my\\040root/runs rw - tmpfs tmpfs rw\n\
            25 1 0:6 / /my\\040root/dev rw - devtmpfs udev rw\n\
            broken\n";
        let root = Root {
            path: Path::new("/my root"),
            mounts: Mounts::Seen,
            own: &["dev", "run"],
            hidden: &[],
            owners: &[],
        };
        assert_eq!(in_memory(&root, mounts), [(0, 20), (0, 25), (0, 6)]);
        assert_eq!(unescaped(b"a\\134b\\"), Path::new("a\\b\\"));
    }
}
