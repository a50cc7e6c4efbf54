//! A vCPU's counters: their values, which of them run, and which have overflowed.
//!
//! What counts behind a counter lives as long as the counter's configuration and never stops: a counter that stands still
//! just does not take over what was counted meanwhile. So stopping, starting and reading cost the host nothing but a
//! look at the count. Only an alarm, for the next overflow, is a request to the host, and it is made as seldom as can be:
//! one that comes early does no harm, because whether a counter has overflowed is computed from its value.

mod counter;
mod floor;
mod gap;
mod hardware;

use std::time::Duration;

use log::debug;

use crate::event::Selection;
use crate::journal::{Entry, Journal};
use crate::notice::{Notice, Notices};
use crate::policy::Policy;
use crate::report::{BackingReport, CounterReport, State, Statistics};
use crate::source::{Backing, FAR, Obeyed, Refusal, Source};
use counter::{Armed, Backed, Counter, Look};
use floor::{Floor, Tell};

/// An alarm that repeats after at least so many counts may be left to repeat, as far as the guest is concerned: its handler is
/// done before it comes again.
const LONG: u64 = 8192;

/// Whether anybody is to know of an overflow when it happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Alarm {
    /// Yes: the guest wants an interrupt.
    AtOverflow,
    /// It is enough to find out when somebody looks.
    Off,
}

/// The counters, numbered from 0; sets of them are bit masks.
pub struct Bank<S: Source> {
    source: S,
    width: u32,
    counters: Vec<Counter<S::Backing>>,
    running: u64,
    overflowed: u64,
    floor: Floor,
    /// What the policy wants between two overflows that interrupt.
    least_period: u64,
    /// When the counters were last looked at because time had passed.
    last_beat: Duration,
    /// Those that were found without hardware. This is asked at every exit.
    starved: u64,
    /// Whether one has lost its hardware, or got it back, since that was last forgotten.
    hardware_changed: bool,
    notices: Notices,
    journal: Journal,
    statistics: Statistics,
}

impl<S: Source> Bank<S> {
    /// So many counters of so many bits, all zero, which select nothing and stand still.
    ///
    /// # Panics
    /// If there are none or more than 64 counters, or their bits are none or more than 63.
    pub fn new(source: S, counters: usize, width: u32) -> Self {
        assert!((1..=64).contains(&counters) && (1..64).contains(&width));
        Self {
            source,
            width,
            counters: (0..counters).map(|_| Counter::default()).collect(),
            running: 0,
            overflowed: 0,
            floor: Floor::default(),
            least_period: 1,
            last_beat: Duration::ZERO,
            starved: 0,
            hardware_changed: false,
            notices: Notices::default(),
            journal: Journal::default(),
            statistics: Statistics::default(),
        }
    }

    /// How many counters there are.
    pub fn size(&self) -> usize {
        self.counters.len()
    }

    /// Sets what a counter counts. It keeps its value.
    pub fn configure(&mut self, counter: usize, selection: Option<Selection>, alarm: Alarm) {
        self.look_if_running(counter);
        let this = &mut self.counters[counter];
        if (this.selection, this.alarm) != (selection, alarm) {
            let interrupts = alarm == Alarm::AtOverflow;
            self.journal.add(|| Entry::Configured { counter, selection, interrupts });
        }
        if (this.selection, this.alarm) != (selection, alarm) {
            this.put_off = false;
        }
        this.alarm = alarm;
        if this.selection != selection {
            self.release(counter);
            self.counters[counter].selection = selection;
        }
        self.resume(counter);
    }

    /// Has something else count for a counter, of which the guest knows nothing: an overflow that was put off still comes.
    pub fn select(&mut self, counter: usize, selection: Option<Selection>) {
        self.look_if_running(counter);
        let this = &mut self.counters[counter];
        if this.selection == selection {
            return;
        }
        let interrupts = this.alarm == Alarm::AtOverflow;
        self.journal.add(|| Entry::Configured { counter, selection, interrupts });
        self.release(counter);
        self.counters[counter].selection = selection;
        self.resume(counter);
    }

