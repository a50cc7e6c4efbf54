//! Whether the bank's counters have hardware of the host's, which others may take: what is found out about that, and who hears
//! of it.

use super::Bank;
use super::counter::Look;
use super::gap::Change;
use crate::journal::Entry;
use crate::notice::Notice;
use crate::source::{Backing, Count, Source};

impl<S: Source> Bank<S> {
    /// Whether a counter that runs is without hardware, as far as was found out.
    pub fn is_starved(&self) -> bool {
        self.starved & self.running != 0
    }

    /// The vCPU stands still from now on, and so its counters miss nothing.
    pub fn stands_still(&mut self) {
        let now = self.source.now();
        for counter in &mut self.counters {
            counter.gaps.stands_still(|| now);
        }
    }

    /// Whether all counters that run and were found without hardware have some again. It asks for that, too.
    pub fn has_hardware_again(&mut self) -> bool {
        let starved = self.starved & self.running;
        let counters = (0..).zip(&mut self.counters).filter(|(counter, _)| starved & 1 << counter != 0);
        let backings = counters.filter_map(|(_, counter)| counter.backed.as_mut());
        // Each is asked.
        backings
            .map(|backed| matches!(backed.backing.count(), Count::Exact(_)))
            .fold(true, |all, has| all & has)
    }

    /// Whether a counter has lost its hardware, or got it back, since that was last forgotten.
    pub fn hardware_changed(&self) -> bool {
        self.hardware_changed
    }

    /// Forgets that.
    pub fn forget_hardware_changed(&mut self) {
        self.hardware_changed = false;
    }

    /// Gives back to the host what counts for a counter, which keeps its value.
    pub(super) fn release(&mut self, counter: usize) {
        self.counters[counter].backed = None;
        let Change::Ended { missed, told } = self.counters[counter].gaps.over(|| self.source.now()) else {
            return;
        };
        if let Some(selection) = self.counters[counter].selection {
            self.gap_is_over(counter, told, Notice::GivenUp { counter, selection, missed });
        }
    }

    fn gap_is_over(&mut self, counter: usize, told: bool, notice: Notice) {
        self.starved &= !(1 << counter);
        self.hardware_changed = true;
        if told {
            self.tell(notice);
        } else {
            self.journal.add(|| Entry::Noticed(notice));
        }
    }

    /// What was counted behind a counter; the operator hears of gaps.
    pub(super) fn count(&mut self, counter: usize) -> Option<Look> {
        let runs = self.runs(counter);
        let this = &mut self.counters[counter];
        let selection = this.selection?;
        let backed = this.backed.as_mut()?;
        let (count, change) = match backed.backing.count() {
            Count::Exact(count) => (count, this.gaps.over(|| self.source.now())),
            Count::Starved(count) if runs => {
                let known = if this.gaps.is_open() {
                    self.source.now()
                } else {
                    self.last_beat.max(backed.since).max(backed.last_alarm.1)
                };
                (count, this.gaps.starved(|| known))
            }
            // One that stands still misses nothing.
            Count::Starved(count) => (count, Change::None),
        };
        match change {
            Change::None => Some(Look { count, recovered: false }),
            Change::Began => {
                self.statistics.starvations += 1;
                self.starved |= 1 << counter;
                self.hardware_changed = true;
                let told = self.tell(Notice::Starved { counter, selection });
                self.counters[counter].gaps.set_told(told);
                Some(Look { count, recovered: false })
            }
            Change::Ended { missed, told } => {
                self.gap_is_over(counter, told, Notice::Recovered { counter, selection, missed });
                Some(Look { count, recovered: true })
            }
        }
    }
}
