//! The virtqueues of one device: takes available requests, and returns them to the driver as used.

use virtio_queue::{Queue, QueueT, Reader, Writer};
use vm_memory::GuestMemoryMmap;

/// The queues of a device, borrowed while it is served. The transport's lock is held meanwhile.
pub struct Queues<'a> {
    memory: &'a GuestMemoryMmap,
    rings: &'a mut [Queue],
    /// A ring is invalid, and the device needs a reset.
    is_broken: &'a mut bool,
    /// Sends the driver a used buffer notification.
    interrupt: &'a dyn Fn(),
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
    pub(super) fn new(
        memory: &'a GuestMemoryMmap,
        rings: &'a mut [Queue],
        is_broken: &'a mut bool,
        interrupt: &'a dyn Fn(),
    ) -> Self {
        Self { memory, rings, is_broken, interrupt }
    }

    /// Returns true if the queue has an available request. Otherwise, enables notifications by the driver.
    pub fn has_request(&mut self, queue: usize) -> bool {
        let memory = self.memory;
        let Some(queue) = self.usable(queue) else { return false };
        // Notifications are enabled only when the queue is empty.
        let has_request = match queue.avail_idx(memory, std::sync::atomic::Ordering::Acquire) {
            Ok(index) if index.0 != queue.next_avail() => Ok(true),
            Ok(_) => queue.enable_notification(memory),
            Err(error) => Err(error),
        };
        has_request.unwrap_or_else(|_| {
            *self.is_broken = true;
            false
        })
    }

    /// Takes the next available request from a queue.
    pub fn pop(&mut self, queue: usize) -> Option<Request<'a>> {
        let memory = self.memory;
        while self.has_request(queue) {
            let Some(chain) = self.rings[queue].pop_descriptor_chain(memory) else {
                // The available index is further ahead than the queue is long.
                *self.is_broken = true;
                return None;
            };
            let head = Head { queue, index: chain.head_index() };
            match (Reader::new(memory, chain.clone()), Writer::new(memory, chain)) {
                (Ok(reader), Ok(writer)) => return Some(Request { head, reader, writer }),
                // The buffers are not in the guest's memory.
                _ => self.complete(head, 0),
            }
        }
        None
    }

    /// Returns a request to the driver as used, with `written` bytes of reply. Notifies the driver at once, if it wants
    /// that, because the next request may take long. A driver that negotiated `VIRTIO_F_EVENT_IDX` gets no further
    /// notification until it has updated `used_event`.
    pub fn complete(&mut self, head: Head, written: u32) {
        let (memory, Head { queue, index }) = (self.memory, head);
        let Some(queue) = self.usable(queue) else { return };
        let needs_notification =
            queue.add_used(memory, index, written).and_then(|()| queue.needs_notification(memory));
        match needs_notification {
            Ok(true) => (self.interrupt)(),
            Ok(false) => {}
            Err(_) => *self.is_broken = true,
        }
    }

    fn usable(&mut self, queue: usize) -> Option<&mut Queue> {
        self.rings.get_mut(queue).filter(|queue| queue.ready() && !*self.is_broken)
    }
}
