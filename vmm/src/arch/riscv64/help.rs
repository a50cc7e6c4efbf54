//! Help texts for RISC-V hosts.

use tally_machine::pmu::Choice;

/// What `--kernel` takes.
pub const KERNEL: &str = "An Image, packed, as an EFI program, or a built tree";

/// What `--pmu` takes, a line each.
pub const PMUS: &str = "
  auto         RISC-V's PMU, as far as this host has it
  riscv        RISC-V's, with overflow interrupts (Sscofpmf)
  riscv-base   cycle and instret alone, which count and do not interrupt
  kvm          KVM's own in-kernel vPMU, for comparison
  none         no PMU: the SBI reports no counters
";

/// Returns a PMU's description for completions and manual pages.
pub fn of_pmu(choice: Choice) -> &'static str {
    match choice {
        Choice::Auto => "RISC-V's PMU, as far as this host has it",
        Choice::Riscv => "RISC-V's PMU with overflow interrupts (Sscofpmf)",
        Choice::RiscvBase => "RISC-V's base PMU: cycle and instret, without an interrupt",
        Choice::Kvm => "KVM's own in-kernel vPMU, for comparison",
        Choice::None => "No PMU: the SBI reports no counters",
    }
}
