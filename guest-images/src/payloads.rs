//! Programs of our own that run in guests, for each kind of processor that guests have.

use std::borrow::Cow;

use crate::Arch;

pub mod riscv64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "riscv64")]
use riscv64 as here;
#[cfg(target_arch = "x86_64")]
use x86_64 as here;

#[cfg(target_arch = "x86_64")]
pub use x86_64::{BARE_METAL, LOOP_BRANCHES};

/// The agent of the default guest, compiled when this crate is, and for the same machines: see the package `guest-agent`.
pub const AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/agent"));

/// How many instructions the default guest's `/lib/tally/loop` executes, whatever its processor.
pub const LOOP_INSTRUCTIONS: u64 = 20_000_004;

/// What a default guest has of our own.
#[derive(Debug, Clone)]
pub struct Own {
    pub(crate) arch: Arch,
    pub(crate) agent: Cow<'static, [u8]>,
    /// Writes to a port, where there are any.
    pub(crate) outb: Option<&'static [u8]>,
    /// The program of [`LOOP_INSTRUCTIONS`].
    pub(crate) known_loop: &'static [u8],
}

impl Default for Own {
    /// For a guest on the machines that this crate is compiled for.
    fn default() -> Self {
        Self { arch: Arch::default(), agent: AGENT.into(), outb: here::OUTB, known_loop: here::LOOP }
    }
}

impl Own {
    /// For a guest on RISC-V, with the agent compiled for that, wherever the guest is built.
    pub fn riscv64(agent: impl Into<Cow<'static, [u8]>>) -> Self {
        let (outb, known_loop) = (riscv64::OUTB, riscv64::LOOP);
        Self { arch: Arch::Riscv64, agent: agent.into(), outb, known_loop }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_needs_nothing_that_is_not_in_it() {
        let machine = match Arch::default() {
            Arch::X86_64 => 62,
            Arch::Riscv64 => 243,
        };
        let at = |offset: usize| u16::from_le_bytes(AGENT[offset..offset + 2].try_into().unwrap());
        // ELF64, an executable that is not relocated, for this machine.
        assert_eq!((&AGENT[..5], at(16), at(18)), (&b"\x7fELF\x02"[..], 2, machine));
        let (headers, size) = (usize::from(at(32)), usize::from(at(54)));
        // The upper half of a kind tells those of one processor from those of all.
        let kinds = (0..usize::from(at(56)))
            .map(|header| headers + header * size)
            .map(|header| (at(header), at(header + 2)));
        // Neither dynamic linking nor an interpreter.
        assert!(!kinds.into_iter().any(|kind| kind == (2, 0) || kind == (3, 0)));
    }
}
