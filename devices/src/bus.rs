//! The bus that forwards I/O port accesses to devices.

use std::ops::Range;

use crate::end::End;

/// A device with I/O ports. All vCPU threads may call it concurrently.
pub trait PortDevice: Send + Sync {
    /// Reads `data.len()` bytes at `offset` ports from the device's first port. The access never extends past the last
    /// port.
    fn read(&self, offset: u16, data: &mut [u8]);
    /// Writes `data` at `offset`, with the same bounds as [`Self::read`].
    fn write(&self, offset: u16, data: &[u8]) -> Option<End>;
}

/// Error: two devices claim the same port.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("I/O ports {new:#x?} are taken by {old:#x?}")]
pub struct Overlap {
    new: Range<u32>,
    old: Range<u32>,
}

struct Slot {
    ports: Range<u32>,
    device: Box<dyn PortDevice>,
}

/// The I/O ports of the virtual machine. As on an ISA bus, reads of unused ports return all ones and writes to them are
/// ignored.
#[derive(Default)]
pub struct PortBus {
    slots: Vec<Slot>,
}

impl PortBus {
    /// Attaches a device to `count` ports, starting at `first`.
    pub fn attach(
        &mut self,
        first: u16,
        count: u16,
        device: impl PortDevice + 'static,
    ) -> Result<(), Overlap> {
        let new = u32::from(first)..u32::from(first) + u32::from(count);
        if let Some(slot) = self.slots.iter().find(|s| s.ports.start < new.end && new.start < s.ports.end) {
            return Err(Overlap { new, old: slot.ports.clone() });
        }
        self.slots.push(Slot { ports: new, device: Box::new(device) });
        Ok(())
    }

    /// Handles an `in` instruction of 1, 2 or 4 bytes.
    pub fn read(&self, port: u16, data: &mut [u8]) {
        match self.find(port, data.len()) {
            Some((device, offset)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Handles an `out` instruction of 1, 2 or 4 bytes.
    pub fn write(&self, port: u16, data: &[u8]) -> Option<End> {
        let (device, offset) = self.find(port, data.len())?;
        device.write(offset, data)
    }

    fn find(&self, port: u16, len: usize) -> Option<(&dyn PortDevice, u16)> {
        let start = u32::from(port);
        let end = start.checked_add(u32::try_from(len).ok()?)?;
        let slot = self.slots.iter().find(|s| s.ports.start <= start && end <= s.ports.end)?;
        Some((slot.device.as_ref(), u16::try_from(start - slot.ports.start).ok()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads return the offset. A write ends the virtual machine with its first byte.
    struct Probe;

    impl PortDevice for Probe {
        fn read(&self, offset: u16, data: &mut [u8]) {
            data.fill(u8::try_from(offset).unwrap());
        }
        fn write(&self, _offset: u16, data: &[u8]) -> Option<End> {
            Some(End::DebugExit(data[0]))
        }
    }

    fn read(bus: &PortBus, port: u16, len: usize) -> Vec<u8> {
        let mut data = vec![0x55; len];
        bus.read(port, &mut data);
        data
    }

    #[test]
    fn a_device_handles_only_its_own_ports() {
        let mut bus = PortBus::default();
        bus.attach(0x10, 4, Probe).unwrap();
        assert_eq!(read(&bus, 0x10, 1), [0]);
        assert_eq!(read(&bus, 0x12, 2), [2, 2]);
        assert_eq!(read(&bus, 0x0f, 1), [0xff]);
        assert_eq!(read(&bus, 0x14, 1), [0xff]);
        assert_eq!(bus.write(0x13, &[9]), Some(End::DebugExit(9)));
        assert_eq!(bus.write(0x14, &[9]), None);
    }

    #[test]
    fn an_access_that_extends_past_a_device_reaches_no_device() {
        let mut bus = PortBus::default();
        bus.attach(0xfffe, 2, Probe).unwrap();
        assert_eq!(read(&bus, 0xfffe, 4), [0xff; 4]);
        assert_eq!(read(&bus, 0xffff, 4), [0xff; 4]);
        assert_eq!(read(&bus, 0xffff, 1), [1]);
    }

    #[test]
    fn two_devices_cannot_share_a_port() {
        let mut bus = PortBus::default();
        bus.attach(0x3f8, 8, Probe).unwrap();
        assert!(bus.attach(0x3ff, 1, Probe).is_err());
        assert!(bus.attach(0x3f0, 9, Probe).is_err());
        bus.attach(0x400, 1, Probe).unwrap();
        bus.attach(0x3f0, 8, Probe).unwrap();
    }
}
