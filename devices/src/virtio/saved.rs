//! What a device knows beyond its registers and queues, in a snapshot.

use serde::{Deserialize, Serialize};

use super::block::DiskState;
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
