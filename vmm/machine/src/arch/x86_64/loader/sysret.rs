//! Finds where Linux returns from system calls.
//!
//! A kernel that takes its processor for Intel's sets no entry for SYSCALL in 32-bit mode, where Intel's has none. On an AMD
//! processor it is an instruction like any other, though, and would enter the kernel at address 0. Pointed to a SYSRET,
//! it does nothing.

use vpmu_retarget::Content;

use super::{Kernel, Kind};

/// SYSRET to 64-bit mode with the trap that Linux has behind it, and with the SWAPGS in front of it, as older ones have it. The
/// two bytes alone occur in other instructions, some of which are changed while the kernel boots.
const GUARDED: &[u8] = &[0x48, 0x0f, 0x07, 0xcc];
const BEHIND_SWAPGS: &[u8] = &[0x0f, 0x01, 0xf8, 0x48, 0x0f, 0x07];
/// Without its prefix (0x48) it returns to 32-bit mode.
const SYSRET: [u8; 2] = [0x0f, 0x07];

impl Kernel {
    /// The address of a SYSRET to 32-bit mode, in code that Linux keeps.
    pub fn sysret(&self) -> Option<u64> {
        let Kind::Linux(_) = self.format.kind else { return None };
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
