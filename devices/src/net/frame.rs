//! An Ethernet frame behind the header that says what is left to do to it (section 5.1.6 of the specification).

use std::io::{self, Read};

/// Size of `struct virtio_net_hdr_v1`.
const HEADER: usize = 12;
/// `VIRTIO_NET_HDR_F_NEEDS_CSUM`.
const NEEDS_CHECKSUM: u8 = 1;
/// `VIRTIO_NET_HDR_GSO_NONE`.
const NOT_SEGMENTED: u8 = 0;

/// A frame and its header. The largest has 64 KiB and an Ethernet header: what IP can segment, or the largest MTU.
#[derive(Debug)]
pub struct Frame {
    bytes: Box<[u8; Self::MAX]>,
    length: usize,
}

/// What is to be done about a frame's checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Checksum {
    /// Nothing.
    Complete,
    /// The frame's sum from `start` on is to be put at `at`.
    Needed {
        /// Where the sum begins.
        start: usize,
        /// Where it belongs.
        at: usize,
    },
}

impl Default for Frame {
    fn default() -> Self {
        let bytes = vec![0; Self::MAX].into_boxed_slice();
        Self { bytes: bytes.try_into().expect("it has that length"), length: 0 }
    }
}

impl Frame {
    /// Size of the header.
    pub const HEADER: usize = HEADER;
    /// Maximum size of a frame with its header.
    pub const MAX: usize = HEADER + 14 + (1 << 16);

    /// Returns true if there is no frame.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Returns the header and the frame.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// Returns the frame.
    pub fn content(&self) -> &[u8] {
        self.bytes().get(HEADER..).unwrap_or_default()
    }

    /// Forgets the frame.
    pub fn clear(&mut self) {
        self.length = 0;
    }

    /// Reads a header and a frame. Returns false, and has none then, if there is less than a header or too much.
    pub fn read(&mut self, length: usize, mut from: impl Read) -> io::Result<bool> {
        self.length = 0;
        if !(HEADER..=Self::MAX).contains(&length) {
            return Ok(false);
        }
        from.read_exact(&mut self.bytes[..length])?;
        self.length = length;
        Ok(true)
    }

    /// Lets `fill` write a header and a frame, and return their length.
    pub fn fill(&mut self, fill: impl FnOnce(&mut [u8]) -> io::Result<usize>) -> io::Result<()> {
        self.length = 0;
        self.length = fill(&mut self.bytes[..])?.min(Self::MAX);
        Ok(())
    }

    /// Takes over a frame to which nothing is left to be done. One that is too long is none.
    pub fn set(&mut self, content: &[u8]) {
        self.length = 0;
        if let Some(bytes) = self.bytes[HEADER..].get_mut(..content.len()) {
            bytes.copy_from_slice(content);
            self.bytes[..HEADER].fill(0);
            self.length = HEADER + content.len();
        }
    }

    /// Notes in the header how many of the driver's buffers the frame is in.
    pub fn set_buffers(&mut self, buffers: u16) {
        [self.bytes[10], self.bytes[11]] = buffers.to_le_bytes();
    }

    /// Returns true if the frame is to be cut into segments.
    pub fn is_segmented(&self) -> bool {
        self.bytes[1] != NOT_SEGMENTED
    }

    /// Returns what is to be done about the checksum, as the header says.
    fn checksum(&self) -> Checksum {
        if self.bytes[0] & NEEDS_CHECKSUM == 0 {
            return Checksum::Complete;
        }
        let start = usize::from(u16::from_le_bytes([self.bytes[6], self.bytes[7]]));
        Checksum::Needed {
            start,
            at: start + usize::from(u16::from_le_bytes([self.bytes[8], self.bytes[9]])),
        }
    }

    /// Completes the checksum of TCP or UDP: the driver has put the sum of the pseudo-header in its place. Returns
    /// false if that place is not in the frame.
    pub fn complete(&mut self) -> bool {
        let Checksum::Needed { start, at } = self.checksum() else { return true };
        let content = &mut self.bytes[..self.length][HEADER..];
        let Some(sum) = content.get(start..).map(internet_checksum) else { return false };
        let Some(place) = content.get_mut(at..at + 2) else { return false };
        // UDP: 0 would mean that there is no checksum (RFC 768); in one's complement all ones is the same number.
        place.copy_from_slice(&(if sum == 0 { u16::MAX } else { sum }).to_be_bytes());
        self.bytes[0] &= !NEEDS_CHECKSUM;
        true
    }
}

/// Returns the complement of the bytes' sum in one's complement (RFC 1071).
fn internet_checksum(bytes: &[u8]) -> u16 {
    let (words, rest) = bytes.as_chunks::<4>();
    // No carry is lost: a frame has fewer than 2^32 words.
    let mut sum: u64 = words.iter().map(|word| u64::from(u32::from_be_bytes(*word))).sum();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    sum += u64::from(u32::from_be_bytes(last));
    while sum > u64::from(u16::MAX) {
        sum = (sum >> 16) + (sum & u64::from(u16::MAX));
    }
    !u16::try_from(sum).expect("it was folded")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(header: [u8; HEADER], content: &[u8]) -> Frame {
        let mut frame = Frame::default();
        let bytes = [&header, content].concat();
        assert!(frame.read(bytes.len(), &bytes[..]).unwrap());
        frame
    }

    #[test]
    fn the_checksum_of_the_example_in_rfc_1071() {
        assert_eq!(internet_checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
        assert_eq!(internet_checksum(&[0x12]), !0x1200);
    }

    #[test]
    fn a_checksum_is_completed_where_the_header_says() {
        // A UDP datagram: its checksum has the sum of the pseudo-header, here 1.
        let mut frame = frame([1, 0, 0, 0, 0, 0, 2, 0, 6, 0, 0, 0], &[9, 9, 0, 1, 0, 2, 0, 8, 0, 1]);
        assert!(frame.complete());
        assert_eq!(frame.content(), [9, 9, 0, 1, 0, 2, 0, 8, 0xff, 0xf3]);
        assert_eq!(frame.checksum(), Checksum::Complete);
    }

    #[test]
    fn a_sum_of_zero_is_sent_as_all_ones() {
        let mut frame = frame([1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0], &[0xff, 0xff, 0, 0]);
        assert!(frame.complete());
        assert_eq!(frame.content(), [0xff; 4]);
    }

    proptest! {
        #[test]
        fn no_header_makes_a_checksum_outside_of_its_frame(
            header in any::<[u8; HEADER]>(),
            content in proptest::collection::vec(any::<u8>(), 0..100),
        ) {
            let mut frame = frame(header, &content);
            let is_done = frame.complete();
            prop_assert_eq!(frame.content().len(), content.len());
            prop_assert!(is_done || frame.content() == content);
        }
    }
}
