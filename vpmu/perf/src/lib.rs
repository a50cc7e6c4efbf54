//! Backs the counters of a virtual PMU (crate [`vpmu`]) with Linux perf events.
//!
//! This crate is for virtual machine monitors that emulate a guest's PMU on a Linux host. `vpmu` knows what the guest's
//! register accesses mean and needs a [`Source`] that counts; [`PerfEvents`] is that source. It opens a pinned perf
//! event for each selected event, reads it with RDPMC where the host allows that, and has overflows send `SIGIO` to the
//! vCPU's thread.
//!
//! A [`PerfEvents`] belongs to one vCPU and must be created and used on the thread that runs it. Its events count that
//! thread only, signal that thread only, and can be read without a system call by that thread only.
//!
//! - [`HostPmu`] chooses the PMU that counts: a hybrid processor has one for each type of core.
//! - [`free_counters`] finds out how many hardware counters are free, so that a guest is not promised more.
//! - [`Obstacle`] explains an error of `perf_event_open`, with the command that helps.
//! - [`Page`] reads a counter without a system call, as long as [`PageLimits`] allow it.
//! - [`Needed`] and [`Rights`] say who may count a guest's kernel.
//! - [`Reservation`] keeps the host's PMU in use while a guest's events come and go.
//! - [`broker`] opens events in a process of its own, so that threads that run guests need no right to perf.
//! - [`Measurement`] counts what a thread does in a guest, for the host's own use.
//! - [`Sampling`] samples what a thread does in a guest, for the host's own use.
//! - [`EntryTicks`] says what each entry into a guest adds to counts, which [`PerfEvents`] can leave out.
//! - [`Attribution`] measures how much a vCPU's thread does in the guest, and how much in the host.
//!
//! # Example
//! Counting the instructions that a vCPU executes in the guest:
//! ```no_run
//! use vpmu::event::{Event, Filter, GenericEvent, Scope, Selection};
//! use vpmu::source::{Backing, Count, FAR, Source};
//! use vpmu_perf::{HostPmu, PerfEvents};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // On the thread that is going to run the vCPU:
//! let (pmu, _) = HostPmu::bind_thread()?;
//! let mut source = PerfEvents::new(pmu);
//! let instructions = Selection {
//!     event: Event::Generic(GenericEvent::Instructions),
//!     filter: Filter::All,
//!     scope: Scope::Guest,
//! };
//! let mut counter = source.start(instructions, FAR)?;
//! // ... KVM_RUN ...
//! match counter.count() {
//!     Count::Exact(count) => println!("{count} instructions"),
//!     Count::Starved(count) => println!("at least {count} instructions: the event lost its hardware counter"),
//! }
//! # Ok(())
//! # }
//! ```

#![deny(missing_docs)]

mod attribution;
pub mod broker;
mod entries;
mod estimate;
mod event;
mod host;
mod instruction;
mod measurement;
mod obstacle;
mod page;
mod page_limits;
mod pairs;
mod parked;
mod probe;
mod request;
mod reservation;
mod rights;
mod sampling;
mod system_calls;

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::{Duration, Instant};

use self::entries::Added;
use self::event::PerfEvent;
use self::pairs::Pairs;
use self::parked::Parked;
use self::system_calls::SystemCalls;
use vpmu::event::{Event, Selection};
use vpmu::policy::{OnStarvation, Policy};
use vpmu::report::BackingReport;
use vpmu::source::{Backing, Count, FAR, Place, PolicyEffect, Refusal, Source};

pub use self::attribution::{Attributed, Attribution, Reading, Work};
pub use self::entries::{Entries, EntryTicks, Ticks};
pub use self::host::{HostPmu, WATCHDOG, watchdog_hint};
pub use self::measurement::Measurement;
pub use self::obstacle::Obstacle;
pub use self::page::{Page, ScheduledOut};
pub use self::page_limits::{MORE_PAGES, PageLimits};
pub use self::probe::{Free, NotFree, exists, free_counters, generic_events};
pub use self::request::{Encoded, Rate, SAMPLE_SIGNAL};
pub use self::reservation::Reservation;
pub use self::rights::{Needed, PARANOID, Rights, paranoid};
pub use self::sampling::Sampling;

/// Opens perf events that count the current thread: the [`Source`] for one vCPU's counters.
pub struct PerfEvents {
    pmu: HostPmu,
    epoch: Instant,
    max_rate: MaxRate,
    /// Twice the least average time between two overflows of an event that is not throttled, when it was last read.
    least_interval: Duration,
    /// Time at which `least_interval` was last read.
    least_interval_read: Duration,
    system_calls: SystemCalls,
    pairs: Pairs,
    parked: Parked,
    /// Events estimate what they miss without hardware.
    estimates: bool,
    /// Events for which the host was asked, and whether it has them.
    existing: HashMap<Event, bool>,
    /// Is told of each event whose page cannot be mapped.
    on_unmapped: fn(&io::Error),
    /// The entries into the guest, if events count those.
    entries: Option<Rc<Entries>>,
}

/// Maximum number of events in [`PerfEvents::existing`]: a guest can ask for any number of events.
const MAX_REMEMBERED: usize = 1024;

