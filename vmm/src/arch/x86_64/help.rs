//! What the command line's help says of these hosts alone.

/// What `--kernel` takes.
pub const KERNEL: &str = "vmlinux, bzImage or a multiboot image";

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

/// Whether there are commands for programs and a simulated host that only some architectures have.
pub const HAS_CHECK_AND_LAB: bool = true;
