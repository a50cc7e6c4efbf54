//! No PMU: every access to a PMU register faults, as on a processor without the registers. CPUID cannot hide all of
//! them: the K7 counters have no feature bit, so kernels probe them.

use crate::outcome::Outcome;
use crate::x86;

/// Returns the outcome of a read or a write of `msr`.
pub fn access(msr: u32) -> Outcome {
    if x86::is_pmu_msr(msr) { Outcome::Fault } else { Outcome::NotHandled }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pmu_register_faults_and_no_other_does() {
        for msr in [0xc1, 0x186, 0x309, 0x38f, 0x4c8, 0xc000_0301, 0xc001_0000, 0xc001_0007, 0xc001_020b] {
            assert_eq!(access(msr), Outcome::Fault, "{msr:#x}");
        }
        for msr in [0x10, 0x1b, 0xc0, 0xc9, 0x30d, 0xc000_0080, 0xc001_0008, 0xc001_020c] {
            assert_eq!(access(msr), Outcome::NotHandled, "{msr:#x}");
        }
    }
}
