//! The queues of one device: requests come out, and go back when they are done.

use virtio_queue::{Queue, QueueT, Reader, Writer};
use vm_memory::GuestMemoryMmap;

/// The queues while they are looked at: nobody else changes them meanwhile.
pub struct Queues<'a> {
    memory: &'a GuestMemoryMmap,
    rings: &'a mut [Queue],
    /// Whether the guest's ring makes no sense, and the device waits to be reset.
    broken: &'a mut bool,
    /// Tells the driver that something went back.
    tell: &'a dyn Fn(),
}

/// What a driver asks for: bytes to be read, and room for an answer.
pub struct Request<'a> {
    /// What goes back when it is done.
    pub head: Head,
    /// What the driver says.
    pub reader: Reader<'a>,
    /// Where the answer goes.
    pub writer: Writer<'a>,
}

/// Where a request came from. It goes back once.
#[derive(Debug)]
pub struct Head {
    queue: usize,
    index: u16,
}

impl<'a> Queues<'a> {
    pub(super) fn new(
        memory: &'a GuestMemoryMmap,
        rings: &'a mut [Queue],
        broken: &'a mut bool,
        tell: &'a dyn Fn(),
    ) -> Self {
        Self { memory, rings, broken, tell }
    }

    /// Whether a request waits in this queue. If none does, the driver will say when there is one.
    pub fn has(&mut self, queue: usize) -> bool {
        let memory = self.memory;
        let Some(queue) = self.usable(queue) else { return false };
        // The index in the ring says at once; the driver is asked to speak up only when there is nothing.
        let waits = match queue.avail_idx(memory, std::sync::atomic::Ordering::Acquire) {
            Ok(index) if index.0 != queue.next_avail() => Ok(true),
            Ok(_) => queue.enable_notification(memory),
            Err(error) => Err(error),
        };
        waits.unwrap_or_else(|_| {
            *self.broken = true;
            false
        })
    }

    /// The next request in this queue.
    pub fn next(&mut self, queue: usize) -> Option<Request<'a>> {
        let memory = self.memory;
        while self.has(queue) {
            let Some(chain) = self.rings[queue].pop_descriptor_chain(memory) else {
                // Something waits, and cannot be taken: the ring's index is further ahead than the ring is long.
                *self.broken = true;
                return None;
            };
            let head = Head { queue, index: chain.head_index() };
            match (Reader::new(memory, chain.clone()), Writer::new(memory, chain)) {
                (Ok(reader), Ok(writer)) => return Some(Request { head, reader, writer }),
                // Buffers that are not in the guest's memory.
                _ => self.done(head, 0),
            }
        }
        None
    }

    /// Gives a request back, with that many bytes of an answer. The driver is told at once, for the next request may take
    /// long; until it has looked, a driver that takes notifications by index is told no more.
    pub fn done(&mut self, head: Head, written: u32) {
        let (memory, Head { queue, index }) = (self.memory, head);
        let Some(queue) = self.usable(queue) else { return };
        let told = queue.add_used(memory, index, written).and_then(|()| queue.needs_notification(memory));
        match told {
            Ok(true) => (self.tell)(),
            Ok(false) => {}
            Err(_) => *self.broken = true,
        }
    }

    fn usable(&mut self, queue: usize) -> Option<&mut Queue> {
        self.rings.get_mut(queue).filter(|queue| queue.ready() && !*self.broken)
    }
}
