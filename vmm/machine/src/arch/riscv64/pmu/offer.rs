//! Determines the PMU that the host can offer. The guest is never offered more counters than the host has free.

pub mod saved;

use kvm_ioctls::Kvm;
use vpmu::event::GenericEvent;
use vpmu::model::riscv::Shape;
use vpmu::policy::Policy;
use vpmu_perf::{HostPmu, Obstacle, free_counters};

use super::super::host;
use super::super::isa;
use super::super::register::Register;
use super::{BackingPmu, Model, OVERFLOW, Offer, Pmu};
use crate::saved_counters::TooFew;

/// Maximum number of programmable counters, beside the two fixed ones.
const MAX: usize = 29;
/// What the two fixed counters count.
const FIXED: [GenericEvent; 2] = [GenericEvent::Cycles, GenericEvent::Instructions];

/// A value of `--pmu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// RISC-V's PMU, with the features that this host supports.
    Auto,
    /// RISC-V's PMU with overflow interrupts (Sscofpmf).
    Riscv,
    /// RISC-V's base PMU: cycle and instret, without an interrupt.
    RiscvBase,
    /// KVM's own in-kernel vPMU, for comparison.
    Kvm,
    /// No PMU. The SBI's PMU extension then has no counters.
    None,
}

/// Reason for [`Unavailable::NoModes`]. Without Sscofpmf Linux refuses events that exclude modes of the host
/// (`PERF_PMU_CAP_NO_EXCLUDE`).
const NO_MODES: &str = "this host's PMU cannot tell guests from the host, as its processor has no Sscofpmf";

/// Why this host cannot offer a PMU.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    #[error("{0}; or run without a PMU: --pmu none")]
    Host(Obstacle),
    #[error("{NO_MODES}; run without a PMU: --pmu none")]
    NoModes,
    /// The host cannot deliver overflow interrupts to the guest. Contains the reason.
    #[error("--pmu riscv needs overflow interrupts, and {0}: --pmu auto and --pmu riscv-base count without")]
    NoInterrupt(&'static str),
    #[error("the saved PMU cannot have been saved: the file was changed")]
    Saved,
    /// The guest was saved with overflow interrupts, and this host cannot deliver them. Contains the reason.
    #[error("the guest's PMU has overflow interrupts, and {0}")]
    SavedInterrupt(&'static str),
    /// The host has fewer free counters than a guest that was saved, and the policy does not allow that.
    #[error(transparent)]
    SavedBusy(#[from] TooFew),
    #[error("--counters {asked}: --pmu {choice} has {has}")]
    Model { asked: u32, choice: &'static str, has: &'static str },
    #[error("--counters {asked}: this host has {free} free")]
    Busy { asked: u32, free: usize },
    #[error("--counters is for Tally's own PMUs, not for --pmu {0}")]
    NotEmulated(&'static str),
    #[error("cannot keep the guest on the cores whose PMU counts: {0}")]
    Cores(std::io::Error),
}

impl Unavailable {
    /// Returns true if the user can do nothing about the reason on this host.
    fn is_for_good(&self) -> bool {
        match self {
            Self::Host(obstacle) => obstacle.is_permanent(),
            Self::NoModes => true,
            _ => false,
        }
    }

    /// Returns the reason, without advice.
    fn reason(&self) -> String {
        match self {
            Self::Host(obstacle) => obstacle.to_string(),
            Self::NoModes => NO_MODES.to_owned(),
            other => other.to_string(),
        }
    }
}

// Not by `#[from]`, which would make the obstacle a cause: an error is printed with its causes.
impl From<Obstacle> for Unavailable {
    fn from(obstacle: Obstacle) -> Self {
        Self::Host(obstacle)
    }
}

impl Choice {
    /// All choices, in the order in which messages list them.
    pub const ALL: [Self; 5] = [Self::Auto, Self::Riscv, Self::RiscvBase, Self::Kvm, Self::None];

    /// Returns true if Tally emulates this PMU.
    pub fn is_emulated(self) -> bool {
        !matches!(self, Self::Kvm | Self::None)
    }

    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Riscv => "riscv",
            Self::RiscvBase => "riscv-base",
            Self::Kvm => "kvm",
            Self::None => "none",
        }
    }
}

/// Determines the PMU that this host can offer the guest for a choice, a number of counters and a policy.
pub fn offer(choice: Choice, counters: Option<u32>, policy: &Policy) -> Result<Offer, Unavailable> {
    let plain = |pmu| Offer { pmu, remarks: Vec::new() };
    match choice {
        _ if !choice.is_emulated() && counters.is_some() => Err(Unavailable::NotEmulated(choice.name())),
        Choice::None => Ok(plain(Pmu::None)),
        Choice::Kvm => Ok(plain(Pmu::Kvm)),
        Choice::Auto | Choice::Riscv | Choice::RiscvBase => match emulated(choice, counters, policy) {
            Err(obstacle) if choice == Choice::Auto && obstacle.is_for_good() && counters.is_none() => {
                let remark = format!("{}; the guest sees no PMU", obstacle.reason());
                Ok(Offer { pmu: Pmu::None, remarks: vec![remark] })
            }
            found => found,
        },
    }
}

fn emulated(choice: Choice, counters: Option<u32>, policy: &Policy) -> Result<Offer, Unavailable> {
    let obstacle = check_host(choice != Choice::RiscvBase)?;
    let (pmu, binding) = HostPmu::bind_thread().map_err(Unavailable::Cores)?;
    if let (Choice::Riscv, Some(why)) = (choice, obstacle) {
        return Err(Unavailable::NoInterrupt(why));
    }
    let overflows = choice != Choice::RiscvBase && obstacle.is_none();
    // The two fixed counters need host counters too. If the other counters interrupt on overflow,
    // Linux does not use the fixed ones, whose overflows never interrupt.
    let fixed: &[_] = if overflows { &[] } else { &FIXED };
    let free = free_counters(pmu, 1, fixed, MAX).map_err(Obstacle::from)?;
    if free.fixed < fixed.len() {
        return Err(Unavailable::Host(Obstacle::NoneFree));
    }
    let remark =
        obstacle.map(|why| format!("{why}: the guest's PMU counts only, and cannot be sampled with"));
    let shape = Shape { programmable: programmable(choice, counters, free.general, policy)?, overflows };
    let remarks = binding.into_iter().chain(remark).collect();
    Ok(Offer { pmu: Pmu::Emulated(Model(shape), BackingPmu::new((), pmu)), remarks })
}

/// Checks that the host's PMU can back a guest's. Returns why its interrupts cannot be delivered, if they are wanted
/// and cannot.
fn check_host(wants_interrupts: bool) -> Result<Option<&'static str>, Unavailable> {
    if !host::has(isa::COUNTER_OVERFLOWS) {
        return Err(Unavailable::NoModes);
    }
    Ok(if wants_interrupts { no_interrupt() } else { None })
}

