//! A vCPU's registers, by KVM's numbers (KVM API, 4.68).

use std::fmt;

use kvm_bindings::{
    KVM_REG_RISCV, KVM_REG_RISCV_CONFIG, KVM_REG_RISCV_CORE, KVM_REG_RISCV_CSR, KVM_REG_RISCV_ISA_EXT,
    KVM_REG_RISCV_SBI_EXT, KVM_REG_RISCV_TIMER, KVM_REG_RISCV_TYPE_MASK, KVM_REG_RISCV_VECTOR,
    KVM_REG_SIZE_MASK, KVM_REG_SIZE_SHIFT, KVM_REG_SIZE_U64, KVMIO, kvm_reg_list, kvm_riscv_config,
    kvm_riscv_core, kvm_riscv_csr, kvm_riscv_timer,
};
use kvm_ioctls::{Error, VcpuFd};
use serde::{Deserialize, Serialize};
use vmm_sys_util::ioctl::ioctl_with_mut_ref;
use vmm_sys_util::ioctl_iowr_nr;

/// KVM's number of a register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Register(u64);

/// More registers than a vCPU has. The list of `kvm-bindings` has no room for those of a processor with vectors.
const MAX: usize = 1024;

/// `struct kvm_reg_list`, with room.
#[repr(C)]
struct List {
    number: u64,
    registers: [u64; MAX],
}

ioctl_iowr_nr!(KVM_GET_REG_LIST, KVMIO, 0xb0, kvm_reg_list);

/// Value of a register: vector registers are longer than a word.
pub type Value = Vec<u8>;

impl Register {
    pub const PC: Self = Self::new(KVM_REG_RISCV_CORE, 0);
    /// The privilege mode of the guest.
    pub const MODE: Self = Self::word(KVM_REG_RISCV_CORE, std::mem::offset_of!(kvm_riscv_core, mode));
    /// The register `ra`, the address to which a function returns.
    pub const RA: Self = Self::new(KVM_REG_RISCV_CORE, 1);
    /// The register `sp`, the stack.
    pub const SP: Self = Self::new(KVM_REG_RISCV_CORE, 2);
    /// The register `tp`, the thread.
    pub const TP: Self = Self::new(KVM_REG_RISCV_CORE, 4);
    /// The register `s0`, the frame.
    pub const S0: Self = Self::new(KVM_REG_RISCV_CORE, 8);
    /// The register `a0`, the first argument of functions.
    pub const A0: Self = Self::new(KVM_REG_RISCV_CORE, 10);
    /// The register `a1`, the second argument of functions.
    pub const A1: Self = Self::new(KVM_REG_RISCV_CORE, 11);
    /// The register `a6`, the function of SBI calls.
    pub const A6: Self = Self::new(KVM_REG_RISCV_CORE, 16);
    /// The register `a7`, the extension of SBI calls.
    pub const A7: Self = Self::new(KVM_REG_RISCV_CORE, 17);
    /// The CSR `sip`: pending interrupts.
    pub const SIP: Self = Self::word(KVM_REG_RISCV_CSR, std::mem::offset_of!(kvm_riscv_csr, sip));
    /// The CSR `sscratch`, which the kernel uses as it likes.
    pub const SSCRATCH: Self = Self::word(KVM_REG_RISCV_CSR, std::mem::offset_of!(kvm_riscv_csr, sscratch));
    /// The CSR `satp`: the page tables.
    pub const SATP: Self = Self::word(KVM_REG_RISCV_CSR, std::mem::offset_of!(kvm_riscv_csr, satp));
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
    /// The clock, `time`, of the whole machine.
    pub const TIME: Self = Self::word(KVM_REG_RISCV_TIMER, std::mem::offset_of!(kvm_riscv_timer, time));
    /// The time at which the timer expires.
    pub const COMPARE: Self = Self::word(KVM_REG_RISCV_TIMER, std::mem::offset_of!(kvm_riscv_timer, compare));
    /// Whether a timer of KVM's runs.
    pub const TIMER_STATE: Self =
        Self::word(KVM_REG_RISCV_TIMER, std::mem::offset_of!(kvm_riscv_timer, state));
    /// The CSR `vlenb`: length of the vector registers in bytes.
    pub const VECTOR_LENGTH: Self = Self::new(KVM_REG_RISCV_VECTOR, 4);

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

    /// Returns all registers that a vCPU has.
    pub fn all(fd: &VcpuFd) -> Result<Vec<Self>, Error> {
        Ok(numbers(fd)?.into_iter().map(Self).collect())
    }

    /// Returns the kind of the register, as `KVM_REG_RISCV_CORE`.
    pub fn kind(self) -> u32 {
        self.low() & KVM_REG_RISCV_TYPE_MASK
    }

    /// Returns the number of the register among those of its kind.
    pub fn number(self) -> u32 {
        self.low() & !KVM_REG_RISCV_TYPE_MASK
    }

    fn low(self) -> u32 {
        u32::try_from(self.0 & u64::from(u32::MAX)).expect("it is masked")
    }

    /// Reads the register, whatever its size.
    pub fn read(self, fd: &VcpuFd) -> Result<Value, Error> {
        let mut value = vec![0; 1 << ((self.0 & KVM_REG_SIZE_MASK) >> KVM_REG_SIZE_SHIFT)];
        fd.get_one_reg(self.0, &mut value)?;
        Ok(value)
    }

    /// Writes the register, whatever its size.
    pub fn write(self, fd: &VcpuFd, value: &Value) -> Result<(), Error> {
        fd.set_one_reg(self.0, value).map(drop)
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

/// Returns KVM's numbers of all registers that a vCPU has.
fn numbers(fd: &VcpuFd) -> Result<Vec<u64>, Error> {
    let mut list = List { number: MAX as u64, registers: [0; MAX] };
    // SAFETY: the request is for this structure. KVM writes `number`, and no more registers than it was.
    if unsafe { ioctl_with_mut_ref(fd, KVM_GET_REG_LIST(), &mut list) } < 0 {
        return Err(Error::last());
    }
    let number = usize::try_from(list.number).map_or(MAX, |number| number.min(MAX));
    Ok(list.registers[..number].to_vec())
}

impl fmt::Display for Register {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
