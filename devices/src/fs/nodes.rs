//! The inodes that the guest has looked up, by FUSE node ID.
//!
//! A node ID refers to the same inode for ever (see [`InodeId`]), but the inode's path descriptor may be closed to
//! save descriptors, or not have been opened yet. A closed inode is opened by the name under which the guest last saw
//! it. If the name now belongs to another inode, the guest gets ESTALE and repeats the lookup. A guest can therefore
//! reference many inodes with a few hundred file descriptors. The nodes themselves are limited too (see [`table`]).
//!
//! In a directory that is a guest's root, a node ID refers to a place instead ([`Identity::Place`]). If another inode
//! of the same type has the name now, the node becomes that inode. It does not while the guest has the old one open,
//! for its programs may have mapped it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{FileType, Statx};
use rustix::io::Errno;

use super::host::{self, PathFd};
use super::message::Name;
use super::view::View;
use super::wire::ROOT;

mod state;
mod table;

pub use state::NodesState;
use table::{Identity, InodeId, Key, Kind, Table};

/// Limits for one share. See [`super`].
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of nodes.
    pub nodes: usize,
    /// Maximum number of bytes that the names of the nodes take.
    pub name_bytes: usize,
    /// Maximum number of descriptors for nodes, and again for handles.
    pub descriptors: usize,
}

/// A mounted file system. The mount distinguishes two mounts of the same directory, which may have different
/// permissions. Kernels that do not provide its number set it to 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileSystem {
    mount: u64,
    device: (u32, u32),
}

/// The nodes of a share.
#[derive(Debug)]
pub struct Nodes {
    limits: Limits,
    table: Table,
    /// Nodes with an open path descriptor, the oldest first. Some of them may have been removed.
    open_order: VecDeque<u64>,
    /// The host's mounted file systems, in the order in which they were found.
    file_systems: Vec<FileSystem>,
    /// The host's block devices, in the order in which they were found.
    devices: Vec<(u32, u32)>,
    /// What the guest does not see.
    view: View,
    created: Instant,
}

/// Time for which an inode is taken to have its name, in a directory whose nodes stand for places. A command that opens
/// thousands of files finds each directory above them this often.
const PERIOD: Duration = Duration::from_millis(100);

/// Maximum depth of a node: the number of components in a path of `PATH_MAX` bytes. More, or a loop, can only result
/// from concurrent renames on the host.
const MAX_DEPTH: usize = 2048;

impl Nodes {
    /// Returns true if an inode is at the place where the guest last saw it.
    pub fn has_name(&mut self, id: u64) -> bool {
        let found = |nodes: &mut Self| {
            let node = nodes.table.get(id).ok_or(Errno::STALE)?;
            let ((parent, name), inode_id) = (node.location(), node.inode_id);
            let name = name.to_owned();
            let found = nodes.find(parent, Name::new(&name)?)?;
            Ok::<_, Errno>(identify(&mut nodes.file_systems, &host::stat(&found)?) == inode_id)
        };
        id == ROOT || found(self).unwrap_or(false)
    }

    pub fn new(root: PathFd, view: View, limits: Limits) -> Result<Self, Errno> {
        let stat = host::stat(&root)?;
        let mut file_systems = Vec::new();
        let inode_id = identify(&mut file_systems, &stat);
        Ok(Self {
            limits,
            table: Table::new(limits, identity(&view), inode_id, root.into()),
            open_order: VecDeque::new(),
            file_systems,
            devices: vec![device(&stat)],
            view,
            created: Instant::now(),
        })
    }

    /// Returns true if nodes stand for places, so that a name never becomes another node.
    pub fn are_places(&self) -> bool {
        identity(&self.view) == Identity::Place
    }

    /// Finds a name in a directory. What is returned must be identified ([`Self::identify_entry`]) before the guest may
    /// use it.
    pub fn find(&mut self, parent: u64, name: Name) -> Result<PathFd, Errno> {
        // This reference keeps the parent from being evicted.
        let parent_fd = self.path_fd(parent)?;
        self.view.find((parent, &parent_fd), name)
    }

