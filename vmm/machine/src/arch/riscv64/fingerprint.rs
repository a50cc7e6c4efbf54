//! What a guest sees of the processor, in a snapshot: a guest is restored only where it sees the same.

use std::collections::BTreeSet;

use kvm_bindings::{KVM_REG_RISCV_CONFIG, KVM_REG_RISCV_ISA_EXT, KVM_REG_RISCV_SBI_EXT};
use serde::{Deserialize, Serialize};

use super::isa;
use super::register::{Register, Value};

/// The registers of a vCPU that say what it can do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fingerprint(Vec<(Register, u64)>);

impl Fingerprint {
    /// Describes what a vCPU with these registers can do.
    pub fn new(registers: &[(Register, Value)]) -> Self {
        let word =
            |value: &Value| value.iter().take(8).rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        let says = |register: Register| match register.kind() {
            KVM_REG_RISCV_CONFIG | KVM_REG_RISCV_ISA_EXT | KVM_REG_RISCV_SBI_EXT => true,
            _ => matches!(register, Register::TICKS | Register::VECTOR_LENGTH),
        };
        let registers = registers.iter().filter(|(register, _)| says(*register));
        Self(registers.map(|(register, value)| (*register, word(value))).collect())
    }

    /// Returns in what this host's processor differs for a guest. KVM does not list what a host does not know: that is
    /// like having 0.
    pub fn difference(&self, here: &Self) -> Option<String> {
        let of = |fingerprint: &Self, wanted: Register| {
            fingerprint.0.iter().find(|(register, _)| *register == wanted).map_or(0, |(_, value)| *value)
        };
        let all: BTreeSet<Register> = self.0.iter().chain(&here.0).map(|(register, _)| *register).collect();
        let different = all.into_iter().map(|register| (register, of(self, register), of(here, register)));
        let (register, was, is) = different.filter(|(_, was, is)| was != is).min()?;
        let name = name(register);
        Some(match (register.kind(), is) {
            (KVM_REG_RISCV_ISA_EXT | KVM_REG_RISCV_SBI_EXT, 0) => format!("it lacks {name}"),
            (KVM_REG_RISCV_ISA_EXT | KVM_REG_RISCV_SBI_EXT, _) => format!("it has {name} as well"),
            _ => format!("its {name} is {is:#x}, and was {was:#x}"),
        })
    }
}

fn name(register: Register) -> String {
    match (register.kind(), register) {
        (KVM_REG_RISCV_ISA_EXT, _) => match isa::name(register.number()) {
            Some(name) => format!("the ISA extension {name}"),
            None => format!("the ISA extension with KVM's number {}", register.number()),
        },
        (KVM_REG_RISCV_SBI_EXT, _) => format!("the SBI extension with KVM's number {}", register.number()),
        (_, Register::TICKS) => "clock's frequency".to_owned(),
        (_, Register::VECTOR_LENGTH) => "vector registers' length".to_owned(),
        (_, Register::SATP_MODE) => "largest mode of satp".to_owned(),
        _ => format!("register {register}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(registers: &[(Register, u64)]) -> Fingerprint {
        let bytes = |(register, value): &(Register, u64)| (*register, value.to_le_bytes().to_vec());
        Fingerprint::new(&registers.iter().map(bytes).collect::<Vec<_>>())
    }

    #[test]
    fn a_guest_is_told_what_a_host_lacks_or_has_in_addition() {
        let (c, zba) = (Register::extension(1), Register::extension(17));
        let saved = fingerprint(&[(Register::SATP_MODE, 9), (Register::PC, 7), (c, 1), (zba, 0)]);
        let difference = |registers: &[(Register, u64)]| saved.difference(&fingerprint(registers));
        assert_eq!(difference(&[(c, 1), (Register::SATP_MODE, 9)]), None);
        let said = |registers: &[(Register, u64)]| difference(registers).unwrap();
        assert_eq!(said(&[(Register::SATP_MODE, 9)]), "it lacks the ISA extension c");
        assert_eq!(
            said(&[(Register::SATP_MODE, 9), (c, 1), (zba, 1)]),
            "it has the ISA extension zba as well"
        );
        assert_eq!(said(&[(Register::SATP_MODE, 8), (c, 1)]), "its largest mode of satp is 0x8, and was 0x9");
    }
}
