//! Makes KVM exit on accesses to the PMU's registers: switches KVM's own vPMU off and sets an MSR filter.

use std::fs;
use std::ops::RangeInclusive;

use kvm_bindings::{
    KVM_CAP_PMU_CAPABILITY, KVM_CAP_X86_USER_SPACE_MSR, KVM_MSR_EXIT_REASON_FILTER, KVM_PMU_CAP_DISABLE,
    kvm_enable_cap,
};
use kvm_ioctls::{Kvm, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VmFd};
use vpmu::x86::{DEBUGCTL, PMU_MSRS, PROGRAM_MSRS, RDPMC_MSRS, Vendor};

use crate::kvm_error::{KvmError, KvmResultExt};

/// Makes KVM exit on accesses to the PMU's registers. If an emulated PMU of this vendor is shown, KVM also exits on the
/// accesses that belong to it: for Intel accesses to `IA32_DEBUGCTL`, and for both vendors reads of the "MSRs" whose
/// numbers are RDPMC's counter numbers, and of those that stand for RDPMC in programs. Some of these numbers are real
/// MSRs, too. KVM handles writes to them.
pub fn take_registers(vm: &VmFd, shown: Option<Vendor>) -> Result<(), KvmError> {
    disable_kvms_own(vm)?;
    let mut cap = kvm_enable_cap { cap: KVM_CAP_X86_USER_SPACE_MSR, ..Default::default() };
    cap.args[0] = KVM_MSR_EXIT_REASON_FILTER.into();
    vm.enable_cap(&cap).operation("enable KVM_CAP_X86_USER_SPACE_MSR")?;

    let (registers, counters) = filtered(shown);
    let read_and_write = MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE;
    let ranges: Vec<_> = registers
        .iter()
        .map(|range| range.with(read_and_write))
        .chain(counters.iter().map(|range| range.with(MsrFilterRangeFlags::READ)))
        .collect();
    vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &ranges).operation("set the MSR filter")
}

/// Returns the MSRs whose reads and writes exit, and those of which only reads exit.
fn filtered(shown: Option<Vendor>) -> (Vec<Bitmap>, Vec<Bitmap>) {
    match shown {
        None => (bitmaps(&PMU_MSRS), Vec::new()),
        // AMD's PMU has no fixed counters, so their RDPMC numbers stay with KVM, which makes the access fault.
        Some(Vendor::Amd) => (bitmaps(&PMU_MSRS), reads(&RDPMC_MSRS[..1])),
        Some(Vendor::Intel) => {
            let mut registers = PMU_MSRS.to_vec();
            registers.push(DEBUGCTL..=DEBUGCTL);
            registers.sort_unstable_by_key(|range| *range.start());
            (bitmaps(&registers), reads(&RDPMC_MSRS))
        }
    }
}

/// Returns bitmaps for reads of counters: by RDPMC's counter numbers in the kernel, and in programs.
fn reads(counters: &[RangeInclusive<u32>]) -> Vec<Bitmap> {
    let mut ranges = counters.to_vec();
    ranges.push(PROGRAM_MSRS);
    ranges.sort_unstable_by_key(|range| *range.start());
    bitmaps(&ranges)
}

/// Returns whether RDPMC faults when KVM's own vPMU is switched off, so that a guest can handle the fault. Elsewhere it
/// reads 0:
/// - before Linux 5.18, where the vPMU cannot be switched off for one guest;
/// - on AMD's processors before Linux 6.8, where a vPMU that is switched off keeps its counters.
pub fn makes_rdpmc_fault(kvm: &Kvm, host: Option<Vendor>) -> bool {
    let is_off = kvm.check_extension_raw(KVM_CAP_PMU_CAPABILITY.into()) > 0
        || fs::read_to_string("/sys/module/kvm/parameters/enable_pmu")
            .is_ok_and(|enabled| enabled.trim() == "N");
    let release = rustix::system::uname();
    is_off && (host == Some(Vendor::Intel) || version(&release.release().to_string_lossy()) >= Some((6, 8)))
}