    /// Returns true if the guest sees this entry of a directory, as far as that can be told.
    pub fn sees(&mut self, parent: u64, name: Name) -> bool {
        let look = |nodes: &mut Self| {
            let found = nodes.find(parent, name)?;
            nodes.identify_entry(&found, parent).map(drop)
        };
        self.view.is_everything() || matches!(look(self), Ok(()) | Err(Errno::ACCESS))
    }

    /// Removes all nodes except the root. Node IDs are not reused even then.
    pub fn clear(&mut self) {
        self.table.clear();
        self.open_order.clear();
    }

    /// Returns the path descriptor of a node.
    pub fn path_fd(&mut self, id: u64) -> Result<Arc<PathFd>, Errno> {
        if self.are_places() {
            return self.follow(id);
        }
        // Walks up to the nearest directory with an open descriptor, and down again.
        let mut closed = Vec::new();
        let mut at = id;
        let mut path_fd = loop {
            let node = self.table.get_mut(at).ok_or(Errno::STALE)?;
            node.mark_used();
            match &node.path_fd {
                Some(open) => break Arc::clone(open),
                None if closed.len() < MAX_DEPTH => {
                    closed.push(at);
                    at = node.location().0;
                }
                None => return Err(Errno::STALE),
            }
        };
        for id in closed.into_iter().rev() {
            path_fd = self.reopen(id, &path_fd)?;
        }
        Ok(path_fd)
    }

    /// Returns the path descriptor of what is at a node's place now.
    fn follow(&mut self, id: u64) -> Result<Arc<PathFd>, Errno> {
        let mut below = Vec::new();
        let mut at = id;
        while at != ROOT {
            if below.len() >= MAX_DEPTH {
                return Err(Errno::STALE);
            }
            below.push(at);
            at = self.table.get(at).ok_or(Errno::STALE)?.location().0;
        }
        let root = self.table.get(ROOT).and_then(|root| root.path_fd.as_ref());
        let mut path_fd = Arc::clone(root.ok_or(Errno::STALE)?);
        for id in below.into_iter().rev() {
            path_fd = self.follow_name(id, &path_fd)?;
        }
        Ok(path_fd)
    }

    fn follow_name(&mut self, id: u64, parent_fd: &PathFd) -> Result<Arc<PathFd>, Errno> {
        let period = self.period();
        let node = self.table.get_mut(id).ok_or(Errno::STALE)?;
        node.mark_used();
        if let Some(path_fd) = &node.path_fd
            && (is_open(path_fd) || node.checked == period)
        {
            return Ok(Arc::clone(path_fd));
        }
        let (parent, name) = node.location();
        let name = name.to_owned();
        let found = self.view.find((parent, parent_fd), Name::new(&name)?)?;
        let (inode_id, stat) = self.identify_entry(&found, parent)?;
        if self.table.get(id).ok_or(Errno::STALE)?.kind != kind(&stat) {
            return Err(Errno::STALE);
        }
        self.put_at(id, inode_id, found)
    }

    /// Makes the inode that has a node's name now the node's.
    fn put_at(&mut self, id: u64, inode_id: InodeId, path_fd: PathFd) -> Result<Arc<PathFd>, Errno> {
        let period = self.period();
        let is_closed = self.table.get(id).is_none_or(|node| node.path_fd.is_none());
        if is_closed {
            self.reserve_descriptor()?;
        }
        let node = self.table.get_mut(id).ok_or(Errno::STALE)?;
        let path_fd = Arc::new(path_fd);
        (node.inode_id, node.path_fd, node.checked) = (inode_id, Some(Arc::clone(&path_fd)), period);
        if is_closed {
            self.open_order.push_back(id);
        }
        Ok(path_fd)
    }

