//! A file system device (section 5.11 of the specification), which carries FUSE requests of a guest to a [`Share`].

use std::io::{Read, Write};

use super::buffers::Moved;
use super::{Device, DeviceState, Queues, Request};
use crate::fs::{Share, Transfer};
use crate::state::{DeviceError, Mismatch};

/// Index and size of the high priority queue. FORGET and INTERRUPT requests use it, so that they do not wait for
/// others.
const HIGH_PRIORITY: (usize, u16) = (0, 128);
/// Index and size of the request queue. A request of 1 MiB (256 pages) takes 260 entries, so this size allows three:
/// Linux reads ahead while a program waits, and when a request does not fit, it waits for some milliseconds.
const REQUESTS: (usize, u16) = (1, 1024);
const TAG: usize = 36;

/// The virtio file system device.
#[derive(Debug)]
pub struct SharedFolder {
    share: Share,
    number: u8,
    request: Vec<u8>,
}

impl SharedFolder {
    /// Creates the device for the guest's share `number`.
    pub fn new(share: Share, number: u8) -> Self {
        Self { share, number, request: vec![0; Share::MAX_REQUEST] }
    }

    /// Returns the tag by which the guest mounts share `number`.
    pub fn tag(number: u8) -> String {
        format!("tally{number}")
    }

    /// Processes a request. Returns the size of the reply.
    fn process(&mut self, request: &mut Request) -> usize {
        let length = request.reader.available_bytes();
        // A request that is too long is not answered. Kernels adhere to the limits of the INIT reply and send none.
        let Some(bytes) = self.request.get_mut(..length) else { return 0 };
        let (head, rest) = bytes.split_at_mut(length.min(Share::WRITE_HEADER));
        if request.reader.read_exact(head).is_err() {
            return 0;
        }
        let room = request.writer.available_bytes();
        if let Some(writing) = self.share.writing(head, length, room) {
            return self.write(&writing, request);
        }
        if request.reader.read_exact(rest).is_err() {
            return 0;
        }
        if let Some(reading) = self.share.reading(bytes, room) {
            return self.read(&reading, request);
        }
        let reply = self.share.serve(bytes, room);
        // Fails only if the driver has reset the device: the reply is not longer than the available bytes.
        let _ = request.writer.write_all(reply);
        reply.len()
    }

    /// Reads a file into the reply: straight, as far as the host has its content in memory.
    fn read(&mut self, reading: &Transfer, request: &mut Request) -> usize {
        let writer = &mut request.writer;
        let mut header = writer.split_first(Share::REPLY_HEADER);
        let mut done = 0;
        let result = loop {
            let (offset, left) = (reading.offset + done as u64, reading.len - done);
            if left == 0 {
                break Ok(());
            }
            match writer.read_from(&reading.file, offset, left, reading.at_once()) {
                Ok(Moved { bytes: 0, .. }) => break Ok(()),
                Ok(moved) => {
                    done += moved.bytes;
                    if moved.is_short && reading.file.is_in_memory() {
                        break Ok(());
                    }
                }
                // The host has to wait for it, or the file system does not know whether it would.
                Err(_) => {
                    break self.share.read_rest(reading, done).map(|rest| {
                        // Fails only after a reset.
                        let _ = writer.write_all(rest);
                        done += rest.len();
                    });
                }
            }
        };
        let result = if done > 0 { Ok(done) } else { result.map(|()| 0) };
        let _ = header.write_all(&Share::read_header(reading, result));
        Share::REPLY_HEADER + done
    }

    /// Writes the request's data to a file: straight, as far as the host does not have to wait for a disk.
    fn write(&mut self, writing: &Transfer, request: &mut Request) -> usize {
        let mut done = 0;
        let result = loop {
            let (offset, left) = (writing.offset + done as u64, writing.len - done);
            if left == 0 {
                break Ok(());
            }
            match request.reader.write_to(&writing.file, offset, left, writing.at_once()) {
                Ok(Moved { bytes: 0, .. }) => break Ok(()),
                Ok(moved) => done += moved.bytes,
                Err(_) => {
                    let rest = &mut self.request[..left];
                    if request.reader.read_exact(rest).is_err() {
                        return 0;
                    }
                    break Share::write_rest(writing, done, rest).map(|more| done += more);
                }
            }
        };
        let result = if done > 0 { Ok(done) } else { result.map(|()| 0) };
        let reply = self.share.write_reply(writing, result);
        let _ = request.writer.write_all(reply);
        reply.len()
    }
}

