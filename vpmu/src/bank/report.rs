//! Reports of the counters and of what was done for them.

use std::time::Duration;

use super::Bank;
use crate::event::Selection;
use crate::report::{BackingReport, CounterReport, State, Statistics};
use crate::source::{Backing, Source};

impl<S: Source> Bank<S> {
    /// Returns what was done so far.
    pub fn statistics(&self) -> Statistics {
        Statistics {
            overflows: self.overflows(),
            system_calls: self.source.requests(),
            ..self.record.statistics
        }
    }

    /// Returns the number of all counters' overflows up to their last updates.
    pub(super) fn overflows(&self) -> u64 {
        self.counters.iter().map(|counter| counter.overflows).sum()
    }

    /// Reports a counter; `words` names an event.
    pub fn report(&mut self, counter: usize, words: impl FnOnce(Selection) -> String) -> CounterReport {
        self.look_if_running(counter);
        let backing = self.event_of(counter).map(|index| self.events[index].backing.report());
        let this = &self.counters[counter];
        let refused = this.refused.as_ref().filter(|_| backing.is_none());
        let state = match (this.selection, refused) {
            (None, _) => State::Unused,
            (Some(_), _) if !self.runs(counter) => State::Stopped,
            (Some(_), Some((_, why))) => State::Refused(why.clone()),
            _ if this.starvation.is_open() => State::Starved,
            _ => State::Counting,
        };
        let starved = this.starvation.total(self.source.now());
        let before = this.share.as_ref().map_or(Duration::ZERO, |share| share.starved_before);
        // The host's own clock stops while there is no hardware.
        let missed = nanoseconds(starved.saturating_sub(before));
        CounterReport {
            event: this.selection.map(words),
            value: this.value,
            state,
            overflows: this.overflows,
            starvations: this.starvation.times(),
            starved_ns: nanoseconds(starved),
            estimated: this.estimated,
            backing: backing.map(|backing| BackingReport {
                enabled_ns: backing.enabled_ns.saturating_add(missed),
                ..backing
            }),
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
