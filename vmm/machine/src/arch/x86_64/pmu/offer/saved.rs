//! The PMU of a guest that was saved: the host must have what the guest has seen.

use vpmu::model::amd::{MAX_COUNTERS, Version};
use vpmu::model::intel::{FIXED, MAX_GENERAL, Shape};
use vpmu::policy::Policy;
use vpmu::x86::Vendor;
use vpmu_perf::{Free, HostPmu, NotFree, Obstacle, free_counters};

use super::super::{BackingPmu, Model, Offer, Pmu};
use super::{Unavailable, intel};
use crate::saved_counters::compare;

/// Determines whether this host can offer a PMU that was saved.
pub fn offer(model: Model, vendor: Option<Vendor>, policy: &Policy) -> Result<Offer, Unavailable> {
    let wanted = wanted(model).ok_or(Unavailable::Saved)?;
    let vendor = vendor.ok_or(Unavailable::Vendor("of a saved guest"))?;
    let (pmu, stays) = HostPmu::bind_thread().map_err(Unavailable::Cores)?;
    let host = BackingPmu::new(vendor, pmu);
    if let Model::Intel(Shape { absent, .. }) = model {
        let lost = intel::absent_events(host) & !absent;
        if lost != 0 {
            return Err(Unavailable::SavedEvents(lost));
        }
    }
    let free = match free_counters(pmu, wanted.general, &FIXED[..wanted.fixed], wanted.general) {
        Ok(free) => free,
        Err(NotFree::NoneFree) => Free { general: 0, fixed: 0 },
        Err(error) => return Err(Obstacle::from(error).into()),
    };
    let remark = compare(wanted, free, policy)?;
    Ok(Offer { pmu: Pmu::Emulated(model, host), remarks: stays.into_iter().chain(remark).collect() })
}

/// Returns the counters of a PMU, or `None` if it cannot have that many.
fn wanted(model: Model) -> Option<Free> {
    match model {
        Model::Amd(version) => {
            let is_possible = !matches!(version, Version::V2(0)) && version.counters() <= MAX_COUNTERS;
            is_possible.then(|| Free { general: version.counters(), fixed: 0 })
        }
        Model::Intel(Shape { general, fixed, .. }) => {
            ((1..=MAX_GENERAL).contains(&general) && fixed <= FIXED.len()).then_some(Free { general, fixed })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vpmu::model::intel;

    #[test]
    fn a_saved_pmu_that_cannot_be_is_refused() {
        let shape = Shape { version: intel::Version::V5, general: 8, fixed: 3, absent: 0 };
        assert!(wanted(Model::Intel(shape)).is_some());
        for shape in
            [Shape { general: 9, ..shape }, Shape { general: 0, ..shape }, Shape { fixed: 4, ..shape }]
        {
            assert!(wanted(Model::Intel(shape)).is_none());
        }
        assert!(wanted(Model::Amd(Version::V2(7))).is_none());
        assert!(wanted(Model::Amd(Version::V2(0))).is_none());
        assert_eq!(wanted(Model::Amd(Version::K7)).map(|free| free.general), Some(4));
    }
}
