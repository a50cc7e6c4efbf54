//! The vendor and model that CPUID shows to the guest.
//!
//! A kernel drives the PMU of the vendor that CPUID names. A guest whose emulated PMU is the other vendor's therefore
//! sees that vendor's identity too, and all other leaves have to follow that vendor's format.
//!
//! CPUID claims no feature that the host's processor lacks and denies no vulnerability that it has. But kernels
//! recognise some vulnerabilities by vendor or model alone, and they cannot recognise those in such a guest. The guest
//! is therefore not suitable for programs that distrust each other. On an AMD host, a program can even crash the guest
//! by a SYSCALL in 32-bit mode: Intel processors refuse this instruction, so kernels leave its entry point (CSTAR)
//! unset. For Linux, Tally points CSTAR to a SYSRET if it finds one in the kernel
//! ([`crate::arch::x86_64::registers::ignore_narrow_syscalls`]).
//!
//! Sources: SDM volume 2, CPUID; APM volume 3, appendix E. Linux evaluates CPUID in `arch/x86/kernel/cpu`.

use std::ops::RangeInclusive;

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use vpmu::x86::{Leaf, Vendor};

use super::function;
use crate::arch::x86_64::pmu::Identity;

/// `IA32_ARCH_CAPABILITIES` (SDM volume 4, table 2-2): the vulnerabilities that an Intel processor does not have.
pub const ARCH_CAPABILITIES: u32 = 0x10a;

/// Signature of a model number that Intel has never used and will not use, because it lies among those of 2010. Kernels
/// do not know the model, so they rely on CPUID's feature bits and use the architectural PMU. For lower model numbers,
/// kernels would assume the errata of older processors.
const GENERIC_INTEL: u32 = signature(6, 0x20, 0);

/// Signature of Zen 4, the first processor with PerfMonV2. Kernels print warnings about models that they do not know.
const ZEN_4: u32 = signature(0x19, 0x11, 1);

/// Returns a signature in the format of leaf 1's EAX. The extended fields hold what does not fit into the base fields.
const fn signature(family: u32, model: u32, stepping: u32) -> u32 {
    let (base, extended) = if family > 0xf { (0xf, family - 0xf) } else { (family, 0) };
    extended << 20 | (model >> 4) << 16 | base << 8 | (model & 0xf) << 4 | stepping
}

/// Changes the host's entries so that they describe a processor of this identity.
pub fn assume(entries: &mut Vec<kvm_cpuid_entry2>, identity: Identity) {
    match (super::vendor(entries), identity) {
        // AMD's events depend on the family, so the guest has to see the host's.
        (_, Identity::Host) | (Some(Vendor::Amd), Identity::Generic(Vendor::Amd)) => {}
        (Some(Vendor::Intel), Identity::Generic(Vendor::Intel)) => {
            for entry in entries.iter_mut().filter(|entry| entry.function == function::FEATURES) {
                entry.eax = GENERIC_INTEL;
            }
        }
        (_, Identity::Generic(Vendor::Intel)) => {
            hide_hypercalls(entries);
            become_intel(entries);
        }
        (_, Identity::Generic(Vendor::Amd)) => {
            hide_hypercalls(entries);
            become_amd(entries);
        }
    }
}

/// Hides KVM's features that use hypercalls. A kernel makes a hypercall with the instruction of the vendor that it
/// sees, VMCALL or VMMCALL, which faults on the other vendor's processors. KVM would patch the instruction, but kernels
/// map their code read-only.
fn hide_hypercalls(entries: &mut [kvm_cpuid_entry2]) {
    /// `PV_UNHALT`, `PV_SEND_IPI`, `PV_SCHED_YIELD`, `HC_MAP_GPA_RANGE`.
    const BY_HYPERCALL: u32 = 1 << 7 | 1 << 11 | 1 << 13 | 1 << 16;
    for entry in entries.iter_mut().filter(|entry| entry.function == function::KVM_FEATURES) {
        entry.eax &= !BY_HYPERCALL;
    }
}

