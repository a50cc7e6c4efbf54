//! Runs a vCPU on its thread, and converts what `KVM_RUN` returns. The exits that only RISC-V has are SBI calls that
//! KVM does not handle, and accesses to CSRs that KVM does not have.

use devices::End;
use kvm_bindings::{KVM_EXIT_RISCV_CSR, KVM_EXIT_RISCV_SBI};
use kvm_ioctls::{VcpuExit, VcpuFd};
use rustix::rand::{GetRandomFlags, getrandom};
use vpmu::model::riscv::Answer;
use vpmu_retarget::riscv::{EXTENSION, READ_COUNTER, READ_OVERFLOWS};

use super::board::Buses;
use super::pmu::Kind as PmuKind;
use super::register::Register;
use super::sbi::{self, Call};
use crate::architecture::Run;
use crate::exit::{self, Kind};
use crate::memory::GuestRam;

/// Why a vCPU has left its guest.
pub type Exit = exit::Exit<OwnExit>;

/// Exits that only RISC-V has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnExit {
    /// The guest's kernel makes an SBI call.
    Call(Call),
    /// The guest accesses the CSR of this number.
    Csr(u64),
}

impl OwnExit {
    /// Returns the kind under which the exit is counted.
    pub fn kind(self) -> Kind {
        match self {
            Self::Call(Call { extension: EXTENSION, function: READ_COUNTER | READ_OVERFLOWS, .. }) => {
                Kind::PmuRead
            }
            Self::Call(Call { extension: EXTENSION, .. }) => Kind::PmuWrite,
            Self::Call(_) | Self::Csr(_) => Kind::Other,
        }
    }
}

/// A vCPU's file descriptor and shared pages (`struct kvm_run`), on the thread that runs the vCPU.
pub struct KvmRun {
    fd: VcpuFd,
}

impl KvmRun {
    fn call(&mut self) -> Call {
        // SAFETY: called for an exit of this kind only, for which KVM has filled in this member of the union.
        let call = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.riscv_sbi };
        Call { extension: call.extension_id, function: call.function_id, arguments: call.args }
    }

    fn csr(&mut self) -> u64 {
        // SAFETY: called for an exit of this kind only, for which KVM has filled in this member of the union.
        unsafe { self.fd.get_kvm_run().__bindgen_anon_1.riscv_csr.csr_num }
    }

    /// Completes an SBI call. KVM copies the result to the guest's registers at the next entry.
    fn answer_call(&mut self, answer: Answer) {
        let ret = [answer.error.cast_unsigned(), answer.value];
        self.fd.get_kvm_run().__bindgen_anon_1.riscv_sbi.ret = ret;
    }

    /// Completes a CSR access. KVM copies the value to the guest's register at the next entry.
    fn answer_csr(&mut self, value: u64) {
        self.fd.get_kvm_run().__bindgen_anon_1.riscv_csr.ret_value = value;
    }
}

impl Run for KvmRun {
    type OwnExit = OwnExit;
    type Buses = Buses;

    fn new(fd: VcpuFd) -> Self {
        Self { fd }
    }

    fn fd(&mut self) -> &mut VcpuFd {
        &mut self.fd
    }

    fn run(&mut self) -> Exit {
        match self.fd.run() {
            Ok(VcpuExit::Unsupported(KVM_EXIT_RISCV_SBI)) => Exit::Own(OwnExit::Call(self.call())),
            Ok(VcpuExit::Unsupported(KVM_EXIT_RISCV_CSR)) => Exit::Own(OwnExit::Csr(self.csr())),
            Ok(other) => Exit::common(&other).unwrap_or_else(|| Exit::rare(&mut self.fd)),
            Err(error) => Exit::failed(error),
        }
    }

    /// Does nothing: KVM coalesces no writes here.
    fn drain(&mut self, _buses: &Buses) {}
}

/// Handles an exit that only RISC-V has. No such exit ends the machine.
pub fn serve(
    exit: OwnExit,
    run: &mut KvmRun,
    pmu: &mut PmuKind,
    buses: &Buses,
    ram: &GuestRam,
) -> Option<End> {
    match exit {
        OwnExit::Call(call) => run.answer_call(sbi::answer(call, pmu, buses, ram)),
        OwnExit::Csr(number) => run.answer_csr(csr(number)),
    }
    None
}

/// Returns the value of a CSR that KVM does not have: entropy for `seed` (Zkr), and 0 for all others.
fn csr(number: u64) -> u64 {
    const SEED: u64 = 0x15;
    /// The state "entropy available" in `seed`.
    const ES16: u64 = 0b10 << 30;
    if number == SEED { ES16 | u64::from(entropy()) } else { 0 }
}

/// Returns 16 bits of the host's entropy.
fn entropy() -> u16 {
    let mut bytes = [0; 2];
    // `getrandom` does not fail for so few bytes once the host's pool is initialised.
    let _ = getrandom(&mut bytes, GetRandomFlags::empty());
    u16::from_le_bytes(bytes)
}

/// Returns a vCPU's program counter.
pub fn place(fd: &VcpuFd) -> u64 {
    Register::PC.get(fd).unwrap_or_default()
}

/// Does nothing: [`kept_place`] reads the register with a system call.
pub fn keep_place(_fd: &mut VcpuFd) {}

/// Returns the program counter at the last exit.
pub fn kept_place(fd: &VcpuFd) -> u64 {
    place(fd)
}

/// Does nothing: the guest has no interface to learn that a vCPU was paused.
pub fn tell_of_pause(_fd: &VcpuFd) {}
