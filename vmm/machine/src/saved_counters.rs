//! The counters of a guest that was saved. Those that this host does not have free are the policy's matter, as those
//! are that a running guest loses.

use vpmu::policy::{OnStarvation, Policy};
use vpmu_perf::{Free, watchdog_hint};

/// Fewer counters are free than the guest has, and the policy does not allow that.
#[derive(Debug, thiserror::Error)]
#[error(
    "the guest has {has} counters, and this host has {free} free{}; its policy's on-starvation is `stop`",
    watchdog_hint()
)]
pub struct TooFew {
    has: usize,
    /// Number of the host's free counters.
    free: usize,
}

/// Returns a remark if fewer counters are free than the guest has, or an error if the policy does not allow that.
pub fn compare(wanted: Free, free: Free, policy: &Policy) -> Result<Option<String>, TooFew> {
    let (has, free) = (wanted.general + wanted.fixed, free.general + free.fixed.min(wanted.fixed));
    match policy.on_starvation {
        _ if free >= has => Ok(None),
        OnStarvation::Stop => Err(TooFew { has, free }),
        OnStarvation::Report | OnStarvation::Scale => Ok(Some(format!(
            "the guest has {has} counters, and this host has {free} free{}: some of them may stand still",
            watchdog_hint()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn with_fewer_free_counters_the_policy_decides() {
        let (six, five) = (Free { general: 6, fixed: 0 }, Free { general: 5, fixed: 0 });
        let with = |on_starvation| Policy { on_starvation, ..Policy::default() };
        assert_eq!(compare(six, six, &with(OnStarvation::Stop)).unwrap(), None);
        let remark = compare(six, five, &with(OnStarvation::Report)).unwrap().unwrap();
        assert!(remark.contains("has 6 counters, and this host has 5 free"), "{remark}");
        let refusal = compare(six, five, &with(OnStarvation::Stop)).unwrap_err().to_string();
        assert!(refusal.contains("has 6 counters, and this host has 5 free"), "{refusal}");
        // A fixed counter that is not beside the general ones takes one of them.
        let both = Free { general: 4, fixed: 2 };
        assert!(compare(both, Free { general: 4, fixed: 1 }, &with(OnStarvation::Stop)).is_err());
    }
}
