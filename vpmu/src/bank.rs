//! A vCPU's counters: their values, which of them run, and which have overflowed.
//!
//! What counts behind a counter lives as long as the counter's configuration and never stops: a counter that stands still
//! just does not take over what was counted meanwhile. So stopping, starting and reading cost the host nothing but a
//! look at the count. Only an alarm, for the next overflow, is a request to the host, and it is made as seldom as can be:
//! one that comes early does no harm, because whether a counter has overflowed is computed from its value.

mod floor;

use std::time::Duration;

use log::debug;

use crate::event::Selection;
use crate::notice::{Notice, Notices};
use crate::source::{Backing, Count, FAR, Refusal, Source};
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
    notices: Notices,
}

struct Counter<B> {
    /// What it showed when it was last looked at.
    value: u64,
    selection: Option<Selection>,
    alarm: Alarm,
    backed: Option<Backed<B>>,
    /// What the host refused when it was last asked: that is told once.
    refused: Option<Selection>,
}

/// What counts for a counter.
struct Backed<B> {
    backing: B,
    /// Its count when the counter was last looked at while it ran.
    mark: u64,
    alarm: Armed,
    /// The count at which its last alarm came, and when that was.
    last_alarm: (u64, Duration),
    /// Whether nobody has used it since it was last asked for.
    idle: bool,
    /// Since when it misses counts, and whether that was told.
    starved: Option<(Duration, bool)>,
}

/// The alarm that is set.
#[derive(Debug, Clone, Copy)]
struct Armed {
    /// The count at which it comes.
    at: u64,
    /// How many counts after it was set; the host repeats it with this distance.
    distance: u64,
    /// Whether it has come and been left to repeat.
    repeats: bool,
}

impl<S: Source> Bank<S> {
    /// So many counters of so many bits, all zero, which select nothing and stand still.
    ///
    /// # Panics
    /// If there are none or more than 64 counters, or their bits are none or more than 63.
    pub fn new(source: S, counters: usize, width: u32) -> Self {
        assert!((1..=64).contains(&counters) && (1..64).contains(&width));
        let counter =
            || Counter { value: 0, selection: None, alarm: Alarm::Off, backed: None, refused: None };
        Self {
            source,
            width,
            counters: (0..counters).map(|_| counter()).collect(),
            running: 0,
            overflowed: 0,
            floor: Floor::default(),
            notices: Notices::default(),
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

    /// Gives back to the host what counts for counters that have stood still since this was last called.
    pub fn release_idle(&mut self) {
        for counter in 0..self.size() {
            let runs = self.runs(counter);
            let backed = &mut self.counters[counter].backed;
            if backed.as_mut().is_some_and(|backed| !runs && std::mem::replace(&mut backed.idle, true)) {
                debug!("counter {counter} stands still: its hardware is given back");
                *backed = None;
            }
        }
    }

    /// Whether the host counts for any of the counters.
    pub fn is_backed(&self) -> bool {
        self.counters.iter().any(|counter| counter.backed.is_some())
    }

    /// The counters that have overflowed since this was last asked, as far as they were looked at.
    pub fn take_overflowed(&mut self) -> u64 {
        std::mem::take(&mut self.overflowed)
    }

    /// What the operator is to know since this was last asked.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.notices.take()
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
        if count >= backed.alarm.at {
            self.alarm_came(counter, count);
        }
    }

    /// What was counted behind a counter; the operator hears of gaps.
    fn count(&mut self, counter: usize) -> Option<u64> {
        let runs = self.runs(counter);
        let this = &mut self.counters[counter];
        let selection = this.selection?;
        let backed = this.backed.as_mut()?;
        let (count, starved) = match backed.backing.count() {
            Count::Exact(count) => (count, false),
            // One that stands still misses nothing.
            Count::Starved(count) => (count, runs),
        };
        match (starved, backed.starved) {
            (true, None) => {
                let now = self.source.now();
                let told = self.notices.tell(Notice::Starved { counter, selection }, now);
                backed.starved = Some((now, told));
            }
            (false, Some((since, told))) => {
                backed.starved = None;
                let now = self.source.now();
                let missed = now.saturating_sub(since);
                if told {
                    self.notices.tell(Notice::Recovered { counter, selection, missed }, now);
                }
            }
            _ => {}
        }
        Some(count)
    }

    /// The host repeats an alarm with the same distance, however short that was. In a guest that has stopped its counters to
    /// handle the overflow a short one could come over and over, and the guest never get on. So an alarm is for once,
    /// unless one repetition is harmless: the guest's next overflow is often at the same distance, and then needs nothing more.
    fn alarm_came(&mut self, counter: usize, count: u64) {
        let now = self.source.now();
        let Some(backed) = &mut self.counters[counter].backed else { return };
        let (last_count, last_time) = std::mem::replace(&mut backed.last_alarm, (count, now));
        if backed.alarm.at.saturating_sub(last_count) < floor::PERIOD
            && let Tell::Raised(times) = self.floor.short_alarm(now)
        {
            self.notices.tell(Notice::RateFloor { period: floor::PERIOD, times }, now);
        }
        let Armed { distance, repeats, .. } = backed.alarm;
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
        } else if let Some(count) = self.count(counter)
            && let Some(backed) = &mut self.counters[counter].backed
        {
            backed.mark = count;
            backed.idle = false;
            self.set_alarm(counter);
        }
    }

    fn start(&mut self, counter: usize) {
        let this = &self.counters[counter];
        let Some(selection) = this.selection else { return };
        let distance = match this.alarm {
            Alarm::AtOverflow => self.until_overflow(counter).max(self.least_distance()),
            Alarm::Off => FAR,
        };
        match self.source.start(selection, distance) {
            Ok(backing) => {
                debug!("counter {counter} counts {selection}, and the host says so after {distance}");
                let alarm = Armed { at: distance, distance, repeats: false };
                let backed = Backed {
                    backing,
                    mark: 0,
                    alarm,
                    last_alarm: (0, Duration::ZERO),
                    idle: false,
                    starved: None,
                };
                let this = &mut self.counters[counter];
                this.backed = Some(backed);
                this.refused = None;
            }
            // The guest's kernel asks again whenever the task comes back that has the event.
            Err(Refusal(why)) => {
                if self.counters[counter].refused.replace(selection) != Some(selection) {
                    let now = self.source.now();
                    self.notices.tell(Notice::Refused { counter, selection, why }, now);
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
        let backed = self.counters[counter].backed.as_ref()?;
        // The last alarm is behind the mark, so that the floor does not move while the guest rewrites its counter.
        Some((backed.mark + distance).max(backed.last_alarm.0 + least))
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
                self.notices.tell(Notice::Unarmed { counter, why }, self.source.now());
            }
        }
    }

    fn leave_to_repeat(&mut self, counter: usize) {
        if let Some(Backed { alarm, .. }) = &mut self.counters[counter].backed {
            *alarm = Armed { at: alarm.at + alarm.distance, distance: alarm.distance, repeats: true };
        }
    }
}
