//! The registers in a page of memory, from which a guest reads them without an exit.
//!
//! The VMM maps the page into the guest as read-only memory, so that only writes exit. In particular, a driver finds
//! out for free why it is interrupted. Reading no register has an effect.
//!
//! There, `InterruptStatus` always says that there may be used buffers. It is true of nearly each interrupt, and the
//! driver looks at its rings for that anyway. So an acknowledgement of nothing else has no effect, and need not exit to
//! the VMM either ([`Transport::ACKNOWLEDGEMENT`]).

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::{State, Transport, interrupt, register};

/// Registers that change.
const CHANGING: [u64; 6] = [
    register::DEVICE_FEATURES,
    register::QUEUE_SIZE_MAX,
    register::QUEUE_READY,
    register::INTERRUPT_STATUS,
    register::STATUS,
    register::CONFIG_GENERATION,
];

/// The page, once there is one.
#[derive(Default)]
pub struct Readable(OnceLock<GuestMemoryMmap>);

impl Readable {
    /// Returns true if guests read the registers from the page.
    pub fn is_used(&self) -> bool {
        self.0.get().is_some()
    }

    fn put(&self, offset: u64, value: u32) {
        if let Some(page) = self.0.get() {
            page.store(value.to_le(), GuestAddress(offset), Ordering::Release).expect("it is in the page");
        }
    }
}

impl Transport {
    /// Offset and value of a write that has no effect when the registers are readable.
    pub const ACKNOWLEDGEMENT: (u64, u32) = (register::INTERRUPT_ACKNOWLEDGE, interrupt::USED);

    /// Puts the registers in a page. Returns the address of its [`Self::SIZE`] bytes, which stay mapped as long as the
    /// transport exists. Must be called before there is a driver.
    pub fn make_readable(&self) -> io::Result<*const u8> {
        let size = usize::try_from(Self::SIZE).expect("it is a page");
        let page = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)]).map_err(io::Error::other)?;
        let address =
            page.iter().next().map(|page| page.as_ptr().cast_const()).ok_or(io::ErrorKind::NotFound)?;
        let state = self.state();
        // Nobody calls this twice.
        let _ = self.readable.0.set(page);
        for offset in (0..register::CONFIG).step_by(size_of::<u32>()) {
            self.readable.put(offset, self.register_in(&state, offset));
        }
        self.publish_config(&state);
        Ok(address)
    }

    /// Puts what may have changed in the page, if there is one.
    pub(super) fn publish(&self, state: &State) {
        if self.readable.is_used() {
            for offset in CHANGING {
                self.readable.put(offset, self.register_in(state, offset));
            }
        }
    }

    /// Puts the device's configuration in the page. What changes while a driver may read it is within one word, and the
    /// driver is told to read it again.
    pub(super) fn publish_config(&self, state: &State) {
        for (offset, word) in (register::CONFIG..).step_by(size_of::<u32>()).zip(state.config.chunks(4)) {
            let mut bytes = [0; 4];
            bytes[..word.len()].copy_from_slice(word);
            self.readable.put(offset, u32::from_le_bytes(bytes));
        }
        self.publish(state);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::testing::Driver;
    use super::*;
    use crate::virtio::{Console, Queues};

    /// Makes the registers of a console readable. Returns what reads them from the page.
    fn readable(driver: &Driver) -> impl Fn(u64) -> u32 + '_ {
        driver.transport.make_readable().unwrap();
        |offset| {
            let page = driver.transport.readable.0.get().unwrap();
            u32::from_le(page.load(GuestAddress(offset), Ordering::Acquire).unwrap())
        }
    }

    #[test]
    fn the_page_has_what_the_registers_read_as_whatever_a_driver_does() {
        let console = Console::new(1);
        let driver = Driver::new(&console);
        let page = readable(&driver);
        let check = || {
            for at in (0..0x120).step_by(4) {
                assert_eq!(page(at), driver.read(at), "{at:#x}");
            }
        };
        check();
        for (offset, value) in
            [(0x14, 1), (0x30, 1), (0x14, 0), (0x30, 77), (0x70, 1), (0x64, 1), (0x64, 3), (0x70, 0)]
        {
            driver.write(offset, value);
            check();
        }
        driver.set_up(1 << 32);
        check();
        assert_eq!(page(0x70), 15);
        driver.write(0x70, 0);
        check();
    }

    #[test]
    fn a_driver_finds_in_the_page_why_it_is_interrupted() {
        let mut console = Console::new(1);
        let mut driver = Driver::ready(&console);
        let page = readable(&driver);
        assert_eq!(page(0x60), 1);
        driver.transport.serve(&mut console, |_, queues: &mut Queues| queues.set_config(vec![7; 6]));
        assert_eq!((page(0x60), page(0x100), page(0x104), page(0xfc)), (3, 0x0707_0707, 0x0707, 1));
        driver.write(0x64, 3);
        assert_eq!(page(0x60), 1);
        drop(page);
        // A device that needs a reset says so.
        driver.submit(3, &[0; 8], 0);
        driver.descriptor(Driver::rings(3), driver.first_descriptor(3), 0, 8, 1, 99);
        driver.serve(&mut console);
        assert_eq!((driver.read(0x70) & 0x40, driver.read(0x60)), (0x40, 3));
        let page = driver.transport.readable.0.get().unwrap();
        assert_eq!(page.read_obj::<u32>(GuestAddress(0x70)).unwrap() & 0x40, 0x40);
    }
}
