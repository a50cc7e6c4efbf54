//! What KVM holds of a vCPU, in a snapshot: all registers that KVM lists.
//!
//! What the vCPU can do (`config`, ISA and SBI extensions) is set up before, and must be the same
//! ([`super::fingerprint`]). The clock belongs to the whole machine. The timer comes after the clock, by which it
//! expires, and after `sip`, because it may interrupt at once.

use kvm_bindings::{
    KVM_MP_STATE_RUNNABLE, KVM_REG_RISCV_CONFIG, KVM_REG_RISCV_CORE, KVM_REG_RISCV_ISA_EXT,
    KVM_REG_RISCV_SBI_EXT, KVM_REG_RISCV_TIMER, KVM_RISCV_TIMER_STATE_ON, kvm_mp_state,
};
use kvm_ioctls::VcpuFd;
use serde::{Deserialize, Serialize};

use super::register::{Register, Value};
use crate::kvm_error::{KvmError, KvmResultExt};

/// The registers of a vCPU, and whether it runs.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    run_state: kvm_mp_state,
    pub(super) registers: Vec<(Register, Value)>,
}

impl VcpuState {
    /// Reads the state. The vCPU's last exit has been completed.
    pub fn save(vcpu: &VcpuFd) -> Result<Self, KvmError> {
        let state = Self {
            run_state: vcpu.get_mp_state().operation("read whether a vCPU runs")?,
            registers: read_all(vcpu)?,
        };
        if state.is_being_started() { Err(KvmError::Starting) } else { Ok(state) }
    }

    /// Sets the state of a new vCPU that has its extensions already. The machine's first vCPU comes first.
    pub fn restore(&self, vcpu: &VcpuFd, is_first: bool) -> Result<(), KvmError> {
        const SHOWN: [u32; 3] = [KVM_REG_RISCV_CONFIG, KVM_REG_RISCV_ISA_EXT, KVM_REG_RISCV_SBI_EXT];
        let registers = || self.registers.iter();
        let is_set = |kind| kind != KVM_REG_RISCV_TIMER && !SHOWN.contains(&kind);
        registers()
            .filter(|(register, _)| is_set(register.kind()))
            .try_for_each(|(register, value)| write(vcpu, *register, value))?;

        let timer = |wanted: Register| registers().filter(move |(register, _)| *register == wanted);
        // No vCPU has seen a later time than that: the first was saved when all stood still.
        let clock = timer(Register::TIME).filter(|_| is_first);
        let (compare, state) = (timer(Register::COMPARE), timer(Register::TIMER_STATE));
        // A timer that is off is so in a new vCPU, where KVM refuses to switch it off. With Sstc it is off here in any
        // case, as the processor compares. Without Sstc, KVM (until Linux 7.2 at least) lets a timer that is switched
        // on expire at once. The guest then finds that it is too early, and sets its timer again.
        let is_on = |value: &Value| value[..] == u64::from(KVM_RISCV_TIMER_STATE_ON).to_le_bytes();
        clock
            .chain(compare)
            .chain(state.filter(|(_, value)| is_on(value)))
            .try_for_each(|(register, value)| write(vcpu, *register, value))?;
        vcpu.set_mp_state(self.run_state).operation("set whether a vCPU runs")
    }

    /// Returns whether another vCPU has started this one (SBI, 9.1), and KVM has not set its registers yet. KVM does so
    /// at the next entry, and shows nobody what it will set. Such a vCPU has never run, or it has called to be stopped,
    /// which does not return.
    fn is_being_started(&self) -> bool {
        const HART_STATE_MANAGEMENT: u64 = 0x0048_534d;
        const STOP: u64 = 1;
        let core = || self.registers.iter().filter(|(register, _)| register.kind() == KVM_REG_RISCV_CORE);
        let has = |wanted, expected: u64| {
            core().any(|(register, value)| *register == wanted && value[..] == expected.to_le_bytes())
        };
        let never_ran = || {
            core().all(|(register, value)| *register == Register::MODE || value.iter().all(|byte| *byte == 0))
        };
        self.run_state.mp_state == KVM_MP_STATE_RUNNABLE
            && (never_ran() || has(Register::A7, HART_STATE_MANAGEMENT) && has(Register::A6, STOP))
    }
}

/// Reads all registers of a vCPU.
pub fn read_all(vcpu: &VcpuFd) -> Result<Vec<(Register, Value)>, KvmError> {
    let list = Register::all(vcpu).operation("list the registers")?;
    let read = |register: Register| Ok((register, register.read(vcpu).operation("read the registers")?));
    list.into_iter().map(read).collect()
}

/// Writes a register. That is an error if KVM refuses it, unless the register has this value.
fn write(vcpu: &VcpuFd, register: Register, value: &Value) -> Result<(), KvmError> {
    match register.write(vcpu, value) {
        Err(_) if register.read(vcpu).as_ref() == Ok(value) => Ok(()),
        Err(_) => Err(KvmError::Lacks(format!("register {register} with the value {value:x?}"))),
        Ok(()) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(mp_state: u32, registers: &[(Register, u64)]) -> VcpuState {
        let registers = registers.iter().map(|(register, value)| (*register, value.to_le_bytes().to_vec()));
        VcpuState { run_state: kvm_mp_state { mp_state }, registers: registers.collect() }
    }

    #[test]
    fn a_vcpu_that_is_being_started_is_not_saved() {
        const STOPPED: u32 = kvm_bindings::KVM_MP_STATE_STOPPED;
        let new = [(Register::PC, 0), (Register::MODE, 1), (Register::A6, 0), (Register::A7, 0)];
        let stopped = [(Register::PC, 0x8000_0000), (Register::A6, 1), (Register::A7, 0x48_534d)];
        let running = [(Register::PC, 0x8000_0000), (Register::A6, 0), (Register::A7, 0x48_534d)];
        for (registers, is_being_started) in [(&new[..], true), (&stopped, true), (&running, false)] {
            assert_eq!(state(KVM_MP_STATE_RUNNABLE, registers).is_being_started(), is_being_started);
            assert!(!state(STOPPED, registers).is_being_started());
        }
    }
}
