//! The virtqueues of one device: takes available requests, and returns them to the driver as used.
//!
//! The registers are locked only while a request is taken or returned, not while it is processed.

use std::num::Wrapping;
use std::sync::atomic::Ordering;

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::Device;
use super::buffers::{Buffers, Reader, Writer};
use super::mmio::{InvalidRing, Session, Transport};

/// The queues of a device while it is served. They are empty once the driver has reset the device.
pub struct Queues<'a> {
    session: Session<'a>,
}

/// A request: a descriptor chain with a device-readable and a device-writable part.
pub struct Request<'a> {
    /// The chain's head, which [`Queues::complete`] takes.
    pub head: Head,
    /// The device-readable buffers.
    pub reader: Reader<'a>,
    /// The device-writable buffers, for the reply.
    pub writer: Writer<'a>,
}

/// The queue and head descriptor of a request. Neither `Clone` nor `Copy`, so that a request is completed only once.
#[derive(Debug)]
pub struct Head {
    queue: usize,
    index: u16,
}

/// What [`Queues::pop_for`] finds.
pub enum Room<'a> {
    /// Requests whose device-writable parts together have the room.
    Enough(Vec<Request<'a>>),
    /// Too little. The driver notifies the device when it has made more available.
    NotYet,
    /// As many requests as may be taken together have too little room.
    Never,
}

impl Transport {
    /// Calls `work` with the device and its queues, and returns the result. Returns `None` without a call if the driver
    /// is not ready, or if the device needs a reset.
    pub fn serve<D: Device + ?Sized, T>(
        &self,
        device: &mut D,
        work: impl FnOnce(&mut D, &mut Queues) -> T,
    ) -> Option<T> {
        self.in_session(device, |device, session| work(device, &mut Queues { session }))
    }
}

impl<'a> Queues<'a> {
    /// Returns true if the queue has an available request. Otherwise, enables notifications by the driver.
    pub fn has_request(&mut self, queue: usize) -> bool {
        let memory = self.session.memory();
        let has_request = |rings: &mut [Queue]| match usable(rings, queue) {
            Some(ring) => has_request(ring, memory),
            None => Ok(false),
        };
        self.session.begin_with_rings(has_request).unwrap_or(false)
    }

    /// Takes the next available request from a queue.
    pub fn pop(&mut self, queue: usize) -> Option<Request<'a>> {
        let session = self.session;
        let take = |rings: &mut [Queue]| {
            let Some(ring) = usable(rings, queue) else { return Ok(None) };
            let Some(index) = next_head(ring, session.memory())? else { return Ok(None) };
            // Buffers outside of the guest's memory are as good as none.
            let (reader, writer) = buffers(session, ring, index)?
                .unwrap_or_else(|| (Buffers::new(session), Buffers::new(session)));
            Ok(Some(Request { head: Head { queue, index }, reader: Reader(reader), writer: Writer(writer) }))
        };
        session.begin_with_rings(take).flatten()
    }

    /// Takes the next available requests whose device-writable parts have room for `length` bytes together, at most as
    /// many as the queue has entries, or a single one unless `may_join`. If they have too little, takes none.
    pub fn pop_for(&mut self, queue: usize, length: usize, may_join: bool) -> Room<'a> {
        let begin =
            |rings: &mut [Queue]| Ok(usable(rings, queue).map(|ring| (ring.next_avail(), ring.size())));
        let Some((first, size)) = self.session.begin_with_rings(begin).flatten() else { return Room::NotYet };
        let most = if may_join { usize::from(size) } else { 1 };
        let (mut requests, mut available) = (Vec::new(), 0);
        let too_little = loop {
            if available >= length && !requests.is_empty() {
                return Room::Enough(requests);
            }
            if requests.len() == most {
                break Room::Never;
            }
            // If there is none, the driver notifies the device of those that come after all that are available now.
            let Some(request) = self.pop(queue) else { break Room::NotYet };
            available += request.writer.available_bytes();
            requests.push(request);
        };
        self.session.with_rings(|rings| {
            if let Some(ring) = usable(rings, queue) {
                ring.set_next_avail(first);
            }
            Ok(())
        });
        too_little
    }

    /// Returns the features that the driver has accepted.
    pub fn features(&self) -> u64 {
        self.session.features()
    }

    /// Changes the device's configuration, and notifies the driver of that.
    pub fn set_config(&mut self, config: Vec<u8>) {
        self.session.set_config(config);
    }

    /// Returns a request to the driver as used, with `written` bytes of reply. Notifies the driver at once, if it wants
    /// that, because the next request may take long. A driver that negotiated `VIRTIO_F_EVENT_IDX` gets no further
    /// notification until it has updated `used_event`.
    pub fn complete(&mut self, head: Head, written: u32) {
        self.complete_together(&[(head, written)]);
    }

    /// Does the same with requests of one queue that belong together: the driver finds all of them at once.
    pub fn complete_together(&mut self, requests: &[(Head, u32)]) {
        let session = self.session;
        let Some(((last, written), others)) = requests.split_last() else { return };
        session.with_rings(|rings| {
            let Some(ring) = usable(rings, last.queue) else { return Ok(()) };
            let memory = session.memory();
            let first = Wrapping(ring.next_used());
            for (head, written) in others {
                put_used(ring, memory, head, *written)?;
            }
            // This publishes all of them.
            ring.add_used(memory, last.index, *written)?;
            let is_wanted = ring.needs_notification(memory)?;
            if is_wanted || ring.event_idx_enabled() && used_event(ring, memory)? - first < number(others)? {
                session.interrupt();
            }
            Ok(())
        });
    }
}

