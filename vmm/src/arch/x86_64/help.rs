//! Help texts for x86-64 hosts.

use tally_machine::pmu::Choice;

/// What `--kernel` takes.
pub const KERNEL: &str = "bzImage, vmlinux, multiboot, or a built tree";

/// What `--pmu` takes, a line each.
pub const PMUS: &str = "
  auto         the PMU of the host's vendor
  amd          AMD's, with PerfMonV2
  amd-legacy   AMD's, without PerfMonV2
  intel        Intel's architectural PMU, version 5
  intel-v2     Intel's architectural PMU, version 2
  kvm          KVM's own in-kernel vPMU, for comparison
  none         none: CPUID shows none, and its registers fault
";

/// Returns a PMU's description for completions and manual pages.
pub fn of_pmu(choice: Choice) -> &'static str {
    match choice {
        Choice::Auto => "That of the host's vendor",
        Choice::Amd => "AMD's PMU with PerfMonV2",
        Choice::AmdLegacy => "AMD's PMU without PerfMonV2",
        Choice::Intel => "Intel's architectural PMU, version 5",
        Choice::IntelV2 => "Intel's architectural PMU, version 2",
        Choice::Kvm => "KVM's own in-kernel vPMU, for comparison",
        Choice::None => "No PMU: CPUID shows none, and its registers fault",
    }
}
