//! A process that exchanges frames over a stream socket, each behind its length in four bytes (big-endian). That is the
//! protocol of passt, and of QEMU's `-netdev stream`.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{RecvFlags, SendFlags, recv, send};
use virtio_bindings::virtio_net::VIRTIO_NET_F_CSUM;

use super::{Backend, Filter, Frame, Offer};

/// Size of a frame's length.
const LENGTH: usize = 4;
/// Size of a buffer for some of the largest frames.
const BUFFER: usize = 256 << 10;

/// The other process, on a socket.
#[derive(Debug)]
pub struct Stream {
    socket: OwnedFd,
    /// What the other process does not see.
    filter: Filter,
    /// Has what was received and not passed on, at `received`.
    buffer: Box<[u8]>,
    received: Range<usize>,
    /// The rest of a frame that did not fit into the socket's buffer.
    unsent: Vec<u8>,
}

impl Stream {
    /// A frame is sent as it is, so its checksum is completed here. There is nothing to segment: the MTU is what passt
    /// gives its guests, IP's maximum in whole words.
    pub const OFFER: Offer = Offer { features: 1 << VIRTIO_NET_F_CSUM, mtu: 65520, pairs: 1 };

    /// Exchanges frames over a socket. Those of the guest that the filter does not let pass are lost.
    pub fn new(socket: OwnedFd, filter: Filter) -> Self {
        Self { socket, filter, buffer: vec![0; BUFFER].into(), received: 0..0, unsent: Vec::new() }
    }

    /// Returns the length of the next frame, if that is known.
    fn next_length(&self) -> io::Result<Option<usize>> {
        let received = &self.buffer[self.received.clone()];
        let Some(length) = received.first_chunk::<LENGTH>() else { return Ok(None) };
        let length = u32::from_be_bytes(*length) as usize;
        if length > Frame::MAX - Frame::HEADER {
            return Err(io::Error::other(format!("a frame of {length} bytes")));
        }
        Ok(Some(length))
    }

    /// Returns the next frame, if all of it has come.
    fn next(&mut self) -> io::Result<Option<&[u8]>> {
        let Some(length) = self.next_length()? else { return Ok(None) };
        let frame = self.received.start + LENGTH..self.received.start + LENGTH + length;
        if frame.end > self.received.end {
            return Ok(None);
        }
        self.received.start = frame.end;
        Ok(Some(&self.buffer[frame]))
    }

