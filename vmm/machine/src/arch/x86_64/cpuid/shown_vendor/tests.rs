//! The CPUID of guests with another identity than the host's, on two hosts: a Zen 2 and an Ice Lake.

use std::collections::BTreeMap;

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};
use vpmu::x86::{Leaf, Vendor};

use super::{ShownProcessor, immunities};
use crate::arch::x86_64::cpuid::for_vcpu;
use crate::arch::x86_64::pmu::Pmu;

const AS_INTEL: ShownProcessor = ShownProcessor::Generic(Vendor::Intel);
const AS_AMD: ShownProcessor = ShownProcessor::Generic(Vendor::Amd);

type Row = (u32, u32, [u32; 4]);

/// CPUID that KVM supports on a Zen 2 with 32 KiB of each L1, 512 KiB of L2 and 16 MiB of L3.
const ZEN_2: [Row; 21] = [
    (0, 0, [0x10, 0x6874_7541, 0x444d_4163, 0x6974_6e65]),
    (1, 0, [0x0083_0f10, 0x0000_0800, 0x76f8_3203, 0x0f8b_fbff]),
    (2, 0, [0, 0, 0, 0]),
    (4, 0, [0, 0, 0, 0]),
    (7, 0, [0, 0x219c_91a9, 0x0040_0004, 0xac00_0000]),
    (0xb, 0, [0, 1, 0x100, 0]),
    (0xd, 0, [0x207, 0x988, 0x988, 0]),
    (0x4000_0001, 0, [0x0100_7efb, 0, 0, 0]),
    (0x8000_0000, 0, [0x8000_0021, 0x6874_7541, 0x444d_4163, 0x6974_6e65]),
    (0x8000_0001, 0, [0x0083_0f10, 0x4000_0000, 0x0040_01f7, 0x2fd3_fbff]),
    (0x8000_0002, 0, [0x2044_4d41, 0x4359_5045, 0x3237_2037, 0x3233_2046]),
    (0x8000_0005, 0, [0xff40_ff40, 0xff40_ff40, 0x2008_0140, 0x2008_0140]),
    (0x8000_0006, 0, [0x4800_6400, 0x6800_6400, 0x0200_6140, 0x0200_9140]),
    (0x8000_0007, 0, [0, 0x1b, 0, 0x100]),
    (0x8000_0008, 0, [0x0030_3030, 0x0108_d205, 0x0000_703f, 0x0001_0007]),
    (0x8000_001d, 0, [0x4121, 0x01c0_003f, 0x3f, 0]),
    (0x8000_001d, 1, [0x4122, 0x01c0_003f, 0x3f, 0]),
    (0x8000_001d, 2, [0x4143, 0x01c0_003f, 0x3ff, 2]),
    (0x8000_001d, 3, [0x1_c163, 0x03c0_003f, 0x3fff, 1]),
    (0x8000_001e, 0, [0, 0x100, 0, 0]),
    (0x8000_0021, 0, [0x45, 0, 0, 0]),
];

/// CPUID that KVM supports on an Ice Lake with 48 and 32 KiB of L1, 1,280 KiB of L2 and 24 MiB of L3.
const ICE_LAKE: [Row; 16] = [
    (0, 0, [0x1b, 0x756e_6547, 0x6c65_746e, 0x4965_6e69]),
    (1, 0, [0x0006_06a6, 0x0000_0800, 0x76fa_3223, 0x0f8b_fbff]),
    (2, 0, [0x00fe_ff01, 0xf0, 0, 0]),
    (4, 0, [0x7c00_4121, 0x02c0_003f, 0x3f, 0]),
    (4, 1, [0x7c00_4122, 0x01c0_003f, 0x3f, 0]),
    (4, 2, [0x7c00_4143, 0x04c0_003f, 0x3ff, 4]),
    (4, 3, [0x7c07_c163, 0x02c0_003f, 0x7fff, 4]),
    (7, 0, [0, 0xf1bf_2fff, 0x0040_5f4e, 0xbc00_8c10]),
    (0xa, 0, [0x0830_0805, 0, 0xf, 0x8604]),
    (0xd, 0, [0x2e7, 0xa88, 0xa88, 0]),
    (0x4000_0001, 0, [0x0100_7efb, 0, 0, 0]),
    (0x8000_0000, 0, [0x8000_0008, 0, 0, 0]),
    (0x8000_0001, 0, [0, 0, 0x121, 0x2c10_0800]),
    (0x8000_0006, 0, [0, 0, 0x0100_7040, 0]),
    (0x8000_0007, 0, [0, 0, 0, 0x100]),
    (0x8000_0008, 0, [0x0000_392e, 0x0100_d200, 0, 0]),
];

