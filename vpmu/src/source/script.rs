//! A source for tests, which decide what is counted and when counters have no hardware.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::time::Duration;

use super::{Backing, Count, FAR, PolicyEffect, Refusal, Source};
use crate::event::{Event, Filter, GenericEvent, Selection};
use crate::policy::Policy;
use crate::report::BackingReport;

/// A raw event that the scripted host does not have.
pub const REFUSED: Event = Event::Raw(0xbad);
/// A generic event that the scripted host does not have.
pub const UNKNOWN: Event = Event::Generic(GenericEvent::BusCycles);

/// A raw event that takes two of the scripted host's counters, as AMD's large increments do.
pub const PAIR: Event = Event::Raw(0x03);

/// A scripted host. Clones are handles to the same host: one is the PMU's source, the other is the test's.
#[derive(Clone, Default)]
pub struct Script(Rc<RefCell<HostState>>);

#[derive(Default)]
struct HostState {
    counters: Vec<(Selection, Weak<RefCell<Counter>>)>,
    now: Duration,
    requests: u64,
    starved: bool,
    /// The limit for overflows is so low that no alarm may repeat.
    has_low_limit: bool,
    /// Number of hardware counters, if that is limited.
    hardware: Option<usize>,
    /// Everything that was to be started.
    started: Vec<Selection>,
    /// What was refused because all hardware was taken, and what took it.
    without_room: Vec<(Selection, Vec<Selection>)>,
}

/// A running event of the scripted host.
pub struct Scripted {
    counter: Rc<RefCell<Counter>>,
    host: Rc<RefCell<HostState>>,
}

struct Counter {
    count: u64,
    period: u64,
    left: u64,
    /// The alarm has expired since that was asked.
    has_expired: bool,
}

impl Counter {
    /// Counts. Returns true if an alarm has expired.
    fn counts(&mut self, step: u64) -> bool {
        self.count += step;
        self.left -= step;
        self.expire()
    }

    fn expire(&mut self) -> bool {
        let has_expired = self.left == 0;
        if has_expired {
            self.left = self.period;
        }
        self.has_expired |= has_expired;
        has_expired
    }
}

impl Script {
    /// Creates a host with this number of hardware counters. It refuses an event for which it has none left.
    pub fn with_counters(counters: usize) -> Self {
        Self(Rc::new(RefCell::new(HostState { hardware: Some(counters), ..HostState::default() })))
    }

    /// Takes the selections that were refused because all hardware was taken, each with those that took it.
    pub fn take_without_room(&self) -> Vec<(Selection, Vec<Selection>)> {
        std::mem::take(&mut self.0.borrow_mut().without_room)
    }

    /// Runs the guest until each event has counted `counts`. Calls `on_alarm` with the number of counts left whenever
    /// an alarm expires. Alarms repeat.
    pub fn guest_runs(&self, counts: u64, mut on_alarm: impl FnMut(u64)) {
        let mut left = counts;
        while left > 0 {
            let counters: Vec<_> =
                self.0.borrow().counters.iter().filter_map(|(_, counter)| counter.upgrade()).collect();
            let step = counters.iter().map(|c| c.borrow().left).min().unwrap_or(left).min(left);
            left -= step;
            let mut alarms = 0;
            for counter in counters {
                alarms += u32::from(counter.borrow_mut().counts(step));
            }
            if alarms > 0 {
                on_alarm(left);
            }
        }
    }

    /// Runs the guest in user mode or in its kernel (`filter` is not all) until each event that counts there has
    /// counted `counts`. Calls `on_alarm` whenever an alarm expires. Alarms repeat.
    pub fn guest_runs_in(&self, filter: Filter, counts: u64, mut on_alarm: impl FnMut()) {
        let mut left = counts;
        while left > 0 {
            let counters: Vec<_> = self.0.borrow().counters.clone();
            let counters: Vec<_> = counters
                .iter()
                .filter(|(selection, _)| [filter, Filter::All].contains(&selection.filter))
                .filter_map(|(_, counter)| counter.upgrade())
                .collect();
            let step = counters.iter().map(|counter| counter.borrow().left).min().unwrap_or(left).min(left);
            left -= step;
            let alarms = counters.iter().filter(|counter| counter.borrow_mut().counts(step)).count();
            if alarms > 0 {
                on_alarm();
            }
        }
    }

