//! The integer registers.

use std::fmt;
use std::ops::BitOr;

/// An integer register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Register(u8);

impl Register {
    /// x0, which is always 0.
    pub const ZERO: Self = Self(0);
    /// x1, the return address.
    pub const RA: Self = Self(1);
    /// x2, the stack pointer.
    pub const SP: Self = Self(2);
    /// x4, in Linux the address of the current task.
    pub const TP: Self = Self(4);
    /// x5 to x7 and x28 to x31: temporary registers.
    pub const T: [Self; 7] = [Self(5), Self(6), Self(7), Self(28), Self(29), Self(30), Self(31)];
    /// x10: the first argument, the return value, and the error of an SBI call.
    pub const A0: Self = Self(10);
    /// x11: the second argument, and the value of an SBI call.
    pub const A1: Self = Self(11);
    /// x12: the third argument.
    pub const A2: Self = Self(12);
    /// x13: the fourth argument.
    pub const A3: Self = Self(13);
    /// x14: the fifth argument.
    pub const A4: Self = Self(14);
    /// x15: the sixth argument.
    pub const A5: Self = Self(15);
    /// x16: the function of an SBI call.
    pub const A6: Self = Self(16);
    /// x17: the extension of an SBI call.
    pub const A7: Self = Self(17);

    /// Returns the register in a five-bit field of an instruction.
    pub(super) fn field(encoding: u32, at: u32) -> Self {
        Self((encoding >> at & 0x1f) as u8)
    }

    /// Returns the register in a three-bit field of a compressed instruction: s0, s1, or a0 to a5.
    pub(super) fn short_field(encoding: u32, at: u32) -> Self {
        Self((encoding >> at & 7) as u8 + 8)
    }

    /// Returns the register's number, 0 to 31.
    pub fn number(self) -> u32 {
        self.0.into()
    }
}

impl fmt::Display for Register {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => write!(f, "zero"),
            1 => write!(f, "ra"),
            2 => write!(f, "sp"),
            3 => write!(f, "gp"),
            4 => write!(f, "tp"),
            number @ 5..=7 => write!(f, "t{}", number - 5),
            number @ 8..=9 => write!(f, "s{}", number - 8),
            number @ 10..=17 => write!(f, "a{}", number - 10),
            number @ 18..=27 => write!(f, "s{}", number - 16),
            number => write!(f, "t{}", number - 25),
        }
    }
}

/// A set of registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registers(u32);

impl Registers {
    /// The empty set.
    pub const NONE: Self = Self(0);

    /// Returns whether a register is in the set.
    pub fn contains(self, register: Register) -> bool {
        self.0 >> register.number() & 1 == 1
    }
}

impl From<Register> for Registers {
    fn from(register: Register) -> Self {
        Self(1 << register.number())
    }
}

impl BitOr for Register {
    type Output = Registers;

    fn bitor(self, other: Self) -> Registers {
        Registers::from(self) | other
    }
}

impl BitOr<Register> for Registers {
    type Output = Self;

    fn bitor(self, register: Register) -> Self {
        Self(self.0 | Self::from(register).0)
    }
}
