//! The host's events that count for the counters: one for all counters that select the same. An event belongs to no
//! counter: each counter's share says which of the event's counts are the counter's. The event is closed when its last
//! counter leaves it, or when others need the hardware and all of its counters stand still.

use log::debug;

use super::Bank;
use super::counter::Share;
use super::deferral::Deferred;
use super::estimate::Handler;
use super::hardware::Reading;
use super::load::Load;
use super::next_alarm::{AlarmKind, Armed};
use crate::event::{Filter, Scope, Selection};
use crate::mask::{self, members};
use crate::notice::Notice;
use crate::source::{Backing, Count, FAR, Refusal, Source};

/// An event of the host, with its counters and its alarm.
pub struct HostEvent<B> {
    pub backing: B,
    pub selection: Selection,
    /// Number of the host's hardware counters that it takes.
    pub hardware: usize,
    /// The counters that have a share in it.
    pub users: u64,
    pub alarm: Armed,
    pub load: Load,
    /// Set while changes to its counters are deferred.
    pub deferred: Option<Deferred>,
    /// Count at the last exit, as long as the guest may make changes as of then.
    pub exit_mark: Option<u64>,
    /// It counts all retired instructions.
    pub counts_instructions: bool,
    /// Instructions that the VMM has completed, which are counted in addition to what the backing has counted.
    completed: u64,
    /// The alarm expires late by instructions that were completed since it was set.
    pub is_alarm_late: bool,
    /// Count at the last reading.
    pub last_count: u64,
    /// What is known of handlers, if their counts are estimated.
    pub handler: Option<Handler>,
}

impl<B: Backing> HostEvent<B> {
    /// Reads the count.
    pub fn count(&mut self) -> Count {
        let count = self.backing.count().map(|count| count.saturating_add(self.completed));
        self.last_count = count.number();
        count
    }

    /// Adds completed instructions.
    pub fn complete(&mut self, instructions: u64) {
        self.completed += instructions;
        self.alarm.at = self.alarm.at.saturating_add(instructions);
        self.is_alarm_late = true;
    }

    /// Takes completed instructions back.
    pub fn take_back(&mut self, instructions: u64) {
        self.completed -= instructions;
        self.alarm.at -= instructions;
    }
}

impl<B> HostEvent<B> {
    /// Returns true if it stands still while the guest's kernel runs.
    pub fn user_only(&self) -> bool {
        (self.selection.filter, self.selection.scope) == (Filter::User, Scope::Guest)
    }

    /// Returns true if it counts time in the guest: cycles of some kind.
    pub fn counts_time(&self) -> bool {
        self.selection.scope == Scope::Guest && self.selection.event.is_time()
    }
}

impl<S: Source> Bank<S> {
    /// Returns whether the host counts for any counter.
    pub fn is_backed(&self) -> bool {
        !self.events.is_empty()
    }

    /// Returns the mask of the counters that have a host event.
    pub(super) fn backed(&self) -> u64 {
        self.events.iter().fold(0, |all, event| all | event.users)
    }

    /// Returns the index of a counter's host event.
    pub(super) fn event_of(&self, counter: usize) -> Option<usize> {
        self.events.iter().position(|event| event.users & 1 << counter != 0)
    }

    /// Starts these counters, whether they have selected an event or not.
    pub(super) fn resume(&mut self, counters: u64) {
        self.idle &= !counters;
        let backed = self.backed();
        for index in 0..self.events.len() {
            let users = self.events[index].users & counters;
            if users != 0 {
                let reading = self.count(index);
                self.resume_on(index, &reading, users);
            }
        }
        let mut left = counters & !backed;
        // Those first whose events are there: to open the others may close events that nothing counts for.
        for index in 0..self.events.len() {
            let selection = self.events[index].selection;
            let alike = self.selecting(selection, left);
            if alike != 0 {
                self.join(index, alike);
                left &= !alike;
            }
        }
        while left != 0 {
            let counter = left.trailing_zeros() as usize;
            left &= !self.back(counter, left);
        }
        self.close_vacant();
    }

    /// Returns which of these counters select this.
    fn selecting(&self, selection: Selection, counters: u64) -> u64 {
        mask::of(members(counters).filter(|counter| self.counters[*counter].selection == Some(selection)))
    }

    /// Starts counters of one host event together, so that its alarm is set at most once.
    fn resume_on(&mut self, index: usize, reading: &Reading, counters: u64) {
        let (estimated, mask) = (self.events[index].backing.estimated(), self.mask());
        if let Some(handler) = &mut self.events[index].handler {
            handler.starts(reading.count);
        }
        for counter in members(counters) {
            self.counters[counter].skip(reading.count, estimated, mask);
        }
        if reading.recovered {
            self.replace_alarm(index, reading.count);
        } else {
            self.set_alarm(index, reading.count);
        }
    }

    /// Opens a host event for a counter, and for those of `others` that select the same. Returns all of these.
    fn back(&mut self, counter: usize, others: u64) -> u64 {
        let Some(selection) = self.counters[counter].selection else { return 1 << counter };
        let alike = self.selecting(selection, others);
        self.start(selection, alike);
        alike
    }

