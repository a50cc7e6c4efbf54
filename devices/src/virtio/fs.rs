//! A shared folder (section 5.11 of the specification): what carries FUSE between a guest and a [`Share`].

use std::io::{Read, Write};

use super::{Device, Queues, Request};
use crate::fs::Share;

/// What the guest forgets comes by a queue of its own, so that it waits for nothing. (Interrupts of requests would, too.)
const HIGH_PRIORITY: (usize, u16) = (0, 128);
/// Linux makes a request no longer than the queue, less four entries; so that those of a mebibyte, 256 pages, fit.
const REQUESTS: (usize, u16) = (1, 512);
const TAG: usize = 36;

/// The device.
#[derive(Debug)]
pub struct SharedFolder {
    share: Share,
    number: u8,
    request: Vec<u8>,
}

impl SharedFolder {
    /// The folder, as the guest's share of that number.
    pub fn new(share: Share, number: u8) -> Self {
        Self { share, number, request: vec![0; Share::LONGEST_REQUEST] }
    }

    /// The name by which a guest mounts the share of that number.
    pub fn tag(number: u8) -> String {
        format!("tally{number}")
    }

    /// Answers; says with how many bytes.
    fn answer(&mut self, request: &mut Request) -> usize {
        let length = request.reader.available_bytes();
        // Longer than any: not from a kernel that has heard how long they may be.
        let Some(text) = self.request.get_mut(..length) else { return 0 };
        if request.reader.read_exact(text).is_err() {
            return 0;
        }
        let answer = self.share.serve(text, request.writer.available_bytes());
        // There is room for it.
        let _ = request.writer.write_all(answer);
        request.writer.bytes_written()
    }
}

impl Device for SharedFolder {
    fn id(&self) -> u32 {
        26
    }

    fn config(&self) -> Vec<u8> {
        let mut tag = Self::tag(self.number).into_bytes();
        tag.resize(TAG, 0);
        // The tag, and the number of queues for requests.
        [tag, 1_u32.to_le_bytes().to_vec()].concat()
    }

    fn queues(&self) -> Vec<u16> {
        vec![HIGH_PRIORITY.1, REQUESTS.1]
    }

    fn serve(&mut self, queues: &mut Queues) {
        for (queue, _) in [HIGH_PRIORITY, REQUESTS] {
            while let Some(mut request) = queues.next(queue) {
                let written = self.answer(&mut request);
                queues.done(request.head, u32::try_from(written).expect("an answer is not that long"));
            }
        }
    }

    fn reset(&mut self) {
        self.share.reset();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::testing::Driver;
    use super::*;
    use crate::Access;

    const LOOKUP: u32 = 1;
    const FORGET: u32 = 2;
    const GETATTR: u32 = 3;

    fn folder() -> (tempfile::TempDir, SharedFolder, Driver) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "the host's").unwrap();
        let device = SharedFolder::new(Share::open(dir.path(), Access::ReadOnly, 1).unwrap(), 3);
        let driver = Driver::ready(&device);
        (dir, device, driver)
    }

    /// A request, with its header.
    fn fuse(opcode: u32, node: u64, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(40 + body.len()).unwrap();
        [&length.to_le_bytes()[..], &opcode.to_le_bytes(), &[9; 8], &node.to_le_bytes(), &[0; 16], body]
            .concat()
    }

    /// The error number that an answer has.
    fn ask(device: &mut SharedFolder, driver: &mut Driver, request: &[u8]) -> i32 {
        let at = driver.ask(REQUESTS.0, request, 4096);
        driver.serve(device);
        let length = driver.answered(REQUESTS.0).expect("every request is answered");
        let answer = driver.bytes(at, length);
        assert_eq!(answer[..4], length.to_le_bytes());
        assert_eq!(answer[8..16], [9; 8], "it is the answer to this one");
        i32::from_le_bytes(*answer[4..].first_chunk().unwrap())
    }

    #[test]
    fn a_guest_finds_the_share_by_its_tag() {
        let (_dir, device, driver) = folder();
        assert_eq!(driver.read(0x08), 26);
        let config = device.config();
        assert_eq!((&config[..7], config.len()), (&b"tally3\0"[..], 40));
        assert_eq!(config[36..], [1, 0, 0, 0]);
    }

    #[test]
    fn requests_are_answered_and_what_is_forgotten_is_not() {
        let (_dir, mut device, mut driver) = folder();
        assert_eq!(ask(&mut device, &mut driver, &fuse(LOOKUP, 1, b"file\0")), 0);
        assert_eq!(ask(&mut device, &mut driver, &fuse(LOOKUP, 1, b"none\0")), -2);
        assert_eq!(ask(&mut device, &mut driver, &fuse(GETATTR, 2, &[0; 16])), 0);
        driver.ask(HIGH_PRIORITY.0, &fuse(FORGET, 2, &1_u64.to_le_bytes()), 0);
        driver.serve(&mut device);
        assert_eq!(driver.answered(HIGH_PRIORITY.0), Some(0));
        let stale = -116;
        assert_eq!(ask(&mut device, &mut driver, &fuse(GETATTR, 2, &[0; 16])), stale);
    }

    #[test]
    fn a_driver_that_begins_anew_knows_nothing() {
        let (_dir, mut device, mut driver) = folder();
        assert_eq!(ask(&mut device, &mut driver, &fuse(LOOKUP, 1, b"file\0")), 0);
        device.reset();
        assert_eq!(ask(&mut device, &mut driver, &fuse(GETATTR, 2, &[0; 16])), -116);
    }

    proptest! {
        #[test]
        fn no_request_harms(opcode in 0..60_u32, says in 0..200_usize, room in 0..200_u32, queue in 0..2_usize) {
            let (dir, mut device, mut driver) = folder();
            let mut text = fuse(opcode, 1, &[1; 200]);
            text.truncate(says);
            if says + room as usize > 0 {
                driver.ask(queue, &text, room);
                driver.serve(&mut device);
                prop_assert!(driver.answered(queue).is_some_and(|length| length <= room));
            }
            prop_assert_eq!(std::fs::read(dir.path().join("file")).unwrap(), b"the host's");
        }
    }
}
