//! The PMU of a guest that was saved: the host must have what the guest has seen.

use vpmu::model::riscv::Shape;
use vpmu::policy::Policy;
use vpmu_perf::{Free, HostPmu, NotFree, Obstacle, free_counters};

use super::super::{BackingPmu, Model, Offer, Pmu};
use super::{FIXED, MAX, Unavailable, check_host};
use crate::saved_counters::compare;

/// Determines whether this host can offer a PMU that was saved.
pub fn offer(Model(shape): Model, policy: &Policy) -> Result<Offer, Unavailable> {
    let wanted = wanted(shape).ok_or(Unavailable::Saved)?;
    let obstacle = check_host(shape.overflows)?;
    if let Some(why) = obstacle {
        return Err(Unavailable::SavedInterrupt(why));
    }
    let (pmu, binding) = HostPmu::bind_thread().map_err(Unavailable::Cores)?;
    let free = match free_counters(pmu, wanted.general.max(1), &FIXED[..wanted.fixed], wanted.general) {
        Ok(free) => free,
        Err(NotFree::NoneFree) => Free { general: 0, fixed: 0 },
        Err(error) => return Err(Obstacle::from(error).into()),
    };
    // A guest without programmable counters does not need the one that was looked for.
    let free = Free { general: free.general.min(wanted.general), ..free };
    let remark = compare(wanted, free, policy)?;
    let pmu = Pmu::Emulated(Model(shape), BackingPmu::new((), pmu));
    Ok(Offer { pmu, remarks: binding.into_iter().chain(remark).collect() })
}

/// Returns the counters of a PMU, or `None` if it cannot have that many. Linux uses the fixed ones only if there are no
/// interrupts.
fn wanted(Shape { programmable, overflows }: Shape) -> Option<Free> {
    let fixed = if overflows { 0 } else { FIXED.len() };
    let is_possible = programmable <= MAX && (programmable > 0 || !overflows);
    is_possible.then_some(Free { general: programmable, fixed })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saved_pmu_that_cannot_be_is_refused() {
        let wanted = |programmable, overflows| wanted(Shape { programmable, overflows });
        assert_eq!(wanted(4, true), Some(Free { general: 4, fixed: 0 }));
        assert_eq!(wanted(4, false), Some(Free { general: 4, fixed: 2 }));
        assert_eq!(wanted(0, false), Some(Free { general: 0, fixed: 2 }));
        assert_eq!(wanted(0, true), None);
        assert_eq!(wanted(30, false), None);
    }
}