    /// Returns the lowest bits of the number of this period. If a node was checked in another one with the same bits,
    /// it is checked a period later.
    fn period(&self) -> u8 {
        (self.created.elapsed().as_millis() / PERIOD.as_millis()).to_le_bytes()[0]
    }

    fn reopen(&mut self, id: u64, parent: &PathFd) -> Result<Arc<PathFd>, Errno> {
        self.reserve_descriptor()?;
        let node = self.table.get_mut(id).ok_or(Errno::STALE)?;
        let (parent_id, name) = node.location();
        let path_fd = match self.view.find((parent_id, parent), Name::new(name)?) {
            Err(Errno::NOENT | Errno::NOTDIR) => Err(Errno::STALE),
            found => found,
        }?;
        let stat = host::stat(&path_fd)?;
        if identify(&mut self.file_systems, &stat) != node.inode_id || kind(&stat) != node.kind {
            return Err(Errno::STALE);
        }
        let path_fd = Arc::new(path_fd);
        node.path_fd = Some(Arc::clone(&path_fd));
        self.open_order.push_back(id);
        Ok(path_fd)
    }

    /// Looks up a name in a directory, and counts the lookup.
    ///
    /// A program that lists or searches a tree looks up every file, and opens few of them. So what is not a directory
    /// is only looked at, and its node is closed until it is used. A directory may become a program's current one,
    /// which has to be open if the host moves it. A mount, and what is in a root, has to be open to be checked.
    pub fn look_up(&mut self, parent: u64, name: Name) -> Result<(u64, Statx), Errno> {
        // This reference keeps the parent from being evicted.
        let parent_fd = self.path_fd(parent)?;
        if !self.are_places() {
            let stat = host::stat_name(&parent_fd, name)?;
            let inode_id = identify(&mut self.file_systems, &stat);
            let here = self.table.get(parent).ok_or(Errno::STALE)?.inode_id.file_system;
            if inode_id.file_system == here && kind(&stat) != Kind::Directory {
                return self.register_inode((inode_id, stat), None, parent, name);
            }
        }
        self.register(self.view.find((parent, &parent_fd), name)?, parent, name)
    }

    /// Returns the path descriptor of a node that is to be opened, and whether it is a directory or a regular file, if
    /// it is either.
    pub fn path_fd_and_type(&mut self, id: u64) -> Result<(Arc<PathFd>, FileType), Errno> {
        let path_fd = self.path_fd(id)?;
        let file_type = match self.table.get(id).ok_or(Errno::STALE)?.kind {
            Kind::Directory => FileType::Directory,
            Kind::File => FileType::RegularFile,
            Kind::Link | Kind::Other => FileType::Unknown,
        };
        Ok((path_fd, file_type))
    }

    /// Returns the attributes of a node.
    pub fn stat(&mut self, id: u64) -> Result<Statx, Errno> {
        let are_places = self.are_places();
        let node = self.table.get_mut(id).ok_or(Errno::STALE)?;
        let ((parent, name), inode_id) = (node.location(), node.inode_id);
        if are_places || node.path_fd.is_some() || node.kind == Kind::Directory {
            return host::stat(&*self.path_fd(id)?);
        }
        let name = name.to_owned();
        node.mark_used();
        let parent_fd = self.path_fd(parent)?;
        let stat = match host::stat_name(&parent_fd, Name::new(&name)?) {
            Err(Errno::NOENT | Errno::NOTDIR) => Err(Errno::STALE),
            found => found,
        }?;
        if identify(&mut self.file_systems, &stat) == inode_id { Ok(stat) } else { Err(Errno::STALE) }
    }

    /// Ensures that one more inode of this name can be registered. Must be called before an inode is created: the guest
    /// could not be told of it otherwise.
    pub fn reserve(&mut self, name: Name) -> Result<(), Errno> {
        self.table.reserve(name)?;
        self.reserve_descriptor()
    }