/// Returns bits to add to [`ARCH_CAPABILITIES`] for a guest that sees an Intel processor on an AMD host. Without them
/// the guest would assume vulnerabilities that only Intel processors have.
///
/// KVM sets the bits that the host's kernel knows of its processor, but not all that hold for every AMD processor.
pub fn immunities(supported: &CpuId, identity: Identity) -> Option<u64> {
    /// `RDCL_NO` (Meltdown, L1TF), `MDS_NO`, `PSCHANGE_MC_NO`, `SBDR_SSDP_NO`, `FBSDP_NO`, `PSDP_NO`, `BHI_NO`,
    /// `PBRSB_NO`, `GDS_NO`, `RFDS_NO`, `ITS_NO`.
    const NOT_ON_AMD: u64 = 1 << 0
        | 1 << 5
        | 1 << 6
        | 1 << 13
        | 1 << 14
        | 1 << 15
        | 1 << 20
        | 1 << 24
        | 1 << 26
        | 1 << 27
        | 1 << 62;
    is_intels_on_amd(supported, identity).then_some(NOT_ON_AMD)
}

/// Returns true if the guest sees an Intel processor on an AMD host.
pub fn is_intels_on_amd(supported: &CpuId, identity: Identity) -> bool {
    identity == Identity::Generic(Vendor::Intel) && super::vendor(supported.as_slice()) == Some(Vendor::Amd)
}

/// Returns the parameter that a Linux guest with an Intel processor on an AMD host needs in addition: 32-bit programs
/// then make system calls by INT 0x80.
///
/// On Intel processors, 32-bit programs enter the kernel by SYSENTER, and it returns by SYSRET. On an AMD host, KVM has
/// to emulate SYSENTER in long mode. AMD's SYSRET does not load the attributes of the stack segment, and kernels
/// correct those only on processors that they know as AMD's.
pub fn kernel_words(host: Option<Vendor>, identity: Identity) -> Option<&'static str> {
    match (host, identity) {
        (Some(Vendor::Amd), Identity::Generic(Vendor::Intel)) => Some("vdso32=0"),
        _ => None,
    }
}

fn become_intel(entries: &mut Vec<kvm_cpuid_entry2>) {
    /// Extended functions that Intel processors do not have.
    const AMD_ONLY: RangeInclusive<u32> = 0x8000_0009..=0x8fff_ffff;
    /// LAHF and SAHF, LZCNT, PREFETCHW.
    const EXTENDED_ECX: u32 = 1 << 0 | 1 << 5 | 1 << 8;
    /// SYSCALL, NX, pages of 1 GiB, RDTSCP, long mode.
    const EXTENDED_EDX: u32 = 1 << 11 | 1 << 20 | 1 << 26 | 1 << 27 | 1 << 29;
    const INVARIANT_TSC: u32 = 1 << 8;
    /// WBNOINVD, and AMD's bits for speculation control: IBPB, IBRS, STIBP, SSBD, `VIRT_SSBD`, `IBPB_RET`. KVM also
    /// sets Intel's bits for those of the controls that Intel has, and kernels evaluate both vendors' bits.
    const SIZES_EBX: u32 = 1 << 9 | 1 << 12 | 1 << 14 | 1 << 15 | 1 << 24 | 1 << 25 | 1 << 30;
    const HAS_ARCH_CAPABILITIES: u32 = 1 << 29;
    /// Execute CPUID leaf 2 once; leaf 4 describes the caches; 64-byte prefetching.
    const DESCRIPTORS: Leaf = Leaf { eax: 0xff01, ebx: 0xf0, ecx: 0, edx: 0 };

    if let Some(caches) = caches(entries, function::CACHES_AMD) {
        put(entries, function::CACHES, &caches);
    }
    entries.retain(|entry| !AMD_ONLY.contains(&entry.function));
    put(entries, function::DESCRIPTORS, &[DESCRIPTORS]);
    for entry in entries {
        match (entry.function, entry.index) {
            (function::VENDOR, _) => set_name(entry, b"GenuineIntel"),
            (function::FEATURES, _) => entry.eax = GENERIC_INTEL,
            (function::MORE_FEATURES, 0) => entry.edx |= HAS_ARCH_CAPABILITIES,
            (function::LAST_EXTENDED, _) => {
                (entry.eax, entry.ebx, entry.ecx, entry.edx) = (function::SIZES, 0, 0, 0);
            }
            (function::EXTENDED_FEATURES, _) => {
                (entry.eax, entry.ebx) = (0, 0);
                entry.ecx &= EXTENDED_ECX;
                entry.edx &= EXTENDED_EDX;
            }
            (function::CACHE_L1_AMD, _) => {
                (entry.eax, entry.ebx, entry.ecx, entry.edx) = (0, 0, 0, 0);
            }
            // ECX describes the L2 cache. Line size, ways and size are in the same fields for both vendors.
            (function::CACHE_L2, _) => (entry.eax, entry.ebx, entry.edx) = (0, 0, 0),
            (function::POWER, _) => {
                (entry.eax, entry.ebx, entry.ecx) = (0, 0, 0);
                entry.edx &= INVARIANT_TSC;
            }
            (function::SIZES, _) => {
                // Bits 23..16 are AMD's guest-physical address width, which Intel does not report.
                entry.eax &= 0xffff;
                entry.ebx &= SIZES_EBX;
                (entry.ecx, entry.edx) = (0, 0);
            }
            _ => {}
        }
    }
}

