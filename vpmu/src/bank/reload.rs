//! Counters that set themselves at an overflow, for the next one: those of event-based branches ([`crate::ebb`]).

use super::Bank;
use crate::event::Selection;
use crate::source::Source;

impl<S: Source> Bank<S> {
    /// Sets the event of a companion, which is no register of the guest's: nothing is looked up or told.
    pub fn configure_companion(&mut self, counter: usize, selection: Option<Selection>) {
        self.interrupting |= 1 << counter;
        self.replace_event(counter, selection);
    }

    /// Lets a counter overflow after `left` counts, and after each `period` counts from then on; after the first only,
    /// if that is 0.
    pub fn reload(&mut self, counter: usize, left: u64, period: u64) {
        let most = self.mask() >> 1;
        self.counters[counter].reload = period.min(most);
        self.write(counter, left.clamp(1, most).wrapping_neg());
    }

    /// Returns the period of a counter that sets itself.
    pub fn period(&self, counter: usize) -> u64 {
        self.counters[counter].reload
    }

    /// Returns the number of counts that are left until a counter overflows, as of its last update.
    pub fn left(&self, counter: usize) -> u64 {
        self.counters[counter].value.wrapping_neg() & self.mask()
    }

    /// Returns the number of overflows of a counter that sets itself, since they were last taken.
    pub fn reloads(&self, counter: usize) -> u64 {
        self.counters[counter].reloads
    }

    /// Sets that number.
    pub fn set_reloads(&mut self, counter: usize, reloads: u64) {
        self.counters[counter].reloads = reloads;
    }

    /// Takes the number of overflows of a counter that sets itself.
    pub fn take_reloads(&mut self, counter: usize) -> u64 {
        std::mem::take(&mut self.counters[counter].reloads)
    }
}
