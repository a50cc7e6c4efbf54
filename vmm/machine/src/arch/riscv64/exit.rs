//! What `KVM_RUN` comes back for here: devices' registers, and the calls of the SBI that are not KVM's.

use kvm_bindings::{KVM_EXIT_RISCV_CSR, KVM_EXIT_RISCV_SBI};
use kvm_ioctls::{VcpuExit, VcpuFd};
use rustix::rand::{GetRandomFlags, getrandom};

use super::register::Register;
use crate::pmu::thread::ThreadPmu;
use crate::vcpu::{Exit, Vcpu};

/// What says where a vCPU is.
pub const POINTER: &str = "PC";

/// Where a vCPU is.
pub fn place(fd: &VcpuFd) -> u64 {
    Register::PC.get(fd).unwrap_or_default()
}

/// From now on it is wanted with each exit: it is asked for.
pub fn keep_place(_fd: &mut VcpuFd) {}

/// Where it is, with the exit.
pub fn kept_place(fd: &VcpuFd) -> u64 {
    place(fd)
}

/// Tells the guest's kernel that a vCPU was away: there is no way to.
pub fn tell_of_pause(_fd: &VcpuFd) {}

/// Sixteen bits of the host's.
fn entropy() -> u16 {
    let mut bytes = [0; 2];
    // So few bytes come at once, since the host has started long ago.
    let _ = getrandom(&mut bytes, GetRandomFlags::empty());
    u16::from_le_bytes(bytes)
}

impl Vcpu {
    /// Runs the guest until it leaves.
    pub fn enter(&mut self, pmu: &mut ThreadPmu) -> Exit {
        match self.fd.run() {
            Ok(VcpuExit::MmioRead(address, data)) => {
                self.exits.memory_reads += 1;
                self.buses.read(address, data);
                Exit::Nothing
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                self.exits.memory_writes += 1;
                self.buses.write(address, data).map_or(Exit::Nothing, Exit::End)
            }
            Ok(VcpuExit::Unsupported(KVM_EXIT_RISCV_SBI)) => {
                self.serve_call(pmu);
                Exit::Nothing
            }
            Ok(VcpuExit::Unsupported(KVM_EXIT_RISCV_CSR)) => {
                self.exits.others += 1;
                self.answer_for_csr();
                Exit::Nothing
            }
            Ok(other) => Exit::of(&other).unwrap_or_else(|| self.rare_exit()),
            Err(error) => self.failed_run(error),
        }
    }

    /// The guest accesses a CSR that KVM has not: `seed` gives entropy (Zkr), all else reads as 0.
    fn answer_for_csr(&mut self) {
        const SEED: u64 = 0x15;
        /// There is entropy.
        const ES16: u64 = 0b10 << 30;
        let run = self.fd.get_kvm_run();
        // SAFETY: called for such an exit only, where the kernel has filled in this member of the union.
        let csr = unsafe { &mut run.__bindgen_anon_1.riscv_csr };
        csr.ret_value = if csr.csr_num == SEED { ES16 | u64::from(entropy()) } else { 0 };
    }
}
