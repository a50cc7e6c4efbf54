//! What counts for the counters: one backing for all that select the same. It belongs to nobody: which of its counts are a
//! counter's is up to the counter's share, and it goes when its last counter leaves it.

use std::time::Duration;

use log::debug;

use super::Bank;
use super::alarms::{Armed, Standing};
use super::counter::Share;
use super::deferral::Deferred;
use super::hardware::Look;
use crate::event::Selection;
use crate::mask::{self, members};
use crate::notice::Notice;
use crate::source::{Backing, FAR, Refusal, Source};

/// A backing, and what the bank keeps of it.
pub struct Backed<B> {
    pub backing: B,
    pub selection: Selection,
    /// The counters that have a share in it.
    pub users: u64,
    pub alarm: Armed,
    /// When its last alarm came.
    pub last_alarm: Duration,
    /// Set while changes to its counters are deferred.
    pub deferred: Option<Deferred>,
}

impl<S: Source> Bank<S> {
    /// Whether the host counts for any of the counters.
    pub fn is_backed(&self) -> bool {
        !self.backings.is_empty()
    }

    /// The counters for which something counts.
    pub(super) fn backed(&self) -> u64 {
        self.backings.iter().fold(0, |all, backed| all | backed.users)
    }

    /// What counts for a counter.
    pub(super) fn backing_of(&self, counter: usize) -> Option<usize> {
        self.backings.iter().position(|backed| backed.users & 1 << counter != 0)
    }

    /// Lets counters take over counts from now on. They are to run, and have selected something or not.
    pub(super) fn resume(&mut self, counters: u64) {
        self.idle &= !counters;
        let backed = self.backed();
        for index in 0..self.backings.len() {
            let users = self.backings[index].users & counters;
            if users != 0 {
                let look = self.count(index);
                self.resume_on(index, &look, users);
            }
        }
        let mut left = counters & !backed;
        while left != 0 {
            let counter = left.trailing_zeros() as usize;
            left &= !self.back(counter, left);
        }
    }

    /// Counters on one backing go on together, so that its alarm is set at most once.
    fn resume_on(&mut self, index: usize, look: &Look, counters: u64) {
        let (estimated, mask) = (self.backings[index].backing.estimated(), self.mask());
        for counter in members(counters) {
            self.counters[counter].skip(look.count, estimated, mask);
        }
        if look.recovered {
            self.set_alarm_anew(index, look.count);
        } else {
            self.set_alarm(index, look.count);
        }
    }

    /// Has something count for a counter that has nothing, and for those of `others` that select the same; says which these are.
    fn back(&mut self, counter: usize, others: u64) -> u64 {
        let Some(selection) = self.counters[counter].selection else { return 1 << counter };
        let same = |counter: &usize| self.counters[*counter].selection == Some(selection);
        let alike = mask::of(members(others).filter(same));
        match self.backings.iter().position(|backed| backed.selection == selection) {
            Some(index) => {
                for counter in members(alike) {
                    debug!("counter {counter} counts {selection}, as others do");
                }
                self.join(index, alike);
            }
            None => self.start(selection, alike),
        }
        alike
    }

    fn join(&mut self, index: usize, counters: u64) {
        let look = self.count(index);
        self.share(counters, look.count);
        self.backings[index].users |= counters;
        self.resume_on(index, &look, counters);
    }

    fn start(&mut self, selection: Selection, counters: u64) {
        self.share(counters, 0);
        let first = self.nearest(counters, 0);
        let distance = first.map_or(FAR, |first| first.at);
        match self.source.start(selection, distance) {
            Ok(backing) => {
                let of = first.map_or(0, |first| 1 << first.counter);
                let alarm = Armed { at: distance, distance, of, standing: Standing::Firm };
                let last_alarm = Duration::ZERO;
                let backed =
                    Backed { backing, selection, users: counters, alarm, last_alarm, deferred: None };
                self.backings.push(backed);
                for counter in members(counters) {
                    debug!("counter {counter} counts {selection}, and the host says so after {distance}");
                    self.counters[counter].refused = None;
                }
            }
            Err(Refusal(why)) => {
                for counter in members(counters) {
                    self.refuse(counter, selection, why.clone());
                }
            }
        }
    }

    /// The guest's kernel asks again whenever the task comes back that has the event.
    fn refuse(&mut self, counter: usize, selection: Selection, why: String) {
        let this = &mut self.counters[counter];
        this.share = None;
        let before = this.refused.replace((selection, why.clone()));
        if before.is_none_or(|(before, _)| before != selection) {
            self.tell(Notice::Refused { counter, selection, why });
        }
    }

    /// Gives counters a share in what has counted so much.
    fn share(&mut self, counters: u64, count: u64) {
        let (now, mask) = (self.source.now(), self.mask());
        for counter in members(counters) {
            let this = &mut self.counters[counter];
            this.share = Some(Share {
                mark: count,
                mark_estimated: 0,
                overflow: u64::MAX,
                last_alarm: count,
                earliest: count.saturating_add(self.least_period),
                since: now,
                starved_before: this.starvation.total(now),
            });
            this.skip(count, 0, mask);
        }
    }

    /// Takes a counter's share from it, with what counted for nobody else. It keeps its value.
    pub(super) fn release(&mut self, counter: usize) {
        self.counters[counter].share = None;
        for backed in &mut self.backings {
            backed.users &= !(1 << counter);
        }
        self.backings.retain(|backed| backed.users != 0);
        self.needs_no_hardware(counter);
    }
}
