//! The CPUID of each vCPU: what KVM supports on this host, without the features that Tally hides, with the guest's own
//! topology, and in the format of the other vendor if the emulated PMU is that vendor's ([`shown_vendor`]).

mod caches;
mod shown_vendor;
mod topology;

use std::arch::x86_64::{__cpuid_count, CpuidResult};

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;
use vpmu::x86::{Leaf, Vendor};

use super::pmu::{Pmu, ShownProcessor};
use crate::kvm_error::{KvmError, KvmResultExt};

pub use self::shown_vendor::{ARCH_CAPABILITIES, immunities, is_intels_on_amd};

mod function {
    pub const VENDOR: u32 = 0;
    pub const FEATURES: u32 = 1;
    pub const DESCRIPTORS: u32 = 2;
    pub const CACHES: u32 = 4;
    pub const MORE_FEATURES: u32 = 7;
    pub const TOPOLOGY: u32 = 0xb;
    pub const TOPOLOGY_V2: u32 = 0x1f;
    pub const KVM_FEATURES: u32 = 0x4000_0001;
    pub const LAST_EXTENDED: u32 = 0x8000_0000;
    pub const EXTENDED_FEATURES: u32 = 0x8000_0001;
    pub const CACHE_L1_AMD: u32 = 0x8000_0005;
    pub const CACHE_L2: u32 = 0x8000_0006;
    pub const POWER: u32 = 0x8000_0007;
    pub const SIZES: u32 = 0x8000_0008;
    pub const SVM: u32 = 0x8000_000a;
    pub const CACHES_AMD: u32 = 0x8000_001d;
    pub const TOPOLOGY_AMD: u32 = 0x8000_001e;
    pub const FEATURES_AMD: u32 = 0x8000_0021;
    pub const TOPOLOGY_AMD_V2: u32 = 0x8000_0026;
}

/// Returns the CPUID of the vCPU with this APIC ID, which is one of `cpus` cores in one package.
pub fn for_vcpu(
    supported: &CpuId,
    apic_id: u8,
    cpus: u8,
    pmu: Pmu,
    shown: ShownProcessor,
) -> Result<CpuId, KvmError> {
    // Versions of KVM differ in which topology subleaves they report. All are replaced below.
    let mut entries: Vec<_> = supported
        .as_slice()
        .iter()
        .copied()
        .filter(|entry| !matches!(entry.function, function::TOPOLOGY | function::TOPOLOGY_V2))
        .collect();
    shown_vendor::assume(&mut entries, shown);
    let vendor = vendor(&entries);
    if let Some(last) = pmu.last_function() {
        extend(&mut entries, last);
    }
    for entry in &mut entries {
        show_pmu(entry, pmu);
        hide_remote_flush(entry, pmu);
        hide_virtualisation(entry);
        set_features(entry, apic_id, cpus, vendor);
        topology::set(entry, apic_id, cpus, vendor);
    }
    let leaves = entries.iter().find(|entry| entry.function == 0).map_or(0, |entry| entry.eax);
    for leaf in [function::TOPOLOGY, function::TOPOLOGY_V2] {
        if leaf <= leaves {
            entries.extend((0..3).map(|level| topology::level(leaf, level, apic_id, cpus)));
        }
    }
    from_entries(&entries)
}

/// Adds the function `last` and raises the highest function of its range. The host's processor may not have the
/// function that describes the emulated PMU.
fn extend(entries: &mut Vec<kvm_cpuid_entry2>, last: u32) {
    // EAX of the first function of each range is the highest function of that range.
    let first = last & function::LAST_EXTENDED;
    for entry in entries.iter_mut().filter(|entry| entry.function == first) {
        entry.eax = entry.eax.max(last);
    }
    if entries.iter().all(|entry| entry.function != last) {
        entries.push(kvm_cpuid_entry2 { function: last, ..Default::default() });
    }
}

/// Replaces the entries of a function by `leaves`, one for each index from 0.
fn put(entries: &mut Vec<kvm_cpuid_entry2>, function: u32, leaves: &[Leaf]) {
    let indexed = matches!(function, function::CACHES | function::CACHES_AMD);
    let flags = if indexed { KVM_CPUID_FLAG_SIGNIFCANT_INDEX } else { 0 };
    entries.retain(|entry| entry.function != function);
    entries.extend((0..).zip(leaves).map(|(index, &Leaf { eax, ebx, ecx, edx })| kvm_cpuid_entry2 {
        function,
        index,
        flags,
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    }));
}

