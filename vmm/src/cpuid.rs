//! What CPUID tells each vCPU: what KVM supports on this host, less what Tally does not show, with the guest's own topology.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;
use vpmu::x86::{Leaf, Vendor};

use crate::kvm::{Doing, KvmError};
use crate::pmu::Pmu;

mod function {
    pub const FEATURES: u32 = 1;
    pub const CACHES: u32 = 4;
    pub const TOPOLOGY: u32 = 0xb;
    pub const TOPOLOGY_V2: u32 = 0x1f;
    pub const LAST_EXTENDED: u32 = 0x8000_0000;
    pub const EXTENDED_FEATURES: u32 = 0x8000_0001;
    pub const SIZES: u32 = 0x8000_0008;
    pub const SVM: u32 = 0x8000_000a;
    pub const CACHES_AMD: u32 = 0x8000_001d;
    pub const TOPOLOGY_AMD: u32 = 0x8000_001e;
    pub const TOPOLOGY_AMD_V2: u32 = 0x8000_0026;
}

/// The CPUID of the vCPU with that APIC id, one of `cpus` cores in one package.
/// Whose processor the guest takes its own for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    Host,
    Generic(Vendor),
}
pub fn for_vcpu(
    supported: &CpuId,
    apic_id: u8,
    cpus: u8,
    pmu: Pmu,
    identity: Identity,
) -> Result<CpuId, KvmError> {
    let amd = is_amd(supported.as_slice());
    // KVM gives as much of the topology leaves as it likes; ours replace them.
    let mut entries: Vec<_> = supported
        .as_slice()
        .iter()
        .copied()
        .filter(|entry| !matches!(entry.function, function::TOPOLOGY | function::TOPOLOGY_V2))
        .collect();
    if identity == Identity::Generic(Vendor::Intel) {
        for entry in &mut entries {
            match entry.function {
                0 => {
                    entry.ebx = 0x756e_6547;
                    entry.edx = 0x4965_6e69;
                    entry.ecx = 0x6c65_746e;
                }
                1 => entry.eax = 0x2_0600,
                _ => {}
            }
        }
    }
    if let Some(last) = pmu.last_function().filter(|l| *l >= 0x8000_0000) {
        extend(&mut entries, last);
    }
    for entry in &mut entries {
        show_pmu(entry, pmu);
        hide_virtualisation(entry);
        set_features(entry, apic_id, cpus, amd);
        set_topology(entry, apic_id, cpus, amd);
    }
    let leaves = entries.iter().find(|entry| entry.function == 0).map_or(0, |entry| entry.eax);
    for leaf in [function::TOPOLOGY, function::TOPOLOGY_V2] {
        if leaf <= leaves {
            entries.extend((0..3).map(|level| topology_level(leaf, level, apic_id, cpus)));
        }
    }
    CpuId::from_entries(&entries).map_err(|_| KvmError::Cpuid(entries.len()))
}

/// Makes room for extended functions up to `last`, for a PMU that the host's processor need not have.
fn extend(entries: &mut Vec<kvm_cpuid_entry2>, last: u32) {
    for entry in entries.iter_mut().filter(|entry| entry.function == function::LAST_EXTENDED) {
        entry.eax = entry.eax.max(last);
    }
    if entries.iter().all(|entry| entry.function != last) {
        entries.push(kvm_cpuid_entry2 { function: last, ..Default::default() });
    }
}

/// Hygon's processors are AMD's in this respect.
fn is_amd(entries: &[kvm_cpuid_entry2]) -> bool {
    let vendors = [b"AuthenticAMD", b"HygonGenuine"];
    entries.iter().filter(|entry| entry.function == 0).any(|entry| {
        let name = [entry.ebx, entry.edx, entry.ecx].map(u32::to_le_bytes).concat();
        vendors.iter().any(|vendor| name == **vendor)
    })
}

/// Whether the host's processor is AMD's.
pub fn host_vendor(kvm: &Kvm) -> Result<Option<Vendor>, KvmError> {
    let supported = kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).doing("say which CPUID it supports")?;
    Ok(Some(if is_amd(supported.as_slice()) { Vendor::Amd } else { Vendor::Intel }))
}

