//! The inodes that the guest has looked up, by FUSE node ID.
//!
//! A node ID refers to the same inode for ever (see [`Identity`]), but the inode's path descriptor may be closed to
//! save descriptors. A closed inode is opened again by the name under which the guest last saw it. If the name now
//! belongs to another inode, the guest gets ESTALE and repeats the lookup. A guest can therefore reference a million
//! inodes with a few hundred file descriptors.

use std::collections::{HashMap, VecDeque};
use std::ffi::CString;
use std::sync::Arc;

use rustix::fs::Statx;
use rustix::io::Errno;

use super::host::{self, Host, PathFd};
use super::message::Name;
use super::wire::ROOT;

/// Identifies an inode. The mount distinguishes two mounts of the same directory, which may have different permissions.
/// The creation time distinguishes a new file from a deleted one that had the same inode number. Kernels and file
/// systems that do not provide these fields set them to 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Identity {
    mount: u64,
    device: (u32, u32),
    inode: u64,
    created: (i64, u32),
}

impl Identity {
    fn of(stat: &Statx) -> Self {
        Self {
            mount: stat.stx_mnt_id,
            device: (stat.stx_dev_major, stat.stx_dev_minor),
            inode: stat.stx_ino,
            created: (stat.stx_btime.tv_sec, stat.stx_btime.tv_nsec),
        }
    }

    fn is_on_other_mount(self, other: Self) -> bool {
        (self.mount, self.device) != (other.mount, other.device)
    }
}

#[derive(Debug)]
enum Location {
    /// The shared directory itself.
    Root,
    /// Node ID of the parent directory, and name.
    Entry(u64, CString),
}

#[derive(Debug)]
struct Node {
    identity: Identity,
    location: Location,
    path_fd: Option<Arc<PathFd>>,
    /// Used since [`Nodes::reserve_descriptor`] last considered this node (second-chance replacement).
    recently_used: bool,
    /// FUSE's lookup count: the number of replies that returned this node, minus those that the guest has forgotten.
    lookups: u64,
}

/// Limits for one share. See [`super`].
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    pub nodes: usize,
    pub descriptors: usize,
}

/// The table of nodes.
#[derive(Debug)]
pub struct Nodes {
    limits: Limits,
    table: HashMap<u64, Node>,
    ids: HashMap<Identity, u64>,
    last_id: u64,
    /// Nodes with an open path descriptor, the oldest first. Some of them may have been forgotten.
    open_order: VecDeque<u64>,
    /// The host's block devices, in the order in which they were found.
    devices: Vec<(u32, u32)>,
}

/// Maximum depth of a node: the number of components in a path of `PATH_MAX` bytes. More, or a loop, can only result
/// from concurrent renames on the host.
const MAX_DEPTH: usize = 2048;

impl Nodes {
    pub fn new(root: PathFd, limits: Limits) -> Result<Self, Errno> {
        let identity = Identity::of(&host::stat(&root)?);
        let root = Node {
            identity,
            location: Location::Root,
            path_fd: Some(root.into()),
            recently_used: true,
            lookups: 0,
        };
        Ok(Self {
            limits,
            table: HashMap::from([(ROOT, root)]),
            ids: HashMap::from([(identity, ROOT)]),
            last_id: ROOT,
            open_order: VecDeque::new(),
            devices: vec![identity.device],
        })
    }

    /// Removes all nodes except the root. Node IDs are not reused even then.
    pub fn clear(&mut self) {
        self.table.retain(|&id, _| id == ROOT);
        self.ids.retain(|_, &mut id| id == ROOT);
        self.open_order.clear();
    }

    /// Returns the path descriptor of a node.
    pub fn path_fd(&mut self, id: u64) -> Result<Arc<PathFd>, Errno> {
        // Walks up to the nearest directory with an open descriptor, and down again.
        let mut closed = Vec::new();
        let mut at = id;
        let mut path_fd = loop {
            let node = self.table.get_mut(&at).ok_or(Errno::STALE)?;
            node.recently_used = true;
            match (&node.path_fd, &node.location) {
                (Some(open), _) => break Arc::clone(open),
                (None, Location::Entry(parent, _)) if closed.len() < MAX_DEPTH => {
                    closed.push(at);
                    at = *parent;
                }
                (None, _) => return Err(Errno::STALE),
            }
        };
        for id in closed.into_iter().rev() {
            path_fd = self.reopen(id, &path_fd)?;
        }
        Ok(path_fd)
    }

