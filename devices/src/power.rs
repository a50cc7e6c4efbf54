//! Registers that end the virtual machine: power-off, reset, and debug exit.

use crate::bus::PortDevice;
use crate::end::End;

/// ACPI's sleep control register, followed by the sleep status register (ACPI 6.5, section 4.8.3.7). The only sleeping
/// state is S5, soft off.
#[derive(Debug)]
pub struct AcpiSleep;

impl AcpiSleep {
    /// Value of `SLP_TYP` for S5. The DSDT's `_S5` object must contain the same value.
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

/// A register that resets the virtual machine when one specific value is written to it. It reads as zero.
#[derive(Debug)]
pub struct ResetOn(pub u8);

impl ResetOn {
    /// ACPI's reset register. The FADT contains the same value.
    pub const ACPI: Self = Self(1);
    /// The command register of the keyboard controller, of which only command 0xfe works: it pulses the reset line.
    /// Reads of its status return zero, which means that both buffers are empty.
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

/// A register that ends the virtual machine with the byte written to it.
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
    fn only_the_reset_value_of_a_register_resets() {
        for value in 0..=0xff {
            assert_eq!(ResetOn::ACPI.write(0, &[value]), (value == 1).then_some(End::Reboot));
            assert_eq!(ResetOn::KEYBOARD.write(0, &[value]), (value == 0xfe).then_some(End::Reboot));
        }
    }

    #[test]
    fn the_missing_keyboard_controller_is_never_busy() {
        let mut status = [0xff];
        ResetOn::KEYBOARD.read(0, &mut status);
        assert_eq!(status, [0]);
    }

    #[test]
    fn debug_exit_reports_the_first_byte() {
        assert_eq!(DebugExit.write(0, &[7, 8, 9, 10]), Some(End::DebugExit(7)));
    }
}
