//! Chooses the number of counters of Intel's PMU, and the architectural events that CPUID reports.

use std::arch::x86_64::__cpuid;

use vpmu::model::intel::{ARCHITECTURAL_EVENTS, FIXED, MAX_GENERAL, Shape, Version};
use vpmu::policy::Policy;
use vpmu::translation::Translation;
use vpmu::x86::Vendor;
use vpmu_perf::{Free, Obstacle, exists, free_counters, watchdog_hint};

use super::{BackingPmu, Model, Unavailable};

/// Returns the PMU to emulate, and a remark for the user if there is one.
pub fn model(
    version: Version,
    choice: &'static str,
    asked: Option<u32>,
    host: BackingPmu,
    policy: &Policy,
) -> Result<(Model, Option<String>), Unavailable> {
    let wanted = wanted(choice, asked)?;
    // Fixed counters count their events as well as general ones, and with less overhead for the guest. At least one
    // general counter is required.
    let free = free_counters(host.pmu, wanted.unwrap_or(1), &FIXED, wanted.unwrap_or(MAX_GENERAL))
        .map_err(Obstacle::from)?;
    let shape = of(version, asked, free, absent_events(host), policy)?;
    let hint = watchdog_hint();
    let remark = (asked.is_none() && !hint.is_empty()).then(|| {
        format!("the guest gets {} general counters and {} fixed ones{hint}", shape.general, shape.fixed)
    });
    Ok((Model::Intel(shape), remark))
}

/// Returns the requested number of general counters, or `None` if the user did not request one.
fn wanted(choice: &'static str, asked: Option<u32>) -> Result<Option<usize>, Unavailable> {
    let Some(asked) = asked else { return Ok(None) };
    match usize::try_from(asked) {
        Ok(counters) if (1..=MAX_GENERAL).contains(&counters) => Ok(Some(counters)),
        _ => Err(Unavailable::Model { asked, choice, has: "1 to 8" }),
    }
}

/// Returns the PMU's shape for a host with these free counters and absent events.
fn of(
    version: Version,
    asked: Option<u32>,
    free: Free,
    absent: u32,
    policy: &Policy,
) -> Result<Shape, Unavailable> {
    let general = match asked {
        Some(asked) if usize::try_from(asked).is_ok_and(|asked| asked > free.general) => {
            return Err(Unavailable::Busy { asked, free: free.general });
        }
        Some(_) => free.general,
        None => policy.offered_counters(free.general),
    };
    Ok(Shape { version, general, fixed: free.fixed, absent: absent | denied_events(policy) })
}

/// Returns a bit for each architectural event that the host cannot count.
pub fn absent_events(host: BackingPmu) -> u32 {
    if host.vendor == Vendor::Intel {
        let leaf = __cpuid(Shape::FUNCTION);
        return absent_of_leaf(leaf.eax, leaf.ebx);
    }
    let translation = Translation { guest: Vendor::Intel, host: host.vendor };
    absent_where(|event| exists(host.pmu, translation.event(event)))
}

/// Returns a bit for each architectural event that the policy denies.
fn denied_events(policy: &Policy) -> u32 {
    absent_where(|event| policy.allows(Vendor::Intel, event))
}

/// Returns a bit for each architectural event that an Intel processor's leaf 0xa reports as absent. A bit set in EBX
/// means that the event is absent. EAX has the number of valid bits in EBX, and the events beyond them are absent, too.
fn absent_of_leaf(eax: u32, ebx: u32) -> u32 {
    let [.., reported] = eax.to_le_bytes();
    let mut bits = 0..;
    absent_where(|_| bits.next().is_some_and(|bit| bit < reported && ebx & 1 << bit == 0))
}

/// Returns a bit for each architectural event for which `is_there` returns false.
fn absent_where(mut is_there: impl FnMut(u64) -> bool) -> u32 {
    let events = (0..).zip(ARCHITECTURAL_EVENTS);
    events.fold(0, |absent, (bit, event)| absent | u32::from(!is_there(event)) << bit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vpmu::policy::{Allowed, Tier};

    #[test]
    fn the_guest_gets_the_hosts_free_fixed_counters_beside_the_general_ones() {
        let free = Free { general: 4, fixed: 2 };
        let shape = Shape { version: Version::V5, general: 4, fixed: 2, absent: 0 };
        let of = |asked, policy: &Policy| of(Version::V5, asked, free, 0, policy).unwrap();
        let spare = Policy { spare_counters: 1, ..Policy::default() };
        assert_eq!(of(None, &Policy::default()), shape);
        assert_eq!(of(Some(4), &spare), shape);
        assert_eq!(of(None, &spare), Shape { general: 3, ..shape }, "the policy leaves one to the host");
    }

    #[test]
    fn more_counters_than_there_are_is_refused() {
        let free = Free { general: 4, fixed: 0 };
        let refusal = of(Version::V5, Some(5), free, 0, &Policy::default()).unwrap_err().to_string();
        assert!(refusal.contains("--counters 5: this host has 4 free"), "{refusal}");
        for asked in [0, 9] {
            let refusal = wanted("intel", Some(asked)).unwrap_err().to_string();
            assert!(refusal.contains("--pmu intel has 1 to 8"), "{refusal}");
        }
    }

    #[test]
    fn events_that_the_policy_denies_are_absent() {
        assert_eq!(denied_events(&Policy::default()), 0);
        let architectural = Policy { allowed: Allowed::Tier(Tier::Architectural), ..Policy::default() };
        assert_eq!(denied_events(&architectural), 0x18, "those of the last-level cache");
        let one = Policy { allowed: Allowed::These(vec!["branches".parse().unwrap()]), ..Policy::default() };
        assert_eq!(denied_events(&one), 0x5f);
    }

    #[test]
    fn events_that_the_processor_does_not_report_are_absent() {
        assert_eq!(absent_of_leaf(0x0730_0402, 0), 0);
        assert_eq!(absent_of_leaf(0x0730_0402, 0x18), 0x18);
        assert_eq!(absent_of_leaf(0x0530_0402, 0x01), 0x61);
    }
}
