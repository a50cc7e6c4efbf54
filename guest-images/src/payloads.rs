//! Tally's own programs that run in guests, for each architecture.

use std::borrow::Cow;

use crate::release::Arch;

pub mod riscv64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "riscv64")]
use riscv64 as here;
#[cfg(target_arch = "x86_64")]
use x86_64 as here;

#[cfg(target_arch = "x86_64")]
pub use x86_64::{BARE_METAL, LOOP_BRANCHES};

/// The agent of the default guest, the package `guest-agent`. The build script compiles it for the same architecture as
/// this crate.
pub const AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/agent"));

/// Number of instructions that the default guest's `/lib/tally/loop` executes, on every architecture.
pub const LOOP_INSTRUCTIONS: u64 = 20_000_004;

/// Returns the default guest's `/lib/tally/outb`, where there are I/O ports.
pub fn outb() -> Option<&'static [u8]> {
    here::OUTB
}

/// Tally's own programs in a default guest.
#[derive(Debug, Clone)]
pub struct OwnPrograms {
    pub(crate) arch: Arch,
    pub(crate) agent: Cow<'static, [u8]>,
    /// Writes to an I/O port, on architectures that have them.
    pub(crate) outb: Option<&'static [u8]>,
    /// The header of event-based branches, on architectures that have them.
    pub(crate) ebb_header: Option<&'static [u8]>,
    /// Executes [`LOOP_INSTRUCTIONS`].
    pub(crate) known_loop: &'static [u8],
}

impl Default for OwnPrograms {
    /// Returns the programs for the architecture that this crate is compiled for.
    fn default() -> Self {
        let (outb, ebb_header, known_loop) = (here::OUTB, here::EBB_HEADER, here::LOOP);
        Self { arch: Arch::default(), agent: AGENT.into(), outb, ebb_header, known_loop }
    }
}

impl OwnPrograms {
    /// Returns the programs for RISC-V, with an agent compiled for it. Works on any architecture.
    pub fn riscv64(agent: impl Into<Cow<'static, [u8]>>) -> Self {
        let (outb, ebb_header, known_loop) = (riscv64::OUTB, riscv64::EBB_HEADER, riscv64::LOOP);
        Self { arch: Arch::Riscv64, agent: agent.into(), outb, ebb_header, known_loop }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_is_statically_linked() {
        let machine = match Arch::default() {
            Arch::X86_64 => 62,
            Arch::Riscv64 => 243,
        };
        let at = |offset: usize| u16::from_le_bytes(AGENT[offset..offset + 2].try_into().unwrap());
        // ELF64, ET_EXEC (not position-independent), for this machine.
        assert_eq!((&AGENT[..5], at(16), at(18)), (&b"\x7fELF\x02"[..], 2, machine));
        let (headers, size) = (usize::from(at(32)), usize::from(at(54)));
        // The program header's type in two halves. The upper half is not zero for types of a specific processor or OS.
        let kinds = (0..usize::from(at(56)))
            .map(|header| headers + header * size)
            .map(|header| (at(header), at(header + 2)));
        // There is neither PT_DYNAMIC nor PT_INTERP.
        assert!(!kinds.into_iter().any(|kind| kind == (2, 0) || kind == (3, 0)));
    }
}
