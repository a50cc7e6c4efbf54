//! Finds a SYSRET in Linux.
//!
//! A kernel that sees an Intel processor sets no entry point for SYSCALL in 32-bit mode (CSTAR), because Intel
//! processors do not have the instruction in that mode. AMD processors have it, and it would enter the kernel at
//! address 0. With CSTAR pointed to a SYSRET, the instruction has no effect.

use vpmu_retarget::x86::Content;

use super::{Kernel, Kind};

/// SYSRET to 64-bit mode, with the INT3 that follows it in newer versions of Linux, and with the SWAPGS that precedes
/// it in older ones. The two bytes of SYSRET alone also occur in other instructions, some of which the kernel patches
/// while it boots.
const GUARDED: &[u8] = &[0x48, 0x0f, 0x07, 0xcc];
const BEHIND_SWAPGS: &[u8] = &[0x0f, 0x01, 0xf8, 0x48, 0x0f, 0x07];
/// SYSRET to 32-bit mode: the instruction without the REX.W prefix (0x48).
const SYSRET: [u8; 2] = [0x0f, 0x07];

impl Kernel {
    /// Returns the address of a SYSRET to 32-bit mode in Linux' `.text`, which stays in memory after the boot.
    pub fn sysret(&self) -> Option<u64> {
        let Kind::Linux(linux) = &self.format.kind else { return None };
        if linux.sysret.is_some() {
            return linux.sysret;
        }
        let sections = self.format.sections.list(&self.image, Content::Data);
        let text =
            sections.iter().find(|section| section.name == ".text" && section.content == Content::Code)?;
        let find = |pattern: &[u8]| {
            let pattern_at = text.bytes.windows(pattern.len()).position(|bytes| bytes == pattern)?;
            Some(pattern_at + pattern.windows(SYSRET.len()).position(|bytes| bytes == SYSRET)?)
        };
        let offset = find(GUARDED).or_else(|| find(BEHIND_SWAPGS))?;
        Some(text.address + offset as u64)
    }
}
