//! A vCPU's counters: their values, which of them run, and which have overflowed.
//!
//! What counts behind a counter lives as long as the counter's configuration and never stops: a counter that stands still
//! just does not take over what was counted meanwhile. So stopping, starting and reading cost the host nothing but a
//! look at the count. Only an alarm, for the next overflow, is a request to the host, and it is made as seldom as can be:
//! one that comes early does no harm, because whether a counter has overflowed is computed from its value.

mod floor;

use crate::event::Selection;
use crate::notice::Notice;
use crate::source::{Backing, Count, FAR, Source};
use floor::{Floor, Tell};

/// After so many, refused events are told no more: a guest can ask for any number of them.
const REFUSALS_TOLD: u32 = 32;

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
    refusals: u32,
    notices: Vec<Notice>,
}

struct Counter<B> {
    /// What it showed when it was last looked at.
    value: u64,
    selection: Option<Selection>,
    alarm: Alarm,
    backed: Option<Backed<B>>,
}

/// What counts for a counter.
struct Backed<B> {
    backing: B,
    /// Its count when the counter was last looked at while it ran.
    mark: u64,
    /// The count at which its alarm comes.
    alarm_at: u64,
    /// The count at which its last alarm came.
    last_alarm: u64,
    /// Since when it misses counts.
    starved: Option<std::time::Duration>,
}

