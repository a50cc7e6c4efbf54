//! Frames in a stream of bytes that arrives in pieces.

use std::marker::PhantomData;

use super::Error;

/// The longest payload of a frame, in bytes.
pub const LONGEST: usize = 256 << 10;
/// The kind and the length.
const HEADER: usize = 5;

/// What can be sent in a frame.
pub trait Message: Sized {
    /// The message with this kind and payload, if there is one.
    fn parse(kind: u8, payload: &[u8]) -> Option<Self>;

    /// Appends the payload and gives the kind.
    fn write(&self, payload: &mut Vec<u8>) -> Result<u8, Error>;

    /// The frame.
    fn encode(&self) -> Result<Vec<u8>, Error> {
        let mut frame = vec![0; HEADER];
        frame[0] = self.write(&mut frame)?;
        let length = frame.len() - HEADER;
        match u32::try_from(length) {
            Ok(field) if length <= LONGEST => frame[1..HEADER].copy_from_slice(&field.to_le_bytes()),
            _ => return Err(Error::TooLong(length)),
        }
        Ok(frame)
    }
}

/// Finds the messages in a stream. It holds no more than one frame of the longest kind and what it was last fed.
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
    /// A decoder at the begin of a stream.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes the next bytes of the stream. Call [`next`](Self::next) until there is no message left before the next call.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next message, once all of it has arrived. After an error there is nothing more to be had from the stream: it
    /// is the same error every time.
    #[expect(
        clippy::should_implement_trait,
        reason = "no message yet is not the end, as it would be of an iterator"
    )]
    pub fn next(&mut self) -> Result<Option<M>, Error> {
        let Some((&[kind, ref length @ ..], rest)) = self.bytes.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > LONGEST {
            return Err(Error::TooLong(length));
        }
        let Some(payload) = rest.get(..length) else { return Ok(None) };
        let message = M::parse(kind, payload).ok_or(Error::Malformed(kind))?;
        self.bytes.drain(..HEADER + length);
        Ok(Some(message))
    }
}