/// The host's limit for the rate of overflows. The host throttles a faster event until its next tick, and lowers the
/// limit by itself when its own handler takes long. The file stays open, because a sandboxed thread can open none.
///
/// A limit that cannot be read is taken for the lowest there is, at which each alarm is set again, by a system call.
/// Linux begins with 100,000 (`DEFAULT_MAX_SAMPLE_RATE`), but may have lowered that since, and an alarm that is left to
/// repeat where it may not be stops its event without anybody knowing.
struct MaxRate(Option<File>);

impl MaxRate {
    /// The limit may sink at any moment.
    const READ_EVERY: Duration = Duration::from_millis(100);

    fn open() -> Self {
        Self(File::open("/proc/sys/kernel/perf_event_max_sample_rate").ok())
    }

    /// Returns twice the least average time between two overflows of an event that is not throttled.
    fn least_interval(&self) -> Duration {
        const LOWEST: u32 = 1;
        Duration::from_secs(2) / self.read().unwrap_or(LOWEST).max(LOWEST)
    }

    fn read(&self) -> Option<u32> {
        let mut text = [0; 16];
        let len = self.0.as_ref()?.read_at(&mut text, 0).ok()?;
        str::from_utf8(&text[..len]).ok()?.trim().parse().ok()
    }
}

impl PerfEvents {
    /// Creates a source whose events are of `pmu`, count the current thread, and send `SIGIO` to it when their alarms
    /// expire.
    pub fn new(pmu: HostPmu) -> Self {
        let max_rate = MaxRate::open();
        Self {
            pmu,
            epoch: Instant::now(),
            least_interval: max_rate.least_interval(),
            max_rate,
            least_interval_read: Duration::ZERO,
            system_calls: SystemCalls::default(),
            pairs: Pairs::of_this_host(),
            parked: Parked::new(),
            estimates: false,
            existing: HashMap::new(),
            on_unmapped: |_| {},
            entries: None,
        }
    }

    /// Calls a function for each event whose page cannot be mapped, with the reason. Such an event counts as exactly as
    /// others, but each reading of it is a system call ([`PageLimits`]).
    #[must_use]
    pub fn on_unmapped_page(self, report: fn(&io::Error)) -> Self {
        Self { on_unmapped: report, ..self }
    }

    /// Leaves entries into the guest out of all counts, on a host whose events count them ([`EntryTicks`]). `all`
    /// returns the number of entries so far. `is_split` says that the guest's kernel has the upper half of the
    /// addresses, and programs the lower one; otherwise, or if this process may not see tracepoints, entries stay in
    /// counts of one privilege level. Also returns the entries, which are to be told of each time that the guest has
    /// run.
    #[must_use]
    pub fn without_entries(
        self,
        ticks: EntryTicks,
        all: impl Fn() -> Option<u64> + 'static,
        is_split: bool,
    ) -> (Self, Rc<Entries>) {
        let entries = Rc::new(Entries::of_this_thread(ticks, all, is_split, self.system_calls.clone()));
        (Self { entries: Some(Rc::clone(&entries)), ..self }, entries)
    }
}

impl PerfEvents {
    /// Starts a parked event, if there is one that counts this selection.
    fn restart(&mut self, selection: Selection, distance: u64) -> Option<PerfEvent> {
        let mut event = self.parked.take(selection)?;
        with_period(distance, |period| event.restart(period)).ok()?;
        Some(event)
    }

    /// Opens an event. Parked ones are given up if they may be why that fails, or why its page cannot be mapped.
    fn open(&mut self, selection: Selection, distance: u64) -> Result<PerfEvent, Refusal> {
        let open = || {
            with_period(distance, |period| {
                PerfEvent::open(self.pmu, selection, period, self.system_calls.clone())
            })
        };
        let opened = open();
        let opened = if opened.is_err() && self.parked.close_all() { open() } else { opened };
        let mut event = opened.map_err(|error| Refusal(error.to_string()))?;
        if event.unmapped().is_some() && self.parked.close_all() {
            event.map();
        }
        if let Some(reason) = event.unmapped() {
            (self.on_unmapped)(reason);
        }
        event.leave_out(self.entries.as_ref().and_then(|entries| Added::to(entries, selection)));
        Ok(event)
    }
}

impl Source for PerfEvents {
    type Backing = PerfEvent;

    fn start(&mut self, selection: Selection, distance: u64) -> Result<PerfEvent, Refusal> {
        let mut event =
            self.restart(selection, distance).map_or_else(|| self.open(selection, distance), Ok)?;
        event.settle();
        if self.estimates {
            event.estimate();
        }
        Ok(event)
    }

    fn stop(&mut self, selection: Selection, event: PerfEvent) {
        self.parked.park(selection, event);
    }

    fn release_idle(&mut self) {
        self.parked.close_idle();
    }

    /// Returns whether the host takes the event. A kernel that does not check an encoding before the event is scheduled
    /// takes every encoding.
    fn can_count(&mut self, event: Event) -> bool {
        if let Some(exists) = self.existing.get(&event) {
            return *exists;
        }
        let opened = PerfEvent::open_disabled(self.pmu, event, self.system_calls.clone());
        let Some(exists) = existence(opened) else { return true };
        if self.existing.len() >= MAX_REMEMBERED {
            self.existing.clear();
        }
        self.existing.insert(event, exists);
        exists
    }