fn show_pmu(entry: &mut kvm_cpuid_entry2, pmu: Pmu) {
    let mut leaf = Leaf { eax: entry.eax, ebx: entry.ebx, ecx: entry.ecx, edx: entry.edx };
    pmu.show(entry.function, entry.index, &mut leaf);
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

fn set_features(entry: &mut kvm_cpuid_entry2, apic_id: u8, cpus: u8, amd: bool) {
    /// KVM's local APIC has this timer mode on every host; with it the guest need not calibrate the other one.
    const TSC_DEADLINE: u32 = 1 << 24;
    const HYPERVISOR: u32 = 1 << 31;
    const HTT: u32 = 1 << 28;
    /// `CmpLegacy`: what HTT counts are cores.
    const CORES_NOT_THREADS: u32 = 1 << 1;
    if entry.function == function::FEATURES {
        entry.ecx |= TSC_DEADLINE | HYPERVISOR;
        entry.ebx = entry.ebx & 0xffff | u32::from(cpus) << 16 | u32::from(apic_id) << 24;
        entry.edx = if cpus > 1 { entry.edx | HTT } else { entry.edx & !HTT };
    }
    if entry.function == function::EXTENDED_FEATURES && amd {
        entry.ecx = if cpus > 1 { entry.ecx | CORES_NOT_THREADS } else { entry.ecx & !CORES_NOT_THREADS };
    }
}

fn set_topology(entry: &mut kvm_cpuid_entry2, apic_id: u8, cpus: u8, amd: bool) {
    match entry.function {
        // Bits 31..26: cores in the package; 25..14: threads that share the cache, all of them for level 3.
        function::CACHES | function::CACHES_AMD if entry.eax & 0x1f != 0 => {
            let shared = if entry.eax >> 5 & 7 >= 3 { u32::from(cpus) - 1 } else { 0 };
            entry.eax = entry.eax & 0x3fff | shared << 14;
            if entry.function == function::CACHES {
                entry.eax |= (u32::from(cpus) - 1).min(0x3f) << 26;
            }
        }
        // ECX: bits 7..0 cores less one, bits 15..12 the width of a core's id.
        function::SIZES if amd => entry.ecx = id_bits(cpus) << 12 | (u32::from(cpus) - 1),
        function::TOPOLOGY_AMD => {
            (entry.eax, entry.ebx, entry.ecx) = (apic_id.into(), apic_id.into(), 0);
        }
        function::TOPOLOGY_AMD_V2 => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        _ => {}
    }
}

/// One level of the extended topology: one thread in a core, all cores in the package, no more (SDM volume 2, CPUID, leaf 0xb).
fn topology_level(leaf: u32, level: u32, apic_id: u8, cpus: u8) -> kvm_cpuid_entry2 {
    const SMT: u32 = 1 << 8;
    const CORE: u32 = 2 << 8;
    let (shift, count, kind) = match level {
        0 => (0, 1, SMT),
        1 => (id_bits(cpus), u32::from(cpus), CORE),
        _ => (0, 0, 0),
    };
    kvm_cpuid_entry2 {
        function: leaf,
        index: level,
        flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
        eax: shift,
        ebx: count,
        ecx: level | kind,
        edx: apic_id.into(),
        ..Default::default()
    }
}

/// How many bits of an APIC id tell the cores apart.
fn id_bits(cpus: u8) -> u32 {
    u32::from(cpus).next_power_of_two().trailing_zeros()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 { function, index, eax: !0, ebx: !0, ecx: !0, edx: !0, ..Default::default() }
    }

    fn seen(entries: &[kvm_cpuid_entry2], apic_id: u8, cpus: u8) -> Vec<kvm_cpuid_entry2> {
        let supported = CpuId::from_entries(entries).unwrap();
        for_vcpu(&supported, apic_id, cpus, Pmu::None, Identity::Host).unwrap().as_slice().to_vec()
    }

    /// Leaf 0 of an AMD processor with leaves up to `last`.
    fn amd(last: u32) -> kvm_cpuid_entry2 {
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
        // Newer KVMs give the first level only, and of one CPU.
        let leaves = seen(&[amd(0xd), entry(0xb, 0), entry(0x8000_0008, 0), entry(0x8000_0001, 0)], 3, 4);
        let topology: Vec<_> = leaves.iter().filter(|leaf| leaf.function == 0xb).collect();
        assert_eq!(topology.len(), 3);
        assert_eq!((topology[0].eax, topology[0].ebx, topology[0].ecx, topology[0].edx), (0, 1, 0x100, 3));
        assert_eq!((topology[1].eax, topology[1].ebx, topology[1].ecx, topology[1].edx), (2, 4, 0x201, 3));
        assert_eq!((topology[2].ebx, topology[2].ecx), (0, 2));
        assert!(leaves.iter().all(|leaf| leaf.function != 0x1f), "beyond the highest leaf");
        assert_eq!(leaves[1].ecx, 2 << 12 | 3);
        assert_eq!(leaves[2].ecx & 2, 2);
        let alone = seen(&[amd(0xd), entry(0x8000_0001, 0)], 0, 1);
        assert_eq!(alone[1].ecx & 2, 0);
    }

    #[test]
    fn what_only_amd_has_stays_as_it_is_on_intel() {
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
}
