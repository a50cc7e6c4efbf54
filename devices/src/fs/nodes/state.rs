//! The nodes in a snapshot.

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::super::message::Name;
use super::super::wire::ROOT;
use super::table::Key;
use super::{MAX_DEPTH, Nodes, kind};
use crate::state::{Mismatch, check};

/// The inodes that the guest has looked up, without the shared directory itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NodesState {
    /// Number of nodes that were removed: the next nodes get other IDs.
    removed: u64,
    nodes: Vec<NodeState>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeState {
    id: u64,
    parent: u64,
    name: CString,
    lookups: u64,
}

impl NodesState {
    /// Returns the path of a node in the shared directory, as far as it is known.
    pub fn path_of(&self, id: u64) -> PathBuf {
        let nodes: HashMap<u64, &NodeState> = self.nodes.iter().map(|node| (node.id, node)).collect();
        let mut at = id;
        path((0..MAX_DEPTH).map_while(|_| {
            let node = nodes.get(&at)?;
            at = node.parent;
            Some(OsStr::from_bytes(node.name.as_bytes()).to_owned())
        }))
    }

    /// Returns the nodes so that each comes after its parent. Leaves out those that cannot be found from the root.
    fn reachable(&self) -> Vec<&NodeState> {
        let mut children: HashMap<u64, Vec<&NodeState>> = HashMap::new();
        for node in &self.nodes {
            children.entry(node.parent).or_default().push(node);
        }
        let mut found: Vec<&NodeState> = children.remove(&ROOT).unwrap_or_default();
        let mut at = 0;
        while let Some(node) = found.get(at) {
            // Each list is taken once, so that a loop of a changed file ends.
            found.extend(children.remove(&node.id).unwrap_or_default());
            at += 1;
        }
        found
    }
}

impl Nodes {
    /// Returns the nodes, for a snapshot.
    pub fn save(&self) -> NodesState {
        let state = |(id, (parent, name), lookups): (u64, (u64, &CStr), u64)| NodeState {
            id,
            parent,
            name: name.to_owned(),
            lookups,
        };
        let nodes = self.table.all().filter(|(id, ..)| *id != ROOT).map(state).collect();
        NodesState { removed: self.table.removed(), nodes }
    }

    /// Restores nodes by their paths. The guest finds those stale that are not there.
    pub fn restore(&mut self, saved: &NodesState) -> Result<(), Mismatch> {
        self.clear();
        self.table.begin_after(saved.removed);
        for node in saved.reachable() {
            check(self.table.may_have(node.id), "inode")?;
            // An inode that is not there, or that this user may not look at, is stale.
            let _ = self.restore_node(node);
        }
        self.table.find_free();
        Ok(())
    }

    fn restore_node(&mut self, NodeState { id, parent, name, lookups }: &NodeState) -> Result<(), Errno> {
        let name = Name::new(name)?;
        let path_fd = self.find(*parent, name)?;
        let (inode_id, stat) = self.identify_entry(&path_fd, *parent)?;
        let key = Key { inode_id, place: (*parent, name.as_c_str()) };
        if self.table.find(key).is_some() {
            // Two nodes were two inodes, and are links to one now.
            return Err(Errno::STALE);
        }
        self.table.reserve_no_more(name)?;
        self.reserve_descriptor()?;
        let node = self.table.put(*id, inode_id, kind(&stat), *parent, name.as_c_str());
        node.lookups = *lookups;
        node.path_fd = Some(path_fd.into());
        self.open_order.push_back(*id);
        Ok(())
    }
}

/// Joins the components of a path, of which the last comes first.
fn path(components: impl Iterator<Item = OsString>) -> PathBuf {
    let mut components: Vec<OsString> = components.collect();
    components.reverse();
    components.into_iter().collect()
}
