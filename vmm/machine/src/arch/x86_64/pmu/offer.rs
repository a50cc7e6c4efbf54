//! From what was asked for to what the host can give: the guest is never offered more counters than there are.

mod amd;
mod intel;

use vpmu::model::intel::Version;
use vpmu::policy::Policy;
use vpmu::x86::Vendor;
use vpmu_perf::{HostPmu, Obstacle};

use super::{Host, Offer, Pmu, Shown};

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// That of the host's vendor.
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

/// A PMU that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// The host gives no counters.
    #[error("{0}; or run without a PMU: --pmu none")]
    Host(#[from] Obstacle),
    /// Nobody knows the host's events.
    #[error("--pmu {0} needs a processor of AMD's or Intel's, and this host's is another vendor's")]
    Vendor(&'static str),
    /// More than the model has.
    #[error("--counters {asked}: --pmu {choice} has {has}")]
    Model {
        /// What was asked for.
        asked: u32,
        /// Of which PMU.
        choice: &'static str,
        /// What is possible.
        has: &'static str,
    },
    /// More than the host has.
    #[error(
        "--counters {asked}: this host has {free} free (`sudo sysctl kernel.nmi_watchdog=0` frees the one of the NMI watchdog)"
    )]
    Busy {
        /// What was asked for.
        asked: u32,
        /// What there is.
        free: usize,
    },
    /// The older models have a fixed number of counters.
    #[error(
        "--pmu amd-legacy has at least 4 counters, and this host has {0} free: --pmu amd does with fewer"
    )]
    TooFew(usize),
    /// A number of counters for a PMU that has none of ours.
    #[error("--counters is for Tally's own PMUs, not for --pmu {0}")]
    NotOurs(&'static str),
    /// The threads cannot stay where the counters are.
    #[error("cannot keep the guest on the cores whose PMU counts: {0}")]
    Cores(std::io::Error),
}

impl Choice {
    /// All that there are, in the order in which users are told of them.
    pub const ALL: [Self; 7] =
        [Self::Auto, Self::Amd, Self::AmdLegacy, Self::Intel, Self::IntelV2, Self::Kvm, Self::None];

    /// Whether that is a PMU of Tally's.
    pub fn is_ours(self) -> bool {
        !matches!(self, Self::Kvm | Self::None)
    }

    /// Its name.
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

/// Finds out what the guest can be offered on a host whose processor is of that vendor, if it is of one whose PMUs are known.
pub fn offer(
    choice: Choice,
    counters: Option<u32>,
    vendor: Option<Vendor>,
    policy: &Policy,
) -> Result<Offer, Unavailable> {
    let plain = |pmu| Offer { pmu, remarks: Vec::new() };
    let without =
        |why: String| Offer { pmu: Pmu::None, remarks: vec![format!("{why}; the guest sees no PMU")] };
    match (choice, vendor) {
        _ if !choice.is_ours() && counters.is_some() => Err(Unavailable::NotOurs(choice.name())),
        (Choice::None, _) => Ok(plain(Pmu::None)),
        (Choice::Kvm, _) => Ok(plain(Pmu::Kvm)),
        (Choice::Auto, None) => Ok(without("this host's processor is neither AMD's nor Intel's".to_owned())),
        (_, None) => Err(Unavailable::Vendor(choice.name())),
        (Choice::Auto, Some(vendor)) => {
            let own = match vendor {
                Vendor::Amd => Choice::Amd,
                Vendor::Intel => Choice::Intel,
            };
            match of_ours(own, counters, vendor, policy) {
                Err(Unavailable::Host(obstacle)) if obstacle.is_permanent() && counters.is_none() => {
                    Ok(without(obstacle.to_string()))
                }
                found => found,
            }
        }
        (_, Some(vendor)) => of_ours(choice, counters, vendor, policy),
    }
}

fn of_ours(
    choice: Choice,
    counters: Option<u32>,
    vendor: Vendor,
    policy: &Policy,
) -> Result<Offer, Unavailable> {
    let (pmu, stays) = HostPmu::bind_thread().map_err(Unavailable::Cores)?;
    let host = Host { vendor, pmu };
    let (shown, remark) = match choice {
        Choice::Intel => intel::shown(Version::V5, choice.name(), counters, host, policy)?,
        Choice::IntelV2 => intel::shown(Version::V2, choice.name(), counters, host, policy)?,
        _ => amd::shown(choice, counters, host)?,
    };
    let meaningless = policy.names_without_meaning(shown.vendor()).map(|name| {
        format!("the policy allows {name}, which no event of this PMU is called: allow its encoding, if it has one")
    });
    let remarks = stays.into_iter().chain(remark).chain(meaningless).collect();
    Ok(Offer { pmu: Pmu::Emulated(shown, host), remarks })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_of_counters_is_for_pmus_of_ours() {
        for (choice, words) in [(Choice::Kvm, "--pmu kvm"), (Choice::None, "--pmu none")] {
            let refusal =
                offer(choice, Some(4), Some(Vendor::Amd), &Policy::default()).unwrap_err().to_string();
            assert!(refusal.contains(words), "{refusal}");
        }
    }

    #[test]
    fn a_processor_whose_events_nobody_knows_counts_nothing() {
        let refusal = offer(Choice::Intel, None, None, &Policy::default()).unwrap_err().to_string();
        assert!(refusal.contains("--pmu intel needs"), "{refusal}");
        let offer = offer(Choice::Auto, None, None, &Policy::default()).unwrap();
        assert_eq!(offer.pmu, Pmu::None);
        assert!(offer.remarks[0].contains("neither AMD's nor Intel's"), "{:?}", offer.remarks);
    }
}