fn supported(rows: &[Row]) -> CpuId {
    let entries: Vec<_> = rows
        .iter()
        .map(|&(function, index, [eax, ebx, ecx, edx])| kvm_cpuid_entry2 {
            function,
            index,
            eax,
            ebx,
            ecx,
            edx,
            ..Default::default()
        })
        .collect();
    CpuId::from_entries(&entries).unwrap()
}

/// CPUID of the last of four vCPUs.
struct Guest(BTreeMap<(u32, u32), kvm_cpuid_entry2>);

impl Guest {
    fn on(host: &[Row], shown: ShownProcessor) -> Self {
        let cpuid = for_vcpu(&supported(host), 3, 4, Pmu::None, shown).unwrap();
        let entries = cpuid.as_slice();
        let seen: BTreeMap<_, _> =
            entries.iter().map(|entry| ((entry.function, entry.index), *entry)).collect();
        assert_eq!(seen.len(), entries.len(), "nothing is said twice");
        Self(seen)
    }

    fn has(&self, function: u32) -> bool {
        self.0.contains_key(&(function, 0))
    }

    fn leaf(&self, function: u32, index: u32) -> Leaf {
        super::super::leaf(&self.0[&(function, index)])
    }

    /// Returns the family and model, with their extended fields (SDM volume 2, CPUID, leaf 1).
    fn model(&self) -> (u32, u32) {
        let signature = self.leaf(1, 0).eax;
        let family = signature >> 8 & 0xf;
        let extended = if family == 0xf { signature >> 20 & 0xff } else { 0 };
        (family + extended, (signature >> 16 & 0xf) << 4 | signature >> 4 & 0xf)
    }

    /// Returns each cache's type, level, size in KiB and number of cores that share it.
    fn caches(&self, function: u32) -> Vec<(u32, u32, u32, u32)> {
        (0..)
            .map_while(|index| self.0.get(&(function, index)))
            .map(|entry| {
                assert_eq!(entry.flags, KVM_CPUID_FLAG_SIGNIFCANT_INDEX);
                let bytes = ((entry.ebx >> 22) + 1) * ((entry.ebx & 0xfff) + 1) * (entry.ecx + 1);
                (entry.eax & 0x1f, entry.eax >> 5 & 7, bytes / 1024, (entry.eax >> 14 & 0xfff) + 1)
            })
            .collect()
    }
}

#[test]
fn a_generic_intel_on_amd_has_a_model_that_kernels_do_not_know() {
    let guest = Guest::on(&ZEN_2, AS_INTEL);
    assert_eq!(Vendor::of(guest.leaf(0, 0)), Some(Vendor::Intel));
    assert_eq!(guest.model(), (6, 0x20));
    assert_eq!(guest.leaf(0x8000_0000, 0), Leaf { eax: 0x8000_0008, ..Leaf::default() });
    assert_eq!(guest.leaf(0x8000_0002, 0).eax, 0x2044_4d41, "its own name tells what it really is");
}

#[test]
fn an_intel_on_amd_has_no_features_that_only_amd_has() {
    let guest = Guest::on(&ZEN_2, AS_INTEL);
    // LAHF, LZCNT, PREFETCHW; SYSCALL, NX, 1 GiB, RDTSCP, LM.
    assert_eq!(guest.leaf(0x8000_0001, 0), Leaf { eax: 0, ebx: 0, ecx: 0x121, edx: 0x2c10_0800 });
    assert_eq!(guest.leaf(0x8000_0005, 0), Leaf::default());
    assert_eq!(guest.leaf(0x8000_0006, 0), Leaf { ecx: 0x0200_6140, ..Leaf::default() });
    assert_eq!(guest.leaf(0x8000_0007, 0), Leaf { edx: 0x100, ..Leaf::default() });
    // Address widths; of AMD's bits in EBX: WBNOINVD, IBPB, IBRS, STIBP and SSBD.
    assert_eq!(guest.leaf(0x8000_0008, 0), Leaf { eax: 0x3030, ebx: 0x0100_d200, ecx: 0, edx: 0 });
    for function in [0x8000_001d, 0x8000_001e, 0x8000_0021] {
        assert!(!guest.has(function), "{function:#x}");
    }
}

