//! What a device knows beyond its registers and queues, in a snapshot.

use serde::{Deserialize, Serialize};

use crate::fs::ShareState;

/// What a virtio device knows beyond its registers and queues.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceState {
    /// A disk's.
    Disk(DiskState),
    /// A shared folder's.
    Share(ShareState),
    /// A network device's, if it has several pairs of queues.
    Net {
        /// Number of pairs that the driver uses.
        pairs: u16,
    },
}

/// What a guest relies on that was saved with a disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskState {
    pub(super) sectors: u64,
    /// Time of the last change of the file's content, in seconds and nanoseconds. A block device has none.
    pub(super) modified: Option<(i64, i64)>,
}

impl DiskState {
    /// Accepts a copy of the disk: the user knows that it is as the disk was.
    pub fn accept_copy(&mut self) {
        self.modified = None;
    }
}
