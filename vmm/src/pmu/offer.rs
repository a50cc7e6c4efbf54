//! From what was asked for to what the host can give: the guest is never offered more counters than there are.

use vpmu::model::amd::{K7_COUNTERS, MOST_COUNTERS, Version};
use vpmu::source::perf::{Obstacle, free_counters};

use super::Pmu;

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// That of the host's vendor
    Auto,
    /// AMD's PMU with PerfMonV2, on any AMD host
    Amd,
    /// AMD's PMU without PerfMonV2
    AmdLegacy,
    /// KVM's own in-kernel vPMU, for comparison
    Kvm,
    /// No PMU: CPUID shows none, and its registers fault
    None,
}

/// What becomes of it.
#[derive(Debug, PartialEq, Eq)]
pub struct Offer {
    /// What the guest sees.
    pub pmu: Pmu,
    /// What the user should know about it, if anything.
    pub remark: Option<String>,
}

/// A PMU that cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// The host gives no counters.
    #[error("{0}; or run without a PMU: --pmu none")]
    Host(#[from] Obstacle),
    /// The host's processor is another vendor's.
    #[error("--pmu {0}: AMD's PMU needs an AMD host, and this one's processor is another vendor's")]
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
}

/// Finds out what the guest can be offered on this host.
pub fn offer(choice: Choice, counters: Option<u32>, amd_host: bool) -> Result<Offer, Unavailable> {
    let plain = |pmu| Offer { pmu, remark: None };
    let without =
        |why: String| Offer { pmu: Pmu::None, remark: Some(format!("{why}; the guest sees no PMU")) };
    match choice {
        Choice::None if counters.is_some() => Err(Unavailable::NotOurs("none")),
        Choice::Kvm if counters.is_some() => Err(Unavailable::NotOurs("kvm")),
        Choice::None => Ok(plain(Pmu::None)),
        Choice::Kvm => Ok(plain(Pmu::Kvm)),
        Choice::Amd if !amd_host => Err(Unavailable::Vendor("amd")),
        Choice::AmdLegacy if !amd_host => Err(Unavailable::Vendor("amd-legacy")),
        Choice::Auto if !amd_host => {
            Ok(without("there is no PMU of this host's vendor to show yet".to_owned()))
        }
        Choice::Auto => match free_counters(MOST_COUNTERS) {
            Ok(free) => of_amds(Choice::Amd, counters, free),
            Err(obstacle) if obstacle.is_for_good() && counters.is_none() => {
                Ok(without(obstacle.to_string()))
            }
            Err(obstacle) => Err(obstacle.into()),
        },
        Choice::Amd | Choice::AmdLegacy => of_amds(choice, counters, free_counters(MOST_COUNTERS)?),
    }
}

/// One of AMD's PMUs on a host that has so many counters free.
fn of_amds(choice: Choice, asked: Option<u32>, free: usize) -> Result<Offer, Unavailable> {
    let version = if choice == Choice::AmdLegacy { legacy(asked, free)? } else { newest(asked, free)? };
    let remark = (asked.is_none() && version.counters() < MOST_COUNTERS).then(|| {
        format!(
            "the guest gets {} counters of {MOST_COUNTERS}: this host has {free} free (`sudo sysctl kernel.nmi_watchdog=0` \
             frees the one of the NMI watchdog); Linux before 5.19 as a guest needs --pmu amd-legacy then",
            version.counters()
        )
    });
    Ok(Offer { pmu: Pmu::Amd(version), remark })
}

fn newest(asked: Option<u32>, free: usize) -> Result<Version, Unavailable> {
    let Some(asked) = asked else { return Ok(Version::V2(free)) };
    match usize::try_from(asked) {
        Ok(counters) if (1..=MOST_COUNTERS).contains(&counters) => {
            if counters > free {
                Err(Unavailable::Busy { asked, free })
            } else {
                Ok(Version::V2(counters))
            }
        }
        _ => Err(Unavailable::Model { asked, choice: "amd", has: "1 to 6" }),
    }
}

/// Without PerfMonV2 the number of counters is not told but known: six with the CPUID bit, four without.
fn legacy(asked: Option<u32>, free: usize) -> Result<Version, Unavailable> {
    let version = match asked {
        None if free >= MOST_COUNTERS => Version::Core,
        None if free >= K7_COUNTERS => Version::K7,
        None => return Err(Unavailable::TooFew(free)),
        Some(6) => Version::Core,
        Some(4) => Version::K7,
        Some(asked) => return Err(Unavailable::Model { asked, choice: "amd-legacy", has: "4 or 6" }),
    };
    match asked {
        Some(asked) if version.counters() > free => Err(Unavailable::Busy { asked, free }),
        _ => Ok(version),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(choice: Choice, asked: Option<u32>, free: usize) -> Version {
        match of_amds(choice, asked, free).unwrap().pmu {
            Pmu::Amd(version) => version,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_guest_gets_no_more_counters_than_the_host_has() {
        assert_eq!(version(Choice::Amd, None, 6), Version::V2(6));
        assert_eq!(version(Choice::Amd, None, 5), Version::V2(5));
        assert_eq!(version(Choice::Amd, Some(2), 5), Version::V2(2));
        assert_eq!(version(Choice::AmdLegacy, None, 6), Version::Core);
        assert_eq!(version(Choice::AmdLegacy, None, 5), Version::K7);
        assert_eq!(version(Choice::AmdLegacy, Some(4), 6), Version::K7);
    }

    #[test]
    fn fewer_counters_than_the_model_has_are_explained() {
        let remark = of_amds(Choice::Amd, None, 5).unwrap().remark.unwrap();
        assert!(remark.contains("5 counters of 6") && remark.contains("nmi_watchdog"), "{remark}");
        assert_eq!(of_amds(Choice::Amd, None, 6).unwrap().remark, None);
        assert_eq!(of_amds(Choice::Amd, Some(2), 5).unwrap().remark, None, "that was asked for");
    }

    #[test]
    fn more_counters_than_there_are_is_refused() {
        for (choice, asked, free, words) in [
            (Choice::Amd, Some(7), 6, "--pmu amd has 1 to 6"),
            (Choice::Amd, Some(0), 6, "--pmu amd has 1 to 6"),
            (Choice::Amd, Some(6), 5, "this host has 5 free"),
            (Choice::AmdLegacy, Some(5), 6, "4 or 6"),
            (Choice::AmdLegacy, Some(6), 5, "this host has 5 free"),
            (Choice::AmdLegacy, None, 3, "--pmu amd does with fewer"),
        ] {
            let refusal = of_amds(choice, asked, free).unwrap_err().to_string();
            assert!(refusal.contains(words) && !refusal.contains('\n'), "{refusal}");
        }
        assert!(offer(Choice::Kvm, Some(4), true).unwrap_err().to_string().contains("--pmu kvm"));
        assert!(offer(Choice::Amd, None, false).unwrap_err().to_string().contains("needs an AMD host"));
    }
}