#[test]
fn an_intel_on_amd_knows_its_caches() {
    let guest = Guest::on(&ZEN_2, AS_INTEL);
    assert_eq!(guest.caches(4), [(1, 1, 32, 1), (2, 1, 32, 1), (3, 2, 512, 1), (3, 3, 16 << 10, 4)]);
    assert_eq!(guest.leaf(4, 3).edx, 1, "what else is known of it");
    assert_eq!(guest.leaf(2, 0).eax, 0xff01, "once is enough, and leaf 4 has it");
}

#[test]
fn a_guest_with_the_other_vendors_identity_is_offered_no_hypercalls() {
    for (host, own, other) in [(&ZEN_2[..], AS_AMD, AS_INTEL), (&ICE_LAKE, AS_INTEL, AS_AMD)] {
        assert_eq!(Guest::on(host, own).leaf(0x4000_0001, 0).eax, 0x0100_7efb);
        assert_eq!(Guest::on(host, other).leaf(0x4000_0001, 0).eax, 0x0100_567b, "without three");
    }
}

#[test]
fn an_intel_on_amd_is_one_package_of_four_cores() {
    let guest = Guest::on(&ZEN_2, AS_INTEL);
    assert_eq!((guest.leaf(1, 0).ebx >> 16 & 0xff, guest.leaf(1, 0).edx >> 28 & 1), (4, 1));
    assert_eq!(guest.leaf(4, 0).eax >> 26, 3);
    assert_eq!(guest.leaf(0xb, 1), Leaf { eax: 2, ebx: 4, ecx: 0x201, edx: 3 });
}

#[test]
fn an_intel_on_amd_is_immune_to_vulnerabilities_that_only_intel_has() {
    let guest = Guest::on(&ZEN_2, AS_INTEL);
    assert_eq!(guest.leaf(7, 0).edx >> 29 & 1, 1, "that there is a register to read");
    let immune = immunities(&supported(&ZEN_2), AS_INTEL).unwrap();
    for bit in [0, 5, 6, 20, 62] {
        assert_eq!(immune >> bit & 1, 1, "Meltdown, MDS, page sizes, branch history, targets: {bit}");
    }
    assert_eq!(immune >> 4 & 1, 0, "speculative stores: KVM knows whether this one has it");
    assert_eq!(immune & (1 << 1 | 1 << 7 | 1 << 8), 0, "nothing that AMD does not have");
}

#[test]
fn an_intel_on_amd_makes_32_bit_system_calls_by_interrupt() {
    assert_eq!(AS_INTEL.kernel_parameters(Some(Vendor::Amd)), Some("vdso32=0"));
    for (host, shown) in
        [(Vendor::Amd, ShownProcessor::Host), (Vendor::Intel, AS_INTEL), (Vendor::Intel, AS_AMD)]
    {
        assert_eq!(shown.kernel_parameters(Some(host)), None, "{host:?} as {shown:?}");
    }
}

#[test]
fn immunities_are_added_only_for_an_intel_on_amd() {
    assert_eq!(immunities(&supported(&ICE_LAKE), AS_INTEL), None);
    assert_eq!(immunities(&supported(&ICE_LAKE), AS_AMD), None);
    assert_eq!(immunities(&supported(&ZEN_2), ShownProcessor::Host), None);
}

#[test]
fn an_amd_on_intel_is_a_zen_4() {
    let guest = Guest::on(&ICE_LAKE, AS_AMD);
    assert_eq!(Vendor::of(guest.leaf(0, 0)), Some(Vendor::Amd));
    let extended = guest.leaf(0x8000_0000, 0);
    assert_eq!((Vendor::of(extended), extended.eax), (Some(Vendor::Amd), 0x8000_0021));
    assert_eq!(guest.model(), (0x19, 0x11));
    assert_eq!(guest.leaf(0x8000_0001, 0).eax, guest.leaf(1, 0).eax);
}

