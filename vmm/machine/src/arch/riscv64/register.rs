//! A vCPU's registers, by KVM's numbers (KVM API, 4.68).

use kvm_bindings::{
    KVM_REG_RISCV, KVM_REG_RISCV_CONFIG, KVM_REG_RISCV_CORE, KVM_REG_RISCV_CSR, KVM_REG_RISCV_ISA_EXT,
    KVM_REG_RISCV_SBI_EXT, KVM_REG_RISCV_TIMER, KVM_REG_SIZE_U64, kvm_riscv_config, kvm_riscv_core,
    kvm_riscv_csr,
};
use kvm_ioctls::{Error, VcpuFd};

/// KVM's number of a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Register(u64);

impl Register {
    /// The program counter.
    pub const PC: Self = Self::new(KVM_REG_RISCV_CORE, 0);
    /// The privilege mode of the guest.
    pub const MODE: Self = Self::word(KVM_REG_RISCV_CORE, std::mem::offset_of!(kvm_riscv_core, mode));
    /// The register `a0`, the first argument of functions.
    pub const A0: Self = Self::new(KVM_REG_RISCV_CORE, 10);
    /// The register `a1`, the second argument of functions.
    pub const A1: Self = Self::new(KVM_REG_RISCV_CORE, 11);
    /// The CSR `sip`: pending interrupts.
    pub const SIP: Self = Self::word(KVM_REG_RISCV_CSR, std::mem::offset_of!(kvm_riscv_csr, sip));
    /// The CSR `scounteren`: whether programs may read the clock and the counters.
    pub const SCOUNTEREN: Self =
        Self::word(KVM_REG_RISCV_CSR, std::mem::offset_of!(kvm_riscv_csr, scounteren));
    /// The largest virtual-memory scheme, as encoded in `satp.MODE`.
    pub const SATP_MODE: Self =
        Self::word(KVM_REG_RISCV_CONFIG, std::mem::offset_of!(kvm_riscv_config, satp_mode));
    /// Block size of the cache-block management instructions (Zicbom).
    pub const ZICBOM_BLOCK: Self =
        Self::word(KVM_REG_RISCV_CONFIG, std::mem::offset_of!(kvm_riscv_config, zicbom_block_size));
    /// Block size of the cache-block zero instruction (Zicboz).
    pub const ZICBOZ_BLOCK: Self =
        Self::word(KVM_REG_RISCV_CONFIG, std::mem::offset_of!(kvm_riscv_config, zicboz_block_size));
    /// The CSR `mvendorid`.
    pub const VENDOR: Self =
        Self::word(KVM_REG_RISCV_CONFIG, std::mem::offset_of!(kvm_riscv_config, mvendorid));
    /// The CSR `marchid`.
    pub const ARCHITECTURE: Self =
        Self::word(KVM_REG_RISCV_CONFIG, std::mem::offset_of!(kvm_riscv_config, marchid));
    /// The CSR `mimpid`.
    pub const IMPLEMENTATION: Self =
        Self::word(KVM_REG_RISCV_CONFIG, std::mem::offset_of!(kvm_riscv_config, mimpid));
    /// Frequency of the clock in Hz.
    pub const TICKS: Self = Self::new(KVM_REG_RISCV_TIMER, 0);

    /// Returns the register that is 1 if the vCPU has this ISA extension.
    pub const fn extension(number: u32) -> Self {
        Self::new(KVM_REG_RISCV_ISA_EXT, number)
    }

    /// Returns the register that is 1 if this SBI extension is enabled.
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

    /// Reads the register.
    pub fn get(self, fd: &VcpuFd) -> Result<u64, Error> {
        let mut value = [0; 8];
        fd.get_one_reg(self.0, &mut value)?;
        Ok(u64::from_le_bytes(value))
    }

    /// Writes the register.
    pub fn set(self, fd: &VcpuFd, value: u64) -> Result<(), Error> {
        fd.set_one_reg(self.0, &value.to_le_bytes()).map(drop)
    }
}
