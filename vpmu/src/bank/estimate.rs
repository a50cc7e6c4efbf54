//! What handlers of overflows have counted, and what the next one will count by the mean of these. [`super::handler`]
//! says why.

use crate::event::{Event, Filter, Scope, Selection};

/// Number of measured handlers whose mean is taken.
const MEASURED: usize = 8;
/// A handler is measured after so many that were estimated.
const ESTIMATED: u32 = 15;
/// What is known of the handlers' counts of a host event.
#[derive(Debug, Default)]
pub struct Handler {
    /// Counts from the interrupt until the kernel stops its counters.
    before: Mean,
    /// Counts from there until the kernel starts them.
    during: Mean,
    phase: Phase,
    /// Number of handlers that were estimated since the last that was measured.
    estimated: u32,
}

/// Counts of a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// From the interrupt until the kernel stops its counters.
    pub before: u64,
    /// From there until the kernel starts them.
    pub during: u64,
}

/// Where the handler is that is being measured, with the host event's count there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    /// None is.
    #[default]
    Other,
    /// The kernel was interrupted.
    Interrupted(u64),
    /// It has stopped its counters.
    Stopped(u64),
}

/// Mean of the last [`MEASURED`] numbers.
#[derive(Debug, Default)]
struct Mean {
    last: [u64; MEASURED],
    /// Where the next number goes.
    next: usize,
    is_full: bool,
}

impl Mean {
    /// Adds a number. One that is far too high is a handler that did something else, and would spoil the mean for a
    /// while.
    fn add(&mut self, number: u64) {
        let most = self.get().map_or(u64::MAX, |mean| mean.saturating_mul(4));
        self.last[self.next] = number.min(most);
        self.next = (self.next + 1) % MEASURED;
        self.is_full |= self.next == 0;
    }

    fn get(&self) -> Option<u64> {
        let sum = self.last.iter().fold(0_u64, |sum, number| sum.saturating_add(*number));
        self.is_full.then(|| sum.saturating_add(MEASURED as u64 / 2) / MEASURED as u64)
    }
}

impl Handler {
    /// Returns what is known of an event's handlers, or `None` if the event's counts are not to be estimated.
    pub fn of(selection: Selection, inexact: &[Event]) -> Option<Self> {
        let counts_handlers = selection.filter != Filter::User && selection.scope == Scope::Guest;
        (counts_handlers && inexact.contains(&selection.event)).then(Self::default)
    }

    /// Returns the estimate, once enough was measured.
    pub fn estimate(&self) -> Option<Estimate> {
        Some(Estimate { before: self.before.get()?, during: self.during.get()? })
    }

    /// Returns the estimate unless the next handler is to be measured.
    pub fn next_estimate(&self) -> Option<Estimate> {
        self.estimate().filter(|_| self.estimated < ESTIMATED)
    }

    /// Records that the handler is estimated.
    pub fn is_estimated(&mut self) {
        (self.phase, self.estimated) = (Phase::Other, self.estimated + 1);
    }

    /// Records that the kernel is interrupted, at this count.
    pub fn interrupts(&mut self, count: u64) {
        self.phase = Phase::Interrupted(count);
    }

    /// Records that the handler is not measured any further.
    pub fn is_left(&mut self) {
        self.phase = Phase::Other;
    }

    /// Records that the kernel has stopped its counters at a count that was estimated.
    pub fn has_stopped(&mut self, count: u64) {
        self.phase = Phase::Stopped(count);
    }

    /// Records that the kernel stops its counters.
    pub fn stops(&mut self, count: u64) {
        if let Phase::Interrupted(at) = self.phase {
            self.before.add(count.saturating_sub(at));
            (self.phase, self.estimated) = (Phase::Stopped(count), 0);
        }
    }

    /// Records that the counters start.
    pub fn starts(&mut self, count: u64) {
        if let Phase::Stopped(at) = std::mem::take(&mut self.phase) {
            self.during.add(count.saturating_sub(at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_estimate_is_the_mean_of_the_last_handlers_that_were_measured() {
        let mut mean = Mean::default();
        for number in 1..8 {
            mean.add(number * 100);
            assert_eq!(mean.get(), None, "too few");
        }
        mean.add(800);
        assert_eq!(mean.get(), Some(450));
        mean.add(900);
        assert_eq!(mean.get(), Some(550), "the first is forgotten");
        mean.add(1_000_000);
        assert_eq!(mean.get(), Some((4400 - 200 + 4 * 550) / 8), "one that did something else counts little");
    }

    #[test]
    fn one_handler_of_sixteen_is_measured() {
        let mut handler = Handler::default();
        let measure = |handler: &mut Handler| {
            handler.phase = Phase::Interrupted(1000);
            handler.stops(1300);
            handler.starts(3300);
        };
        for _ in 0..MEASURED {
            assert_eq!(handler.next_estimate(), None);
            measure(&mut handler);
        }
        for _ in 0..3 {
            for _ in 0..ESTIMATED {
                assert_eq!(handler.next_estimate(), Some(Estimate { before: 300, during: 2000 }));
                handler.is_estimated();
            }
            assert_eq!(handler.next_estimate(), None);
            measure(&mut handler);
        }
    }

    #[test]
    fn only_cycles_of_the_guests_kernel_are_estimated() {
        let cycles = [Event::Raw(0x76)];
        let is_estimated =
            |event, filter, scope| Handler::of(Selection { event, filter, scope }, &cycles).is_some();
        assert!(is_estimated(Event::Raw(0x76), Filter::All, Scope::Guest));
        assert!(is_estimated(Event::Raw(0x76), Filter::Kernel, Scope::Guest));
        assert!(!is_estimated(Event::Raw(0x76), Filter::User, Scope::Guest));
        assert!(!is_estimated(Event::Raw(0x76), Filter::All, Scope::Thread));
        assert!(!is_estimated(Event::Raw(0xc0), Filter::All, Scope::Guest));
    }
}