impl Device for SharedFolder {
    fn id(&self) -> u32 {
        26
    }

    fn config(&self) -> Vec<u8> {
        let mut tag = Self::tag(self.number).into_bytes();
        tag.resize(TAG, 0);
        // `tag`, `num_request_queues`.
        [tag, 1_u32.to_le_bytes().to_vec()].concat()
    }

    fn queue_sizes(&self) -> Vec<u16> {
        vec![HIGH_PRIORITY.1, REQUESTS.1]
    }

    fn serve(&mut self, queues: &mut Queues) {
        for (queue, _) in [HIGH_PRIORITY, REQUESTS] {
            while let Some(mut request) = queues.pop(queue) {
                let written = self.process(&mut request);
                queues.complete(request.head, u32::try_from(written).expect("a reply is shorter than 4 GiB"));
            }
        }
    }

    fn reset(&mut self) {
        self.share.reset();
    }

    fn save(&mut self) -> Result<Option<DeviceState>, DeviceError> {
        Ok(Some(DeviceState::Share(self.share.save()?)))
    }

    fn restore(&mut self, saved: Option<&DeviceState>) -> Result<(), DeviceError> {
        match saved {
            Some(DeviceState::Share(saved)) => self.share.restore(saved),
            _ => Err(Mismatch("shared folder").into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::Driver;
    use super::*;
    use crate::access::Access;

    const LOOKUP: u32 = 1;
    const FORGET: u32 = 2;
    const GETATTR: u32 = 3;
    const OPEN: u32 = 14;
    const READ: u32 = 15;
    const WRITE: u32 = 16;

    fn share() -> (tempfile::TempDir, SharedFolder, Driver) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "the host's").unwrap();
        let device = SharedFolder::new(Share::open(dir.path(), Access::ReadOnly, 1).unwrap(), 3);
        let driver = Driver::ready(&device);
        (dir, device, driver)
    }

    /// Creates a request with its header.
    fn fuse(opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(40 + body.len()).unwrap();
        [&length.to_le_bytes()[..], &opcode.to_le_bytes(), &[9; 8], &node.to_le_bytes(), &[0; 16], body]
            .concat()
    }

    /// Sends a request. Returns the error in the reply's header.
    fn send(device: &mut SharedFolder, driver: &mut Driver, request: &[u8]) -> i32 {
        let at = driver.submit(REQUESTS.0, request, 4096);
        driver.serve(device);
        let length = driver.next_completion(REQUESTS.0).expect("every request is completed");
        let reply = driver.bytes(at, length);
        assert_eq!(reply[..4], length.to_le_bytes());
        assert_eq!(reply[8..16], [9; 8], "the reply is for this request");
        i32::from_le_bytes(*reply[4..].first_chunk().unwrap())
    }

    #[test]
    fn a_guest_finds_the_share_by_its_tag() {
        let (_dir, device, driver) = share();
        assert_eq!(driver.read(0x08), 26);
        let config = device.config();
        assert_eq!((&config[..7], config.len()), (&b"tally3\0"[..], 40));
        assert_eq!(config[36..], [1, 0, 0, 0]);
    }

    #[test]
    fn requests_get_replies_and_a_forgotten_inode_is_stale() {
        let (_dir, mut device, mut driver) = share();
        assert_eq!(send(&mut device, &mut driver, &fuse(LOOKUP, 1, b"file\0")), 0);
        assert_eq!(send(&mut device, &mut driver, &fuse(LOOKUP, 1, b"none\0")), -2);
        assert_eq!(send(&mut device, &mut driver, &fuse(GETATTR, 2, &[0; 16])), 0);
        driver.submit(HIGH_PRIORITY.0, &fuse(FORGET, 2, &1_u64.to_le_bytes()), 0);
        driver.serve(&mut device);
        assert_eq!(driver.next_completion(HIGH_PRIORITY.0), Some(0));
        let stale = -116;
        assert_eq!(send(&mut device, &mut driver, &fuse(GETATTR, 2, &[0; 16])), stale);
    }

    #[test]
    fn a_reset_forgets_all_inodes() {
        let (_dir, mut device, mut driver) = share();
        assert_eq!(send(&mut device, &mut driver, &fuse(LOOKUP, 1, b"file\0")), 0);
        device.reset();
        assert_eq!(send(&mut device, &mut driver, &fuse(GETATTR, 2, &[0; 16])), -116);
    }

    /// The body of a READ or WRITE of the first handle.
    fn part(offset: u64, size: u32) -> Vec<u8> {
        [&1_u64.to_le_bytes()[..], &offset.to_le_bytes(), &size.to_le_bytes(), &[0; 20]].concat()
    }

    /// Sends a request. Returns the error and the body of the reply.
    fn call(device: &mut SharedFolder, driver: &mut Driver, request: &[u8]) -> (i32, Vec<u8>) {
        let at = driver.submit(REQUESTS.0, request, 4096);
        driver.serve(device);
        let length = driver.next_completion(REQUESTS.0).expect("every request is completed");
        let reply = driver.bytes(at, length);
        assert_eq!((&reply[..4], &reply[8..16]), (&length.to_le_bytes()[..], &[9; 8][..]));
        (i32::from_le_bytes(*reply[4..].first_chunk().unwrap()), reply[16..].to_vec())
    }

    #[test]
    fn files_are_read_and_written_straight_from_and_to_the_guests_memory() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "the host's").unwrap();
        let mut device = SharedFolder::new(Share::open(dir.path(), Access::ReadWrite, 1).unwrap(), 0);
        let mut driver = Driver::ready(&device);
        assert_eq!(send(&mut device, &mut driver, &fuse(LOOKUP, 1, b"file\0")), 0);
        let mut call = |opcode, body: &[u8]| call(&mut device, &mut driver, &fuse(opcode, 2, body));
        assert_eq!(call(OPEN, &[2, 0, 0, 0, 0, 0, 0, 0]).0, 0);
        assert_eq!(call(READ, &part(4, 100)), (0, b"host's".to_vec()));
        assert_eq!(call(READ, &part(4, 2)), (0, b"ho".to_vec()));
        assert_eq!(call(READ, &part(10, 100)), (0, Vec::new()));
        let data = b"guest's";
        let write = [part(4, 7), data.to_vec()].concat();
        assert_eq!(call(WRITE, &write), (0, vec![7, 0, 0, 0, 0, 0, 0, 0]));
        assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"the guest's");
        // More than the request has, beyond the end of all files, and of no handle.
        let invalid = (-22, Vec::new());
        assert_eq!(call(WRITE, &[part(4, 8), data.to_vec()].concat()), invalid);
        assert_eq!(call(READ, &part(u64::MAX, 1)), invalid);
        let mut other = part(0, 1);
        other[0] = 7;
        assert_eq!(call(READ, &other), (-9, Vec::new()));
        assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"the guest's");
    }

    proptest! {
        #[test]
        fn every_request_is_completed_within_its_buffer(
            opcode in 0..60_u32,
            request_size in 0..200_usize,
            reply_size in 0..200_u32,
            queue in 0..2_usize,
        ) {
            let (dir, mut device, mut driver) = share();
            let mut request = fuse(opcode, 1, &[1; 200]);
            request.truncate(request_size);
            if request_size + reply_size as usize > 0 {
                driver.submit(queue, &request, reply_size);
                driver.serve(&mut device);
                prop_assert!(driver.next_completion(queue).is_some_and(|length| length <= reply_size));
            }
            prop_assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"the host's");
        }
    }
}