    /// Receives more. Returns false if there is nothing yet.
    fn receive_more(&mut self) -> io::Result<bool> {
        self.buffer.copy_within(self.received.clone(), 0);
        self.received = 0..self.received.len();
        let received = recv(&self.socket, &mut self.buffer[self.received.end..], RecvFlags::DONTWAIT);
        match received {
            Ok((0, _)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((count, _)) => {
                self.received.end += count;
                Ok(true)
            }
            Err(error) => no_error_if_it_would_wait(error).map(|()| false),
        }
    }

    /// Sends as many bytes as there is room for. Returns their number.
    fn send_some(&self, bytes: &[u8]) -> io::Result<usize> {
        let sent = send(&self.socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        sent.or_else(|error| no_error_if_it_would_wait(error).map(|()| 0))
    }
}

fn no_error_if_it_would_wait(error: rustix::io::Errno) -> io::Result<()> {
    match error {
        rustix::io::Errno::AGAIN | rustix::io::Errno::INTR => Ok(()),
        error => Err(error.into()),
    }
}

impl Backend for Stream {
    fn accept(&mut self, _features: u64) -> io::Result<()> {
        Ok(())
    }

    fn receive(&mut self, frame: &mut Frame) -> io::Result<bool> {
        loop {
            if let Some(content) = self.next()? {
                frame.set(content);
                return Ok(true);
            }
            if !self.receive_more()? {
                return Ok(false);
            }
        }
    }

    fn has_room(&mut self) -> io::Result<bool> {
        let sent = if self.unsent.is_empty() { 0 } else { self.send_some(&self.unsent)? };
        self.unsent.drain(..sent);
        Ok(self.unsent.is_empty())
    }

    fn is_full(&self) -> bool {
        !self.unsent.is_empty()
    }

    fn send(&mut self, frame: &mut Frame) -> io::Result<()> {
        if frame.is_segmented() || !frame.complete() {
            return Ok(());
        }
        let content = frame.content();
        // Not before: the guest says where the checksum is put, which may be into an address.
        if !self.filter.passes(content) {
            return Ok(());
        }
        let length = u32::try_from(content.len()).expect("a frame is short").to_be_bytes();
        let bytes = [&length, content].concat();
        let sent = self.send_some(&bytes)?;
        self.unsent.extend_from_slice(&bytes[sent..]);
        Ok(())
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn pair() -> (UnixStream, Stream) {
        let (theirs, ours) = UnixStream::pair().unwrap();
        (theirs, Stream::new(ours.into(), Filter::Open))
    }

    fn received(stream: &mut Stream) -> Vec<Vec<u8>> {
        let mut frame = Frame::default();
        let next = || stream.receive(&mut frame).unwrap().then(|| frame.content().to_vec());
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn frames_are_found_however_the_stream_is_cut() {
        let (mut theirs, mut stream) = pair();
        let bytes = [&[0, 0, 0, 3], &b"abc"[..], &[0, 0, 0, 0], &[0, 0, 0, 2], b"de"].concat();
        let mut all = Vec::new();
        for byte in bytes {
            theirs.write_all(&[byte]).unwrap();
            all.extend(received(&mut stream));
        }
        assert_eq!(all, [&b"abc"[..], b"", b"de"]);
    }

    #[test]
    fn a_frame_that_is_too_long_is_an_error_and_so_is_the_end() {
        let (mut theirs, mut stream) = pair();
        theirs.write_all(&[0, 1, 0, 15]).unwrap();
        assert!(stream.receive(&mut Frame::default()).is_err());
        let (theirs, mut stream) = pair();
        drop(theirs);
        let error = stream.receive(&mut Frame::default()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_frame_is_judged_as_the_other_process_sees_it() {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        let mut stream = Stream::new(ours.into(), Filter::WithoutLoopback);
        let mut frame = Frame::default();
        let mut send = |header: [u8; Frame::HEADER], to: [u8; 4], content: [u8; 2]| {
            let content = [&[2; 12], &[0x08, 0x00, 0x45][..], &[0; 15], &to, &content].concat();
            let bytes = [&header[..], &content].concat();
            assert!(frame.read(bytes.len(), &bytes[..]).unwrap());
            stream.send(&mut frame).unwrap();
        };
        // The checksum of all that follows is to be put into the destination, which becomes 127.0.0.1.
        send([1, 0, 0, 0, 0, 0, 30, 0, 0, 0, 0, 0], [10, 0, 0, 1], [0x76, 0xfe]);
        send([0; Frame::HEADER], [127, 0, 0, 1], [0; 2]);
        send([0; Frame::HEADER], [10, 0, 0, 2], [0; 2]);
        drop(stream);
        let mut seen = Vec::new();
        theirs.read_to_end(&mut seen).unwrap();
        let destinations: Vec<&[u8]> =
            seen.chunks(LENGTH + 36).map(|frame| &frame[LENGTH + 30..][..4]).collect();
        assert_eq!(destinations, [[10, 0, 0, 2]]);
    }

    #[test]
    fn no_frame_is_cut_when_the_socket_is_full() {
        let (mut theirs, mut stream) = pair();
        let mut frame = Frame::default();
        let mut sent = 0;
        while stream.has_room().unwrap() {
            frame.set(&vec![u8::try_from(sent % 251).unwrap(); 60_000]);
            stream.send(&mut frame).unwrap();
            sent += 1;
        }
        for number in 0..sent {
            let mut bytes = vec![0; LENGTH + 60_000];
            theirs.read_exact(&mut bytes).unwrap();
            assert_eq!(bytes[..LENGTH], 60_000_u32.to_be_bytes());
            assert!(bytes[LENGTH..].iter().all(|byte| usize::from(*byte) == number % 251));
            let _ = stream.has_room().unwrap();
        }
        assert!(stream.has_room().unwrap());
    }
}