impl<S: Source> Bank<S> {
    /// So many counters of so many bits, all zero, which select nothing and stand still.
    ///
    /// # Panics
    /// If there are none or more than 64 counters, or their bits are none or more than 63.
    pub fn new(source: S, counters: usize, width: u32) -> Self {
        assert!((1..=64).contains(&counters) && (1..64).contains(&width));
        let counter = || Counter { value: 0, selection: None, alarm: Alarm::Off, backed: None };
        Self {
            source,
            width,
            counters: (0..counters).map(|_| counter()).collect(),
            running: 0,
            overflowed: 0,
            floor: Floor::default(),
            refusals: 0,
            notices: Vec::new(),
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
        this.alarm = alarm;
        if this.selection != selection {
            this.selection = selection;
            this.backed = None;
        }
        self.resume(counter);
    }

    /// Says which counters run; all others stand still.
    pub fn run(&mut self, running: u64) {
        let before = self.running;
        for counter in 0..self.size() {
            if before & !running & 1 << counter != 0 {
                self.look(counter);
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
        self.counters[counter].value = value & self.mask();
        self.set_alarm(counter);
    }

    /// Looks whether alarms have come, after a signal that says so, and at what has overflowed.
    pub fn look_at_all(&mut self) {
        for counter in 0..self.size() {
            self.look(counter);
        }
    }

    /// The counters that have overflowed since this was last asked, as far as they were looked at.
    pub fn take_overflowed(&mut self) -> u64 {
        std::mem::take(&mut self.overflowed)
    }

    /// What the operator is to know since this was last asked.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.notices)
    }

    fn mask(&self) -> u64 {
        (1 << self.width) - 1
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
        let Some(count) = self.count(counter) else { return };
        let runs = self.runs(counter);
        let width = self.width;
        let this = &mut self.counters[counter];
        let Some(backed) = &mut this.backed else { return };
        if runs {
            let sum = u128::from(this.value) + u128::from(count.saturating_sub(backed.mark));
            if sum >> width != 0 {
                self.overflowed |= 1 << counter;
            }
            #[expect(clippy::cast_possible_truncation, reason = "the bits above are those that overflowed")]
            let value = sum as u64 & ((1 << width) - 1);
            this.value = value;
            backed.mark = count;
        }
        if count >= backed.alarm_at {
            self.alarm_came(counter, count);
        }
    }

    /// What was counted behind a counter; the operator hears of gaps.
    fn count(&mut self, counter: usize) -> Option<u64> {
        let this = &mut self.counters[counter];
        let selection = this.selection?;
        let backed = this.backed.as_mut()?;
        let (count, starved) = match backed.backing.count() {
            Count::Exact(count) => (count, false),
            Count::Starved(count) => (count, true),
        };
        match (starved, backed.starved) {
            (true, None) => {
                backed.starved = Some(self.source.now());
                self.notices.push(Notice::Starved { counter, selection });
            }
            (false, Some(since)) => {
                backed.starved = None;
                let missed = self.source.now().saturating_sub(since);
                self.notices.push(Notice::Recovered { counter, selection, missed });
            }
            _ => {}
        }
        Some(count)
    }

    /// An alarm is set for once. The host would repeat it with the same distance, however short that was; in a guest
    /// that has stopped its counters to handle the overflow, a short one could come over and over.
    fn alarm_came(&mut self, counter: usize, count: u64) {
        let Some(backed) = &mut self.counters[counter].backed else { return };
        let short = backed.alarm_at.saturating_sub(backed.last_alarm) < floor::PERIOD;
        backed.last_alarm = count;
        if short && let Tell::Raised(times) = self.floor.short_alarm(self.source.now()) {
            self.notices.push(Notice::RateFloor { period: floor::PERIOD, times });
        }
        let at = self.wanted(counter).unwrap_or(count + FAR);
        self.arm(counter, count, at);
    }

    /// Lets a counter that runs take over counts from now on.
    fn resume(&mut self, counter: usize) {
        if !self.runs(counter) {
            return;
        }
        if self.counters[counter].backed.is_none() {
            self.start(counter);
        } else if let Some(count) = self.count(counter)
            && let Some(backed) = &mut self.counters[counter].backed
        {
            backed.mark = count;
            self.set_alarm(counter);
        }
    }

    fn start(&mut self, counter: usize) {
        let this = &self.counters[counter];
        let Some(selection) = this.selection else { return };
        let alarm_at = match this.alarm {
            Alarm::AtOverflow => self.until_overflow(counter).max(self.least_distance()),
            Alarm::Off => FAR,
        };
        match self.source.start(selection, alarm_at) {
            Ok(backing) => {
                let backed = Backed { backing, mark: 0, alarm_at, last_alarm: 0, starved: None };
                self.counters[counter].backed = Some(backed);
            }
            Err(refusal) => self.refuse(counter, selection, refusal.0),
        }
    }

    fn refuse(&mut self, counter: usize, selection: Selection, why: String) {
        if self.refusals < REFUSALS_TOLD {
            self.notices.push(Notice::Refused { counter, selection, why });
        } else if self.refusals == REFUSALS_TOLD {
            self.notices.push(Notice::NoMoreRefusals);
        }
        self.refusals = self.refusals.saturating_add(1);
    }

    /// Sets the alarm of a counter that was just looked at, unless one is set that comes early enough.
    fn set_alarm(&mut self, counter: usize) {
        let Some(at) = self.wanted(counter) else { return };
        if let Some(backed) = &self.counters[counter].backed
            && at < backed.alarm_at
        {
            let mark = backed.mark;
            self.arm(counter, mark, at);
        }
    }

    /// The count at which a counter that was just looked at needs an alarm, if it runs and has one.
    fn wanted(&mut self, counter: usize) -> Option<u64> {
        if !self.runs(counter) || self.counters[counter].alarm == Alarm::Off {
            return None;
        }
        let least = self.least_distance();
        let distance = self.until_overflow(counter);
        let backed = self.counters[counter].backed.as_ref()?;
        // The last alarm is behind the mark, so that the floor does not move while the guest rewrites its counter.
        Some((backed.mark + distance).max(backed.last_alarm + least))
    }

    fn until_overflow(&self, counter: usize) -> u64 {
        ((1 << self.width) - self.counters[counter].value).min(FAR)
    }

    fn least_distance(&mut self) -> u64 {
        self.floor.distance(|| self.source.now())
    }

    fn arm(&mut self, counter: usize, count: u64, at: u64) {
        if let Some(backed) = &mut self.counters[counter].backed {
            backed.backing.arm(at.saturating_sub(count).max(1));
            backed.alarm_at = at;
        }
    }
}