/// Returns the first two numbers of a kernel's release.
fn version(release: &str) -> Option<(u32, u32)> {
    let (major, rest) = release.split_once('.')?;
    let minor = rest.split(|digit: char| !digit.is_ascii_digit()).next()?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn disable_kvms_own(vm: &VmFd) -> Result<(), KvmError> {
    // The value is 0 if KVM has no vPMU or its `enable_pmu` is off, and also before Linux 5.18, which does not know the
    // capability. The vPMU of such an old KVM cannot be switched off. But accesses to its MSRs exit because of the
    // filter, and RDPMC, the only other way to access its counters, reads 0.
    if vm.check_extension_raw(KVM_CAP_PMU_CAPABILITY.into()) <= 0 {
        return Ok(());
    }
    let mut cap = kvm_enable_cap { cap: KVM_CAP_PMU_CAPABILITY, ..Default::default() };
    cap.args[0] = KVM_PMU_CAP_DISABLE.into();
    vm.enable_cap(&cap).operation("switch KVM's own vPMU off")
}

/// A bitmap over a range of MSRs. An access to an MSR with a clear bit exits.
struct Bitmap {
    base: u32,
    count: u32,
    bits: Vec<u8>,
}

impl Bitmap {
    /// Maximum number of MSRs in one range of a filter.
    const MAX: u32 = 0x600 * 8;

    fn with(&self, flags: MsrFilterRangeFlags) -> MsrFilterRange<'_> {
        MsrFilterRange { flags, base: self.base, msr_count: self.count, bitmap: &self.bits }
    }
}

/// Returns as few bitmaps as possible that cover the ranges, which must be in ascending order. A filter has at most
/// sixteen, and KVM searches them one after the other.
fn bitmaps(ranges: &[RangeInclusive<u32>]) -> Vec<Bitmap> {
    let mut bitmaps: Vec<Bitmap> = Vec::new();
    for range in ranges {
        if bitmaps.last().is_none_or(|bitmap| range.end() - bitmap.base >= Bitmap::MAX) {
            bitmaps.push(Bitmap { base: *range.start(), count: 0, bits: Vec::new() });
        }
        let bitmap = bitmaps.last_mut().expect("there is one now");
        bitmap.count = range.end() - bitmap.base + 1;
        // KVM requires whole 64-bit words, whatever the number of registers.
        bitmap.bits.resize(bitmap.count.div_ceil(64) as usize * 8, 0xff);
        for msr in range.clone() {
            let bit = msr - bitmap.base;
            bitmap.bits[bit as usize / 8] &= !(1 << (bit % 8));
        }
    }
    bitmaps
}

#[cfg(test)]
mod tests {
    use super::*;

    fn has(bitmaps: &[Bitmap], msr: u32) -> bool {
        bitmaps.iter().any(|map| {
            let bit = msr.wrapping_sub(map.base);
            bit < map.count && map.bits[bit as usize / 8] & 1 << (bit % 8) == 0
        })
    }

    #[test]
    fn accesses_to_every_pmu_register_exit_and_no_others() {
        for shown in [None, Some(Vendor::Amd), Some(Vendor::Intel)] {
            let (bitmaps, _) = filtered(shown);
            assert_eq!(bitmaps.len(), 3, "Intel's, and two of AMD's");
            for msr in (0..0x2_0000).chain(0xc000_0000..0xc001_2000) {
                let control = msr == DEBUGCTL && shown == Some(Vendor::Intel);
                assert_eq!(has(&bitmaps, msr), vpmu::x86::is_pmu_msr(msr) || control, "{msr:#x}");
            }
        }
    }

    #[test]
    fn reads_of_counters_by_rdpmc_exit_and_other_msrs_stay_with_kvm() {
        let (_, counters) = filtered(Some(Vendor::Intel));
        for number in [0, 7, 1 << 30, 3 | 1 << 30, 1 << 31, 3 << 30] {
            assert!(has(&counters, number), "{number:#x}");
        }
        let (_, amds) = filtered(Some(Vendor::Amd));
        assert!(has(&amds, 5) && !has(&amds, 1 << 30));
        assert_eq!((amds.len(), counters.len()), (2, 5), "one more for programs");
        for program in [0x5461_6c00, 0x5461_6c42, 0x5461_6c7f] {
            assert!(has(&amds, program) && has(&counters, program), "{program:#x}");
        }
        for msr in [0x10, 0x1b, 0x5461_6bff, 0x5461_6c80, 0xc000_0080, 0x4000_0010] {
            assert!(!has(&counters, msr), "{msr:#x}");
        }
    }

    #[test]
    fn releases_are_compared_as_numbers() {
        assert_eq!(version("6.12.43+deb13-amd64"), Some((6, 12)));
        assert_eq!(version("7.0-rc1"), Some((7, 0)));
        assert!(version("6.10.0") > version("6.8.0") && version("custom") < version("6.8"));
    }

    #[test]
    fn filters_have_sizes_that_kvm_accepts() {
        for shown in [None, Some(Vendor::Amd), Some(Vendor::Intel)] {
            let (registers, counters) = filtered(shown);
            assert!(registers.len() + counters.len() <= 16);
            for bitmap in registers.iter().chain(&counters) {
                assert!(bitmap.bits.len().is_multiple_of(8) && bitmap.bits.len() <= 0x600);
                assert!(bitmap.count as usize <= bitmap.bits.len() * 8);
            }
        }
    }
}
