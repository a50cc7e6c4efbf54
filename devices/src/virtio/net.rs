//! A network device (section 5.1 of the specification) with one queue in each direction. A [`Backend`] carries its frames.

use std::fmt;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;

use log::warn;
use rustix::event::PollFlags;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_MAC, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU};

use super::{Device, Queues, Request, Room};
use crate::net::{Backend, Frame, Offer};

const QUEUE_SIZE: u16 = 256;
const RECEIVEQ: usize = 0;
const TRANSMITQ: usize = 1;
/// Number of frames in one direction before the other one has its turn.
const TURN: usize = 64;

/// An Ethernet address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mac(pub [u8; 6]);

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.map(|byte| format!("{byte:02x}")).join(":"))
    }
}

/// The virtio network device.
pub struct Net {
    mac: Mac,
    offer: Offer,
    /// None if nothing is plugged in, or if it has failed: frames of the guest are lost then.
    backend: Option<Box<dyn Backend>>,
    /// The backend knows what the driver has accepted.
    is_driven: bool,
    /// The next frame for the guest, which has no room for it yet.
    incoming: Frame,
    outgoing: Frame,
}

impl Net {
    /// Creates a device with this address.
    pub fn new(mac: Mac, backend: Box<dyn Backend>) -> Self {
        let unplugged = Self::unplugged(mac, backend.offer());
        Self { backend: Some(backend), ..unplugged }
    }

    /// Creates a device that is as one with such a backend, but has none.
    pub fn unplugged(mac: Mac, offer: Offer) -> Self {
        let (incoming, outgoing) = (Frame::default(), Frame::default());
        Self { mac, offer, backend: None, is_driven: false, incoming, outgoing }
    }

    /// Does what can be done now.
    fn work(&mut self, queues: &mut Queues) -> io::Result<()> {
        let Self { backend: Some(backend), incoming, outgoing, .. } = self else {
            // What the guest sends is lost.
            while let Some(request) = queues.pop(TRANSMITQ) {
                queues.complete(request.head, 0);
            }
            return Ok(());
        };
        if !std::mem::replace(&mut self.is_driven, true) {
            backend.accept(queues.features())?;
        }
        loop {
            let has_sent = send(&mut **backend, outgoing, queues)?;
            let has_received = receive(&mut **backend, incoming, queues)?;
            if !has_sent && !has_received {
                return Ok(());
            }
        }
    }
}

/// Sends frames of the guest. Returns false if there are no more, or no room for them.
fn send(backend: &mut dyn Backend, frame: &mut Frame, queues: &mut Queues) -> io::Result<bool> {
    for _ in 0..TURN {
        if !backend.has_room()? {
            return Ok(false);
        }
        let Some(Request { head, reader, .. }) = queues.pop(TRANSMITQ) else { return Ok(false) };
        // Fails only if the driver has reset the device.
        let is_frame = frame.read(reader.available_bytes(), reader).unwrap_or(false);
        queues.complete(head, 0);
        if is_frame {
            backend.send(frame)?;
        }
    }
    Ok(true)
}

/// Receives frames for the guest. Returns false if there are no more, or no room for them.
fn receive(backend: &mut dyn Backend, frame: &mut Frame, queues: &mut Queues) -> io::Result<bool> {
    for _ in 0..TURN {
        if frame.is_empty() && !backend.receive(frame)? {
            return Ok(false);
        }
        let may_join = queues.features() & 1 << VIRTIO_NET_F_MRG_RXBUF != 0;
        let requests = match queues.pop_for(RECEIVEQ, frame.bytes().len(), may_join) {
            Room::Enough(requests) => requests,
            Room::NotYet => return Ok(false),
            // Lost: the driver expects smaller ones.
            Room::Never => {
                frame.clear();
                continue;
            }
        };
        frame.set_buffers(u16::try_from(requests.len()).expect("there are at most as many as in the queue"));
        let mut bytes = frame.bytes();
        let mut used = Vec::with_capacity(requests.len());
        for Request { head, mut writer, .. } in requests {
            let (now, later) = bytes.split_at(bytes.len().min(writer.available_bytes()));
            // Fails only if the driver has reset the device.
            let _ = writer.write_all(now);
            used.push((head, u32::try_from(now.len()).expect("a frame is short")));
            bytes = later;
        }
        queues.complete_together(&used);
        frame.clear();
    }
    Ok(true)
}

impl Device for Net {
    fn id(&self) -> u32 {
        1
    }

    fn features(&self) -> u64 {
        1 << VIRTIO_NET_F_MAC | 1 << VIRTIO_NET_F_MTU | 1 << VIRTIO_NET_F_MRG_RXBUF | self.offer.features
    }

    fn config(&self) -> Vec<u8> {
        // `mac`, `status`, `max_virtqueue_pairs`, `mtu`.
        [&self.mac.0[..], &[0; 4], &self.offer.mtu.to_le_bytes()].concat()
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![QUEUE_SIZE; 2]
    }

    fn serve(&mut self, queues: &mut Queues) {
        if let Err(error) = self.work(queues) {
            let why = match error.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                    "the process that carried it has ended".to_owned()
                }
                _ => error.to_string(),
            };
            warn!("the guest's network is gone: {why}");
            self.backend = None;
        }
    }

    fn awaits(&self) -> Option<(BorrowedFd<'_>, PollFlags)> {
        let backend = self.backend.as_ref()?;
        let mut events = PollFlags::empty();
        events.set(PollFlags::IN, self.incoming.is_empty());
        events.set(PollFlags::OUT, backend.is_full());
        Some((backend.descriptor(), events))
    }

    fn reset(&mut self) {
        self.is_driven = false;
        self.incoming.clear();
    }
}

#[cfg(test)]
mod tests;
