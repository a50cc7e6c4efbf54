//! The instruction by which a program reads a hardware counter: RDPMC, or on RISC-V the read of a counter's CSR.

#[cfg(target_arch = "riscv64")]
mod csr;

#[cfg(target_arch = "riscv64")]
pub use csr::{prepare, read};
#[cfg(target_arch = "x86_64")]
pub use rdpmc::{prepare, read};

#[cfg(target_arch = "x86_64")]
mod rdpmc {
    /// Does nothing: RDPMC of an event that has just lost its counter reads something, and the event's page then says
    /// that it was not the count.
    pub fn prepare() {}

    /// Reads the counter with this number.
    #[expect(clippy::unnecessary_wraps, reason = "other architectures may fail")]
    pub fn read(index: u32) -> Option<u64> {
        let (low, high): (u32, u32);
        // SAFETY: RDPMC only reads a counter. The kernel has said that user space may read it and that this counter
        // exists.
        unsafe {
            // Not `nomem`: the instruction must stay between the two reads of the lock.
            std::arch::asm!("rdpmc", in("ecx") index, out("eax") low, out("edx") high,
                            options(nostack, preserves_flags));
        }
        Some(u64::from(high) << 32 | u64::from(low))
    }
}