/// Returns the vendor of the processor that the entries describe.
fn vendor(entries: &[kvm_cpuid_entry2]) -> Option<Vendor> {
    entries.iter().find(|entry| entry.function == function::VENDOR).and_then(|entry| Vendor::of(leaf(entry)))
}

/// Returns the CPUID that KVM supports on this host, with the host's caches.
pub fn supported(kvm: &Kvm) -> Result<CpuId, KvmError> {
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).operation("get the supported CPUID")?;
    let mut entries = supported.as_slice().to_vec();
    caches::add_hosts(&mut entries, |function, index| {
        let CpuidResult { eax, ebx, ecx, edx } = __cpuid_count(function, index);
        Leaf { eax, ebx, ecx, edx }
    });
    from_entries(&entries)
}

fn from_entries(entries: &[kvm_cpuid_entry2]) -> Result<CpuId, KvmError> {
    CpuId::from_entries(entries)
        .map_err(|_| KvmError::Lacks(format!("room for the {} CPUID leaves that it supports", entries.len())))
}

fn leaf(entry: &kvm_cpuid_entry2) -> Leaf {
    Leaf { eax: entry.eax, ebx: entry.ebx, ecx: entry.ecx, edx: entry.edx }
}

fn show_pmu(entry: &mut kvm_cpuid_entry2, pmu: Pmu) {
    let mut leaf = leaf(entry);
    pmu.show(entry.function, entry.index, &mut leaf);
    (entry.eax, entry.ebx, entry.ecx, entry.edx) = (leaf.eax, leaf.ebx, leaf.ecx, leaf.edx);
}

/// Hides VMX and SVM. Tally does not emulate a PMU for nested guests.
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

/// Hides `KVM_FEATURE_PV_TLB_FLUSH` and INVLPGB (APM volume 3, appendix E.4.7) from guests whose pages Tally looks at
/// ([`super::paging`]). With either, a guest's kernel may give a page to others without waiting for a vCPU that has
/// left the guest.
fn hide_remote_flush(entry: &mut kvm_cpuid_entry2, pmu: Pmu) {
    const PV_TLB_FLUSH: u32 = 1 << 9;
    const INVLPGB: u32 = 1 << 3;
    match entry.function {
        _ if !matches!(pmu, Pmu::Emulated(..)) => {}
        function::KVM_FEATURES => entry.eax &= !PV_TLB_FLUSH,
        function::SIZES => entry.ebx &= !INVLPGB,
        _ => {}
    }
}

fn set_features(entry: &mut kvm_cpuid_entry2, apic_id: u8, cpus: u8, vendor: Option<Vendor>) {
    /// KVM's local APIC supports this timer mode on every host. A guest that uses it need not calibrate the APIC timer.
    const TSC_DEADLINE: u32 = 1 << 24;
    const HYPERVISOR: u32 = 1 << 31;
    const HTT: u32 = 1 << 28;
    /// `CmpLegacy`: the logical processors that leaf 1 counts are cores.
    const CORES_NOT_THREADS: u32 = 1 << 1;
    if entry.function == function::FEATURES {
        entry.ecx |= TSC_DEADLINE | HYPERVISOR;
        entry.ebx = entry.ebx & 0xffff | u32::from(cpus) << 16 | u32::from(apic_id) << 24;
        entry.edx = if cpus > 1 { entry.edx | HTT } else { entry.edx & !HTT };
    }
    if entry.function == function::EXTENDED_FEATURES && vendor == Some(Vendor::Amd) {
        entry.ecx = if cpus > 1 { entry.ecx | CORES_NOT_THREADS } else { entry.ecx & !CORES_NOT_THREADS };
    }
}

#[cfg(test)]
mod tests {
    use vpmu::model::amd;
    use vpmu_perf::HostPmu;

    use super::super::pmu::{BackingPmu, Model};
    use super::*;

