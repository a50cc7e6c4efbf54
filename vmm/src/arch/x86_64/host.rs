//! The processor that the host has.

use std::arch::x86_64::__cpuid;
use std::{fmt, fs};

use kvm_ioctls::Kvm;
use vpmu::x86::Vendor;

use super::cpuid;
use crate::doctor::fact::Fact;
use crate::kvm::KvmError;
use crate::pmu::Pmu;

/// A processor, as far as PMUs go: its vendor, if it is one whose PMUs are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Processor(pub Option<Vendor>);

impl Processor {
    /// The host's.
    pub fn of(kvm: &Kvm) -> Result<Self, KvmError> {
        cpuid::host_vendor(kvm).map(Self)
    }

    /// What a kernel has to be told of its processor.
    pub fn kernel_words(self, pmu: Pmu) -> Option<&'static str> {
        cpuid::kernel_words(self.0, pmu.identity())
    }
}

impl fmt::Display for Processor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Some(Vendor::Amd) => "AMD's processor",
            Some(Vendor::Intel) => "Intel's processor",
            None => "another vendor's processor",
        })
    }
}

/// What there is to know of it.
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

/// The first processor: its name, and the numbers by which it is known.
pub fn processor() -> String {
    described(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

/// Whether the processor itself says that it can, whatever the kernel makes of it: Linux hides the flag of what the
/// firmware has switched off.
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
    let maker = match value(cpuinfo, "vendor_id") {
        "AuthenticAMD" | "HygonGenuine" => "AMD's",
        "GenuineIntel" => "Intel's",
        other => other,
    };
    let mend = match (is_hidden, is_guest(cpuinfo)) {
        (true, _) => {
            "which it has: the firmware has switched it off, and its settings can switch it on (SVM, VT-x)"
        }
        (false, true) => {
            "for the host of this virtual machine does not allow nested ones; there: `sudo modprobe kvm-amd nested=1` or `sudo modprobe kvm-intel nested=1`"
        }
        (false, false) => "or the firmware hides it: look in its settings (SVM, VT-x)",
    };
    match (has(cpuinfo, "svm"), has(cpuinfo, "vmx")) {
        (true, _) => Fact::good(about, format!("{processor}, {maker}, with AMD-V, enabled by the firmware")),
        (_, true) => Fact::good(about, format!("{processor}, {maker}, with VT-x, enabled by the firmware")),
        _ => Fact::bad(about, format!("{processor}, {maker}, without hardware virtualisation, {mend}")),
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

/// What the first processor has for a key.
fn value<'a>(cpuinfo: &'a str, key: &str) -> &'a str {
    let mut fields = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    fields.find(|(name, _)| name.trim() == key).map_or("?", |(_, value)| value.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::fact::State;

    const CPUINFO: &str =
        "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 151\nmodel name\t: A core\nstepping\t: 2\n";

    #[test]
    fn a_processor_is_named_with_its_numbers() {
        assert_eq!(described(CPUINFO), "A core (family 6, model 151, stepping 2, microcode ?)");
    }

    #[test]
    fn virtualisation_is_known_by_its_flag() {
        let says =
            |flags: &str, hidden| virtualisation(&format!("{CPUINFO}flags\t\t: fpu {flags} lm\n"), hidden);
        assert!(
            says("svm", true).says.contains("with AMD-V") && says("vmx", true).says.contains("with VT-x")
        );
        assert_eq!(says("svm_lock", false).state, State::Bad);
    }

    #[test]
    fn where_virtualisation_is_lacking_it_is_told_who_could_switch_it_on() {
        let says =
            |flags: &str, hidden| virtualisation(&format!("{CPUINFO}flags\t\t: {flags}\n"), hidden).says;
        assert!(says("fpu", true).contains("the firmware has switched it off"));
        assert!(says("fpu hypervisor", false).contains("nested=1"));
        assert!(says("fpu", false).contains("look in its settings"));
    }
}
