//! A driver for tests: it sets a device up by its registers, as a guest does, and asks it for things.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Device, Transport};

/// How many entries each of its queues has.
const ENTRIES: u16 = 16;
/// How far apart the queues' rings lie, and the buffers behind them.
const STRIDE: u64 = 0x1000;
const BUFFERS: u64 = 0x10_0000;
const BUFFER_SIZE: u64 = 0x1_0000;

/// A guest's memory with a driver's rings in it, and the registers of the device.
pub struct Driver {
    pub memory: GuestMemoryMmap,
    pub transport: Arc<Transport>,
    pub interrupt: EventFd,
    /// For each queue: how many requests were made, and how many seen to be done.
    made: Vec<u16>,
    seen: Vec<u16>,
    buffers: u64,
}

impl Driver {
    /// A guest of 4 MiB whose driver has found the device and does nothing yet.
    pub fn new(device: &dyn Device) -> Self {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 4 << 20)]).unwrap();
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        let transport = Transport::new(device, memory.clone(), interrupt.try_clone().unwrap()).unwrap();
        let queues = device.queues().len();
        Self { memory, transport, interrupt, made: vec![0; queues], seen: vec![0; queues], buffers: 0 }
    }

    /// The same, with the driver ready.
    pub fn ready(device: &dyn Device) -> Self {
        let driver = Self::new(device);
        driver.set_up(1 << 32);
        driver
    }

    /// Takes all features of the device's first 32 but notifications by index, and these; sets up all queues.
    pub fn set_up(&self, more_features: u64) {
        for status in [1, 3] {
            self.write(0x70, status);
        }
        self.write(0x14, 0);
        // Without those, this driver hears of everything.
        let features = u64::from(self.read(0x10) & !(1 << 29)) | more_features;
        for (page, half) in [(0, features & u64::from(u32::MAX)), (1, features >> 32)] {
            self.write(0x24, page);
            self.write(0x20, u32::try_from(half).unwrap());
        }
        self.write(0x70, 11);
        for queue in 0..u32::try_from(self.made.len()).unwrap() {
            self.write(0x30, queue);
            self.write(0x38, ENTRIES.into());
            let rings = u32::try_from(u64::from(queue + 1) * STRIDE).unwrap();
            for (register, value) in [(0x80, rings), (0x90, rings + 0x400), (0xa0, rings + 0x800), (0x44, 1)]
            {
                self.write(register, value);
            }
        }
        self.write(0x70, 15);
    }

    pub fn read(&self, register: u64) -> u32 {
        let mut data = [0; 4];
        self.transport.read(register, &mut data);
        u32::from_le_bytes(data)
    }

    pub fn write(&self, register: u64, value: u32) {
        self.transport.write(register, &value.to_le_bytes());
    }

    /// Asks for something: bytes that the device reads, and room for its answer. Says where the answer will be.
    pub fn ask(&mut self, queue: usize, says: &[u8], room: u32) -> GuestAddress {
        let rings = (queue as u64 + 1) * STRIDE;
        let buffer = BUFFERS + self.buffers % 32 * BUFFER_SIZE;
        self.buffers += 1;
        self.memory.write_slice(says, GuestAddress(buffer)).unwrap();
        let answer = buffer + BUFFER_SIZE / 2;
        let made = self.made[queue];
        let first = made * 2 % ENTRIES;
        let (has_text, has_room) = (!says.is_empty(), room > 0);
        let mut index = first;
        if has_text {
            let next = u16::from(has_room);
            self.descriptor(rings, index, buffer, u32::try_from(says.len()).unwrap(), next, index + 1);
            index += 1;
        }
        if has_room {
            self.descriptor(rings, index, answer, room, 2, 0);
        }
        self.memory.write_obj(first, GuestAddress(rings + 0x404 + u64::from(made % ENTRIES) * 2)).unwrap();
        self.made[queue] = made.wrapping_add(1);
        self.memory.write_obj(self.made[queue], GuestAddress(rings + 0x402)).unwrap();
        GuestAddress(answer)
    }

    /// Writes a descriptor of a queue whose rings are there.
    pub fn descriptor(&self, rings: u64, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        let at = GuestAddress(rings + u64::from(index) * 16);
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend(length.to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend(next.to_le_bytes());
        self.memory.write_slice(&bytes, at).unwrap();
    }

    /// Where a queue's rings are.
    pub fn rings(queue: usize) -> u64 {
        (queue as u64 + 1) * STRIDE
    }

    /// The length of the next answer in this queue, if there is one.
    pub fn answered(&mut self, queue: usize) -> Option<u32> {
        let rings = Self::rings(queue);
        let done: u16 = self.memory.read_obj(GuestAddress(rings + 0x802)).unwrap();
        if done == self.seen[queue] {
            return None;
        }
        let entry = u64::from(self.seen[queue] % ENTRIES);
        self.seen[queue] = self.seen[queue].wrapping_add(1);
        Some(self.memory.read_obj(GuestAddress(rings + 0x804 + entry * 8 + 4)).unwrap())
    }

    /// Bytes of the guest's memory.
    pub fn bytes(&self, at: GuestAddress, length: u32) -> Vec<u8> {
        let mut bytes = vec![0; length as usize];
        self.memory.read_slice(&mut bytes, at).unwrap();
        bytes
    }

    /// Has the device do what waits.
    pub fn serve(&self, device: &mut dyn Device) {
        self.transport.serve(device, Device::serve);
    }
}
