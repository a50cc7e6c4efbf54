//! Who made the guest's processor. A kernel drives the PMU of the vendor that CPUID names, so a guest that is given the
//! other vendor's PMU is given its identity too, and then everything else has to be said in that vendor's words.
//!
//! Nothing is claimed that the host's processor cannot do, and no flaw denied that it has. But what kernels know of flaws by
//! vendor or model alone, they do not know here, so such a guest is not for programs that distrust each other. On AMD hosts
//! one of its programs can even bring it down, by a SYSCALL in 32-bit mode: Intel's processors refuse that, so kernels leave
//! its entry (CSTAR) unset.
//!
//! Sources: SDM volume 2, CPUID; APM volume 3, appendix E. What kernels make of it: Linux, `arch/x86/kernel/cpu`.

use std::ops::RangeInclusive;

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use vpmu::x86::{Leaf, Vendor};

use super::function;
use crate::arch::x86_64::pmu::Identity;

/// `IA32_ARCH_CAPABILITIES` (SDM volume 4, table 2-2): which flaws one of Intel's processors does not have.
pub const ARCH_CAPABILITIES: u32 = 0x10a;

/// A model that Intel has never used, nor will: it is amid those of 2010. So kernels go by what CPUID promises, and use the
/// architectural PMU. (Lower ones are taken to have the bugs of older processors.)
const INTELS: u32 = signature(6, 0x20, 0);

/// Zen 4, the first with PerfMonV2. A model is needed that kernels know: of others they complain.
const AMDS: u32 = signature(0x19, 0x11, 1);

/// A signature as leaf 1 has it: what does not fit the old fields is in the extended ones.
const fn signature(family: u32, model: u32, stepping: u32) -> u32 {
    let (base, extended) = if family > 0xf { (0xf, family - 0xf) } else { (family, 0) };
    extended << 20 | (model >> 4) << 16 | base << 8 | (model & 0xf) << 4 | stepping
}