    fn entry(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax: !0, ebx: !0, ecx: !0, edx: !0, ..Default::default() }
    }

    fn seen(entries: &[kvm_cpuid_entry2], apic_id: u8, cpus: u8) -> Vec<kvm_cpuid_entry2> {
        let supported = CpuId::from_entries(entries).unwrap();
        for_vcpu(&supported, apic_id, cpus, Pmu::None, ShownProcessor::Host).unwrap().as_slice().to_vec()
    }

    /// Leaf 0 of an AMD processor with leaves up to `last`.
    fn amds(last: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            eax: last,
            ebx: 0x6874_7541,
            edx: 0x6974_6e65,
            ecx: 0x444d_4163,
            ..Default::default()
        }
    }

    #[test]
    fn each_vcpu_reads_its_own_id() {
        for id in [0, 3] {
            let leaves = seen(&[entry(1, 0), entry(0x8000_001e, 0)], id, 4);
            assert_eq!(leaves[0].ebx >> 16, u32::from(id) << 8 | 4);
            assert_eq!(leaves[1].eax, u32::from(id));
        }
    }

    #[test]
    fn the_cores_are_one_package_whatever_kvm_says_of_its_own() {
        // Newer versions of KVM report the first level only, for one CPU.
        let leaves = seen(&[amds(0xd), entry(0xb, 0), entry(0x8000_0008, 0), entry(0x8000_0001, 0)], 3, 4);
        let topology: Vec<_> = leaves.iter().filter(|leaf| leaf.function == 0xb).collect();
        assert_eq!(topology.len(), 3);
        assert_eq!((topology[0].eax, topology[0].ebx, topology[0].ecx, topology[0].edx), (0, 1, 0x100, 3));
        assert_eq!((topology[1].eax, topology[1].ebx, topology[1].ecx, topology[1].edx), (2, 4, 0x201, 3));
        assert_eq!((topology[2].ebx, topology[2].ecx), (0, 2));
        assert!(leaves.iter().all(|leaf| leaf.function != 0x1f), "beyond the highest leaf");
        assert_eq!(leaves[1].ecx, 2 << 12 | 3);
        assert_eq!(leaves[2].ecx & 2, 2);
        let alone = seen(&[amds(0xd), entry(0x8000_0001, 0)], 0, 1);
        assert_eq!(alone[1].ecx & 2, 0);
    }

    #[test]
    fn amds_core_count_is_not_set_on_intel() {
        let leaves = seen(&[kvm_cpuid_entry2 { function: 0x8000_0008, ..Default::default() }], 0, 4);
        assert_eq!(leaves[0].ecx, 0);
    }

    #[test]
    fn a_guest_sees_no_virtualisation_and_no_pmu() {
        let leaves = seen(&[entry(1, 0), entry(0xa, 0), entry(0x8000_0001, 0), entry(0x8000_000a, 0)], 0, 1);
        assert_eq!(leaves[0].ecx & 1 << 5, 0);
        assert_eq!(leaves[1].eax, 0);
        assert_eq!(leaves[2].ecx & 1 << 2, 0);
        assert_eq!(leaves[3].edx, 0);
    }

    #[test]
    fn a_guest_whose_pages_are_looked_at_does_not_flush_other_vcpus_without_waiting_for_them() {
        const PV_TLB_FLUSH: u32 = 1 << 9;
        const INVLPGB: u32 = 1 << 3;
        let (pmu, _) = HostPmu::bind_thread().unwrap();
        let host = BackingPmu::new(Vendor::Amd, pmu);
        let supported =
            CpuId::from_entries(&[amds(0xd), entry(0x4000_0001, 0), entry(0x8000_0008, 0)]).unwrap();
        for (pmu, expected) in [
            (Pmu::None, (!0, !0)),
            (Pmu::Kvm, (!0, !0)),
            (Pmu::Emulated(Model::Amd(amd::Version::Core), host), (!PV_TLB_FLUSH, !INVLPGB)),
        ] {
            let seen = for_vcpu(&supported, 0, 1, pmu, ShownProcessor::Host).unwrap();
            let leaf = |function| seen.as_slice().iter().find(|leaf| leaf.function == function).unwrap();
            assert_eq!((leaf(0x4000_0001).eax, leaf(0x8000_0008).ebx), expected, "{pmu}");
        }
    }
}
