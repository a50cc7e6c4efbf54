//! Stores the nodes in little memory, and evicts nodes that the guest has not used for long when there are too many.
//!
//! A guest's kernel forgets inodes only when its own memory is short, so a program that walks through a large tree
//! makes it reference all of them. If a node is evicted, the guest's next request for it fails with ESTALE, and the
//! guest's kernel looks the path up again. It cannot do so for a program's current directory.
//!
//! What a node stands for is either an inode or a place ([`Identity`]).

use std::collections::hash_map::RandomState;
use std::ffi::CStr;
use std::hash::BuildHasher;
use std::sync::Arc;

use hashbrown::HashTable;
use rustix::fs::FileType;
use rustix::io::Errno;

use super::super::host::PathFd;
use super::super::message::Name;
use super::super::wire::ROOT;
use super::Limits;

/// Identifies an inode on one of the file systems that [`super::Nodes`] has numbered. The creation time distinguishes a
/// new file from a deleted one that had the same inode number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct InodeId {
    pub inode: u64,
    /// Nanoseconds, or 0 if the file system does not provide it.
    pub created: i64,
    pub file_system: u32,
}

/// What a node stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    /// An inode, whatever names it has.
    Inode,
    /// A name in a directory, whatever inode has it now. A guest that has an overlay over a share cannot look a name up
    /// again once it has found another inode there: Linux's overlay would answer ESTALE from then on.
    Place,
}

/// The type of an inode. A program in the guest may use a directory without looking it up again, as its current
/// directory; others are used through an open file, or looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Directory,
    File,
    Link,
    /// A FIFO, a socket or a device node.
    Other,
}

impl From<FileType> for Kind {
    fn from(file_type: FileType) -> Self {
        match file_type {
            FileType::Directory => Self::Directory,
            FileType::RegularFile => Self::File,
            FileType::Symlink => Self::Link,
            _ => Self::Other,
        }
    }
}

/// What a node is found by.
#[derive(Debug, Clone, Copy)]
pub struct Key<'a> {
    pub inode_id: InodeId,
    /// The directory's node ID, and the name in it.
    pub place: (u64, &'a CStr),
}

/// An inode that the guest references. There are many, so the fields are few.
#[derive(Debug)]
pub struct Node {
    id: u64,
    pub inode_id: InodeId,
    /// Node ID of the directory in which the guest last saw the inode. The root has none, 0.
    parent: u64,
    /// The inode's name there.
    name: Box<CStr>,
    pub path_fd: Option<Arc<PathFd>>,
    /// FUSE's lookup count: the number of replies that returned this node, minus those that the guest has forgotten.
    pub lookups: u64,
    /// Number of nodes whose `parent` is this one.
    children: u32,
    /// Used since [`super::Nodes::reserve_descriptor`] last considered this node (second-chance replacement).
    pub is_fd_used: bool,
    /// Used after its first lookup, and since [`Table::evict`] last considered this node.
    is_used: bool,
    pub kind: Kind,
    /// When the inode was last known to have this name: the lowest bits of a number of periods.
    pub checked: u8,
}

/// The nodes, by node ID and by identity.
#[derive(Debug)]
pub struct Table {
    limits: Limits,
    identity: Identity,
    slots: Vec<Option<Node>>,
    /// Indices of empty slots.
    free: Vec<u32>,
    /// Indices of nodes, by the hash of what they stand for.
    index: HashTable<u32>,
    hasher: RandomState,
    /// Number of bytes that the names take.
    name_bytes: usize,
    /// Number of nodes that were removed.
    removed: u64,
    /// The slot that [`Self::evict`] considers next.
    hand: usize,
}

/// Number of bits of a node ID for the slot, counted from 1. The upper bits distinguish the nodes that use a slot one
/// after the other.
const SLOT_BITS: u32 = 20;

impl Node {
    /// Returns the node ID of the directory in which the guest last saw the inode, and its name there.
    pub fn location(&self) -> (u64, &CStr) {
        (self.parent, &self.name)
    }

    fn key(&self) -> Key<'_> {
        Key { inode_id: self.inode_id, place: self.location() }
    }

    pub fn mark_used(&mut self) {
        (self.is_used, self.is_fd_used) = (true, true);
    }

    fn is_evictable(&self) -> bool {
        // A descriptor with other references belongs to an open file or to the current request. The parent of another
        // node is needed to open that one.
        let is_referenced = self.path_fd.as_ref().is_some_and(|path_fd| Arc::strong_count(path_fd) > 1);
        self.id != ROOT && self.children == 0 && !is_referenced
    }
}