    /// Enters the guest so often that alarms are nearer by this much, of which nothing is in the counts. Returns
    /// whether one has expired.
    pub fn counts_entries(&self, entries: u64) -> bool {
        let counters: Vec<_> =
            self.0.borrow().counters.iter().filter_map(|(_, counter)| counter.upgrade()).collect();
        let expired = counters.iter().filter(|counter| {
            let mut counter = counter.borrow_mut();
            counter.left = counter.left.saturating_sub(entries);
            counter.expire()
        });
        expired.count() > 0
    }

    /// Advances time, in which the guest does not run.
    pub fn time_passes(&self, time: Duration) {
        self.0.borrow_mut().now += time;
    }

    /// Sets whether others hold the hardware of all events.
    pub fn starve(&self, starved: bool) {
        self.0.borrow_mut().starved = starved;
    }

    /// Lowers the limit for overflows, so that no alarm may repeat.
    pub fn lower_limit(&self) {
        self.0.borrow_mut().has_low_limit = true;
    }

    /// Returns the number of running events.
    pub fn counters(&self) -> usize {
        self.selections().len()
    }

    /// Takes the selections that were to be started since the last call, whether they exist or not.
    pub fn take_started(&self) -> Vec<Selection> {
        std::mem::take(&mut self.0.borrow_mut().started)
    }

    /// Returns the selections of the running events.
    pub fn selections(&self) -> Vec<Selection> {
        self.0.borrow().selections()
    }
}

impl HostState {
    fn selections(&self) -> Vec<Selection> {
        let alive = self.counters.iter().filter(|(_, counter)| counter.strong_count() > 0);
        alive.map(|(selection, _)| *selection).collect()
    }

    /// Returns whether there is hardware for one more event.
    fn has_room(&self, event: Event) -> bool {
        let taken = self.selections().iter().map(|taken| hardware_counters(taken.event)).sum::<usize>();
        self.hardware.is_none_or(|counters| taken + hardware_counters(event) <= counters)
    }
}

fn exists(event: Event) -> bool {
    !matches!(event, REFUSED | UNKNOWN | Event::Absent { .. } | Event::Denied { .. })
}

fn hardware_counters(event: Event) -> usize {
    if event == PAIR { 2 } else { 1 }
}

impl Source for Script {
    type Backing = Scripted;

    fn start(&mut self, selection: Selection, distance: u64) -> Result<Scripted, Refusal> {
        let mut host = self.0.borrow_mut();
        host.requests += 1;
        host.started.push(selection);
        if !exists(selection.event) {
            return Err(Refusal("it does not exist".to_owned()));
        }
        assert!((1..=FAR).contains(&distance), "{distance}");
        if !host.has_room(selection.event) {
            let taken = host.selections();
            host.without_room.push((selection, taken));
            return Err(Refusal("all hardware is taken".to_owned()));
        }
        let counter =
            Rc::new(RefCell::new(Counter { count: 0, period: distance, left: distance, has_expired: false }));
        host.counters.retain(|(_, counter)| counter.strong_count() > 0);
        host.counters.push((selection, Rc::downgrade(&counter)));
        Ok(Scripted { counter, host: Rc::clone(&self.0) })
    }

    fn can_count(&mut self, event: Event) -> bool {
        exists(event)
    }

    fn hardware_counters(&self, event: Event) -> usize {
        hardware_counters(event)
    }

    fn now(&self) -> Duration {
        self.0.borrow().now
    }

    fn least_interval(&mut self, _now: Duration) -> Duration {
        if self.0.borrow().has_low_limit { Duration::from_secs(1) } else { Duration::from_micros(20) }
    }

    fn set_policy(&mut self, _policy: &Policy) -> PolicyEffect {
        PolicyEffect::OnNewBackings
    }

    fn requests(&self) -> u64 {
        self.0.borrow().requests
    }
}

impl Backing for Scripted {
    fn count(&mut self) -> Count {
        let count = self.counter.borrow().count;
        if self.host.borrow().starved { Count::Starved(count) } else { Count::Exact(count) }
    }

    fn arm(&mut self, distance: u64) -> Result<(), Refusal> {
        assert!((1..=FAR).contains(&distance), "{distance}");
        self.host.borrow_mut().requests += 1;
        let mut counter = self.counter.borrow_mut();
        (counter.period, counter.left) = (distance, distance);
        Ok(())
    }

    fn takes_early_expiry(&mut self) -> bool {
        std::mem::take(&mut self.counter.borrow_mut().has_expired)
    }

    fn estimated(&self) -> u64 {
        0
    }

    fn report(&mut self) -> BackingReport {
        BackingReport { hardware: None, enabled_ns: 0, running_ns: 0 }
    }
}
