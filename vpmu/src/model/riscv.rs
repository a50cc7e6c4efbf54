//! The PMU of a RISC-V guest: counters that its kernel configures, starts and stops by calls of the SBI's "Performance
//! Monitoring Unit Extension" (SBI specification, chapter 11) and reads from CSRs of the unprivileged architecture, and whose
//! overflows are as `Sscofpmf` has them.
//!
//! A counter has the same number everywhere: it is that of its CSR from [`CYCLE`] on, of its bit in `scountovf`, and in the
//! unit. So there is one, 1, behind which there is nothing: its CSR is `time`, which is no counter.
//!
//! A counter's value is set only where its overflow is forgotten, too, when it is configured or started. So that an overflow
//! interrupts nobody while `scountovf` still has the counter's last one, as `Sscofpmf` wants it, cannot make a difference: there
//! are 2^64 counts between the two. OpenSBI has the bit set from the configuration of a counter to its start, lest that
//! interrupts early. Here one that stands still never does, and the bit is only ever set by an overflow.
//!
//! There are no firmware counters. What they count is what the firmware does for a guest: timers, interrupts between harts,
//! fences, traps. KVM does all of that in the host's kernel, which tells nobody how often. A counter of the few calls that
//! come here would count ourselves, under a name that promises something else. Nor is there a snapshot of the counters in shared
//! memory: Linux loses samples with it.

mod event;
mod sbi;

#[cfg(test)]
mod tests;

use super::Model;
use crate::Outcome;
use crate::event::{Event, Filter, Meaning, Selection};
use crate::mask::{first, members};
use crate::policy::Policy;
use crate::report::{Report, State};
use crate::source::Source;
use crate::unit::{CounterConfig, Unit};
use sbi::{Config, Error};

pub use sbi::{Answer, EVENT_GET_INFO, NUM_COUNTERS};

/// All counters have as many bits as a register.
const WIDTH: u32 = 64;
/// There can be no more programmable counters than these, `hpmcounter3` to `hpmcounter31`.
pub const MOST_PROGRAMMABLE: usize = 29;

/// The CSR `cycle`, the first of the counters.
pub const CYCLE: u32 = 0xc00;
/// The CSR `hpmcounter31`, the last that there can be.
pub const LAST_COUNTER: u32 = 0xc1f;
/// The CSR `time`, which is among them and is none.
pub const TIME: u32 = 0xc01;
/// The CSR `scountovf`: which counters have overflowed.
pub const OVERFLOWS: u32 = 0xda0;

/// What the guest is told of its counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// How many there are beside `cycle` and `instret`: `hpmcounter3` and those behind it.
    pub programmable: usize,
    /// Whether these tell of their overflows (`Sscofpmf`).
    pub overflows: bool,
}

/// The counters that have one event only, with it: they are always there, and their overflows interrupt nobody.
const FIXED: [(usize, Meaning); 2] = [(0, Meaning::Cycles), (2, Meaning::Instructions)];
/// The first that counts anything.
const FIRST_PROGRAMMABLE: usize = 3;

impl Shape {
    /// One more than the highest number of a counter.
    fn size(self) -> usize {
        FIRST_PROGRAMMABLE + self.programmable
    }

    fn programmable(self) -> u64 {
        first(self.size()) & !first(FIRST_PROGRAMMABLE)
    }

    fn counters(self) -> u64 {
        FIXED.iter().fold(self.programmable(), |set, (counter, _)| set | 1 << counter)
    }

    /// Those that tell of their overflows.
    fn overflowing(self) -> u64 {
        if self.overflows { self.programmable() } else { 0 }
    }
}

/// What a counter is configured for.
#[derive(Debug, Clone, Copy)]
struct Use {
    event: Event,
    /// Where it counts, if it does anywhere.
    filter: Option<Filter>,
}

/// One vCPU's PMU.
pub(crate) struct Riscv<S: Source> {
    shape: Shape,
    policy: Policy,
    unit: Unit<S>,
    /// What the guest has each counter for, from its configuration until it is reset. In the unit one that was reset goes on
    /// to select what it did, so that what counts for it can stay: Linux resets a counter whenever the task that has it goes.
    uses: Vec<Option<Use>>,
}

