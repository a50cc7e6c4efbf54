//! A driver for tests and fuzz targets. It sets up a device with its registers, as a guest does, and submits requests.
//!
//! Its functions panic if they are called with what is outside of its memory.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Device, Transport};

/// Number of entries of each queue.
const QUEUE_SIZE: u16 = 16;
/// Distance between the rings of two queues. The buffers are behind all rings.
const STRIDE: u64 = 0x1000;
const BUFFERS: u64 = 0x10_0000;
const BUFFER_SIZE: u64 = 0x1_0000;

/// The guest's side: memory with a driver's rings, and the registers of the device.
pub struct Driver {
    /// The guest's memory: 4 MiB.
    pub memory: GuestMemoryMmap,
    /// The registers of the device.
    pub transport: Arc<Transport>,
    /// The interrupt of the device.
    pub interrupt: EventFd,
    /// For each queue, the number of requests submitted, and of completions seen.
    submitted: Vec<u16>,
    completed: Vec<u16>,
    buffers: u64,
}

impl Driver {
    /// Creates a guest with 4 MiB of memory whose driver has not set up the device yet.
    pub fn new(device: &dyn Device) -> Self {
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        let memory = Self::memory();
        let transport = Transport::new(device, memory.clone(), interrupt.try_clone().unwrap()).unwrap();
        Self::of(transport, memory, interrupt, device.queue_sizes().len())
    }

    /// Creates memory for a guest.
    pub fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap()
    }

    /// Creates the driver of a device with this number of queues, whose transport uses `memory`.
    pub fn of(transport: Arc<Transport>, memory: GuestMemoryMmap, interrupt: EventFd, queues: usize) -> Self {
        Self {
            memory,
            transport,
            interrupt,
            submitted: vec![0; queues],
            completed: vec![0; queues],
            buffers: 0,
        }
    }

    /// Creates a guest whose driver is ready.
    pub fn ready(device: &dyn Device) -> Self {
        let driver = Self::new(device);
        driver.set_up(1 << 32);
        driver
    }

    /// Accepts the first 32 feature bits of the device except `VIRTIO_F_EVENT_IDX`, and `more_features`. Sets up all
    /// queues.
    pub fn set_up(&self, more_features: u64) {
        self.write(0x14, 0);
        // Without `VIRTIO_F_EVENT_IDX`, the driver is notified of every completion.
        self.set_up_with(u64::from(self.read(0x10) & !(1 << 29)) | more_features);
    }

    /// Accepts these features, and sets up all queues.
    pub fn set_up_with(&self, features: u64) {
        for status in [1, 3] {
            self.write(0x70, status);
        }
        for (select, half) in [(0, features & u64::from(u32::MAX)), (1, features >> 32)] {
            self.write(0x24, select);
            self.write(0x20, u32::try_from(half).unwrap());
        }
        self.write(0x70, 11);
        for queue in 0..u32::try_from(self.submitted.len()).unwrap() {
            self.write(0x30, queue);
            self.write(0x38, QUEUE_SIZE.into());
            let rings = u32::try_from(u64::from(queue + 1) * STRIDE).unwrap();
            for (register, value) in [(0x80, rings), (0x90, rings + 0x400), (0xa0, rings + 0x800), (0x44, 1)]
            {
                self.write(register, value);
            }
        }
        self.write(0x70, 15);
    }

    /// Resets the device, clears the rings, and sets the device up as [`Self::set_up`] does.
    pub fn reset(&mut self, more_features: u64) {
        self.write(0x70, 0);
        let queues = self.submitted.len();
        let rings = vec![0; queues * usize::try_from(STRIDE).unwrap()];
        self.memory.write_slice(&rings, GuestAddress(STRIDE)).unwrap();
        (self.submitted, self.completed) = (vec![0; queues], vec![0; queues]);
        self.set_up(more_features);
    }

    /// Reads a register.
    pub fn read(&self, register: u64) -> u32 {
        let mut data = [0; 4];
        self.transport.read(register, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes a register.
    pub fn write(&self, register: u64, value: u32) {
        self.transport.write(register, &value.to_le_bytes());
    }

    /// Submits a request with a buffer of `reply_size` bytes for the reply. Returns the address of that buffer.
    pub fn submit(&mut self, queue: usize, request: &[u8], reply_size: u32) -> GuestAddress {
        let rings = (queue as u64 + 1) * STRIDE;
        let buffer = BUFFERS + self.buffers % 32 * BUFFER_SIZE;
        self.buffers += 1;
        self.memory.write_slice(request, GuestAddress(buffer)).unwrap();
        let reply = buffer + BUFFER_SIZE / 2;
        let submitted = self.submitted[queue];
        let first = submitted * 2 % QUEUE_SIZE;
        let (has_request, has_reply) = (!request.is_empty(), reply_size > 0);
        let mut index = first;
        if has_request {
            let next = u16::from(has_reply);
            self.descriptor(rings, index, buffer, u32::try_from(request.len()).unwrap(), next, index + 1);
            index += 1;
        }
        if has_reply {
            self.descriptor(rings, index, reply, reply_size, 2, 0);
        }
        self.memory
            .write_obj(first, GuestAddress(rings + 0x404 + u64::from(submitted % QUEUE_SIZE) * 2))
            .unwrap();
        self.submitted[queue] = submitted.wrapping_add(1);
        self.memory.write_obj(self.submitted[queue], GuestAddress(rings + 0x402)).unwrap();
        GuestAddress(reply)
    }

    /// Returns the index of the first descriptor of the last request.
    pub fn first_descriptor(&self, queue: usize) -> u16 {
        self.submitted[queue].wrapping_sub(1) * 2 % QUEUE_SIZE
    }

    /// Writes a descriptor of the queue whose rings are at address `rings`.
    pub fn descriptor(&self, rings: u64, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let at = GuestAddress(rings + u64::from(index) * 16);
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.memory.write_slice(&bytes, at).unwrap();
    }

    /// Returns the address of a queue's rings.
    pub fn rings(queue: usize) -> u64 {
        (queue as u64 + 1) * STRIDE
    }

    /// Returns the length of the next reply in a queue, if a request has been completed.
    pub fn next_completion(&mut self, queue: usize) -> Option<u32> {
        let rings = Self::rings(queue);
        let used_index: u16 = self.memory.read_obj(GuestAddress(rings + 0x802)).unwrap();
        if used_index == self.completed[queue] {
            return None;
        }
        let entry = u64::from(self.completed[queue] % QUEUE_SIZE);
        self.completed[queue] = self.completed[queue].wrapping_add(1);
        Some(self.memory.read_obj(GuestAddress(rings + 0x804 + entry * 8 + 4)).unwrap())
    }

    /// Reads the guest's memory.
    pub fn bytes(&self, at: GuestAddress, length: u32) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        self.memory.read_slice(&mut bytes, at).unwrap();
        bytes
    }

    /// Makes the device process all available requests.
    pub fn serve(&self, device: &mut dyn Device) {
        self.transport.serve(device, Device::serve);
    }
}