fn programmable(
    choice: Choice,
    asked: Option<u32>,
    free: usize,
    policy: &Policy,
) -> Result<usize, Unavailable> {
    if choice == Choice::RiscvBase {
        return match asked {
            None => Ok(0),
            Some(asked) => {
                Err(Unavailable::Model { asked, choice: choice.name(), has: "cycle and instret only" })
            }
        };
    }
    let Some(asked) = asked else { return Ok(policy.offered_counters(free).min(MAX)) };
    match usize::try_from(asked) {
        Ok(counters) if counters > free => Err(Unavailable::Busy { asked, free }),
        Ok(counters) if (1..=MAX).contains(&counters) => Ok(counters),
        _ => Err(Unavailable::Model { asked, choice: choice.name(), has: "1 to 29" }),
    }
}

/// Returns why overflow interrupts cannot be delivered to a guest, or `None` if they can. KVM has to accept the
/// overflow interrupt in `sip`, and to report this bit and no other as pending. Older kernels report another
/// interrupt instead.
fn no_interrupt() -> Option<&'static str> {
    const OLD: &str =
        "this host's KVM cannot give a guest the interrupt of its counters (a newer kernel can)";
    let takes = || {
        let vm = Kvm::new().ok()?.create_vm().ok()?;
        let fd = vm.create_vcpu(0).ok()?;
        Register::SIP.set(&fd, OVERFLOW).ok()?;
        let waits = Register::SIP.get(&fd).ok()?;
        Some(waits == OVERFLOW && isa::extensions(&fd).contains(&isa::COUNTER_OVERFLOWS))
    };
    (takes() != Some(true)).then_some(OLD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_gets_no_more_counters_than_the_host_has() {
        let policy = Policy::default();
        let programmable = |choice, asked, free| programmable(choice, asked, free, &policy);
        assert_eq!(programmable(Choice::Auto, None, 40).unwrap(), MAX);
        assert_eq!(programmable(Choice::Riscv, None, 4).unwrap(), 4);
        assert_eq!(programmable(Choice::RiscvBase, None, 4).unwrap(), 0);
        let spare = Policy { spare_counters: 1, ..policy.clone() };
        assert_eq!(super::programmable(Choice::Riscv, None, 4, &spare).unwrap(), 3);
        let refusal = programmable(Choice::Riscv, Some(5), 4).unwrap_err().to_string();
        assert_eq!(refusal, "--counters 5: this host has 4 free");
    }
}
