//! Chooses the guest's PMU from the user's options and the host's free counters. A guest never gets more counters than
//! the host has free.

mod amd;
mod intel;
mod saved;

use vpmu::model::intel::Version;
use vpmu::policy::Policy;
use vpmu::x86::Vendor;
use vpmu_perf::{HostPmu, Obstacle, watchdog_hint};

use super::{BackingPmu, Model, Offer, Pmu};
use crate::saved_counters::TooFew;

pub use saved::offer as saved;

/// The user's choice of a PMU (`--pmu`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// The newest emulated PMU of the host's vendor.
    Auto,
    /// AMD's PMU with PerfMonV2.
    Amd,
    /// AMD's PMU without PerfMonV2.
    AmdLegacy,
    /// Intel's architectural PMU, version 5.
    Intel,
    /// Intel's architectural PMU, version 2.
    IntelV2,
    /// KVM's own in-kernel vPMU, for comparison.
    Kvm,
    /// No PMU: CPUID shows none, and its registers fault.
    None,
}

/// Reason why the requested PMU is not available.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    #[error("{0}; or run without a PMU: --pmu none")]
    Host(Obstacle),
    #[error("--pmu {0} needs a processor of AMD's or Intel's, and this host's is another vendor's")]
    Vendor(&'static str),
    #[error("--counters {asked}: --pmu {choice} has {has}")]
    Model { asked: u32, choice: &'static str, has: &'static str },
    #[error("--counters {asked}: this host has {free} free{}", watchdog_hint())]
    Busy {
        asked: u32,
        /// Number of the host's free counters.
        free: usize,
    },
    /// The older models have a fixed number of counters, and the host has fewer free.
    #[error(
        "--pmu amd-legacy has at least 4 counters, and this host has {0} free: --pmu amd does with fewer"
    )]
    TooFew(usize),
    #[error("--counters is for Tally's own PMUs, not for --pmu {0}")]
    NotEmulated(&'static str),
    /// The host has fewer free counters than a guest that was saved, and the policy does not allow that.
    #[error(transparent)]
    SavedBusy(#[from] TooFew),
    /// The guest was saved on a host that could count these events, as masks of CPUID leaf 0xa.
    #[error("the guest was saved on a host that counts architectural events that this one does not: {0:#x}")]
    SavedEvents(u32),
    #[error("the saved PMU cannot have been saved: the file was changed")]
    Saved,
    #[error("cannot keep the guest on the cores whose PMU counts: {0}")]
    Cores(std::io::Error),
}

// Not by `#[from]`, which would make the obstacle a cause: an error is printed with its causes.
impl From<Obstacle> for Unavailable {
    fn from(obstacle: Obstacle) -> Self {
        Self::Host(obstacle)
    }
}

impl Choice {
    /// All choices, in the order of the help text.
    pub const ALL: [Self; 7] =
        [Self::Auto, Self::Amd, Self::AmdLegacy, Self::Intel, Self::IntelV2, Self::Kvm, Self::None];

    /// Returns true if Tally emulates this PMU.
    pub fn is_emulated(self) -> bool {
        !matches!(self, Self::Kvm | Self::None)
    }

    /// Returns the choice's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Amd => "amd",
            Self::AmdLegacy => "amd-legacy",
            Self::Intel => "intel",
            Self::IntelV2 => "intel-v2",
            Self::Kvm => "kvm",
            Self::None => "none",
        }
    }
}

/// Chooses the guest's PMU on a host whose processor is of this vendor, or of another one (`None`). Returns the reason
/// if the choice is not available.
pub fn offer(
    choice: Choice,
    counters: Option<u32>,
    vendor: Option<Vendor>,
    policy: &Policy,
) -> Result<Offer, Unavailable> {
    let plain = |pmu| Offer { pmu, remarks: Vec::new() };
    let without_pmu =
        |why: String| Offer { pmu: Pmu::None, remarks: vec![format!("{why}; the guest sees no PMU")] };
    match (choice, vendor) {
        _ if !choice.is_emulated() && counters.is_some() => Err(Unavailable::NotEmulated(choice.name())),
        (Choice::None, _) => Ok(plain(Pmu::None)),
        (Choice::Kvm, _) => Ok(plain(Pmu::Kvm)),
        (Choice::Auto, None) => {
            Ok(without_pmu("this host's processor is neither AMD's nor Intel's".to_owned()))
        }
        (_, None) => Err(Unavailable::Vendor(choice.name())),
        (Choice::Auto, Some(vendor)) => {
            let own = match vendor {
                Vendor::Amd => Choice::Amd,
                Vendor::Intel => Choice::Intel,
            };
            match emulated(own, counters, vendor, policy) {
                Err(Unavailable::Host(obstacle)) if obstacle.is_permanent() && counters.is_none() => {
                    Ok(without_pmu(obstacle.to_string()))
                }
                found => found,
            }
        }
        (_, Some(vendor)) => emulated(choice, counters, vendor, policy),
    }
}

/// Chooses the version and counters of an emulated PMU, and binds this thread to the cores whose PMU counts.
fn emulated(
    choice: Choice,
    counters: Option<u32>,
    vendor: Vendor,
    policy: &Policy,
) -> Result<Offer, Unavailable> {
    let (pmu, stays) = HostPmu::bind_thread().map_err(Unavailable::Cores)?;
    let host = BackingPmu::new(vendor, pmu);
    let (model, remark) = match choice {
        Choice::Intel => intel::model(Version::V5, choice.name(), counters, host, policy)?,
        Choice::IntelV2 => intel::model(Version::V2, choice.name(), counters, host, policy)?,
        _ => amd::model(choice, counters, host, policy)?,
    };
    let unknown_names = policy.unknown_event_names(model.vendor()).map(|name| {
        format!("the policy allows {name}, but this PMU has no event of that name: allow its encoding, if it has one")
    });
    let remarks = stays.into_iter().chain(remark).chain(unknown_names).collect();
    Ok(Offer { pmu: Pmu::Emulated(model, host), remarks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_counters_is_refused_for_pmus_that_tally_does_not_emulate() {
        for (choice, words) in [(Choice::Kvm, "--pmu kvm"), (Choice::None, "--pmu none")] {
            let refusal =
                offer(choice, Some(4), Some(Vendor::Amd), &Policy::default()).unwrap_err().to_string();
            assert!(refusal.contains(words), "{refusal}");
        }
    }

    #[test]
    fn a_processor_of_an_unknown_vendor_has_no_pmu() {
        let refusal = offer(Choice::Intel, None, None, &Policy::default()).unwrap_err().to_string();
        assert!(refusal.contains("--pmu intel needs"), "{refusal}");
        let offer = offer(Choice::Auto, None, None, &Policy::default()).unwrap();
        assert_eq!(offer.pmu, Pmu::None);
        assert!(offer.remarks[0].contains("neither AMD's nor Intel's"), "{:?}", offer.remarks);
    }
}
