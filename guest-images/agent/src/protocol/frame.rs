//! Encodes frames, and decodes them from a byte stream that arrives in pieces.

use std::marker::PhantomData;

use super::Error;

/// Maximum length of a payload, in bytes.
pub const MAX_PAYLOAD: usize = 256 << 10;
/// Size of a frame's header: the kind and the length.
const HEADER: usize = 5;

/// A message that can be sent in a frame.
pub trait Message: Sized {
    /// Decodes a message. Returns `None` if it is not valid.
    fn parse(kind: u8, payload: &[u8]) -> Option<Self>;

    /// Appends the payload to `payload` and returns the kind.
    fn write(&self, payload: &mut Vec<u8>) -> Result<u8, Error>;

    /// Encodes the message as a frame.
    fn encode(&self) -> Result<Vec<u8>, Error> {
        let mut frame = vec![0; HEADER];
        frame[0] = self.write(&mut frame)?;
        let length = frame.len() - HEADER;
        match u32::try_from(length) {
            Ok(field) if length <= MAX_PAYLOAD => frame[1..HEADER].copy_from_slice(&field.to_le_bytes()),
            _ => return Err(Error::TooLong(length)),
        }
        Ok(frame)
    }
}

/// Decodes the messages of a stream. Buffers at most one frame of maximum length and the bytes of the last
/// [`Decoder::feed`].
#[derive(Debug)]
pub struct Decoder<M> {
    bytes: Vec<u8>,
    message: PhantomData<fn() -> M>,
}

impl<M> Default for Decoder<M> {
    fn default() -> Self {
        Self { bytes: Vec::new(), message: PhantomData }
    }
}

impl<M: Message> Decoder<M> {
    /// Creates a decoder at the start of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the next bytes of the stream. Before the next call, [`next`](Self::next) must be called until it returns
    /// `None`.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Returns the bytes of a message that has not arrived completely.
    pub fn rest(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the next message, or `None` until all of it has arrived. After an error, every call returns the same
    /// error.
    #[expect(
        clippy::should_implement_trait,
        reason = "for an iterator, `None` would mean the end of the stream"
    )]
    pub fn next(&mut self) -> Result<Option<M>, Error> {
        let Some((&[kind, ref length @ ..], rest)) = self.bytes.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MAX_PAYLOAD {
            return Err(Error::TooLong(length));
        }
        let Some(payload) = rest.get(..length) else { return Ok(None) };
        let message = M::parse(kind, payload).ok_or(Error::Malformed(kind))?;
        self.bytes.drain(..HEADER + length);
        Ok(Some(message))
    }
}
