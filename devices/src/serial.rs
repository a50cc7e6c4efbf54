//! A 16550A serial port: vm-superio's model behind a lock, shared by the vCPU threads and the thread that feeds its
//! input.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use vm_superio::Trigger;
use vm_superio::serial::SerialEvents;
use vmm_sys_util::eventfd::EventFd;

use crate::bus::PortDevice;
use crate::end::End;
use crate::interrupt::Interrupt;
use crate::state::Mismatch;

/// Error while input was passed to the port.
#[derive(Debug, thiserror::Error)]
#[error("the serial port's interrupt cannot be raised: {0}")]
pub struct SerialError(io::Error);

/// Adapts [`Interrupt`] to vm-superio's trait.
struct Line(Box<dyn Interrupt>);

impl Trigger for Line {
    type E = io::Error;

    fn trigger(&self) -> io::Result<()> {
        self.0.raise()
    }
}

/// Signals that the guest has read the whole input FIFO, so that more input can be queued.
struct RoomEvent(EventFd);

impl SerialEvents for RoomEvent {
    fn buffer_read(&self) {}
    fn out_byte(&self) {}
    fn tx_lost_byte(&self) {}
    fn in_buffer_empty(&self) {
        // A write to a non-blocking eventfd fails only if the counter would overflow. The eventfd is readable then
        // anyway.
        let _ = self.0.write(1);
    }
}

/// The model writes its output to a buffer. The buffer is passed on after the model's lock has been released.
type Model = vm_superio::Serial<Line, RoomEvent, Vec<u8>>;

/// The serial port. Clones share one port.
#[derive(Clone)]
pub struct Serial {
    model: Arc<Mutex<Model>>,
    /// Has a lock of its own: a slow output may block a vCPU that transmits, but not the thread that passes input.
    out: Arc<Mutex<dyn Write + Send>>,
}

/// The registers of a port, and the input that the guest has not read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialState(#[serde(with = "Registers")] vm_superio::SerialState);

/// The fields of vm-superio's state.
#[derive(Serialize, Deserialize)]
#[serde(remote = "vm_superio::SerialState", deny_unknown_fields)]
struct Registers {
    baud_divisor_low: u8,
    baud_divisor_high: u8,
    interrupt_enable: u8,
    interrupt_identification: u8,
    line_control: u8,
    line_status: u8,
    modem_control: u8,
    modem_status: u8,
    scratch: u8,
    in_buffer: Vec<u8>,
}

/// Maximum number of bytes that one access transmits. The widest access has four bytes, and each transmits at most one.
const MAX_SENT: usize = 4;

impl Serial {
    /// Number of I/O ports.
    pub const PORTS: u16 = 8;

    /// Creates a port that raises `interrupt`, signals `room` when the guest has read all its input, and writes to
    /// `out`.
    pub fn new(interrupt: impl Interrupt + 'static, room: EventFd, out: impl Write + Send + 'static) -> Self {
        let model =
            Model::with_events(Line(Box::new(interrupt)), RoomEvent(room), Vec::with_capacity(MAX_SENT));
        Self { model: Arc::new(Mutex::new(model)), out: Arc::new(Mutex::new(out)) }
    }

    /// Creates a port with a state that was saved.
    pub fn restored(
        state: &SerialState,
        interrupt: impl Interrupt + 'static,
        room: EventFd,
        out: impl Write + Send + 'static,
    ) -> Result<Self, Mismatch> {
        let line = Line(Box::new(interrupt));
        let model = Model::from_state(&state.0, line, RoomEvent(room), Vec::with_capacity(MAX_SENT));
        let model = model.map_err(|_| Mismatch("serial port"))?;
        Ok(Self { model: Arc::new(Mutex::new(model)), out: Arc::new(Mutex::new(out)) })
    }

    /// Returns the state, for a snapshot.
    pub fn save(&self) -> SerialState {
        SerialState(self.model().state())
    }

    /// Queues input for the guest. Returns the number of bytes that fitted into the FIFO.
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
        let (mut sent, mut count) = ([0; MAX_SENT], 0);
        let mut model = self.model();
        for (byte, register) in data.iter().zip(offset..) {
            // Fails only if the interrupt cannot be raised. That cannot be reported to the guest, which misses the
            // interrupt.
            let _ = model.write(register.to_le_bytes()[0], *byte);
        }
        for (slot, byte) in sent.iter_mut().zip(model.writer_mut().drain(..)) {
            *slot = byte;
            count += 1;
        }
        drop(model);
        if count > 0 {
            let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
            // Output that cannot be written is lost, as on a serial line that is not connected.
            let _ = out.write_all(&sent[..count]);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Collects the bytes that the guest transmitted.
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
    fn bytes_that_the_guest_transmits_are_written_to_the_output() {
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
