//! Reports of the counters and of what was done for them.

use std::time::Duration;

use super::Bank;
use crate::event::Selection;
use crate::report::{CounterReport, State, Statistics};
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
        self.counters.iter().take(self.guests).map(|counter| counter.overflows).sum()
    }

    /// Reports a counter; `words` names an event.
    pub fn report(&mut self, counter: usize, words: impl FnOnce(Selection) -> String) -> CounterReport {
        self.update_if_running(counter);
        let backing = self.event_of(counter).map(|index| self.events[index].backing.report());
        let this = &self.counters[counter];
        let refused = this.refused.as_ref().filter(|_| backing.is_none());
        let state = match (this.selection, refused) {
            (None, _) => State::Unused,
            (Some(_), _) if !self.runs(counter) => State::Stopped,
            (Some(_), Some(_)) => State::Refused,
            _ if this.starvation.is_open() => State::Starved,
            _ => State::Counting,
        };
        let starved = this.starvation.total(self.source.now());
        let before = this.share.as_ref().map_or(Duration::ZERO, |share| share.starved_before);
        // The host's own clock stops while there is no hardware.
        let missed = nanoseconds(starved.saturating_sub(before));
        let enabled_ns = backing.map(|backing| backing.enabled_ns.saturating_add(missed));
        CounterReport {
            counter,
            event: this.selection.map(words),
            value: this.value,
            state,
            refusal: refused.filter(|_| state == State::Refused).map(|(_, why)| why.clone()),
            hardware: backing.and_then(|backing| backing.hardware),
            overflows: this.overflows,
            enabled: enabled_ns.map(seconds),
            running: backing.map(|backing| seconds(backing.running_ns)),
            starvations: this.starvation.times(),
            starved: seconds(nanoseconds(starved)),
            estimated: this.estimated,
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[expect(clippy::cast_precision_loss, reason = "nanoseconds of a hundred days are exact")]
fn seconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e9
}
