//! What `KVM_RUN` comes back for here: devices' registers, and the calls of the SBI that are not KVM's.

use kvm_bindings::KVM_EXIT_RISCV_SBI;
use kvm_ioctls::{VcpuExit, VcpuFd};

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
            Ok(other) => Exit::of(&other).unwrap_or_else(|| self.rare_exit()),
            Err(error) => self.failed_run(error),
        }
    }
}
