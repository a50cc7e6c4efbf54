//! Runs a vCPU on its thread, and converts what `KVM_RUN` returns. The exits that only RISC-V has are SBI calls that
//! KVM does not handle, and accesses to CSRs that KVM does not have.

use devices::End;
use kvm_bindings::{KVM_EXIT_RISCV_CSR, KVM_EXIT_RISCV_SBI};
use kvm_ioctls::{VcpuExit, VcpuFd};
use vpmu::model::riscv::Answer;
use vpmu_retarget::riscv::{EXTENSION, READ_COUNTER, READ_OVERFLOWS};

use super::board::Board;
use super::pmu::VcpuPmu;
use super::register::Register;
use super::sbi::{self, Call};
use crate::entropy::entropy;
use crate::exit::{self, ExitKind};
use crate::memory::GuestRam;

/// Why a vCPU has left its guest.
pub type Exit = exit::Exit<ArchExit>;

/// Exits that only RISC-V has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ArchExit {
    /// The guest's kernel makes an SBI call.
    Call(Call),
    /// The guest accesses the CSR of this number.
    Csr(u64),
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

    /// Wraps the file descriptor. Must be called on the thread that runs the vCPU.
    pub fn new(fd: VcpuFd) -> Self {
        Self { fd }
    }

    /// Returns the vCPU's file descriptor, for all operations except `KVM_RUN`.
    pub fn fd(&mut self) -> &mut VcpuFd {
        &mut self.fd
    }

    /// Runs the guest until its next exit. KVM coalesces no writes here, which the board would have to see.
    pub fn run(&mut self, _board: &Board) -> Exit {
        match self.fd.run() {
            Ok(VcpuExit::Unsupported(KVM_EXIT_RISCV_SBI)) => Exit::Arch(ArchExit::Call(self.call())),
            Ok(VcpuExit::Unsupported(KVM_EXIT_RISCV_CSR)) => Exit::Arch(ArchExit::Csr(self.csr())),
            Ok(other) => Exit::from_vcpu_exit(&other).unwrap_or_else(|| Exit::from_kvm_run(&mut self.fd)),
            Err(error) => Exit::from_run_error(error),
        }
    }

    /// Returns the kind under which an exit is counted.
    pub fn kind(exit: &ArchExit) -> ExitKind {
        match exit {
            ArchExit::Call(Call {
                extension: EXTENSION, function: READ_COUNTER | READ_OVERFLOWS, ..
            }) => ExitKind::PmuRead,
            ArchExit::Call(Call { extension: EXTENSION, .. }) => ExitKind::PmuWrite,
            ArchExit::Call(_) | ArchExit::Csr(_) => ExitKind::Other,
        }
    }

    /// Handles an exit that only this architecture has. Returns how the machine ends if the exit ends it.
    pub fn handle(
        &mut self,
        exit: ArchExit,
        pmu: &mut VcpuPmu,
        board: &Board,
        ram: &GuestRam,
    ) -> Option<End> {
        match exit {
            ArchExit::Call(call) => self.answer_call(sbi::answer(call, pmu, board, ram)),
            ArchExit::Csr(number) => self.answer_csr(csr(number)),
        }
        None
    }

    /// Returns whether a vCPU is in user mode.
    pub fn is_in_user_mode(fd: &VcpuFd) -> bool {
        const USER: u64 = 0;
        Register::MODE.get(fd).is_ok_and(|mode| mode == USER)
    }

    /// Returns a vCPU's program counter.
    pub fn instruction_pointer(fd: &VcpuFd) -> u64 {
        Register::PC.get(fd).unwrap_or_default()
    }

    /// Does nothing: KVM stores no registers, and [`Self::instruction_pointer_at_exit`] asks for it.
    pub fn store_instruction_pointer(_fd: &mut VcpuFd) {}

    /// Does nothing, for the same reason.
    pub fn store_registers(_fd: &mut VcpuFd) {}

    /// Does nothing: none are stored.
    pub fn forget_registers(_fd: &mut VcpuFd) {}

    /// Returns the program counter at the last exit.
    pub fn instruction_pointer_at_exit(fd: &mut VcpuFd) -> u64 {
        Self::instruction_pointer(fd)
    }

    /// Does nothing: the guest has no interface to learn that a vCPU was paused.
    pub fn tell_guest_of_pause(_fd: &VcpuFd) {}
}

/// Returns the value of a CSR that KVM does not have: entropy for `seed` (Zkr), and 0 for all others.
fn csr(number: u64) -> u64 {
    const SEED: u64 = 0x15;
    /// The state "entropy available" in `seed`.
    const ES16: u64 = 0b10 << 30;
    if number == SEED { ES16 | u64::from(u16::from_le_bytes(entropy())) } else { 0 }
}
