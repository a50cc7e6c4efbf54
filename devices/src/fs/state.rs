//! What a guest has looked up and opened in a shared directory, in a snapshot.
//!
//! Inodes are saved by their paths in the directory. A restored guest finds what is at these paths then, here or on
//! another host: an inode that is gone is stale for the guest, as one that the host has removed meanwhile. An open file
//! has to be there, or the guest is not restored. A state may come from a file, so nothing in it is trusted: what it
//! names is found as the guest's own requests find it.

use std::path::PathBuf;

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::Server;
use super::handles::HandleState;
use super::nodes::NodesState;
use crate::state::{DeviceError, check};

/// What a guest has looked up and opened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShareState {
    nodes: NodesState,
    /// In the order of their numbers.
    handles: Vec<HandleState>,
    /// The last number that a handle got.
    last_handle: u64,
}

impl Server {
    pub(super) fn save(&mut self) -> Result<ShareState, DeviceError> {
        let (handles, last_handle) = self.handles.save();
        for HandleState { node, .. } in &handles {
            // A file that was unlinked, or that the host has replaced, could not be opened again.
            if !self.nodes.has_name(*node) {
                return Err(DeviceError::Nameless(self.path_of(*node)));
            }
        }
        Ok(ShareState { nodes: self.nodes.save(), handles, last_handle })
    }

    pub(super) fn restore(&mut self, saved: &ShareState) -> Result<(), DeviceError> {
        /// More than any guest opens.
        const MAX_HANDLE: u64 = 1 << 62;
        let ShareState { nodes, handles, last_handle } = saved;
        let are_in_order = handles.is_sorted_by(|one, next| one.number < next.number);
        let are_old = handles.last().is_none_or(|last| last.number <= *last_handle);
        check(are_in_order && are_old && *last_handle <= MAX_HANDLE, "open file")?;
        self.nodes.restore(nodes)?;
        self.handles.begin_after(*last_handle);
        for handle in handles {
            self.reopen(handle).map_err(|errno| {
                let path = nodes.path_of(handle.node);
                DeviceError::Unopened { path, why: std::io::Error::from(errno).to_string() }
            })?;
        }
        Ok(())
    }

    /// Opens a file or a directory again that the guest has open.
    fn reopen(&mut self, HandleState { number, node, mode }: &HandleState) -> Result<(), Errno> {
        self.handles.check_limit()?;
        let path_fd = self.nodes.path_fd(*node).map_err(|errno| match errno {
            Errno::STALE => Errno::NOENT,
            other => other,
        })?;
        if let Some(mode) = mode {
            let file = self.host.open(&path_fd, self.open_mode(*mode)?)?;
            self.handles.put_file(*number, file, *mode, *node, path_fd);
        } else {
            let directory = self.host.open_directory(&path_fd)?;
            self.handles.put_directory(*number, directory, *node, path_fd);
        }
        Ok(())
    }

    fn path_of(&self, node: u64) -> PathBuf {
        self.nodes.save().path_of(node)
    }
}