    fn reopen(&mut self, id: u64, parent: &PathFd) -> Result<Arc<PathFd>, Errno> {
        self.reserve_descriptor()?;
        let node = self.table.get_mut(&id).ok_or(Errno::STALE)?;
        let Location::Entry(_, name) = &node.location else { return Err(Errno::STALE) };
        let path_fd = match Host::find(parent, Name::new(name)?) {
            Err(Errno::NOENT | Errno::NOTDIR) => Err(Errno::STALE),
            found => found,
        }?;
        if Identity::of(&host::stat(&path_fd)?) != node.identity {
            return Err(Errno::STALE);
        }
        let path_fd = Arc::new(path_fd);
        node.path_fd = Some(Arc::clone(&path_fd));
        self.open_order.push_back(id);
        Ok(path_fd)
    }

    /// Looks up a name in a directory, and counts the lookup.
    pub fn look_up(&mut self, parent: u64, name: Name) -> Result<(u64, Statx), Errno> {
        let path_fd = Host::find(&*self.path_fd(parent)?, name)?;
        self.register(path_fd, parent, name)
    }

    /// Counts a lookup of the inode that has this name in a directory. Creates its node if necessary.
    pub fn register(&mut self, path_fd: PathFd, parent: u64, name: Name) -> Result<(u64, Statx), Errno> {
        let stat = host::stat(&path_fd)?;
        let identity = Identity::of(&stat);
        let parent_node = self.table.get(&parent).ok_or(Errno::STALE)?;
        // Other mounts in the share are allowed, but not procfs, where /proc/self would refer to this process.
        if parent_node.identity.is_on_other_mount(identity) && host::is_proc(&path_fd)? {
            return Err(Errno::ACCESS);
        }
        let id = self.ids.get(&identity).copied();
        if id.is_none() && self.table.len() >= self.limits.nodes {
            return Err(Errno::NFILE);
        }
        let is_closed = id.is_none_or(|id| self.table[&id].path_fd.is_none());
        if is_closed {
            self.reserve_descriptor()?;
        }
        let id = id.unwrap_or_else(|| {
            self.last_id += 1;
            self.ids.insert(identity, self.last_id);
            self.last_id
        });
        let node = self.table.entry(id).or_insert_with(|| Node {
            identity,
            location: Location::Entry(parent, CString::default()),
            path_fd: None,
            recently_used: true,
            lookups: 0,
        });
        node.lookups = node.lookups.saturating_add(1);
        node.recently_used = true;
        if let Location::Entry(last_parent, last_name) = &mut node.location {
            *last_parent = parent;
            if last_name.as_c_str() != name.as_c_str() {
                name.as_c_str().clone_into(last_name);
            }
        }
        if is_closed {
            node.path_fd = Some(path_fd.into());
            self.open_order.push_back(id);
        }
        Ok((id, stat))
    }

    /// Records the new location of an inode that the guest has renamed, if the inode has a node.
    pub fn record_rename(&mut self, parent: u64, name: Name) -> Result<(), Errno> {
        let path_fd = Host::find(&*self.path_fd(parent)?, name)?;
        let identity = Identity::of(&host::stat(&path_fd)?);
        if let Some(node) = self.ids.get(&identity).and_then(|id| self.table.get_mut(id))
            && let Location::Entry(last_parent, last_name) = &mut node.location
        {
            *last_parent = parent;
            name.as_c_str().clone_into(last_name);
        }
        Ok(())
    }

    /// Subtracts from the lookup count. Removes the node when the count reaches zero.
    pub fn forget(&mut self, id: u64, lookups: u64) {
        let Some(node) = self.table.get_mut(&id) else { return };
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups == 0 && id != ROOT {
            let identity = node.identity;
            self.table.remove(&id);
            self.ids.remove(&identity);
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
            let Some(node) = self.table.get_mut(&id) else { continue };
            let is_referenced = node.path_fd.as_ref().is_some_and(|path_fd| Arc::strong_count(path_fd) > 1);
            if is_referenced || node.recently_used {
                node.recently_used = false;
                self.open_order.push_back(id);
            } else {
                node.path_fd = None;
            }
        }
        if self.open_order.len() < self.limits.descriptors { Ok(()) } else { Err(Errno::NFILE) }
    }

    /// Returns the number of nodes, and how many of them have an open path descriptor.
    #[cfg(test)]
    pub fn counts(&self) -> (usize, usize) {
        (self.table.len(), self.table.values().filter(|node| node.path_fd.is_some()).count())
    }
}