    /// Counts a lookup of the inode that has this name in a directory. Creates its node if necessary.
    pub fn register(&mut self, path_fd: PathFd, parent: u64, name: Name) -> Result<(u64, Statx), Errno> {
        let (inode_id, stat) = self.identify_entry(&path_fd, parent)?;
        let key = Key { inode_id, place: (parent, name.as_c_str()) };
        if self.are_places()
            && let Some(id) = self.table.find(key)
        {
            if self.table.get(id).is_some_and(|node| node.kind == kind(&stat)) {
                return self.register_at(id, inode_id, path_fd, stat);
            }
            // The guest takes it for another inode, too.
            self.table.remove(id);
        }
        self.register_inode((inode_id, stat), Some(path_fd), parent, name)
    }

    /// Counts a lookup of an inode, which is open or not.
    fn register_inode(
        &mut self,
        (inode_id, stat): (InodeId, Statx),
        path_fd: Option<PathFd>,
        parent: u64,
        name: Name,
    ) -> Result<(u64, Statx), Errno> {
        let key = Key { inode_id, place: (parent, name.as_c_str()) };
        if !self.is_at(key) {
            self.table.reserve(name)?;
        }
        // It may have been evicted just now.
        let known = self.table.find(key);
        let is_closed = known.and_then(|id| self.table.get(id)).is_none_or(|node| node.path_fd.is_none());
        let path_fd = path_fd.filter(|_| is_closed);
        if path_fd.is_some() {
            self.reserve_descriptor()?;
        }
        let id = known.unwrap_or_else(|| self.table.insert(inode_id, kind(&stat), parent, name.as_c_str()));
        self.table.set_location(id, parent, name);
        let period = self.period();
        let node = self.table.get_mut(id).ok_or(Errno::STALE)?;
        if is_closed {
            // Without creation times, another inode of the same number is taken for this one.
            node.kind = kind(&stat);
        }
        node.checked = period;
        node.lookups = node.lookups.saturating_add(1);
        if known.is_some() {
            node.mark_used();
        }
        if let Some(path_fd) = path_fd {
            node.path_fd = Some(path_fd.into());
            self.open_order.push_back(id);
        }
        Ok((id, stat))
    }

    /// Counts a lookup of a node that stands for the place of this inode.
    fn register_at(
        &mut self,
        id: u64,
        inode_id: InodeId,
        path_fd: PathFd,
        stat: Statx,
    ) -> Result<(u64, Statx), Errno> {
        let known = self.table.get(id).and_then(|node| node.path_fd.as_ref());
        let stat = if let Some(open) = known.filter(|path_fd| is_open(path_fd)) {
            // For the guest, the old one is still there.
            host::stat(open)?
        } else {
            self.put_at(id, inode_id, path_fd)?;
            stat
        };
        let node = self.table.get_mut(id).ok_or(Errno::STALE)?;
        node.lookups = node.lookups.saturating_add(1);
        node.mark_used();
        Ok((id, stat))
    }

    /// Returns the identity of an inode in a directory. Fails if the guest may not access it. Must be called before the
    /// inode is opened.
    pub fn identify_entry(&mut self, path_fd: &PathFd, parent: u64) -> Result<(InodeId, Statx), Errno> {
        let stat = host::stat(path_fd)?;
        let inode_id = identify(&mut self.file_systems, &stat);
        let parent = self.table.get(parent).ok_or(Errno::STALE)?;
        let is_mount = parent.inode_id.file_system != inode_id.file_system;
        self.view.check(path_fd, &stat, is_mount)?;
        // Other mounts in the share are allowed, but not procfs, where /proc/self would refer to this process.
        if is_mount && host::is_proc(path_fd)? {
            return Err(Errno::ACCESS);
        }
        Ok((inode_id, stat))
    }

