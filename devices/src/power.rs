//! The registers with which a guest ends: power-off, reset, and one that carries a number out.

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

/// A register that resets the machine when one certain value is written to it, and reads as zero.
#[derive(Debug)]
pub struct ResetOn(pub u8);

impl ResetOn {
    /// The register that the ACPI tables name; they name this value too.
    pub const ACPI: Self = Self(1);
    /// All that is left of the keyboard controller: command 0xfe pulses the reset line. Reads find its buffers empty.
    pub const KEYBOARD: Self = Self(0xfe);
}

impl PortDevice for ResetOn {
    fn read(&self, _offset: u16, data: &mut [u8]) {
        data.fill(0);
    }

    fn write(&self, _offset: u16, data: &[u8]) -> Option<End> {
        (*data.first()? == self.0).then_some(End::Reboot)
    }
}

/// A register by which a guest ends with a number.
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
            assert_eq!(ResetOn::ACPI.write(0, &[value]), (value == 1).then_some(End::Reboot));
            assert_eq!(ResetOn::KEYBOARD.write(0, &[value]), (value == 0xfe).then_some(End::Reboot));
        }
    }

    #[test]
    fn a_keyboard_that_is_not_there_is_never_busy() {
        let mut status = [0xff];
        ResetOn::KEYBOARD.read(0, &mut status);
        assert_eq!(status, [0]);
    }

    #[test]
    fn a_number_is_carried_out_as_what_it_is() {
        assert_eq!(DebugExit.write(0, &[7, 8, 9, 10]), Some(End::DebugExit(7)));
    }
}
