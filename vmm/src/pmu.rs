//! Which PMU the guest sees, and how KVM is made to show it.

use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER, KVM_PMU_CAP_DISABLE,
    kvm_enable_cap,
};
use kvm_ioctls::{Cap, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VmFd};
use vpmu::Outcome;
use vpmu::model::none;
use vpmu::x86::PMU_MSRS;

use crate::kvm::{Doing, KvmError};

/// What the guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Pmu {
    /// No PMU: CPUID shows none, and its registers fault
    None,
    /// KVM's own in-kernel vPMU, for comparison
    Kvm,
}

impl Pmu {
    /// Tells KVM, before the first vCPU exists.
    pub fn configure(self, vm: &VmFd) -> Result<(), KvmError> {
        match self {
            Self::Kvm => Ok(()),
            Self::None => {
                disable_kvms_own(vm)?;
                trap_registers(vm)
            }
        }
    }

    /// What becomes of an access to a register that was trapped.
    pub fn access(self, msr: u32) -> Outcome {
        match self {
            Self::None => none::access(msr),
            Self::Kvm => Outcome::NotMine,
        }
    }
}

fn disable_kvms_own(vm: &VmFd) -> Result<(), KvmError> {
    // No such capability, or a value of 0: this KVM has no vPMU, or its operator left it off.
    if vm.check_extension_raw(KVM_CAP_PMU_CAPABILITY.into()) <= 0 {
        return Ok(());
    }
    let mut cap = kvm_enable_cap { cap: KVM_CAP_PMU_CAPABILITY, ..Default::default() };
    cap.args[0] = KVM_PMU_CAP_DISABLE.into();
    vm.enable_cap(&cap).doing("switch KVM's own vPMU off")
}

/// A clear bit denies. KVM wants whole 64-bit words, whatever the number of registers.
const DENIED: [u8; 32] = [0; 32];

fn trap_registers(vm: &VmFd) -> Result<(), KvmError> {
    let mut cap = kvm_enable_cap { cap: KVM_CAP_X86_USER_SPACE_MSR, ..Default::default() };
    cap.args[0] = KVM_MSR_EXIT_REASON_FILTER.into();
    vm.enable_cap(&cap).doing("have MSR accesses handed over")?;

    let ranges = PMU_MSRS.map(|range| MsrFilterRange {
        flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
        base: *range.start(),
        msr_count: range.end() - range.start() + 1,
        bitmap: &DENIED,
    });
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &ranges).doing("set the MSR filter")
}

/// What a KVM must be able to do for this PMU, beyond what every machine needs.
pub fn needs(pmu: Pmu) -> &'static [(Cap, &'static str)] {
    match pmu {
        Pmu::Kvm => &[],
        Pmu::None => &[
            (Cap::X86UserSpaceMsr, "KVM_CAP_X86_USER_SPACE_MSR"),
            (Cap::X86MsrFilter, "KVM_CAP_X86_MSR_FILTER"),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bitmap_holds_every_range() {
        assert!(PMU_MSRS.iter().all(|range| (range.end() - range.start()) as usize / 8 < DENIED.len()));
    }
}