fn become_amd(entries: &mut Vec<kvm_cpuid_entry2>) {
    const SELF_SNOOP: u32 = 1 << 27;
    /// SGX; HLE and RTM; MPX; Processor Trace.
    const INTEL_ONLY_EBX: u32 = 1 << 2 | 1 << 4 | 1 << 11 | 1 << 14 | 1 << 25;
    /// SGX launch control.
    const INTEL_ONLY_ECX: u32 = 1 << 30;
    /// Mitigations that clear or control buffers (9, 10, 28), TSX (11, 13, 16), hybrid processors (15), and
    /// `ARCH_CAPABILITIES` and `CORE_CAPABILITIES` (29, 30). Intel's bits for speculation control stay: KVM also sets
    /// AMD's bits for them, and kernels evaluate both vendors' bits.
    const INTEL_ONLY_EDX: u32 =
        1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 15 | 1 << 16 | 1 << 28 | 1 << 29 | 1 << 30;
    /// Bits of leaf 1's EDX that AMD processors repeat in leaf 0x80000001's EDX.
    const REPEATED_BY_AMD: u32 = 0x0183_f3ff;
    const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;
    /// FXSAVE and XSAVE always save the FPU's error pointers. On older AMD processors, which do not, kernels have to
    /// clear the pointers themselves.
    const ERROR_POINTERS_SAVED: u32 = 1 << 2;
    /// LFENCE serialises, a null selector clears the segment's base, and the processor is not vulnerable to SRSO and
    /// both kinds of TSA, which are AMD's vulnerabilities.
    const FEATURES: Leaf = Leaf { eax: 1 << 2 | 1 << 6 | 1 << 29, ebx: 0, ecx: 1 << 1 | 1 << 2, edx: 0 };

    if let Some(caches) = caches(entries, function::CACHES) {
        let (first, others) = legacy_caches(&caches);
        put(entries, function::CACHE_L1_AMD, &[first]);
        put(entries, function::CACHE_L2, &[others]);
        put(entries, function::CACHES_AMD, &caches);
    }
    entries.retain(|entry| !matches!(entry.function, function::DESCRIPTORS | function::CACHES));
    put(entries, function::TOPOLOGY_AMD, &[Leaf::default()]);
    put(entries, function::FEATURES_AMD, &[FEATURES]);
    let features =
        entries.iter().find(|entry| entry.function == function::FEATURES).map_or(0, |entry| entry.edx);
    for entry in entries {
        match (entry.function, entry.index) {
            (function::VENDOR, _) => set_name(entry, b"AuthenticAMD"),
            (function::FEATURES, _) => {
                entry.eax = ZEN_4;
                entry.edx &= !SELF_SNOOP;
            }
            (function::MORE_FEATURES, 0) => {
                entry.ebx &= !INTEL_ONLY_EBX;
                entry.ecx &= !INTEL_ONLY_ECX;
                entry.edx &= !INTEL_ONLY_EDX;
            }
            (function::LAST_EXTENDED, _) => {
                entry.eax = function::FEATURES_AMD;
                set_name(entry, b"AuthenticAMD");
            }
            (function::EXTENDED_FEATURES, _) => {
                entry.eax = ZEN_4;
                entry.ecx |= TOPOLOGY_EXTENSIONS;
                entry.edx |= features & REPEATED_BY_AMD;
            }
            (function::SIZES, _) => entry.ebx |= ERROR_POINTERS_SAVED,
            _ => {}
        }
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

/// Writes a vendor's name to EBX, EDX and ECX, in the order of leaf 0.
fn set_name(entry: &mut kvm_cpuid_entry2, name: &[u8; 12]) {
    let (words, _) = name.as_chunks();
    let [ebx, edx, ecx] = [words[0], words[1], words[2]].map(u32::from_le_bytes);
    (entry.ebx, entry.edx, entry.ecx) = (ebx, edx, ecx);
}

/// Returns the caches that a function describes: the fields that Intel's leaf 4 and AMD's leaf 0x8000001d have in
/// common. Returns `None` if there are none. The number of cores that share a cache is left out, since
/// [`super::topology`] sets it.
fn caches(entries: &[kvm_cpuid_entry2], function: u32) -> Option<Vec<Leaf>> {
    /// Type, level, self-initialising, fully associative.
    const EAX: u32 = 0x3ff;
    /// Whether WBINVD acts on the caches of lower levels, and whether the cache includes them.
    const EDX: u32 = 3;
    const TYPE: u32 = 0x1f;
    let mut caches: Vec<_> =
        entries.iter().filter(|entry| entry.function == function && entry.eax & TYPE != 0).collect();
    caches.sort_by_key(|entry| entry.index);
    let common_fields = |entry: &&kvm_cpuid_entry2| Leaf {
        eax: entry.eax & EAX,
        ebx: entry.ebx,
        ecx: entry.ecx,
        edx: entry.edx & EDX,
    };
    (!caches.is_empty()).then(|| caches.iter().map(common_fields).collect())
}

/// Returns AMD's leaves 0x80000005 (first-level caches) and 0x80000006 (other caches), for programs that read only
/// these.
fn legacy_caches(caches: &[Leaf]) -> (Leaf, Leaf) {
    const DATA: u32 = 1;
    const INSTRUCTIONS: u32 = 2;
    let (mut first, mut others) = (Leaf::default(), Leaf::default());
    for cache in caches {
        let (ways, line) = ((cache.ebx >> 22) + 1, (cache.ebx & 0xfff) + 1);
        let kib = ways * ((cache.ebx >> 12 & 0x3ff) + 1) * line * (cache.ecx + 1) / 1024;
        // One line per tag.
        let lines = 1 << 8 | line;
        match (cache.eax >> 5 & 7, cache.eax & 0x1f) {
            (1, DATA) => first.ecx = kib << 24 | ways << 16 | lines,
            (1, INSTRUCTIONS) => first.edx = kib << 24 | ways << 16 | lines,
            (2, _) => others.ecx = kib << 16 | associativity(ways) << 12 | lines,
            (3, _) => others.edx = (kib / 512) << 18 | associativity(ways) << 12 | lines,
            _ => {}
        }
    }
    (first, others)
}

/// Returns AMD's code for the number of ways (APM volume 3, appendix E, table E-4).
fn associativity(ways: u32) -> u32 {
    const SEE_0X8000001D: u32 = 9;
    match ways {
        1 | 2 | 4 => ways,
        8 => 6,
        16 => 8,
        32 => 0xa,
        48 => 0xb,
        64 => 0xc,
        96 => 0xd,
        128 => 0xe,
        _ => SEE_0X8000001D,
    }
}

#[cfg(test)]
mod tests;
