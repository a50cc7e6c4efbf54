//! Limits the interrupts of a vCPU: a rate, and a burst.

use std::num::NonZeroU32;
use std::time::Duration;

/// Token bucket: one token per interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimiter {
    /// Time in which one token arrives.
    interval: Duration,
    /// Tokens that can be saved beyond one, as the time in which they arrive.
    burst: Duration,
    /// Time at which the tokens spent so far will have arrived.
    spent_up_to: Duration,
}

impl RateLimiter {
    /// A limit of `per_second` interrupts, a tenth of which may come at once.
    pub fn new(per_second: NonZeroU32) -> Self {
        const SECOND: u32 = 1_000_000_000;
        let interval = Duration::from_nanos(SECOND.div_ceil(per_second.get()).into());
        let at_once = (per_second.get() / 10).max(1);
        Self { interval, burst: interval * (at_once - 1), spent_up_to: Duration::ZERO }
    }

    /// Takes a token. Without one, returns the time from which there is one.
    pub fn take(&mut self, now: Duration) -> Result<(), Duration> {
        let from = self.spent_up_to.saturating_sub(self.burst);
        if now < from {
            return Err(from);
        }
        self.spent_up_to = self.spent_up_to.max(now) + self.interval;
        Ok(())
    }

    /// Returns how long it takes until all tokens spent so far have arrived.
    pub fn spent_ahead(&self, now: Duration) -> Duration {
        self.spent_up_to.saturating_sub(now)
    }

    /// Sets how long it takes until all tokens spent so far have arrived, as far as that many can be spent.
    pub fn spend_ahead(&mut self, now: Duration, time: Duration) {
        self.spent_up_to = now.saturating_add(time.min(self.burst + self.interval));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn limiter(per_second: u32) -> RateLimiter {
        RateLimiter::new(NonZeroU32::new(per_second).unwrap())
    }

    #[test]
    fn what_is_not_had_is_had_in_time() {
        let mut limiter = limiter(20);
        let at = Duration::from_millis;
        assert_eq!([limiter.take(at(7)), limiter.take(at(7))], [Ok(()), Ok(())], "two at once");
        assert_eq!(limiter.take(at(7)), Err(at(57)));
        assert_eq!(limiter.take(at(56)), Err(at(57)));
        assert_eq!(limiter.take(at(57)), Ok(()));
        assert_eq!(limiter.take(at(58)), Err(at(107)));
    }

    proptest! {
        #[test]
        fn no_window_has_more_than_its_share_and_what_is_saved(
            per_second in prop_oneof![1_u32..50, 1_u32..=u32::MAX],
            steps in proptest::collection::vec(0_u64..200_000_000, 1..200),
        ) {
            let mut limiter = limiter(per_second);
            let (mut now, mut had) = (Duration::ZERO, Vec::new());
            for step in steps {
                now += Duration::from_nanos(step);
                if limiter.take(now).is_ok() {
                    had.push(now);
                }
            }
            let at_once = u128::from((per_second / 10).max(1));
            for (number, first) in had.iter().enumerate() {
                for (further, last) in had[number..].iter().enumerate() {
                    let window = last.saturating_sub(*first);
                    let share = window.as_nanos() * u128::from(per_second) / 1_000_000_000;
                    prop_assert!(further as u128 <= share + at_once, "{further} after {window:?}");
                }
            }
        }
    }
}
