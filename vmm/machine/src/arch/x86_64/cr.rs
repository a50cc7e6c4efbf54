//! Bits of the control registers and of EFER (SDM volume 3, section 2.5; AMD APM volume 2, section 3.1).

/// Protected mode.
pub const CR0_PE: u64 = 1;
/// There is a floating-point unit; always set.
pub const CR0_ET: u64 = 1 << 4;
/// Paging.
pub const CR0_PG: u64 = 1 << 31;
/// Page tables with entries of 64 bits.
pub const CR4_PAE: u64 = 1 << 5;
/// Programs may execute RDPMC.
pub const CR4_PCE: u64 = 1 << 8;
/// Page tables of five levels.
pub const CR4_LA57: u64 = 1 << 12;
/// 64-bit mode is enabled.
pub const EFER_LME: u64 = 1 << 8;
/// 64-bit mode is active.
pub const EFER_LMA: u64 = 1 << 10;
