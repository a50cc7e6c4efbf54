//! A network device (section 5.1 of the specification). A [`Backend`] carries the frames of each pair of queues, one in
//! each direction; with several pairs, a control queue tells how many of them the driver uses.

use std::fmt;
use std::io::{self, Read, Write};
use std::os::fd::BorrowedFd;

use log::warn;
use rustix::event::PollFlags;
use virtio_bindings::virtio_net::{
    VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET, VIRTIO_NET_ERR, VIRTIO_NET_F_CTRL_VQ,
    VIRTIO_NET_F_MAC, VIRTIO_NET_F_MQ, VIRTIO_NET_F_MRG_RXBUF, VIRTIO_NET_F_MTU, VIRTIO_NET_F_STATUS,
    VIRTIO_NET_OK,
};

use super::{Device, DeviceState, Queues, Request, Room};
use crate::net::{Backend, Frame, Offer};
use crate::state::{DeviceError, check};

const QUEUE_SIZE: u16 = 256;
const CONTROL_QUEUE_SIZE: u16 = 16;
/// Status of a network that carries frames.
const LINK_UP: u16 = 1;
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
    /// Empty if nothing is plugged in, or if it has failed: frames of the guest are lost then.
    pairs: Vec<Pair>,
    has_failed: bool,
    /// Number of pairs that the driver uses.
    used: u16,
    /// The backends know what the driver has accepted.
    is_driven: bool,
    /// The driver knows another device's configuration: it may have seen the link down.
    is_restored: bool,
}

/// What is behind a pair of queues.
struct Pair {
    backend: Box<dyn Backend>,
    /// The next frame for the guest, which has no room for it yet.
    incoming: Frame,
    outgoing: Frame,
}

/// Returns the receive queue of a pair.
const fn receiveq(pair: usize) -> usize {
    2 * pair
}

/// Returns the transmit queue of a pair.
const fn transmitq(pair: usize) -> usize {
    2 * pair + 1
}

impl Net {
    /// Creates a device with this address, and a pair of queues for each backend.
    pub fn new(mac: Mac, offer: Offer, backends: Vec<Box<dyn Backend>>) -> Self {
        let pair = |backend| Pair { backend, incoming: Frame::default(), outgoing: Frame::default() };
        Self { pairs: backends.into_iter().map(pair).collect(), ..Self::unplugged(mac, offer) }
    }

    /// Creates a device that offers the same, but has no backend.
    pub fn unplugged(mac: Mac, offer: Offer) -> Self {
        Self {
            mac,
            offer,
            pairs: Vec::new(),
            has_failed: false,
            used: 1,
            is_driven: false,
            is_restored: false,
        }
    }

    /// Does what can be done now.
    fn work(&mut self, queues: &mut Queues) -> io::Result<()> {
        if std::mem::take(&mut self.is_restored) {
            queues.set_config(self.config());
        }
        if self.pairs.is_empty() {
            self.serve_control_queue(queues);
            self.drop_outgoing(queues);
            return Ok(());
        }
        if !std::mem::replace(&mut self.is_driven, true) {
            for pair in &mut self.pairs {
                pair.backend.accept(queues.features())?;
            }
        }
        loop {
            let mut is_done = !self.serve_control_queue(queues);
            for (number, pair) in self.pairs.iter_mut().enumerate() {
                let has_sent = pair.send(queues, transmitq(number))?;
                // Frames for a pair that the driver does not use go to one that it uses.
                let has_received = pair.receive(queues, receiveq(number % usize::from(self.used)))?;
                is_done &= !has_sent && !has_received;
            }
            if is_done {
                return Ok(());
            }
        }
    }

    /// Does what the driver commands. Returns false if there are no more commands.
    fn serve_control_queue(&mut self, queues: &mut Queues) -> bool {
        let has_several = queues.features() & 1 << VIRTIO_NET_F_MQ != 0;
        let queue = if has_several { receiveq(usize::from(self.offer.pairs)) } else { receiveq(1) };
        if queues.features() & 1 << VIRTIO_NET_F_CTRL_VQ == 0 {
            return false;
        }
        for _ in 0..TURN {
            let Some(Request { head, mut reader, mut writer }) = queues.pop(queue) else { return false };
            let mut command = [0; 4];
            let pairs = match reader.read_exact(&mut command) {
                Ok(()) if has_several => pairs_to_use(command),
                _ => None,
            };
            let pairs = pairs.filter(|pairs| (1..=self.offer.pairs).contains(pairs));
            self.used = pairs.unwrap_or(self.used);
            let answer = if pairs.is_some() { VIRTIO_NET_OK } else { VIRTIO_NET_ERR };
            let answer = u8::try_from(answer).expect("it is 0 or 1");
            let written = writer.write_all(&[answer]).is_ok();
            queues.complete(head, written.into());
        }
        true
    }

