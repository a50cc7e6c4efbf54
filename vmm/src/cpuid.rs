//! What CPUID tells each vCPU: what KVM supports on this host, less what Tally does not show, with the guest's own topology.

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use vpmu::x86::Leaf;

use crate::pmu::Pmu;

mod function {
    pub const FEATURES: u32 = 1;
    pub const CACHES: u32 = 4;
    pub const TOPOLOGY: u32 = 0xb;
    pub const TOPOLOGY_V2: u32 = 0x1f;
    pub const EXTENDED_FEATURES: u32 = 0x8000_0001;
    pub const SIZES: u32 = 0x8000_0008;
    pub const SVM: u32 = 0x8000_000a;
    pub const CACHES_AMD: u32 = 0x8000_001d;
    pub const TOPOLOGY_AMD: u32 = 0x8000_001e;
    pub const TOPOLOGY_AMD_V2: u32 = 0x8000_0026;
}

/// The CPUID of the vCPU with that APIC id, one of `cpus` cores in one package.
pub fn for_vcpu(supported: &CpuId, apic_id: u8, cpus: u8, pmu: Pmu) -> CpuId {
    let mut cpuid = supported.clone();
    for entry in cpuid.as_mut_slice() {
        if !matches!(pmu, Pmu::Kvm) {
            hide_pmu(entry);
        }
        hide_virtualisation(entry);
        set_features(entry, apic_id, cpus);
        set_topology(entry, apic_id, cpus);
    }
    cpuid
}

fn hide_pmu(entry: &mut kvm_cpuid_entry2) {
    let mut leaf = Leaf { eax: entry.eax, ebx: entry.ebx, ecx: entry.ecx, edx: entry.edx };
    vpmu::x86::hide_pmu(entry.function, &mut leaf);
    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (leaf.eax, leaf.ebx, leaf.ecx, leaf.edx);
}

/// A guest in a guest would count on a PMU that we do not follow it to.
fn hide_virtualisation(entry: &mut kvm_cpuid_entry2) {
    const VMX: u32 = 1 << 5;
    const SVM: u32 = 1 << 2;
    match entry.function {
        function::FEATURES => entry.ecx &= !VMX,
        function::EXTENDED_FEATURES => entry.ecx &= !SVM,
        function::SVM => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        _ => {}
    }
}

fn set_features(entry: &mut kvm_cpuid_entry2, apic_id: u8, cpus: u8) {
    /// KVM's local APIC has this timer mode on every host; with it the guest need not calibrate the other one.
    const TSC_DEADLINE: u32 = 1 << 24;
    const HYPERVISOR: u32 = 1 << 31;
    const HTT: u32 = 1 << 28;
    if entry.function == function::FEATURES {
        entry.ecx |= TSC_DEADLINE | HYPERVISOR;
        entry.ebx = entry.ebx & 0xffff | u32::from(cpus) << 16 | u32::from(apic_id) << 24;
        entry.edx = if cpus > 1 { entry.edx | HTT } else { entry.edx & !HTT };
    }
}

fn set_topology(entry: &mut kvm_cpuid_entry2, apic_id: u8, cpus: u8) {
    let id_bits = u32::from(cpus).next_power_of_two().trailing_zeros();
    match entry.function {
        // Bits 31..26: cores in the package; 25..14: threads that share the cache, all of them for level 3.
        function::CACHES | function::CACHES_AMD if entry.eax & 0x1f != 0 => {
            let shared = if entry.eax >> 5 & 7 >= 3 { u32::from(cpus) - 1 } else { 0 };
            entry.eax = entry.eax & 0x3fff | shared << 14;
            if entry.function == function::CACHES {
                entry.eax |= (u32::from(cpus) - 1).min(0x3f) << 26;
            }
        }
        function::TOPOLOGY | function::TOPOLOGY_V2 => {
            const SMT: u32 = 1 << 8;
            const CORE: u32 = 2 << 8;
            let (shift, count, kind) = match entry.index {
                0 => (0, 1, SMT),
                1 => (id_bits, u32::from(cpus), CORE),
                _ => (0, 0, 0),
            };
            (entry.eax, entry.ebx, entry.ecx, entry.edx) =
                (shift, count, entry.index | kind, u32::from(apic_id));
        }
        // ECX: bits 7..0 cores less one, bits 15..12 the width of a core's id.
        function::SIZES => entry.ecx = id_bits << 12 | (u32::from(cpus) - 1),
        function::TOPOLOGY_AMD => {
            (entry.eax, entry.ebx, entry.ecx) = (apic_id.into(), apic_id.into(), 0);
        }
        function::TOPOLOGY_AMD_V2 => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax: !0, ebx: !0, ecx: !0, edx: !0, ..Default::default() }
    }

    fn seen(entries: &[kvm_cpuid_entry2], apic_id: u8, cpus: u8) -> Vec<kvm_cpuid_entry2> {
        let supported = CpuId::from_entries(entries).unwrap();
        for_vcpu(&supported, apic_id, cpus, Pmu::None).as_slice().to_vec()
    }

    #[test]
    fn each_vcpu_reads_its_own_id() {
        for id in [0, 3] {
            let leaves = seen(&[entry(1, 0), entry(0xb, 1), entry(0x8000_001e, 0)], id, 4);
            assert_eq!(leaves[0].ebx >> 16, u32::from(id) << 8 | 4);
            assert_eq!((leaves[1].eax, leaves[1].ebx, leaves[1].edx), (2, 4, id.into()));
            assert_eq!(leaves[2].eax, u32::from(id));
        }
    }

    #[test]
    fn a_guest_sees_no_virtualisation_and_no_pmu() {
        let leaves = seen(&[entry(1, 0), entry(0xa, 0), entry(0x8000_0001, 0), entry(0x8000_000a, 0)], 0, 1);
        assert_eq!(leaves[0].ecx & 1 << 5, 0);
        assert_eq!(leaves[1].eax, 0);
        assert_eq!(leaves[2].ecx & 1 << 2, 0);
        assert_eq!(leaves[3].edx, 0);
    }
}