#[test]
fn an_amd_on_intel_has_no_features_that_only_intel_has() {
    let guest = Guest::on(&ICE_LAKE, AS_AMD);
    assert_eq!(guest.leaf(1, 0).edx >> 27 & 1, 0, "self-snooping");
    // HLE and RTM, MPX, SGX and Processor Trace are hidden; speculation control stays.
    assert_eq!(
        guest.leaf(7, 0),
        Leaf { eax: 0, ebx: 0xf1bf_2fff & !0x0200_4814, ecx: 0x0040_5f4e, edx: 0x8c00_0010 }
    );
    for function in [2, 4] {
        assert!(!guest.has(function), "{function:#x}");
    }
    assert_eq!(guest.leaf(0xa, 0), Leaf::default());
}

#[test]
fn an_amd_on_intel_repeats_the_features_of_leaf_1() {
    let guest = Guest::on(&ICE_LAKE, AS_AMD);
    let both = guest.leaf(0x8000_0001, 0).edx & 0x0183_f3ff;
    assert_eq!(both, guest.leaf(1, 0).edx & 0x0183_f3ff);
    assert_eq!(guest.leaf(0x8000_0001, 0).edx & !0x0183_f3ff, 0x2c10_0800, "beside what it can do itself");
}

#[test]
fn an_amd_on_intel_needs_no_msrs_that_only_amd_has() {
    let guest = Guest::on(&ICE_LAKE, AS_AMD);
    // LFENCE serialises without DE_CFG; no SRSO, no TSA; the FPU's error pointers are saved.
    assert_eq!(
        guest.leaf(0x8000_0021, 0),
        Leaf { eax: 1 << 2 | 1 << 6 | 1 << 29, ecx: 6, ..Leaf::default() }
    );
    assert_eq!(guest.leaf(0x8000_0008, 0).ebx, 0x0100_d204);
    // MSRs of SVM, OSVW and IBS would fault.
    assert_eq!(guest.leaf(0x8000_0001, 0).ecx & (1 << 2 | 1 << 9 | 1 << 10), 0);
}

#[test]
fn an_amd_on_intel_knows_its_caches() {
    let guest = Guest::on(&ICE_LAKE, AS_AMD);
    assert_eq!(
        guest.caches(0x8000_001d),
        [(1, 1, 48, 1), (2, 1, 32, 1), (3, 2, 1280, 1), (3, 3, 24 << 10, 4)]
    );
    let (first, others) = (guest.leaf(0x8000_0005, 0), guest.leaf(0x8000_0006, 0));
    assert_eq!((first.ecx, first.edx), (48 << 24 | 12 << 16 | 0x140, 32 << 24 | 8 << 16 | 0x140));
    // There is no code for twenty or twelve ways.
    assert_eq!((others.ecx, others.edx), (1280 << 16 | 0x9140, 48 << 18 | 0x9140));
}

#[test]
fn an_amd_on_intel_is_one_package_of_four_cores() {
    let guest = Guest::on(&ICE_LAKE, AS_AMD);
    assert_eq!(guest.leaf(0x8000_0008, 0).ecx, 2 << 12 | 3);
    assert_eq!(guest.leaf(0x8000_001e, 0), Leaf { eax: 3, ebx: 3, ..Leaf::default() });
    assert_eq!(guest.leaf(0x8000_0001, 0).ecx & (1 << 1 | 1 << 22), 1 << 1 | 1 << 22);
    assert_eq!(guest.leaf(0xb, 1), Leaf { eax: 2, ebx: 4, ecx: 0x201, edx: 3 });
}

#[test]
fn a_generic_intel_on_intel_differs_in_its_model_only() {
    let (host, guest) = (Guest::on(&ICE_LAKE, ShownProcessor::Host), Guest::on(&ICE_LAKE, AS_INTEL));
    assert_eq!((host.model(), guest.model()), ((6, 0x6a), (6, 0x20)));
    let differing: Vec<_> =
        host.0.iter().filter(|(at, entry)| guest.0[at] != **entry).map(|(at, _)| *at).collect();
    assert_eq!(differing, [(1, 0)]);
    assert_eq!(host.0.len(), guest.0.len());
}

#[test]
fn an_amd_guest_on_amd_has_the_hosts_identity() {
    assert_eq!(Guest::on(&ZEN_2, AS_AMD).0, Guest::on(&ZEN_2, ShownProcessor::Host).0);
}