impl Table {
    /// Creates a table with the root.
    pub fn new(limits: Limits, identity: Identity, inode_id: InodeId, path_fd: Arc<PathFd>) -> Self {
        let mut table = Self {
            limits,
            identity,
            slots: Vec::new(),
            free: Vec::new(),
            index: HashTable::new(),
            hasher: RandomState::new(),
            name_bytes: 0,
            removed: 0,
            hand: 0,
        };
        let root = table.insert(inode_id, Kind::Directory, 0, c"");
        debug_assert_eq!(root, ROOT);
        table.slots[0].as_mut().expect("the root").path_fd = Some(path_fd);
        table
    }

    pub fn get(&self, id: u64) -> Option<&Node> {
        self.slots.get(slot(id)?)?.as_ref().filter(|node| node.id == id)
    }

    pub fn get_mut(&mut self, id: u64) -> Option<&mut Node> {
        self.slots.get_mut(slot(id)?)?.as_mut().filter(|node| node.id == id)
    }

    /// Returns the ID of the node that stands for an inode or a place.
    pub fn find(&self, key: Key) -> Option<u64> {
        let is_same = |&at: &u32| {
            let node = self.slots[at as usize].as_ref().expect("the index has no empty slots");
            match self.identity {
                Identity::Inode => node.inode_id == key.inode_id,
                Identity::Place => node.location() == key.place,
            }
        };
        let at = self.index.find(hash(&self.hasher, self.identity, key), is_same)?;
        self.slots[*at as usize].as_ref().map(|node| node.id)
    }

    /// Ensures that there is room for one more node of this name, by evicting others if necessary.
    pub fn reserve(&mut self, name: Name) -> Result<(), Errno> {
        let size = allocated(name.as_c_str());
        while self.index.len() >= self.limits.nodes || self.name_bytes + size > self.limits.name_bytes {
            self.evict()?;
        }
        Ok(())
    }

