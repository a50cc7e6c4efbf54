//! A host that counts what a target tells it to, and checks what it is asked for.

use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use vpmu::event::{Event, Selection};
use vpmu::policy::Policy;
use vpmu::report::BackingReport;
use vpmu::shared_page::Page;
use vpmu::source::{Backing, Count, FAR, PolicyEffect, Refusal, Source};
use vpmu::translation::encoding;
use vpmu::x86::Vendor;

/// The host. Clones are handles to the same host.
#[derive(Clone)]
pub struct Host(Rc<RefCell<State>>);

struct State {
    /// Vendors of the guest's and the host's PMU; none on RISC-V.
    vendors: Option<(Vendor, Vendor)>,
    policy: Policy,
    most: usize,
    counters: Vec<Weak<RefCell<Counter>>>,
    now: Duration,
    /// Calls since the last exit.
    calls: usize,
    requests: u64,
    is_starved: bool,
    refuses: bool,
    page: Rc<Page>,
    later: Vec<Later>,
}

/// A write of the page after this number of looks at it.
pub struct Later {
    /// Looks that are left.
    pub looks: u8,
    pub word: u8,
    pub value: u64,
}

/// A running event.
pub struct Running {
    counter: Rc<RefCell<Counter>>,
    host: Host,
}

struct Counter {
    count: u64,
    period: u64,
    left: u64,
}

/// Returns whether Linux counts with this encoding exactly what a processor of this vendor has under it. This says in
/// other words what `vpmu::translation` says.
fn is_of_a_processor(vendor: Vendor, code: u64) -> bool {
    let (event, unit_mask) = (code & 0xff | code >> 24 & 0xf00, code >> 8 & 0xff);
    let edge_invert_threshold = code & (1 << 18 | 1 << 23 | 0xff << 24);
    let others = code & !(0xf_0000_00ff | unit_mask << 8 | edge_invert_threshold);
    others == 0
        && match vendor {
            Vendor::Intel => event != 0 && event <= 0xff,
            Vendor::Amd => event != 0xfff,
        }
}

impl Host {
    /// Creates a host whose counters all work, for a guest with `most` counters.
    pub fn new(vendors: Option<(Vendor, Vendor)>, most: usize, page: Rc<Page>) -> Self {
        Self(Rc::new(RefCell::new(State {
            vendors,
            policy: Policy::default(),
            most,
            counters: Vec::new(),
            now: Duration::ZERO,
            calls: 0,
            requests: 0,
            is_starved: false,
            refuses: false,
            page,
            later: Vec::new(),
        })))
    }

    /// Sets the policy that holds from now on.
    pub fn expect_policy(&self, policy: &Policy) {
        self.0.borrow_mut().policy = policy.clone();
    }

    /// Returns the number of calls since this was last called.
    pub fn take_calls(&self) -> usize {
        std::mem::take(&mut self.0.borrow_mut().calls)
    }

    /// Tally looks at the page, or calls the host: another vCPU may write the page now.
    pub fn looks(&self) {
        let mut state = self.0.borrow_mut();
        let State { later, page, .. } = &mut *state;
        later.retain_mut(|write| {
            write.looks = write.looks.saturating_sub(1);
            if write.looks == 0 {
                super::word(page, write.word).store(write.value, Relaxed);
            }
            write.looks > 0
        });
    }

    /// Writes the page later.
    pub fn write_later(&self, write: Later) {
        let mut state = self.0.borrow_mut();
        if state.later.len() < 16 {
            state.later.push(write);
        }
    }

    /// Advances time.
    pub fn time_passes(&self, time: Duration) {
        self.0.borrow_mut().now += time;
    }

    /// Sets whether others hold all hardware, and whether new events are refused.
    pub fn set(&self, is_starved: bool, refuses: bool) {
        let mut state = self.0.borrow_mut();
        (state.is_starved, state.refuses) = (is_starved, refuses);
    }

