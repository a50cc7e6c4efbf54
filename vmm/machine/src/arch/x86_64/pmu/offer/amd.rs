//! Chooses the version and the number of counters of AMD's PMUs.

use vpmu::model::amd::{K7_COUNTERS, MAX_COUNTERS, Version};
use vpmu::policy::Policy;
use vpmu_perf::{Obstacle, free_counters, watchdog_hint};

use super::{BackingPmu, Choice, Model, Unavailable};

/// Returns the PMU to emulate, and a remark for the user if there is one.
pub fn model(
    choice: Choice,
    asked: Option<u32>,
    host: BackingPmu,
    policy: &Policy,
) -> Result<(Model, Option<String>), Unavailable> {
    let free = free_counters(host.pmu, MAX_COUNTERS, &[], MAX_COUNTERS).map_err(Obstacle::from)?.general;
    of(choice, asked, free, policy).map(|(version, remark)| (Model::Amd(version), remark))
}

/// Returns the version for a host with `free` counters, and a remark for the user if the policy is not the reason for
/// fewer than the model could have.
fn of(
    choice: Choice,
    asked: Option<u32>,
    free: usize,
    policy: &Policy,
) -> Result<(Version, Option<String>), Unavailable> {
    let offered = if asked.is_none() { policy.offered_counters(free) } else { free };
    let version = if choice == Choice::AmdLegacy { legacy(asked, offered)? } else { newest(asked, offered)? };
    let is_policys = offered < free && free == MAX_COUNTERS;
    let remark = (asked.is_none() && !is_policys && version.counters() < MAX_COUNTERS).then(|| {
        format!(
            "the guest gets {} counters of {MAX_COUNTERS}: this host has {free} free{}; Linux before 5.19 as a guest \
             needs --pmu amd-legacy then",
            version.counters(),
            watchdog_hint()
        )
    });
    Ok((version, remark))
}

fn newest(asked: Option<u32>, free: usize) -> Result<Version, Unavailable> {
    let Some(asked) = asked else { return Ok(Version::V2(free)) };
    match usize::try_from(asked) {
        Ok(counters) if (1..=MAX_COUNTERS).contains(&counters) => {
            if counters > free {
                Err(Unavailable::Busy { asked, free })
            } else {
                Ok(Version::V2(counters))
            }
        }
        _ => Err(Unavailable::Model { asked, choice: "amd", has: "1 to 6" }),
    }
}

/// Returns the version without PerfMonV2. CPUID then does not report the number of counters: there are six with the
/// CPUID bit `PerfCtrExtCore`, and four without it.
fn legacy(asked: Option<u32>, free: usize) -> Result<Version, Unavailable> {
    let version = match asked {
        None if free >= MAX_COUNTERS => Version::Core,
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
        of(choice, asked, free, &Policy::default()).unwrap().0
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
        let remark_of = |asked, free| of(Choice::Amd, asked, free, &Policy::default()).unwrap().1;
        let remark = remark_of(None, 5).unwrap();
        assert!(remark.contains("5 counters of 6: this host has 5 free"), "{remark}");
        assert_eq!(remark_of(None, 6), None);
        assert_eq!(remark_of(Some(2), 5), None, "that was asked for");
    }

    #[test]
    fn a_policy_leaves_counters_to_the_host_unless_a_number_is_asked_for() {
        let spare = |choice, asked, free| {
            of(choice, asked, free, &Policy { spare_counters: 1, ..Policy::default() }).unwrap()
        };
        assert_eq!(spare(Choice::Amd, None, 6), (Version::V2(5), None));
        assert_eq!(spare(Choice::Amd, Some(6), 6), (Version::V2(6), None));
        assert_eq!(spare(Choice::AmdLegacy, None, 6), (Version::K7, None));
        assert_eq!(spare(Choice::Amd, None, 1).0, Version::V2(1), "one at least");
        let (version, remark) = spare(Choice::Amd, None, 5);
        assert_eq!((version, remark.is_some()), (Version::V2(4), true), "somebody else has one, too");
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
            let refusal = of(choice, asked, free, &Policy::default()).unwrap_err().to_string();
            assert!(refusal.contains(words) && !refusal.contains('\n'), "{refusal}");
        }
    }
}
