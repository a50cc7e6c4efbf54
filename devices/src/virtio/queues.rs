//! The virtqueues of one device: takes available requests, and returns them to the driver as used.
//!
//! The registers are locked only while a request is taken or returned, not while it is processed.

use std::sync::atomic::Ordering;

use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryMmap, Permissions};

use super::buffers::{Buffers, Reader, Writer};
use super::mmio::{InvalidRing, Session};

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

impl<'a> Queues<'a> {
    pub(super) fn new(session: Session<'a>) -> Self {
        Self { session }
    }

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
            if !has_request(ring, session.memory())? {
                return Ok(None);
            }
            // Without a chain, the available index is further ahead than the queue is long.
            let chain = ring.pop_descriptor_chain(session.memory()).ok_or(InvalidRing)?;
            let index = chain.head_index();
            // Buffers outside of the guest's memory are as good as none.
            let (reader, writer) = buffers(session, ring, index)?
                .unwrap_or_else(|| (Buffers::new(session), Buffers::new(session)));
            Ok(Some(Request { head: Head { queue, index }, reader: Reader(reader), writer: Writer(writer) }))
        };
        session.begin_with_rings(take).flatten()
    }

    /// Returns a request to the driver as used, with `written` bytes of reply. Notifies the driver at once, if it wants
    /// that, because the next request may take long. A driver that negotiated `VIRTIO_F_EVENT_IDX` gets no further
    /// notification until it has updated `used_event`.
    pub fn complete(&mut self, head: Head, written: u32) {
        let (session, Head { queue, index }) = (self.session, head);
        session.with_rings(|rings| {
            let Some(ring) = usable(rings, queue) else { return Ok(()) };
            ring.add_used(session.memory(), index, written)?;
            if ring.needs_notification(session.memory())? {
                session.interrupt();
            }
            Ok(())
        });
    }
}

fn usable(rings: &mut [Queue], queue: usize) -> Option<&mut Queue> {
    rings.get_mut(queue).filter(|ring| ring.ready())
}

fn has_request(ring: &mut Queue, memory: &GuestMemoryMmap) -> Result<bool, InvalidRing> {
    // Notifications are enabled only when the queue is empty.
    if ring.avail_idx(memory, Ordering::Acquire)?.0 != ring.next_avail() {
        return Ok(true);
    }
    Ok(ring.enable_notification(memory)?)
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
    let mut total = 0_u32;
    // A longer chain has a loop.
    for _ in 0..ring.size() {
        if index >= ring.size() {
            return Err(InvalidRing);
        }
        let at = u64::from(index) * size_of::<Descriptor>() as u64;
        let at = ring.desc_table().checked_add(at).ok_or(InvalidRing)?;
        let descriptor: Descriptor = memory.read_obj(GuestAddress(at))?;
        if descriptor.refers_to_indirect_table() {
            return Err(InvalidRing);
        }
        // "Drivers MUST NOT add a descriptor chain longer than 2^32 bytes in total" (section 2.7.5.2).
        total = total.checked_add(descriptor.len()).ok_or(InvalidRing)?;
        let (part, access) = if descriptor.is_write_only() {
            (&mut writable, Permissions::Write)
        } else {
            (&mut readable, Permissions::Read)
        };
        let Ok(slices) = memory.get_slices(descriptor.addr(), descriptor.len() as usize, access) else {
            return Ok(None);
        };
        for slice in slices {
            let Ok(slice) = slice else { return Ok(None) };
            part.push(slice);
        }
        if !descriptor.has_next() {
            return Ok(Some((readable, writable)));
        }
        index = descriptor.next();
    }
    Err(InvalidRing)
}