    /// Says which counters run; all others stand still.
    pub fn run(&mut self, running: u64) {
        let before = self.running;
        for counter in 0..self.size() {
            if before & !running & 1 << counter != 0 {
                self.look(counter);
                self.counters[counter].gaps.stands_still(|| self.source.now());
            }
        }
        self.running = running;
        for counter in 0..self.size() {
            if running & !before & 1 << counter != 0 {
                self.resume(counter);
            }
        }
    }

    /// What a counter shows.
    pub fn read(&mut self, counter: usize) -> u64 {
        self.look_if_running(counter);
        self.counters[counter].value
    }

    /// Sets what a counter shows, as far as it is wide.
    pub fn write(&mut self, counter: usize, value: u64) {
        self.look_if_running(counter);
        let value = value & self.mask();
        let this = &mut self.counters[counter];
        (this.value, this.put_off, this.estimated) = (value, false, 0);
        self.set_alarm(counter);
    }

    /// Looks whether alarms have come, after a signal that says so, and at what has overflowed.
    pub fn look_at_all(&mut self) {
        for counter in 0..self.size() {
            self.look(counter);
        }
    }

    /// Some time has passed: counters that have lost their hardware are found out.
    pub fn beat(&mut self) {
        self.look_at_all();
        self.last_beat = self.source.now();
    }

    /// Gives back to the host what counts for counters that have stood still since this was last called.
    pub fn release_idle(&mut self) {
        for counter in 0..self.size() {
            let runs = self.runs(counter);
            let backed = &mut self.counters[counter].backed;
            if backed.as_mut().is_some_and(|backed| !runs && std::mem::replace(&mut backed.idle, true)) {
                debug!("counter {counter} stands still: its hardware is given back");
                self.release(counter);
            }
        }
    }

    /// How late it is.
    pub fn now(&self) -> Duration {
        self.source.now()
    }

    /// Whether the host counts for any of the counters.
    pub fn is_backed(&self) -> bool {
        self.counters.iter().any(|counter| counter.backed.is_some())
    }

    /// From now on counts as the operator wants it to.
    pub fn obey(&mut self, policy: &Policy) {
        self.look_at_all();
        self.least_period = policy.least_period.get().min(FAR);
        if self.source.obey(policy) == Obeyed::FromTheNextOn {
            for counter in 0..self.size() {
                self.release(counter);
                self.resume(counter);
            }
        }
    }

    /// An alarm has come: looks which counters have overflowed.
    pub fn alarm(&mut self) {
        let before = self.overflowed;
        self.look_at_all();
        self.statistics.alarms += 1;
        if self.overflowed == before {
            self.statistics.ignored_alarms += 1;
        }
    }

    /// The counters that have overflowed since this was last asked, as far as they were looked at.
    pub fn take_overflowed(&mut self) -> u64 {
        std::mem::take(&mut self.overflowed)
    }

