//! The vendor and model that CPUID shows to the guest.
//!
//! A kernel drives the PMU of the vendor that CPUID names. A guest whose emulated PMU is the other vendor's therefore
//! sees that vendor's processor too, and all other leaves have to follow that vendor's format.
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

use kvm_bindings::{CpuId, kvm_cpuid_entry2};
use vpmu::x86::{Leaf, Vendor};

use super::caches::{cache_leaves, legacy_caches};
use super::{function, put};
use crate::arch::x86_64::pmu::ShownProcessor;

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

/// Changes the host's entries so that they describe this processor.
pub fn assume(entries: &mut Vec<kvm_cpuid_entry2>, shown: ShownProcessor) {
    match (super::vendor(entries), shown) {
        // AMD's events depend on the family, so the guest has to see the host's.
        (_, ShownProcessor::Host) | (Some(Vendor::Amd), ShownProcessor::Generic(Vendor::Amd)) => {}
        (Some(Vendor::Intel), ShownProcessor::Generic(Vendor::Intel)) => {
            for entry in entries.iter_mut().filter(|entry| entry.function == function::FEATURES) {
                entry.eax = GENERIC_INTEL;
            }
        }
        (_, ShownProcessor::Generic(Vendor::Intel)) => {
            hide_hypercalls(entries);
            become_intel(entries);
        }
        (_, ShownProcessor::Generic(Vendor::Amd)) => {
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
pub fn immunities(supported: &CpuId, shown: ShownProcessor) -> Option<u64> {
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
    is_intels_on_amd(supported, shown).then_some(NOT_ON_AMD)
}

/// Returns true if the guest sees an Intel processor on an AMD host.
pub fn is_intels_on_amd(supported: &CpuId, shown: ShownProcessor) -> bool {
    shown == ShownProcessor::Generic(Vendor::Intel)
        && super::vendor(supported.as_slice()) == Some(Vendor::Amd)
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

    if let Some(caches) = cache_leaves(entries, function::CACHES_AMD) {
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

    if let Some(caches) = cache_leaves(entries, function::CACHES) {
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

/// Writes a vendor's name to EBX, EDX and ECX, in the order of leaf 0.
fn set_name(entry: &mut kvm_cpuid_entry2, name: &[u8; 12]) {
    let (words, _) = name.as_chunks();
    let [ebx, edx, ecx] = [words[0], words[1], words[2]].map(u32::from_le_bytes);
    (entry.ebx, entry.edx, entry.ecx) = (ebx, edx, ecx);
}

#[cfg(test)]
mod tests;
