//! The guest's topology: one package, one thread per core, and which caches the cores share.

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use vpmu::x86::Vendor;

use super::function;

/// Replaces the topology in an entry: which caches are shared, the number of cores, and the vCPU's APIC ID.
pub fn set(entry: &mut kvm_cpuid_entry2, apic_id: u8, cpus: u8, vendor: Option<Vendor>) {
    match entry.function {
        // Bits 31..26: cores in the package less one (Intel only); 25..14: threads that share the cache, less one. All
        // share level 3.
        function::CACHES | function::CACHES_AMD if entry.eax & 0x1f != 0 => {
            let shared = if entry.eax >> 5 & 7 >= 3 { u32::from(cpus) - 1 } else { 0 };
            entry.eax = entry.eax & 0x3fff | shared << 14;
            if entry.function == function::CACHES {
                entry.eax |= (u32::from(cpus) - 1).min(0x3f) << 26;
            }
        }
        // ECX: bits 7..0 are the number of cores less one, bits 15..12 the width of a core's ID.
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

/// Returns a level of the extended topology (SDM volume 2, CPUID, leaf 0xb): one thread per core, all cores in one
/// package. All higher levels are invalid.
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

/// Returns the number of bits of an APIC ID that identify the core.
fn id_bits(cpus: u8) -> u32 {
    u32::from(cpus).next_power_of_two().trailing_zeros()
}