    /// What the operator is to know since this was last asked.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.notices.take()
    }

    /// Where everything is written down.
    pub fn journal(&mut self) -> &mut Journal {
        &mut self.journal
    }

    /// What was done so far.
    pub fn statistics(&self) -> Statistics {
        let overflows = self.counters.iter().map(|counter| counter.overflows).sum();
        Statistics { overflows, system_calls: self.source.requests(), ..self.statistics }
    }

    /// What there is to say of a counter; `words` names what is counted.
    pub fn report(&mut self, counter: usize, words: impl FnOnce(Selection) -> String) -> CounterReport {
        self.look_if_running(counter);
        let runs = self.runs(counter);
        let this = &mut self.counters[counter];
        let refused = this.refused.as_ref().filter(|_| this.backed.is_none());
        let state = match (this.selection, refused) {
            (None, _) => State::Unused,
            (Some(_), _) if !runs => State::Stopped,
            (Some(_), Some((_, why))) => State::Refused(why.clone()),
            _ if this.gaps.is_open() => State::Starved,
            _ => State::Counting,
        };
        let starved = this.gaps.total(self.source.now());
        CounterReport {
            event: this.selection.map(words),
            value: this.value,
            state,
            overflows: this.overflows,
            starvations: this.gaps.times(),
            starved_ns: nanoseconds(starved),
            estimated: this.estimated,
            backing: this.backed.as_mut().map(|backed| {
                let report = backed.backing.report();
                // Its own clock stops while it has no hardware.
                let missed = nanoseconds(starved.saturating_sub(backed.starved_before));
                BackingReport { enabled_ns: report.enabled_ns.saturating_add(missed), ..report }
            }),
        }
    }

    fn mask(&self) -> u64 {
        (1 << self.width) - 1
    }

    /// Has the operator know of it, unless there was too much of late; whether he will.
    pub fn tell(&mut self, notice: Notice) -> bool {
        self.journal.add(|| Entry::Noticed(notice.clone()));
        self.notices.tell(notice, self.source.now())
    }

    fn runs(&self, counter: usize) -> bool {
        self.running & 1 << counter != 0
    }

    fn look_if_running(&mut self, counter: usize) {
        if self.runs(counter) {
            self.look(counter);
        }
    }

    /// Takes over what was counted while the counter ran, and sets its next alarm if one has come.
    fn look(&mut self, counter: usize) {
        let Some(Look { count, recovered }) = self.count(counter) else { return };
        let runs = self.runs(counter);
        let width = self.width;
        let this = &mut self.counters[counter];
        let Some(backed) = &mut this.backed else { return };
        if runs {
            let sum = u128::from(this.value) + u128::from(count.saturating_sub(backed.mark));
            let interrupts = this.alarm == Alarm::AtOverflow;
            if sum >> width != 0 {
                let at = backed.mark + ((1 << width) - this.value);
                self.statistics.clamps += u64::from(interrupts && at < backed.earliest);
                this.put_off = true;
            }
            if this.put_off && (count >= backed.earliest || !interrupts) {
                this.put_off = false;
                self.overflowed |= 1 << counter;
                this.overflows += 1;
                backed.earliest = count + self.least_period;
            }
            #[expect(clippy::cast_possible_truncation, reason = "the bits above are those that overflowed")]
            let value = sum as u64 & ((1 << width) - 1);
            this.value = value;
            backed.mark = count;
            let estimated = backed.backing.estimated();
            this.estimated += estimated.saturating_sub(backed.mark_estimated);
            backed.mark_estimated = estimated;
        }
        if count >= backed.alarm.at {
            self.alarm_came(counter, count);
        } else if recovered && let Some(at) = self.wanted(counter) {
            // What was estimated meanwhile, if anything, brings its next overflow nearer.
            self.arm(counter, count, at);
        }
    }

    /// The host repeats an alarm with the same distance, however short that was. In a guest that has stopped its counters to
    /// handle the overflow a short one could come over and over, and the guest never get on. So an alarm is for once,
    /// unless one repetition is harmless: the guest's next overflow is often at the same distance, and then needs nothing more.
    fn alarm_came(&mut self, counter: usize, count: u64) {
        let now = self.source.now();
        let Some(backed) = &mut self.counters[counter].backed else { return };
        let (last_count, last_time) = std::mem::replace(&mut backed.last_alarm, (count, now));
        let Armed { at, distance, repeats } = backed.alarm;
        if at.saturating_sub(last_count) < floor::PERIOD
            && let Tell::Raised(times) = self.floor.short_alarm(now)
        {
            self.tell(Notice::RateFloor { period: floor::PERIOD, times });
        }
        let harmless = !repeats && distance >= LONG && self.source.may_repeat(now.saturating_sub(last_time));
        match self.wanted(counter) {
            Some(at) if at < count + FAR => self.arm(counter, count, at),
            Some(_) if harmless => self.leave_to_repeat(counter),
            _ => self.arm(counter, count, count + FAR),
        }
    }

    /// Lets a counter that runs take over counts from now on.
    fn resume(&mut self, counter: usize) {
        if !self.runs(counter) {
            return;
        }
        if self.counters[counter].backed.is_none() {
            self.start(counter);
        } else if let Some(Look { count, .. }) = self.count(counter)
            && let Some(backed) = &mut self.counters[counter].backed
        {
            backed.mark = count;
            backed.mark_estimated = backed.backing.estimated();
            backed.idle = false;
            self.set_alarm(counter);
        }
    }

    fn start(&mut self, counter: usize) {
        let this = &self.counters[counter];
        let Some(selection) = this.selection else { return };
        let distance = match this.alarm {
            Alarm::AtOverflow if this.put_off => self.least_period,
            Alarm::AtOverflow => {
                self.until_overflow(counter).max(self.least_period).max(self.least_distance())
            }
            Alarm::Off => FAR,
        };
        match self.source.start(selection, distance) {
            Ok(backing) => {
                debug!("counter {counter} counts {selection}, and the host says so after {distance}");
                let alarm = Armed { at: distance, distance, repeats: false };
                let now = self.source.now();
                let backed = Backed {
                    backing,
                    mark: 0,
                    mark_estimated: 0,
                    alarm,
                    last_alarm: (0, Duration::ZERO),
                    earliest: self.least_period,
                    idle: false,
                    since: now,
                    starved_before: self.counters[counter].gaps.total(now),
                };
                let this = &mut self.counters[counter];
                this.backed = Some(backed);
                this.refused = None;
            }
            // The guest's kernel asks again whenever the task comes back that has the event.
            Err(Refusal(why)) => {
                let before = self.counters[counter].refused.replace((selection, why.clone()));
                if before.is_none_or(|(before, _)| before != selection) {
                    self.tell(Notice::Refused { counter, selection, why });
                }
            }
        }
    }

    /// Sets the alarm of a counter that was just looked at, unless one is set that comes early enough.
    fn set_alarm(&mut self, counter: usize) {
        let Some(at) = self.wanted(counter) else { return };
        let Some(Backed { mark, alarm, .. }) = &mut self.counters[counter].backed else { return };
        // One that comes a single count early would leave a period of 1, of which Linux makes 2. One that repeats would
        // always come early by what was counted in the handler, unless it comes just right.
        if at < alarm.at || at == alarm.at + 1 || at > alarm.at && alarm.repeats {
            let mark = *mark;
            self.arm(counter, mark, at);
        } else {
            alarm.repeats = false;
        }
    }

    /// The count at which a counter that was just looked at needs an alarm, if it runs and has one.
    fn wanted(&mut self, counter: usize) -> Option<u64> {
        if !self.runs(counter) || self.counters[counter].alarm == Alarm::Off {
            return None;
        }
        let least = self.least_distance();
        let distance = self.until_overflow(counter);
        let this = &self.counters[counter];
        let backed = this.backed.as_ref()?;
        if this.put_off {
            return Some(backed.earliest);
        }
        // The last alarm is behind the mark, so that the floor does not move while the guest rewrites its counter.
        Some((backed.mark + distance).max(backed.last_alarm.0 + least).max(backed.earliest))
    }

    fn until_overflow(&self, counter: usize) -> u64 {
        ((1 << self.width) - self.counters[counter].value).min(FAR)
    }

    fn least_distance(&mut self) -> u64 {
        self.floor.distance(|| self.source.now())
    }

    fn arm(&mut self, counter: usize, count: u64, at: u64) {
        if let Some(backed) = &mut self.counters[counter].backed {
            let distance = at.saturating_sub(count).max(1);
            backed.alarm = Armed { at, distance, repeats: false };
            if let Err(Refusal(why)) = backed.backing.arm(distance) {
                self.tell(Notice::Unarmed { counter, why });
            }
        }
    }

    fn leave_to_repeat(&mut self, counter: usize) {
        if let Some(Backed { alarm, .. }) = &mut self.counters[counter].backed {
            *alarm = Armed { at: alarm.at + alarm.distance, distance: alarm.distance, repeats: true };
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
