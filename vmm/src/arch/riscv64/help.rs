//! What the command line's help says of these hosts alone.

/// What `--kernel` takes.
pub const KERNEL: &str = "An Image, also packed by gzip or as an EFI program";

/// What `--pmu` takes, a line each.
pub const PMUS: &str = "
  auto         RISC-V's PMU, as far as this host has it
  riscv        RISC-V's, with overflow interrupts (Sscofpmf)
  riscv-base   cycle and instret alone, which count and do not interrupt
  kvm          KVM's own in-kernel vPMU, for comparison
  none         one without counters
";

/// Whether there are commands for programs and a simulated host that only some architectures have.
pub const HAS_CHECK_AND_LAB: bool = false;
