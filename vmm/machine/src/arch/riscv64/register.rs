//! A vCPU's registers as KVM has them, each with a number (KVM API, 4.68).

use kvm_bindings::{
    KVM_REG_RISCV, KVM_REG_RISCV_CONFIG, KVM_REG_RISCV_CORE, KVM_REG_RISCV_CSR, KVM_REG_RISCV_ISA_EXT,
    KVM_REG_RISCV_SBI_EXT, KVM_REG_RISCV_TIMER, KVM_REG_SIZE_U64, kvm_riscv_config, kvm_riscv_csr,
};
use kvm_ioctls::{Error, VcpuFd};

/// A register's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Register(u64);

impl Register {
    /// Where the vCPU is.
    pub const PC: Self = Self::new(KVM_REG_RISCV_CORE, 0);
    /// The first arguments of functions.
    pub const A0: Self = Self::new(KVM_REG_RISCV_CORE, 10);
    /// The next.
    pub const A1: Self = Self::new(KVM_REG_RISCV_CORE, 11);
    /// Which interrupts wait.
    pub const SIP: Self = Self::word(KVM_REG_RISCV_CSR, std::mem::offset_of!(kvm_riscv_csr, sip));
    /// Which of the clock and the counters programs may read.
    pub const SCOUNTEREN: Self =
        Self::word(KVM_REG_RISCV_CSR, std::mem::offset_of!(kvm_riscv_csr, scounteren));
    /// The page tables that there can be, as `satp` has it.
    pub const SATP_MODE: Self =
        Self::word(KVM_REG_RISCV_CONFIG, std::mem::offset_of!(kvm_riscv_config, satp_mode));
    /// How much a CBO instruction of management is about.
    pub const ZICBOM_BLOCK: Self =
        Self::word(KVM_REG_RISCV_CONFIG, std::mem::offset_of!(kvm_riscv_config, zicbom_block_size));
    /// How much one that clears is about.
    pub const ZICBOZ_BLOCK: Self =
        Self::word(KVM_REG_RISCV_CONFIG, std::mem::offset_of!(kvm_riscv_config, zicboz_block_size));
    /// Who made the processor.
    pub const VENDOR: Self =
        Self::word(KVM_REG_RISCV_CONFIG, std::mem::offset_of!(kvm_riscv_config, mvendorid));
    /// What its maker calls its kind.
    pub const ARCHITECTURE: Self =
        Self::word(KVM_REG_RISCV_CONFIG, std::mem::offset_of!(kvm_riscv_config, marchid));
    /// And its version.
    pub const IMPLEMENTATION: Self =
        Self::word(KVM_REG_RISCV_CONFIG, std::mem::offset_of!(kvm_riscv_config, mimpid));
    /// How often the clock ticks in a second.
    pub const TICKS: Self = Self::new(KVM_REG_RISCV_TIMER, 0);

    /// Whether there is an extension of the instruction set.
    pub const fn extension(number: u32) -> Self {
        Self::new(KVM_REG_RISCV_ISA_EXT, number)
    }

    /// Whether there is an extension of the SBI.
    pub const fn sbi(number: u32) -> Self {
        Self::new(KVM_REG_RISCV_SBI_EXT, number)
    }

    const fn new(kind: u32, number: u32) -> Self {
        Self(KVM_REG_RISCV.cast_unsigned() | KVM_REG_SIZE_U64 | kind as u64 | number as u64)
    }

    const fn word(kind: u32, offset: usize) -> Self {
        Self(
            KVM_REG_RISCV.cast_unsigned()
                | KVM_REG_SIZE_U64
                | kind as u64
                | (offset / size_of::<u64>()) as u64,
        )
    }

    /// Its value.
    pub fn get(self, fd: &VcpuFd) -> Result<u64, Error> {
        let mut value = [0; 8];
        fd.get_one_reg(self.0, &mut value)?;
        Ok(u64::from_le_bytes(value))
    }

    /// Sets it.
    pub fn set(self, fd: &VcpuFd, value: u64) -> Result<(), Error> {
        fd.set_one_reg(self.0, &value.to_le_bytes()).map(drop)
    }
}
