//! A vCPU on its thread, and the one place that sees what `KVM_RUN` comes back with: the calls of the SBI that are not KVM's, and
//! CSRs that KVM has not.

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

/// The exits that other architectures do not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnExit {
    /// The guest's kernel calls the SBI.
    Call(Call),
    /// The guest accesses a CSR of this number.
    Csr(u64),
}

impl OwnExit {
    /// What it is counted as.
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

/// A vCPU's file, and the pages that KVM shares for it. It stays on the thread that runs the vCPU.
pub struct KvmRun {
    fd: VcpuFd,
}

impl KvmRun {
    fn call(&mut self) -> Call {
        // SAFETY: called for such an exit only, where the kernel has filled in this member of the union.
        let call = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.riscv_sbi };
        Call { extension: call.extension_id, function: call.function_id, arguments: call.args }
    }

    fn csr(&mut self) -> u64 {
        // SAFETY: called for such an exit only, where the kernel has filled in this member of the union.
        unsafe { self.fd.get_kvm_run().__bindgen_anon_1.riscv_csr.csr_num }
    }

    /// Gives the guest's kernel the answer to its call. KVM takes it from there at the next entry.
    fn answer_call(&mut self, answer: Answer) {
        let ret = [answer.error.cast_unsigned(), answer.value];
        self.fd.get_kvm_run().__bindgen_anon_1.riscv_sbi.ret = ret;
    }

    /// Gives the guest what it reads from a CSR.
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

    /// KVM holds nothing back here.
    fn drain(&mut self, _buses: &Buses) {}
}

/// Deals with an exit that other architectures do not have.
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

/// Returns what a CSR reads as that KVM has not: `seed` gives entropy (Zkr), all else is 0.
fn csr(number: u64) -> u64 {
    const SEED: u64 = 0x15;
    /// There is entropy.
    const ES16: u64 = 0b10 << 30;
    if number == SEED { ES16 | u64::from(entropy()) } else { 0 }
}

/// Sixteen bits of the host's.
fn entropy() -> u16 {
    let mut bytes = [0; 2];
    // So few bytes come at once, since the host has started long ago.
    let _ = getrandom(&mut bytes, GetRandomFlags::empty());
    u16::from_le_bytes(bytes)
}

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
