//! A minimal version of QEMU's firmware configuration device (`fw_cfg`). It offers what public test kernels read: the
//! signature and interface ID, the number of CPUs, and the size of the memory.

use std::sync::Mutex;

use crate::bus::PortDevice;
use crate::end::End;

const SELECTOR: u16 = 0;
const DATA: u16 = 1;

/// Item keys, from QEMU's specification of the device (`docs/specs/fw_cfg`).
mod key {
    pub const SIGNATURE: u16 = 0x00;
    pub const ID: u16 = 0x01;
    pub const RAM_SIZE: u16 = 0x03;
    pub const CPUS: u16 = 0x05;
    pub const MAX_CPUS: u16 = 0x0f;
}

#[derive(Debug, Clone, Copy)]
struct Cursor {
    key: u16,
    position: usize,
}

/// The device. Its first port is the 16-bit selector. Its second port returns the selected item byte by byte.
#[derive(Debug)]
pub struct FwCfg {
    cpus: u16,
    ram: u64,
    cursor: Mutex<Cursor>,
}

impl FwCfg {
    /// Creates a device that reports `cpus` CPUs and `ram` bytes of memory.
    pub fn new(cpus: u16, ram: u64) -> Self {
        Self { cpus, ram, cursor: Mutex::new(Cursor { key: key::SIGNATURE, position: 0 }) }
    }

    fn item(&self, key: u16) -> ([u8; 8], usize) {
        let (value, len) = match key {
            key::SIGNATURE => (u64::from(u32::from_le_bytes(*b"QEMU")), 4),
            // Bit 0: the traditional interface (selector and data port). Bit 1, DMA, is clear.
            key::ID => (1, 4),
            key::RAM_SIZE => (self.ram, 8),
            key::CPUS | key::MAX_CPUS => (self.cpus.into(), 2),
            _ => (0, 0),
        };
        (value.to_le_bytes(), len)
    }

    fn cursor(&self) -> std::sync::MutexGuard<'_, Cursor> {
        self.cursor.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl PortDevice for FwCfg {
    fn read(&self, offset: u16, data: &mut [u8]) {
        data.fill(0);
        if offset != DATA {
            return;
        }
        let mut cursor = self.cursor();
        let (bytes, len) = self.item(cursor.key);
        for byte in data {
            *byte = bytes[..len].get(cursor.position).copied().unwrap_or(0);
            cursor.position = cursor.position.saturating_add(1);
        }
    }

    fn write(&self, offset: u16, data: &[u8]) -> Option<End> {
        if let (SELECTOR, [low, high]) = (offset, data) {
            *self.cursor() = Cursor { key: u16::from_le_bytes([*low, *high]), position: 0 };
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(device: &FwCfg, key: u16, len: usize) -> Vec<u8> {
        device.write(SELECTOR, &key.to_le_bytes());
        (0..len)
            .map(|_| {
                let mut byte = [0xaa];
                device.read(DATA, &mut byte);
                byte[0]
            })
            .collect()
    }

    #[test]
    fn a_test_kernel_reads_its_cpus_and_memory() {
        let device = FwCfg::new(4, 5 << 30);
        assert_eq!(item(&device, key::SIGNATURE, 4), b"QEMU");
        assert_eq!(item(&device, key::CPUS, 2), [4, 0]);
        assert_eq!(item(&device, key::RAM_SIZE, 8), (5_u64 << 30).to_le_bytes());
    }

    #[test]
    fn reads_past_an_item_and_of_unknown_items_return_zero() {
        let device = FwCfg::new(1, 1 << 20);
        assert_eq!(item(&device, key::CPUS, 4), [1, 0, 0, 0]);
        assert_eq!(item(&device, 0x8000, 4), [0; 4]);
    }
}