    fn hardware_counters(&self, event: Event) -> usize {
        self.pairs.hardware_counters(event)
    }

    fn now(&self) -> Duration {
        self.epoch.elapsed()
    }

    fn least_interval(&mut self, now: Duration) -> Duration {
        if now.saturating_sub(self.least_interval_read) >= MaxRate::READ_EVERY {
            (self.least_interval, self.least_interval_read) = (self.max_rate.least_interval(), now);
        }
        self.least_interval
    }

    fn set_policy(&mut self, policy: &Policy) -> PolicyEffect {
        let estimates = policy.on_starvation == OnStarvation::Scale;
        let before = std::mem::replace(&mut self.estimates, estimates);
        if before == estimates { PolicyEffect::Immediate } else { PolicyEffect::OnNewBackings }
    }

    fn requests(&self) -> u64 {
        self.system_calls.count()
    }
}

impl Backing for PerfEvent {
    fn count(&mut self) -> Count {
        self.read()
    }

    fn arm(&mut self, distance: u64) -> Result<(), Refusal> {
        with_period(distance, |period| self.set_period(period)).map_err(|error| Refusal(error.to_string()))
    }

    fn takes_early_expiry(&mut self) -> bool {
        self.takes_early_expiry()
    }

    fn estimated(&self) -> u64 {
        self.estimated()
    }

    fn place(&self) -> Place {
        PerfEvent::place(self)
    }

    fn report(&mut self) -> BackingReport {
        PerfEvent::report(self)
    }
}

/// Returns whether the host has an event, given the result of opening it. Returns `None` for an error that may go away,
/// such as a lack of resources.
fn existence<T>(opened: io::Result<T>) -> Option<bool> {
    match opened {
        Ok(_) => Some(true),
        Err(error) => match error.raw_os_error() {
            // EINVAL is also what a PMU returns that cannot tell guests from the host.
            None | Some(libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP | libc::EINVAL) => Some(false),
            Some(_) => None,
        },
    }
}

/// Calls `request` with `distance` as the sample period, or with the shortest period that the host takes instead. A
/// longer period makes the alarm late and nothing else, because overflows are computed from the count.
fn with_period<T>(distance: u64, mut request: impl FnMut(u64) -> io::Result<T>) -> io::Result<T> {
    /// Linux raises a period of 1 to 2. On Intel's branch event, a period of 1 requests a branch trace (BTS) instead.
    const LEAST: u64 = 2;
    /// Several Intel processors miscount with shorter periods, and Linux refuses those (`limit_period`).
    const LEAST_EVERYWHERE: u64 = 128;
    match request(distance.clamp(LEAST, FAR)) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) && distance < LEAST_EVERYWHERE => {
            request(LEAST_EVERYWHERE)
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// Returns the periods requested of a host that takes periods from `least` on, and whether it took the last one.
    fn asked(distance: u64, least: u64) -> (Vec<u64>, bool) {
        let mut asked = Vec::new();
        let result = with_period(distance, |period| {
            asked.push(period);
            if period < least { Err(io::Error::from_raw_os_error(libc::EINVAL)) } else { Ok(()) }
        });
        (asked, result.is_ok())
    }

    #[test]
    fn an_event_is_missing_if_the_host_does_not_know_it_and_not_if_resources_are_short() {
        let said = |errno| existence::<()>(Err(io::Error::from_raw_os_error(errno)));
        assert_eq!(existence(Ok(())), Some(true));
        assert_eq!([said(libc::ENOENT), said(libc::EINVAL)], [Some(false); 2]);
        assert_eq!([said(libc::EBUSY), said(libc::EMFILE), said(libc::EACCES)], [None; 3]);
        assert_eq!(existence::<()>(Err(io::Error::other("the policy denies it"))), Some(false));
    }

    #[test]
    fn a_limit_that_cannot_be_read_is_taken_for_the_lowest() {
        let limit = |text: &str| {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(text.as_bytes()).unwrap();
            MaxRate(Some(file)).least_interval()
        };
        assert_eq!(limit("100000\n"), Duration::from_micros(20));
        let lowest = Duration::from_secs(2);
        assert_eq!(
            [limit("1\n"), limit("0\n"), limit("none\n"), MaxRate(None).least_interval()],
            [lowest; 4]
        );
    }

    #[test]
    fn no_host_is_asked_for_a_branch_trace() {
        assert_eq!(asked(1, 0), (vec![2], true));
        assert_eq!(asked(u64::MAX, 0), (vec![FAR], true));
    }

    #[test]
    fn a_host_that_refuses_short_periods_is_asked_for_a_longer_one() {
        assert_eq!(asked(5, 32), (vec![5, 128], true));
        assert_eq!(asked(500, 32), (vec![500], true));
        assert_eq!(asked(5, 1000), (vec![5, 128], false));
        assert_eq!(asked(500, 1000), (vec![500], false), "that is not why it refuses");
    }
}