    /// Takes what the guest sends, which is lost.
    fn drop_outgoing(&self, queues: &mut Queues) {
        for pair in 0..usize::from(self.offer.pairs) {
            while let Some(request) = queues.pop(transmitq(pair)) {
                queues.complete(request.head, 0);
            }
        }
    }
}

/// Returns the number of pairs that a `VQ_PAIRS_SET` command sets, or `None` for another command.
fn pairs_to_use([class, command, low, high]: [u8; 4]) -> Option<u16> {
    let is_that = [class, command].map(u32::from) == [VIRTIO_NET_CTRL_MQ, VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET];
    is_that.then(|| u16::from_le_bytes([low, high]))
}

impl Pair {
    /// Sends frames of the guest. Returns false if there are no more, or no room for them.
    fn send(&mut self, queues: &mut Queues, queue: usize) -> io::Result<bool> {
        let Self { backend, outgoing: frame, .. } = self;
        for _ in 0..TURN {
            if !backend.has_room()? {
                return Ok(false);
            }
            let Some(Request { head, reader, .. }) = queues.pop(queue) else { return Ok(false) };
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
    fn receive(&mut self, queues: &mut Queues, queue: usize) -> io::Result<bool> {
        let Self { backend, incoming: frame, .. } = self;
        for _ in 0..TURN {
            if frame.is_empty() && !backend.receive(frame)? {
                return Ok(false);
            }
            let may_join = queues.features() & 1 << VIRTIO_NET_F_MRG_RXBUF != 0;
            let requests = match queues.pop_for(queue, frame.bytes().len(), may_join) {
                Room::Enough(requests) => requests,
                Room::NotYet => return Ok(false),
                // Lost: the driver expects smaller ones.
                Room::Never => {
                    frame.clear();
                    continue;
                }
            };
            deliver(frame, requests, queues);
            frame.clear();
        }
        Ok(true)
    }
}

/// Puts a frame into buffers of the guest with room for it.
fn deliver(frame: &mut Frame, requests: Vec<Request<'_>>, queues: &mut Queues) {
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
}

impl Device for Net {
    fn id(&self) -> u32 {
        1
    }

    fn features(&self) -> u64 {
        let several = if self.offer.pairs > 1 { 1 << VIRTIO_NET_F_CTRL_VQ | 1 << VIRTIO_NET_F_MQ } else { 0 };
        1 << VIRTIO_NET_F_MAC
            | 1 << VIRTIO_NET_F_MTU
            | 1 << VIRTIO_NET_F_MRG_RXBUF
            | 1 << VIRTIO_NET_F_STATUS
            | several
            | self.offer.features
    }

    fn config(&self) -> Vec<u8> {
        // `mac`, `status`, `max_virtqueue_pairs`, `mtu`.
        let Offer { pairs, mtu, .. } = self.offer;
        let status = if self.has_failed { 0 } else { LINK_UP };
        [&self.mac.0[..], &status.to_le_bytes(), &pairs.to_le_bytes(), &mtu.to_le_bytes()].concat()
    }

    fn queue_sizes(&self) -> Vec<u16> {
        let mut sizes = vec![QUEUE_SIZE; receiveq(self.offer.pairs.into())];
        sizes.extend((self.offer.pairs > 1).then_some(CONTROL_QUEUE_SIZE));
        sizes
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
            self.pairs.clear();
            self.has_failed = true;
            queues.set_config(self.config());
        }
    }

    fn awaits(&self) -> Vec<(BorrowedFd<'_>, PollFlags)> {
        let awaits = |Pair { backend, incoming, .. }: &Pair| {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, incoming.is_empty());
            events.set(PollFlags::OUT, backend.is_full());
            events
        };
        let all = self.pairs.iter().map(|pair| (pair.backend.descriptor(), awaits(pair)));
        // One that has ended would always be ready, whatever is awaited of it.
        all.filter(|(_, events)| !events.is_empty()).collect()
    }

    fn reset(&mut self) {
        (self.used, self.is_driven) = (1, false);
        for pair in &mut self.pairs {
            pair.incoming.clear();
        }
    }

    fn save(&mut self) -> Result<Option<DeviceState>, DeviceError> {
        Ok((self.offer.pairs > 1).then_some(DeviceState::Net { pairs: self.used }))
    }

    fn restore(&mut self, saved: Option<&DeviceState>) -> Result<(), DeviceError> {
        let used = match saved {
            None => 1,
            Some(DeviceState::Net { pairs }) => *pairs,
            Some(_) => 0,
        };
        check((1..=self.offer.pairs).contains(&used), "state")?;
        (self.used, self.is_restored) = (used, true);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