impl<S: Source> Riscv<S> {
    /// The PMU after reset: all counters are 0, configured for nothing, and stopped.
    ///
    /// # Panics
    /// If there are more than [`MOST_PROGRAMMABLE`] counters.
    pub fn new(shape: Shape, source: S) -> Self {
        assert!(shape.programmable <= MOST_PROGRAMMABLE);
        let mut unit = Unit::new(source, shape.size(), WIDTH);
        unit.set_control(0);
        Self { shape, policy: Policy::default(), unit, uses: vec![None; shape.size()] }
    }

    fn info(&self, counter: u64) -> Result<u64, Error> {
        self.set(counter, 1)?;
        Ok(sbi::info(counter + u64::from(CYCLE), WIDTH))
    }

    /// Counters of this set.
    fn set(&self, base: u64, mask: u64) -> Result<u64, Error> {
        sbi::set(base, mask, self.shape.counters())
    }

    fn configure_matching(
        &mut self,
        base: u64,
        mask: u64,
        config: Config,
        index: u64,
        data: u64,
    ) -> Result<u64, Error> {
        let set = self.set(base, mask)?;
        let event = self.countable(index, data).ok_or(Error::NotSupported)?;
        let wanted = Use { event, filter: config.filter() };
        let counter = self.choose(set, config, wanted).ok_or(Error::NotSupported)?;
        self.configure(counter, wanted);
        if config.clears_value() {
            self.unit.write(counter, 0);
        }
        if config.starts() {
            self.unit.set_control(self.unit.control() | 1 << counter);
        }
        Ok(counter as u64)
    }

    fn countable(&mut self, index: u64, data: u64) -> Option<Event> {
        let event = event::decode(index, data)?;
        (self.policy.allows_event(event) && self.unit.can_count(event)).then_some(event)
    }

    /// The counter of a set that is to count this: the first, if the guest says so, or else a free one.
    fn choose(&self, set: u64, config: Config, wanted: Use) -> Option<usize> {
        let able = set & (self.shape.programmable() | fixed_for(wanted.event));
        if config.skips_match() {
            let first = set & set.wrapping_neg();
            return members(first & able).next();
        }
        let free = able & !self.used();
        let programmable = free & self.shape.programmable();
        // A fixed counter's overflow interrupts nobody, and whether somebody is to be is not said before it is started. So
        // where others tell of theirs, it is for who asks for no other.
        let has_choice = self.shape.overflows && set & self.shape.programmable() != 0;
        let best = match free & !programmable {
            fixed if fixed != 0 && !has_choice => fixed,
            _ => programmable,
        };
        let selection = self.selection(wanted);
        let counted_it = |counter: &usize| self.unit.config(*counter).selection == selection;
        members(best).find(counted_it).or_else(|| members(best).next())
    }

    /// Those that are configured.
    fn used(&self) -> u64 {
        (0..).zip(&self.uses).fold(0, |set, (counter, used)| set | u64::from(used.is_some()) << counter)
    }

    fn configure(&mut self, counter: usize, wanted: Use) {
        self.uses[counter] = Some(wanted);
        let config = CounterConfig {
            selection: self.selection(wanted),
            enabled: true,
            interrupts: self.shape.overflowing() & 1 << counter != 0,
        };
        self.unit.configure(counter, config);
        self.unit.clear_status(1 << counter);
    }

    fn selection(&self, wanted: Use) -> Option<Selection> {
        let Use { event, filter } = wanted;
        let scope = self.policy.scope_of_event(event);
        let event = if self.policy.allows_event(event) { event } else { event::denied(event) };
        Some(Selection { event, filter: filter?, scope })
    }

    /// Starts all of a set that are stopped.
    fn start(&mut self, base: u64, mask: u64, flags: u64, value: u64) -> Result<u64, Error> {
        let set = self.set(base, mask)?;
        let sets_value = sbi::start_flags(flags)?;
        let unused = set & !self.used();
        if unused & self.shape.programmable() != 0 {
            return Err(Error::InvalidParameter);
        }
        // The fixed ones need no configuration.
        for (counter, meaning) in FIXED.into_iter().filter(|(counter, _)| unused & 1 << counter != 0) {
            self.configure(counter, Use { event: Event::Meaning(meaning), filter: Some(Filter::All) });
        }
        let control = self.unit.control();
        let stopped = set & !control;
        if sets_value {
            members(stopped).for_each(|counter| self.unit.write(counter, value));
        }
        self.unit.clear_status(stopped);
        self.unit.set_control(control | stopped);
        if stopped == set { Ok(0) } else { Err(Error::AlreadyStarted) }
    }