    /// Adds a node, for which there must be room. Returns its ID, which no other node ever had.
    pub fn insert(&mut self, inode_id: InodeId, kind: Kind, parent: u64, name: &CStr) -> u64 {
        let at = self.free.pop().unwrap_or_else(|| {
            if self.slots.len() == self.slots.capacity() {
                // Never beyond the limit, which `Vec` by itself might double.
                let room = self.limits.nodes.saturating_sub(self.slots.len());
                self.slots.reserve_exact((self.slots.len() / 2).max(64).min(room));
            }
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).expect("at most the limit")
        });
        let id = self.removed << SLOT_BITS | u64::from(at + 1);
        self.fill(at, id, inode_id, kind, parent, name);
        id
    }

    fn fill(&mut self, at: u32, id: u64, inode_id: InodeId, kind: Kind, parent: u64, name: &CStr) {
        self.slots[at as usize] = Some(Node {
            id,
            inode_id,
            parent,
            name: name.into(),
            path_fd: None,
            lookups: 0,
            children: 0,
            is_fd_used: true,
            is_used: false,
            kind,
            checked: 0,
        });
        let (slots, hasher, identity) = (&self.slots, &self.hasher, self.identity);
        let key = Key { inode_id, place: (parent, name) };
        self.index.insert_unique(hash(hasher, identity, key), at, |&at| {
            let node = slots[at as usize].as_ref().expect("the index has no empty slots");
            hash(hasher, identity, node.key())
        });
        self.name_bytes += allocated(name);
        self.count_child(parent, 1);
    }

    /// Records where the guest has seen an inode. There must be room for the name. A node that stands for a place stays
    /// there.
    pub fn set_location(&mut self, id: u64, parent: u64, name: Name) {
        if self.identity == Identity::Place {
            return;
        }
        let Some(node) = self.get_mut(id).filter(|node| node.id != ROOT) else { return };
        let name = name.as_c_str();
        let (old_parent, old_size) = (std::mem::replace(&mut node.parent, parent), allocated(&node.name));
        if *node.name != *name {
            node.name = name.into();
        }
        self.name_bytes = self.name_bytes + allocated(name) - old_size;
        self.count_child(old_parent, -1);
        self.count_child(parent, 1);
    }

    pub fn remove(&mut self, id: u64) {
        let Some(at) = slot(id) else { return };
        let Some(node) = self.slots.get_mut(at).and_then(|slot| slot.take_if(|node| node.id == id)) else {
            return;
        };
        let at = u32::try_from(at).expect("at most the limit");
        if let Ok(entry) =
            self.index.find_entry(hash(&self.hasher, self.identity, node.key()), |&other| other == at)
        {
            entry.remove();
        }
        self.name_bytes -= allocated(&node.name);
        self.count_child(node.parent, -1);
        self.removed += 1;
        self.free.push(at);
    }

    fn count_child(&mut self, parent: u64, change: i32) {
        // The guest may have forgotten the parent before the child.
        if let Some(parent) = self.get_mut(parent) {
            parent.children = parent.children.saturating_add_signed(change);
        }
    }

    /// Removes a node that has not been used for long, a directory only if there is nothing else.
    fn evict(&mut self) -> Result<(), Errno> {
        let id = self.unused(|kind| kind != Kind::Directory).or_else(|| self.unused(|_| true));
        let id = id.ok_or(Errno::NFILE)?;
        self.remove(id);
        Ok(())
    }

    /// Returns a node that can be evicted and has not been used for long.
    fn unused(&mut self, is_wanted: impl Fn(Kind) -> bool) -> Option<u64> {
        for _ in 0..2 * self.slots.len() {
            self.hand = (self.hand + 1) % self.slots.len();
            if let Some(node) = &mut self.slots[self.hand]
                && is_wanted(node.kind)
                && node.is_evictable()
                && !std::mem::take(&mut node.is_used)
            {
                return Some(node.id);
            }
        }
        None
    }

    /// Removes all nodes except the root.
    pub fn clear(&mut self) {
        let Some(root) = self.slots[0].take() else { return };
        let removed = self.removed + self.slots.len() as u64;
        *self = Self::new(
            self.limits,
            self.identity,
            root.inode_id,
            root.path_fd.expect("the root is never closed"),
        );
        self.removed = removed;
    }

    /// Returns the ID, the location and the lookup count of each node.
    pub fn all(&self) -> impl Iterator<Item = (u64, (u64, &CStr), u64)> {
        self.slots.iter().flatten().map(|node| (node.id, node.location(), node.lookups))
    }

    /// Returns the number of nodes that were removed.
    pub fn removed(&self) -> u64 {
        self.removed
    }

    /// Gives nodes IDs from now on that those of another table with this number of removed nodes did not get.
    pub fn begin_after(&mut self, removed: u64) {
        // Nodes that are not put here keep their IDs, too. IDs have fewer bits for the number, and never get that far.
        self.removed = (removed & (u64::MAX >> SLOT_BITS)) + 1;
    }

    /// Returns true if a node of another table can have this ID, which no node has here.
    pub fn may_have(&self, id: u64) -> bool {
        let is_free = |at| at < self.limits.nodes && self.slots.get(at).is_none_or(Option::is_none);
        slot(id).is_some_and(is_free) && id >> SLOT_BITS <= self.removed
    }

    /// Fails if there is no room for one more node of this name.
    pub fn reserve_no_more(&self, name: Name) -> Result<(), Errno> {
        let size = allocated(name.as_c_str());
        let is_full =
            self.index.len() >= self.limits.nodes || self.name_bytes + size > self.limits.name_bytes;
        if is_full { Err(Errno::NFILE) } else { Ok(()) }
    }

    /// Adds a node with the ID that it had in another table ([`Self::may_have`]). Then [`Self::find_free`] must be
    /// called.
    pub fn put(&mut self, id: u64, inode_id: InodeId, kind: Kind, parent: u64, name: &CStr) -> &mut Node {
        let at = slot(id).expect("such a node can be here");
        if self.slots.len() <= at {
            self.slots.resize_with(at + 1, || None);
        }
        self.fill(u32::try_from(at).expect("at most the limit"), id, inode_id, kind, parent, name);
        self.slots[at].as_mut().expect("it was put there")
    }

    /// Finds the empty slots after nodes were put.
    pub fn find_free(&mut self) {
        let empty = (0..).zip(&self.slots).filter(|(_, slot)| slot.is_none());
        self.free = empty.map(|(at, _)| at).collect();
    }

    /// Returns the number of nodes, and how many of them have an open path descriptor.
    #[cfg(test)]
    pub fn counts(&self) -> (usize, usize) {
        let nodes = || self.slots.iter().flatten();
        (nodes().count(), nodes().filter(|node| node.path_fd.is_some()).count())
    }
}

/// Returns the index of the slot that a node ID refers to.
fn slot(id: u64) -> Option<usize> {
    usize::try_from(id & ((1 << SLOT_BITS) - 1)).ok()?.checked_sub(1)
}

fn hash(hasher: &RandomState, identity: Identity, key: Key) -> u64 {
    match identity {
        Identity::Inode => hasher.hash_one(key.inode_id),
        Identity::Place => hasher.hash_one(key.place),
    }
}

/// Returns the number of bytes that the C library's allocator uses for a name.
fn allocated(name: &CStr) -> usize {
    (name.count_bytes() + 1 + size_of::<usize>()).next_multiple_of(16).max(32)
}

#[cfg(test)]
mod tests;