    /// Runs the guest for at most this number of counts, up to the next alarm. Subtracts what it ran. Returns whether
    /// an alarm has expired.
    pub fn guest_runs(&self, left: &mut u64) -> bool {
        let counters: Vec<_> = {
            let mut state = self.0.borrow_mut();
            state.counters.retain(|counter| counter.strong_count() > 0);
            state.counters.iter().filter_map(Weak::upgrade).collect()
        };
        let step = counters.iter().map(|counter| counter.borrow().left).min().unwrap_or(*left).min(*left);
        *left -= step;
        let mut has_expired = false;
        for counter in counters {
            let mut counter = counter.borrow_mut();
            counter.count += step;
            counter.left -= step;
            if counter.left == 0 {
                counter.left = counter.period;
                has_expired = true;
            }
        }
        has_expired
    }

    fn call(&self) {
        self.0.borrow_mut().calls += 1;
        self.looks();
    }

    fn check(&self, event: Event) {
        let state = self.0.borrow();
        let code = match (event, state.vendors) {
            (Event::Raw(code), None) => return assert!(code < 1 << 56, "{code:#x} reached the host"),
            (Event::Raw(code), Some((guest, host))) => {
                assert!(guest == host && is_of_a_processor(host, code), "{code:#x} reached the host");
                code
            }
            (Event::Generic(event), Some((guest, _))) => {
                encoding(guest, event).unwrap_or_else(|| panic!("the guest has no {event:?}"))
            }
            _ => return,
        };
        let is_allowed = state.vendors.is_some_and(|(guest, _)| state.policy.allows(guest, code));
        assert!(is_allowed, "{code:#x} reached the host, and the policy denies it");
    }
}

impl Source for Host {
    type Backing = Running;

    fn start(&mut self, selection: Selection, distance: u64) -> Result<Running, Refusal> {
        self.call();
        self.check(selection.event);
        assert!((1..=FAR).contains(&distance), "{distance}");
        let mut state = self.0.borrow_mut();
        state.requests += 1;
        if state.refuses || matches!(selection.event, Event::Absent { .. } | Event::Denied { .. }) {
            return Err(Refusal("it does not exist".to_owned()));
        }
        state.counters.retain(|counter| counter.strong_count() > 0);
        let (open, most) = (state.counters.len(), state.most);
        assert!(open < most, "one more event while {open} are open, for {most} counters");
        let counter = Rc::new(RefCell::new(Counter { count: 0, period: distance, left: distance }));
        state.counters.push(Rc::downgrade(&counter));
        Ok(Running { counter, host: self.clone() })
    }

    fn can_count(&mut self, event: Event) -> bool {
        self.call();
        self.check(event);
        !matches!(event, Event::Absent { .. } | Event::Denied { .. })
    }

    fn hardware_counters(&self, event: Event) -> usize {
        let is_amds = self.0.borrow().vendors.is_some_and(|(_, host)| host == Vendor::Amd);
        // As on AMD's processors: large increments take two.
        if is_amds && matches!(event, Event::Raw(code) if code & 0xf_0000_00ff == 0x03) { 2 } else { 1 }
    }

    fn now(&self) -> Duration {
        self.0.borrow().now
    }

    fn least_interval(&mut self, _now: Duration) -> Duration {
        Duration::from_micros(20)
    }

    fn set_policy(&mut self, _policy: &Policy) -> PolicyEffect {
        PolicyEffect::OnNewBackings
    }

    fn requests(&self) -> u64 {
        self.0.borrow().requests
    }
}

impl Backing for Running {
    fn count(&mut self) -> Count {
        self.host.call();
        let count = self.counter.borrow().count;
        if self.host.0.borrow().is_starved { Count::Starved(count) } else { Count::Exact(count) }
    }

    fn arm(&mut self, distance: u64) -> Result<(), Refusal> {
        self.host.call();
        assert!((1..=FAR).contains(&distance), "{distance}");
        self.host.0.borrow_mut().requests += 1;
        let mut counter = self.counter.borrow_mut();
        (counter.period, counter.left) = (distance, distance);
        Ok(())
    }

    fn estimated(&self) -> u64 {
        0
    }

    fn report(&mut self) -> BackingReport {
        BackingReport { hardware: None, enabled_ns: 0, running_ns: 0 }
    }
}