/// Has the entries, which are the host's, describe a processor of that identity.
pub fn assume(entries: &mut Vec<kvm_cpuid_entry2>, identity: Identity) {
    match (super::vendor(entries), identity) {
        // AMD's events are those of its family, so that has to stay.
        (_, Identity::Host) | (Some(Vendor::Amd), Identity::Generic(Vendor::Amd)) => {}
        (Some(Vendor::Intel), Identity::Generic(Vendor::Intel)) => {
            for entry in entries.iter_mut().filter(|entry| entry.function == function::FEATURES) {
                entry.eax = INTELS;
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

/// A kernel calls KVM with the instruction of the vendor that it sees: VMCALL, or VMMCALL, which fault on the other's
/// processors. KVM would write the right one over it, where kernels do not let anybody write.
fn hide_hypercalls(entries: &mut [kvm_cpuid_entry2]) {
    /// To wake a vCPU, interrupt several, yield to one, and tell of memory that is not encrypted.
    const BY_HYPERCALL: u32 = 1 << 7 | 1 << 11 | 1 << 13 | 1 << 16;
    for entry in entries.iter_mut().filter(|entry| entry.function == function::KVM_FEATURES) {
        entry.eax &= !BY_HYPERCALL;
    }
}

/// What to add to [`ARCH_CAPABILITIES`], for a guest that would otherwise take its processor to have flaws of Intel's.
///
/// KVM says there what the host's kernel knows of its processor, but not all that is known of AMD's at large.
pub fn immunities(supported: &CpuId, identity: Identity) -> Option<u64> {
    /// Meltdown and L1TF, MDS, huge pages' machine check, stale data of devices (three kinds), branch history, the return
    /// stack after VM exits, gathers, the register file, indirect targets.
    const OF_ALL_AMDS: u64 = 1 << 0
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
    is_intels_on_amd(supported, identity).then_some(OF_ALL_AMDS)
}

/// Whether the guest takes an AMD processor for one of Intel's.
pub fn is_intels_on_amd(supported: &CpuId, identity: Identity) -> bool {
    identity == Identity::Generic(Vendor::Intel) && super::vendor(supported.as_slice()) == Some(Vendor::Amd)
}

/// What Linux has to be told besides: that 32-bit programs call it by interrupt.
///
/// With Intel's processors they use SYSENTER, and SYSRET to return. On AMD's, KVM has to emulate the one, and the other leaves
/// the stack segment as it is, which kernels make up for only where they see an AMD.
pub fn kernel_words(host: Option<Vendor>, identity: Identity) -> Option<&'static str> {
    match (host, identity) {
        (Some(Vendor::Amd), Identity::Generic(Vendor::Intel)) => Some("vdso32=0"),
        _ => None,
    }
}

fn become_intel(entries: &mut Vec<kvm_cpuid_entry2>) {
    /// The extended functions that Intel does not have.
    const AMDS_OWN: RangeInclusive<u32> = 0x8000_0009..=0x8fff_ffff;
    /// LAHF and SAHF, LZCNT, PREFETCHW.
    const EXTENDED_ECX: u32 = 1 << 0 | 1 << 5 | 1 << 8;
    /// SYSCALL, NX, pages of 1 GiB, RDTSCP, long mode.
    const EXTENDED_EDX: u32 = 1 << 11 | 1 << 20 | 1 << 26 | 1 << 27 | 1 << 29;
    const INVARIANT_TSC: u32 = 1 << 8;
    /// WBNOINVD; and AMD's switches of speculation (IBPB, IBRS, STIBP, SSBD, its virtual form, and whether IBPB clears returns).
    /// KVM says in Intel's words too what can be said in them, and kernels look at both.
    const SIZES_EBX: u32 = 1 << 9 | 1 << 12 | 1 << 14 | 1 << 15 | 1 << 24 | 1 << 25 | 1 << 30;
    const HAS_ARCH_CAPABILITIES: u32 = 1 << 29;
    /// One round; "see leaf 4" for the caches; prefetching 64 bytes.
    const DESCRIPTORS: Leaf = Leaf { eax: 0xff01, ebx: 0xf0, ecx: 0, edx: 0 };

    if let Some(caches) = caches(entries, function::CACHES_AMD) {
        put(entries, function::CACHES, &caches);
    }
    entries.retain(|entry| !AMDS_OWN.contains(&entry.function));
    put(entries, function::DESCRIPTORS, &[DESCRIPTORS]);
    for entry in entries {
        match (entry.function, entry.index) {
            (function::VENDOR, _) => set_name(entry, b"GenuineIntel"),
            (function::FEATURES, _) => entry.eax = INTELS,
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
            // The second level's line, ways and size are where AMD has them.
            (function::CACHE_L2, _) => (entry.eax, entry.ebx, entry.edx) = (0, 0, 0),
            (function::POWER, _) => {
                (entry.eax, entry.ebx, entry.ecx) = (0, 0, 0);
                entry.edx &= INVARIANT_TSC;
            }
            (function::SIZES, _) => {
                // Bits 23..16: a width of addresses that Intel does not tell.
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
    /// SGX; HLE and RTM; MPX; processor trace.
    const INTELS_EBX: u32 = 1 << 2 | 1 << 4 | 1 << 11 | 1 << 14 | 1 << 25;
    /// SGX's launch control.
    const INTELS_ECX: u32 = 1 << 30;
    /// What concerns buffers (9, 10, 28), TSX (11, 13, 16), hybrid processors (15), and `ARCH_` and `CORE_CAPABILITIES`.
    /// The switches of speculation stay: KVM says them in AMD's words besides, and kernels look at both.
    const INTELS_EDX: u32 =
        1 << 9 | 1 << 10 | 1 << 11 | 1 << 13 | 1 << 15 | 1 << 16 | 1 << 28 | 1 << 29 | 1 << 30;
    /// What leaf 1's EDX says that AMD's extended one says again.
    const SAID_TWICE: u32 = 0x0183_f3ff;
    const TOPOLOGY_EXTENSIONS: u32 = 1 << 22;
    /// Saving the state of the FPU always saves its error pointers: older AMDs' kernels have to see to it themselves.
    const ERROR_POINTERS_SAVED: u32 = 1 << 2;
    /// LFENCE serialises, a null selector clears the base, and there is neither of two flaws of AMD's: SRSO, TSA (both kinds).
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
                entry.eax = AMDS;
                entry.edx &= !SELF_SNOOP;
            }
            (function::MORE_FEATURES, 0) => {
                entry.ebx &= !INTELS_EBX;
                entry.ecx &= !INTELS_ECX;
                entry.edx &= !INTELS_EDX;
            }
            (function::LAST_EXTENDED, _) => {
                entry.eax = function::FEATURES_AMD;
                set_name(entry, b"AuthenticAMD");
            }
            (function::EXTENDED_FEATURES, _) => {
                entry.eax = AMDS;
                entry.ecx |= TOPOLOGY_EXTENSIONS;
                entry.edx |= features & SAID_TWICE;
            }
            (function::SIZES, _) => entry.ebx |= ERROR_POINTERS_SAVED,
            _ => {}
        }
    }
}

/// Puts these in the place of what the function has said so far, one for each index.
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

/// A vendor's name, as leaf 0 spells it.
fn set_name(entry: &mut kvm_cpuid_entry2, name: &[u8; 12]) {
    let (words, _) = name.as_chunks();
    let [ebx, edx, ecx] = [words[0], words[1], words[2]].map(u32::from_le_bytes);
    (entry.ebx, entry.edx, entry.ecx) = (ebx, edx, ecx);
}

/// The caches that a function tells of, without what each vendor adds; who shares them is the topology's.
/// Intel's leaf 4 and AMD's 0x8000001d say the same in the same places.
fn caches(entries: &[kvm_cpuid_entry2], function: u32) -> Option<Vec<Leaf>> {
    /// Type, level, two properties.
    const EAX: u32 = 0x3ff;
    /// What WBINVD does to those above, and whether they are included.
    const EDX: u32 = 3;
    const TYPE: u32 = 0x1f;
    let mut caches: Vec<_> =
        entries.iter().filter(|entry| entry.function == function && entry.eax & TYPE != 0).collect();
    caches.sort_by_key(|entry| entry.index);
    let told = |entry: &&kvm_cpuid_entry2| Leaf {
        eax: entry.eax & EAX,
        ebx: entry.ebx,
        ecx: entry.ecx,
        edx: entry.edx & EDX,
    };
    (!caches.is_empty()).then(|| caches.iter().map(told).collect())
}

/// The caches as AMD's 0x80000005 (the first level) and 0x80000006 (the others) tell them, for programs that ask only there.
fn legacy_caches(caches: &[Leaf]) -> (Leaf, Leaf) {
    const DATA: u32 = 1;
    const INSTRUCTIONS: u32 = 2;
    let (mut first, mut others) = (Leaf::default(), Leaf::default());
    for cache in caches {
        let (ways, line) = ((cache.ebx >> 22) + 1, (cache.ebx & 0xfff) + 1);
        let kib = ways * ((cache.ebx >> 12 & 0x3ff) + 1) * line * (cache.ecx + 1) / 1024;
        // One line to a tag.
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

/// The code of so many ways (APM volume 3, appendix E, table E-4).
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
