//! Facts about an x86-64 host's processor.

use std::arch::x86_64::__cpuid;
use std::fs;

use crate::arch::value;
use crate::host::fact::Fact;

/// Where a build leaves a kernel in its tree.
pub const IMAGE_IN_TREE: &str = "arch/x86/boot/bzImage";

/// Returns the facts about the processor.
pub fn facts() -> Vec<Fact> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let mut facts = vec![virtualisation(&cpuinfo, hidden_by_firmware())];
    facts.extend(is_guest(&cpuinfo).then(|| {
        Fact::note(
            "machine",
            "this host is itself a virtual machine: its counters are what its own host gives it",
        )
    }));
    facts
}

/// Describes the first processor: its name, family, model, stepping and microcode.
pub fn processor() -> String {
    described(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

/// Returns true if CPUID reports hardware virtualisation. Linux hides the flag in `/proc/cpuinfo` if the firmware has
/// disabled it.
fn hidden_by_firmware() -> bool {
    const VMX: u32 = 1 << 5;
    const SVM: u32 = 1 << 2;
    __cpuid(1).ecx & VMX != 0 || __cpuid(0x8000_0001).ecx & SVM != 0
}

fn has(cpuinfo: &str, flag: &str) -> bool {
    value(cpuinfo, "flags").split(' ').any(|word| word == flag)
}

fn is_guest(cpuinfo: &str) -> bool {
    has(cpuinfo, "hypervisor")
}

fn virtualisation(cpuinfo: &str, is_hidden: bool) -> Fact {
    let about = "processor";
    let processor = described(cpuinfo);
    let vendor = match value(cpuinfo, "vendor_id") {
        "AuthenticAMD" | "HygonGenuine" => "AMD's",
        "GenuineIntel" => "Intel's",
        other => other,
    };
    let advice = match (is_hidden, is_guest(cpuinfo)) {
        (true, _) => {
            "which it has: the firmware has switched it off, and its settings can switch it on (SVM, VT-x)"
        }
        (false, true) => {
            "for the host of this virtual machine does not allow nested ones; there: `sudo modprobe kvm-amd nested=1` or `sudo modprobe kvm-intel nested=1`"
        }
        (false, false) => "or the firmware hides it: look in its settings (SVM, VT-x)",
    };
    match (has(cpuinfo, "svm"), has(cpuinfo, "vmx")) {
        (true, _) => Fact::good(about, format!("{processor}, {vendor}, with AMD-V, enabled by the firmware")),
        (_, true) => Fact::good(about, format!("{processor}, {vendor}, with VT-x, enabled by the firmware")),
        _ => Fact::bad(about, format!("{processor}, {vendor}, without hardware virtualisation, {advice}")),
    }
}

fn described(cpuinfo: &str) -> String {
    format!(
        "{} (family {}, model {}, stepping {}, microcode {})",
        value(cpuinfo, "model name"),
        value(cpuinfo, "cpu family"),
        value(cpuinfo, "model"),
        value(cpuinfo, "stepping"),
        value(cpuinfo, "microcode")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::fact::State;

    const CPUINFO: &str =
        "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 151\nmodel name\t: A core\nstepping\t: 2\n";

    #[test]
    fn a_processor_is_named_with_its_numbers() {
        assert_eq!(described(CPUINFO), "A core (family 6, model 151, stepping 2, microcode ?)");
    }

    #[test]
    fn virtualisation_is_found_by_its_flag() {
        let says =
            |flags: &str, hidden| virtualisation(&format!("{CPUINFO}flags\t\t: fpu {flags} lm\n"), hidden);
        assert!(
            says("svm", true).says.contains("with AMD-V") && says("vmx", true).says.contains("with VT-x")
        );
        assert_eq!(says("svm_lock", false).state, State::Bad);
    }

    #[test]
    fn missing_virtualisation_comes_with_advice_on_how_to_enable_it() {
        let says =
            |flags: &str, hidden| virtualisation(&format!("{CPUINFO}flags\t\t: {flags}\n"), hidden).says;
        assert!(says("fpu", true).contains("the firmware has switched it off"));
        assert!(says("fpu hypervisor", false).contains("nested=1"));
        assert!(says("fpu", false).contains("look in its settings"));
    }
}