    fn join(&mut self, index: usize, counters: u64) {
        for counter in members(counters) {
            debug!("counter {counter} counts {}, for which there is an event", self.events[index].selection);
        }
        let reading = self.count(index);
        self.share(counters, reading.count);
        self.events[index].users |= counters;
        self.resume_on(index, &reading, counters);
    }

    fn start(&mut self, selection: Selection, counters: u64) {
        let hardware = self.source.hardware_counters(selection.event);
        // Whoever left that event now wants another one: this or, in the end, none.
        if let Some(vacant) = self.events.iter().position(|event| event.users == 0) {
            self.close(vacant);
        }
        self.make_room(hardware);
        self.share(counters, 0);
        let first = self.nearest(counters, 0);
        let distance = first.map_or(FAR, |first| first.at);
        match self.source.start(selection, distance) {
            Ok(backing) => {
                let counter_mask = first.map_or(0, |first| 1 << first.counter);
                let alarm = Armed { at: distance, distance, counter_mask, kind: AlarmKind::Kept, early: 0 };
                let event = HostEvent {
                    backing,
                    selection,
                    hardware,
                    users: counters,
                    alarm,
                    load: Load::default(),
                    deferred: None,
                    exit_mark: None,
                    counts_instructions: self.instruction_events.contains(&selection.event),
                    completed: 0,
                    is_alarm_late: false,
                    last_count: 0,
                    handler: Handler::of(selection, self.inexact),
                };
                self.events.push(event);
                for counter in members(counters) {
                    debug!("counter {counter} counts {selection}, alarm after {distance}");
                    self.counters[counter].refused = None;
                }
                // Hardware that is missing now is missed from now on, and tried for again before the next poll.
                self.count(self.events.len() - 1);
            }
            Err(Refusal(why)) => {
                for counter in members(counters) {
                    self.note_refusal(counter, selection, why.clone());
                }
            }
        }
    }

    /// Closes events of counters that stand still until there is room for one that takes so much of the hardware. The
    /// guest's counters stand for as much hardware as there is.
    ///
    /// An event that takes more than one counter of the host has that many of the guest's, too: AMD's large increments
    /// count in a pair, whose second counter the guest's kernel sets to the Merge event. When the kernel stops the
    /// pair, it gives the second counter to another event at once, and the first one keeps its event and stands still.
    fn make_room(&mut self, hardware: usize) {
        while self.taken() + hardware > self.guests {
            let stand_still =
                (0..self.events.len()).filter(|index| self.events[*index].users & self.running == 0);
            let event = |index: &usize| &self.events[*index];
            let Some(index) =
                stand_still.max_by_key(|index| (event(index).users == 0, event(index).hardware))
            else {
                return;
            };
            debug!(
                "closed the event of {}, whose counters stand still: others need its hardware",
                self.events[index].selection
            );
            members(self.events[index].users).for_each(|counter| self.leave(counter));
            self.close(index);
        }
    }

    /// Returns how many of the host's hardware counters all events take.
    fn taken(&self) -> usize {
        self.events.iter().map(|event| event.hardware).sum()
    }

    /// Records that the source refuses a counter's event (the host does, or the policy), and tells the operator once:
    /// the guest's kernel asks again whenever the task that has the event is scheduled.
    fn note_refusal(&mut self, counter: usize, selection: Selection, why: String) {
        let this = &mut self.counters[counter];
        this.share = None;
        let before = this.refused.replace((selection, why.clone()));
        if before.is_none_or(|(before, _)| before != selection) {
            self.add_notice(Notice::Refused { counter, selection, why });
        }
    }

    /// Gives counters a share in a host event that has counted `count`.
    fn share(&mut self, counters: u64, count: u64) {
        let (now, mask) = (self.source.now(), self.mask());
        for counter in members(counters) {
            let this = &mut self.counters[counter];
            this.share = Some(Share {
                mark: count,
                ahead: 0,
                mark_estimated: 0,
                overflow: u64::MAX,
                last_alarm: count,
                earliest: count.saturating_add(self.min_period),
                since: now,
                starved_before: this.starvation.total(now),
            });
            this.skip(count, 0, mask);
        }
    }

    /// Takes a counter's share from it, and closes its host event if that has no other counters. The counter keeps its
    /// value.
    pub(super) fn release(&mut self, counter: usize) {
        self.leave(counter);
        self.close_vacant();
    }

    /// Takes a counter's share from it. Its host event stays, also without counters.
    pub(super) fn leave(&mut self, counter: usize) {
        self.counters[counter].share = None;
        for event in &mut self.events {
            event.users &= !(1 << counter);
        }
        self.needs_no_hardware(counter);
    }

    /// Closes the host events without counters.
    pub(super) fn close_vacant(&mut self) {
        while let Some(index) = self.events.iter().position(|event| event.users == 0) {
            self.close(index);
        }
    }

    fn close(&mut self, index: usize) {
        let HostEvent { selection, backing, .. } = self.events.remove(index);
        self.source.stop(selection, backing);
    }
}