    /// Stops all of a set that run.
    fn stop(&mut self, base: u64, mask: u64, flags: u64) -> Result<u64, Error> {
        let set = self.set(base, mask)?;
        let resets = sbi::stop_flags(flags)?;
        let control = self.unit.control();
        self.unit.set_control(control & !set);
        if resets {
            self.unit.clear_status(set);
            members(set).for_each(|counter| self.uses[counter] = None);
        }
        if control & set == set { Ok(0) } else { Err(Error::AlreadyStopped) }
    }
}

/// The counter that has this event and no other, if there is one, as a set.
fn fixed_for(event: Event) -> u64 {
    let same = FIXED.iter().filter(|(_, meaning)| event == Event::Meaning(*meaning));
    same.fold(0, |set, (counter, _)| set | 1 << counter)
}

impl<S: Source> Model<S> for Riscv<S> {
    /// A CSR that the guest's kernel reads.
    fn read(&mut self, csr: u32) -> Outcome {
        match csr {
            TIME => Outcome::NotMine,
            CYCLE..=LAST_COUNTER => match usize::try_from(csr - CYCLE) {
                Ok(counter) if counter < self.shape.size() => Outcome::Value(self.unit.read(counter)),
                _ => Outcome::Fault,
            },
            OVERFLOWS if self.shape.overflows => {
                Outcome::Value(self.unit.status() & self.shape.overflowing())
            }
            OVERFLOWS => Outcome::Fault,
            _ => Outcome::NotMine,
        }
    }

    /// All of them are read-only.
    fn write(&mut self, csr: u32, _value: u64) -> Outcome {
        match csr {
            TIME => Outcome::NotMine,
            CYCLE..=LAST_COUNTER | OVERFLOWS => Outcome::Fault,
            _ => Outcome::NotMine,
        }
    }

    /// A call of the extension: its function and its arguments, `a0` to `a5`, as the guest has them.
    fn call(&mut self, function: u64, arguments: [u64; 6]) -> Answer {
        let [base, mask, flags, event, data, _] = arguments;
        let result = match function {
            NUM_COUNTERS => Ok(self.shape.size() as u64),
            sbi::GET_INFO => self.info(base),
            sbi::CONFIG_MATCHING => self.configure_matching(base, mask, Config(flags), event, data),
            sbi::START => self.start(base, mask, flags, event),
            sbi::STOP => self.stop(base, mask, flags),
            // Every counter is a hardware counter.
            sbi::FIRMWARE_READ | sbi::FIRMWARE_READ_HIGH => Err(Error::InvalidParameter),
            _ => Err(Error::NotSupported),
        };
        result.into()
    }

    /// Whether there is an event, as the guest writes it, that can be counted: what the function [`EVENT_GET_INFO`] says of
    /// each in a list. That is in the guest's memory, which is not seen here.
    fn has_event(&mut self, index: u64, data: u64) -> bool {
        self.countable(index, data).is_some()
    }

    fn set_policy(&mut self, policy: &Policy) {
        self.policy = policy.clone();
        self.unit.set_policy(policy);
        for counter in members(self.shape.counters()) {
            // Those without a use are to select nothing that is denied now.
            let selection = self.uses[counter].and_then(|used| self.selection(used));
            self.unit.select(counter, selection);
        }
    }

    fn unit(&mut self) -> &mut Unit<S> {
        &mut self.unit
    }

    fn report(&mut self) -> Report {
        let mut report = self.unit.report(|selection| selection.to_string());
        for (counter, used) in report.counters.iter_mut().zip(&self.uses) {
            if used.is_none() {
                counter.event = None;
                if counter.state == State::Stopped {
                    counter.state = State::Unused;
                }
            }
        }
        report
    }
}