/// Puts a request in the used ring (section 2.7.8), without publishing it.
fn put_used(
    ring: &mut Queue,
    memory: &GuestMemoryMmap,
    head: &Head,
    written: u32,
) -> Result<(), InvalidRing> {
    let next = ring.next_used();
    let element = u64::from(head.index) | u64::from(written) << 32;
    let at = 4 + u64::from(next % ring.size()) * size_of_val(&element) as u64;
    let at = ring.used_ring().checked_add(at).ok_or(InvalidRing)?;
    memory.write_obj(element.to_le(), GuestAddress(at))?;
    ring.set_next_used(next.wrapping_add(1));
    Ok(())
}

/// Returns the index of the used request of which the driver wants to be notified (section 2.7.7).
fn used_event(ring: &Queue, memory: &GuestMemoryMmap) -> Result<Wrapping<u16>, InvalidRing> {
    let at = ring.avail_ring().checked_add(4 + 2 * u64::from(ring.size())).ok_or(InvalidRing)?;
    Ok(Wrapping(u16::from_le(memory.load(GuestAddress(at), Ordering::Relaxed)?)))
}

fn number(requests: &[(Head, u32)]) -> Result<Wrapping<u16>, InvalidRing> {
    u16::try_from(requests.len()).map(Wrapping).map_err(|_| InvalidRing)
}

fn usable(rings: &mut [Queue], queue: usize) -> Option<&mut Queue> {
    rings.get_mut(queue).filter(|ring| ring.ready())
}

fn has_request(ring: &mut Queue, memory: &GuestMemoryMmap) -> Result<bool, InvalidRing> {
    // Notifications are enabled only when the queue is empty.
    if available(ring, memory)? > 0 {
        return Ok(true);
    }
    Ok(ring.enable_notification(memory)?)
}

/// Returns the number of available requests. Fails if the queue does not have as many entries.
fn available(ring: &Queue, memory: &GuestMemoryMmap) -> Result<u16, InvalidRing> {
    let Wrapping(available) = ring.avail_idx(memory, Ordering::Acquire)? - Wrapping(ring.next_avail());
    if available <= ring.size() { Ok(available) } else { Err(InvalidRing) }
}

/// Takes the next entry of the available ring (section 2.7.6): the index of a request's first descriptor. Without one,
/// enables notifications by the driver. This is what `Queue::pop_descriptor_chain` does, with fewer instructions.
fn next_head(ring: &mut Queue, memory: &GuestMemoryMmap) -> Result<Option<u16>, InvalidRing> {
    if !has_request(ring, memory)? {
        return Ok(None);
    }
    let next = ring.next_avail();
    let at = 4 + u64::from(next % ring.size()) * size_of_val(&next) as u64;
    let at = ring.avail_ring().checked_add(at).ok_or(InvalidRing)?;
    let head = u16::from_le(memory.load(GuestAddress(at), Ordering::Acquire)?);
    ring.set_next_avail(next.wrapping_add(1));
    Ok(Some(head))
}

/// Reads the descriptor chain that begins at `index`, each descriptor once: a guest may change them at any time.
/// Returns `None` if a buffer is not in the guest's memory.
///
/// `DescriptorChain` of virtio-queue is not used, because it follows indirect descriptors, which no device here offers
/// (`VIRTIO_F_INDIRECT_DESC`, section 2.7.5.3). A table of them can describe far more than a queue.
fn buffers<'a>(
    session: Session<'a>,
    ring: &Queue,
    mut index: u16,
) -> Result<Option<(Buffers<'a>, Buffers<'a>)>, InvalidRing> {
    let memory = session.memory();
    let (mut readable, mut writable) = (Buffers::new(session), Buffers::new(session));
    // The table is looked for once: a large request has hundreds of descriptors.
    let table = usize::from(ring.size()) * size_of::<Descriptor>();
    let table = memory.get_slice(GuestAddress(ring.desc_table()), table)?;
    let mut total = 0_u32;
    // A longer chain has a loop.
    for _ in 0..ring.size() {
        if index >= ring.size() {
            return Err(InvalidRing);
        }
        let at = usize::from(index) * size_of::<Descriptor>();
        let descriptor: Descriptor = table.read_obj(at).map_err(|_| InvalidRing)?;
        if descriptor.refers_to_indirect_table() {
            return Err(InvalidRing);
        }
        // "Drivers MUST NOT add a descriptor chain longer than 2^32 bytes in total" (section 2.7.5.2).
        total = total.checked_add(descriptor.len()).ok_or(InvalidRing)?;
        let part = if descriptor.is_write_only() { &mut writable } else { &mut readable };
        if !add(part, memory, &descriptor) {
            return Ok(None);
        }
        if !descriptor.has_next() {
            return Ok(Some((readable, writable)));
        }
        index = descriptor.next();
    }
    Err(InvalidRing)
}

/// Adds a descriptor's buffer. Returns false if it is not in the guest's memory.
fn add<'a>(part: &mut Buffers<'a>, memory: &'a GuestMemoryMmap, descriptor: &Descriptor) -> bool {
    let (start, length) = (descriptor.addr(), descriptor.len() as usize);
    if let Ok(slice) = memory.get_slice(start, length) {
        part.push(slice);
        return true;
    }
    // It may be in two regions that are side by side.
    memory.get_slices(start, length).all(|slice| slice.map(|slice| part.push(slice)).is_ok())
}
