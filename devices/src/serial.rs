//! A 16550A serial port: vm-superio's model behind a lock, so that the vCPUs and whoever feeds its input share it.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_superio::Trigger;
use vm_superio::serial::SerialEvents;
use vmm_sys_util::eventfd::EventFd;

use crate::{End, Interrupt, PortDevice};

/// Input that the port would not take.
#[derive(Debug, thiserror::Error)]
#[error("the serial port's interrupt cannot be raised: {0}")]
pub struct SerialError(io::Error);

/// The port's interrupt.
struct Line(Box<dyn Interrupt>);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.raise()
    }
}

/// Tells the feeder that the guest has read all that was there.
struct RoomEvent(EventFd);

impl SerialEvents for RoomEvent {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        // A non-blocking eventfd refuses only when it has been signalled 2^64 - 2 times without being read: then it is readable already.
        let _ = self.0.write(1);
    }
}

/// The model collects what it sends, so that it is passed on when nobody waits for the model any more.
type Model = vm_superio::Serial<Line, RoomEvent, Vec<u8>>;

/// The port. A clone is the same port.
#[derive(Clone)]
pub struct Serial {
    model: Arc<Mutex<Model>>,
    /// May block a vCPU that sends, but nobody who offers input.
    out: Arc<Mutex<dyn Write + Send>>,
}

/// The widest access is of four bytes, each of which sends one at most.
const MOST_SENT: usize = 4;

impl Serial {
    /// The number of ports that it takes on the bus.
    pub const PORTS: u16 = 8;

    /// A port that raises `interrupt`, signals `room` when the guest has read its input, and sends to `out`.
    pub fn new(interrupt: impl Interrupt + 'static, room: EventFd, out: impl Write + Send + 'static) -> Self {
        let model =
            Model::with_events(Line(Box::new(interrupt)), RoomEvent(room), Vec::with_capacity(MOST_SENT));
        Self { model: Arc::new(Mutex::new(model)), out: Arc::new(Mutex::new(out)) }
    }

    /// Offers input to the guest; says how much of it there was room for.
    pub fn receive(&self, input: &[u8]) -> Result<usize, SerialError> {
        let mut model = self.model();
        if model.fifo_capacity() == 0 {
            return Ok(0);
        }
        model.enqueue_raw_bytes(input).map_err(|e| match e {
            vm_superio::serial::Error::Trigger(e) | vm_superio::serial::Error::IOError(e) => SerialError(e),
            vm_superio::serial::Error::FullFifo => SerialError(io::ErrorKind::WouldBlock.into()),
        })
    }

    fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PortDevice for Serial {
    fn read(&self, offset: u16, data: &mut [u8]) {
        let mut model = self.model();
        for (byte, register) in data.iter_mut().zip(offset..) {
            *byte = model.read(register.to_le_bytes()[0]);
        }
    }

    fn write(&self, offset: u16, data: &[u8]) -> Option<End> {
        let (mut sent, mut count) = ([0; MOST_SENT], 0);
        let mut model = self.model();
        for (byte, register) in data.iter().zip(offset..) {
            // Fails only if the interrupt cannot be raised: a driver that waits for it misses it, as it would on a loose line.
            let _ = model.write(register.to_le_bytes()[0], *byte);
        }
        for (place, byte) in sent.iter_mut().zip(model.writer_mut().drain(..)) {
            *place = byte;
            count += 1;
        }
        drop(model);
        if count > 0 {
            let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
            // Output that nobody takes any more is lost, as on a line with nobody at its other end.
            let _ = out.write_all(&sent[..count]);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Collects what the guest sent.
    #[derive(Clone, Default)]
    struct Wire(Arc<Mutex<Vec<u8>>>);

    impl Write for Wire {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn event() -> EventFd {
        EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK).unwrap()
    }

    #[test]
    fn what_the_guest_sends_comes_out() {
        let line = Wire::default();
        let port = Serial::new(event(), event(), line.clone());
        for byte in b"tally" {
            assert_eq!(port.write(0, &[*byte]), None);
        }
        assert_eq!(*line.0.lock().unwrap(), b"tally");
    }

    #[test]
    fn input_beyond_the_fifo_waits_until_the_guest_has_read() {
        let room = event();
        let port = Serial::new(event(), room.try_clone().unwrap(), Wire::default());
        let input = [b'x'; 200];
        let taken = port.receive(&input).unwrap();
        assert!(taken > 0 && taken < input.len());
        assert_eq!(port.receive(&input).unwrap(), 0);
        assert!(room.read().is_err(), "nothing was read yet");
        for _ in 0..taken {
            let mut byte = [0];
            port.read(0, &mut byte);
            assert_eq!(byte, [b'x']);
        }
        assert_eq!(room.read().unwrap(), 1);
        assert!(port.receive(&input).unwrap() > 0);
    }
}
