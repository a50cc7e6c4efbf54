//! The registers with which a guest ends: power-off, reset, and two that carry a number out.

use crate::{End, PortDevice};

/// ACPI's sleep control register and, behind it, the sleep status register (ACPI 6.5, section 4.8.3.7). The only sleeping state is S5, soft off.
#[derive(Debug)]
pub struct AcpiSleep;

impl AcpiSleep {
    /// The value of `SLP_TYP` that means S5; the DSDT's `_S5` must say the same.
    pub const S5: u8 = 5;
    const ENABLE: u8 = 1 << 5;
    const TYPE_SHIFT: u8 = 2;
    const TYPE_MASK: u8 = 7;
}

impl PortDevice for AcpiSleep {
    fn read(&self, _offset: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, offset: u16, data: &[u8]) -> Option<End> {
        let value = *data.first()?;
        let kind = value >> Self::TYPE_SHIFT & Self::TYPE_MASK;
        (offset == 0 && value & Self::ENABLE != 0 && kind == Self::S5).then_some(End::PowerOff)
    }
}

/// The reset register that the ACPI tables name.
#[derive(Debug)]
pub struct ResetRegister;

impl ResetRegister {
    /// What must be written to it.
    pub const VALUE: u8 = 1;
}

impl PortDevice for ResetRegister {
    fn read(&self, _offset: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u16, data: &[u8]) -> Option<End> {
        (*data.first()? == Self::VALUE).then_some(End::Reboot)
    }
}

/// All that is left of the keyboard controller: the reset line, pulsed by command 0xfe.
/// It stands at the command port, 0x64, where reads find its buffers empty.
#[derive(Debug)]
pub struct Keyboard;

impl Keyboard {
    const PULSE_RESET: u8 = 0xfe;
}

impl PortDevice for Keyboard {
    fn read(&self, _offset: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u16, data: &[u8]) -> Option<End> {
        (*data.first()? == Self::PULSE_RESET).then_some(End::Reboot)
    }
}

/// The port by which a test kernel ends with a number.
#[derive(Debug)]
pub struct DebugExit;

impl PortDevice for DebugExit {
    fn read(&self, _offset: u16, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&self, _offset: u16, data: &[u8]) -> Option<End> {
        data.first().copied().map(End::DebugExit)
    }
}

/// The port by which the default guest's init says with what status its command ended.
#[derive(Debug)]
pub struct CommandStatus;

impl PortDevice for CommandStatus {
    fn read(&self, _offset: u16, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn write(&self, _offset: u16, data: &[u8]) -> Option<End> {
        data.first().copied().map(End::Command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_s5_with_the_enable_bit_powers_off() {
        assert_eq!(AcpiSleep.write(0, &[0x34]), Some(End::PowerOff));
        assert_eq!(AcpiSleep.write(0, &[0x14]), None);
        assert_eq!(AcpiSleep.write(0, &[0x20]), None);
        assert_eq!(AcpiSleep.write(1, &[0x34]), None);
    }

    #[test]
    fn only_the_named_values_reset() {
        for value in 0..=0xff {
            assert_eq!(ResetRegister.write(0, &[value]), (value == 1).then_some(End::Reboot));
            assert_eq!(Keyboard.write(0, &[value]), (value == 0xfe).then_some(End::Reboot));
        }
    }

    #[test]
    fn a_keyboard_that_is_not_there_is_never_busy() {
        let mut status = [0xff];
        Keyboard.read(0, &mut status);
        assert_eq!(status, [0]);
    }
}
