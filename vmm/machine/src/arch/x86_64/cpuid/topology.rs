//! The guest's cores: one package of them, one thread each, and what caches they share.

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use vpmu::x86::Vendor;

use super::function;

/// Changes what KVM says of caches and cores.
pub fn set(entry: &mut kvm_cpuid_entry2, apic_id: u8, cpus: u8, vendor: Option<Vendor>) {
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
        function::SIZES if vendor == Some(Vendor::Amd) => {
            entry.ecx = id_bits(cpus) << 12 | (u32::from(cpus) - 1);
        }
        function::TOPOLOGY_AMD => {
            (entry.eax, entry.ebx, entry.ecx) = (apic_id.into(), apic_id.into(), 0);
        }
        function::TOPOLOGY_AMD_V2 => (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0),
        _ => {}
    }
}

/// One level of the extended topology: one thread in a core, all cores in the package, no more (SDM volume 2, CPUID, leaf 0xb).
pub fn level(leaf: u32, level: u32, apic_id: u8, cpus: u8) -> kvm_cpuid_entry2 {
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