    /// Returns true if the inode has a node, and the guest last saw it there.
    fn is_at(&self, key: Key) -> bool {
        let node = self.table.find(key).and_then(|id| self.table.get(id));
        node.is_some_and(|node| node.location() == key.place)
    }

    /// Records the new location of an inode that the guest has renamed, if the inode has a node.
    pub fn record_rename(&mut self, parent: u64, name: Name) -> Result<(), Errno> {
        let parent_fd = self.path_fd(parent)?;
        let path_fd = self.view.find((parent, &parent_fd), name)?;
        let inode_id = identify(&mut self.file_systems, &host::stat(&path_fd)?);
        self.table.reserve(name)?;
        if let Some(id) = self.table.find(Key { inode_id, place: (parent, name.as_c_str()) }) {
            self.table.set_location(id, parent, name);
        }
        Ok(())
    }

    /// Subtracts from the lookup count. Removes the node when the count reaches zero.
    pub fn forget(&mut self, id: u64, lookups: u64) {
        let Some(node) = self.table.get_mut(id) else { return };
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups == 0 && id != ROOT {
            self.table.remove(id);
        }
    }

    /// Returns the inode number that the guest sees. The share is one device for the guest, so inode numbers of other
    /// devices than the root's get the index of their device in the upper bits. This keeps the numbers of two mounts
    /// apart.
    pub fn guest_inode(&mut self, device: (u32, u32), inode: u64) -> u64 {
        let index = self.devices.iter().position(|&known| known == device).unwrap_or_else(|| {
            self.devices.push(device);
            self.devices.len() - 1
        });
        inode.wrapping_add((index as u64) << 48)
    }

    /// Ensures that one more path descriptor may be opened, by closing others if necessary. Does not close a descriptor
    /// with other references, such as that of an open file.
    fn reserve_descriptor(&mut self) -> Result<(), Errno> {
        for _ in 0..2 * self.open_order.len() {
            if self.open_order.len() < self.limits.descriptors {
                break;
            }
            let Some(id) = self.open_order.pop_front() else { break };
            let Some(node) = self.table.get_mut(id) else { continue };
            let is_referenced = node.path_fd.as_ref().is_some_and(|path_fd| Arc::strong_count(path_fd) > 1);
            if is_referenced || node.is_fd_used {
                node.is_fd_used = false;
                self.open_order.push_back(id);
            } else {
                node.path_fd = None;
            }
        }
        if self.open_order.len() < self.limits.descriptors { Ok(()) } else { Err(Errno::NFILE) }
    }

    #[cfg(test)]
    pub fn counts(&self) -> (usize, usize) {
        self.table.counts()
    }
}

/// Returns what the nodes of a share stand for.
fn identity(view: &View) -> Identity {
    if view.is_everything() { Identity::Inode } else { Identity::Place }
}

/// Returns true if an open file or directory, or the current request, has this path descriptor, too.
fn is_open(path_fd: &Arc<PathFd>) -> bool {
    Arc::strong_count(path_fd) > 1
}

fn kind(stat: &Statx) -> Kind {
    FileType::from_raw_mode(stat.stx_mode.into()).into()
}

fn device(stat: &Statx) -> (u32, u32) {
    (stat.stx_dev_major, stat.stx_dev_minor)
}

/// Returns the identity of an inode. Adds its file system to the known ones if necessary.
fn identify(known: &mut Vec<FileSystem>, stat: &Statx) -> InodeId {
    let file_system = FileSystem { mount: stat.stx_mnt_id, device: device(stat) };
    let index = known.iter().position(|other| *other == file_system).unwrap_or_else(|| {
        known.push(file_system);
        known.len() - 1
    });
    let seconds = stat.stx_btime.tv_sec.wrapping_mul(1_000_000_000);
    InodeId {
        inode: stat.stx_ino,
        created: seconds.wrapping_add(stat.stx_btime.tv_nsec.into()),
        file_system: u32::try_from(index).expect("a host has fewer mounts"),
    }
}
