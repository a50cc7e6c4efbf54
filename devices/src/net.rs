//! What carries the frames of a network device on the host: queues of a tap device of Linux, or another process on a
//! socket.

mod filter;
mod frame;
mod stream;
mod tap;

use std::io;
use std::os::fd::BorrowedFd;

pub use filter::{Block, Filter};
pub use frame::Frame;
pub use stream::Stream;
pub use tap::{Tap, TapError};

/// What a device offers a driver because of its backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Offer {
    /// Feature bits for checksums and segmentation.
    pub features: u64,
    /// The largest frame that can be sent and received, without its Ethernet header.
    pub mtu: u16,
    /// Number of pairs of queues: one queue in each direction.
    pub pairs: u16,
}

/// Carries Ethernet frames between a guest and the rest of the world. Neither direction waits.
pub trait Backend: Send {
    /// Prepares for a driver that has accepted these features.
    fn accept(&mut self, features: u64) -> io::Result<()>;
    /// Receives the next frame for the guest. Returns false if there is none yet.
    fn receive(&mut self, frame: &mut Frame) -> io::Result<bool>;
    /// Returns true if a frame of the guest can be sent, after an attempt to make room.
    fn has_room(&mut self) -> io::Result<bool>;
    /// Returns true if no frame could be sent when that was last attempted.
    fn is_full(&self) -> bool;
    /// Sends a frame of the guest. One that cannot be sent is lost, as on any network.
    fn send(&mut self, frame: &mut Frame) -> io::Result<()>;
    /// Returns the descriptor that is readable when a frame has come, and writable when there is room again.
    fn descriptor(&self) -> BorrowedFd<'_>;
}
