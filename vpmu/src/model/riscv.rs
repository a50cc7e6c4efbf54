//! The PMU of a RISC-V guest. The guest's kernel configures, starts and stops counters by calls of the SBI's
//! "Performance Monitoring Unit Extension" (SBI specification, chapter 11), reads them from the unprivileged counter
//! CSRs, and learns of overflows as the `Sscofpmf` extension says.
//!
//! A counter has the same number everywhere: its CSR's number relative to [`CYCLE`], its bit in `scountovf`, and its
//! number in the unit. Number 1 is no counter, because its CSR is `time`.
//!
//! `Sscofpmf` suppresses the interrupt of an overflow while the counter's bit in `scountovf` is still set. That is not
//! implemented, because a guest cannot notice: a counter's value is set only together with clearing the bit, when the
//! counter is configured or started, so there are 2^64 counts between two overflows without a clear. OpenSBI sets the
//! bit from a counter's configuration to its start to avoid an early interrupt. Here a stopped counter never
//! interrupts, and only an overflow sets the bit.
//!
//! There are no firmware counters. They would count what the firmware does for a guest: timers, IPIs, fences, traps.
//! KVM does all of that in the host's kernel, which does not tell how often. There is no snapshot of the counters in
//! shared memory either, because Linux loses samples with it.

mod event;
mod page;
pub(crate) mod sbi;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use super::Model;
use crate::event::{Event, Filter, GenericEvent, Selection};
use crate::mask::{first, members};
use crate::outcome::Outcome;
use crate::policy::Policy;
use crate::report::{Report, State};
use crate::source::Source;
use crate::state::{self, Mismatch, SbiUse, UnitState, check};
use crate::unit::{CounterConfig, Unit};
use page::Configuration;
use sbi::{Config, Error};

pub(crate) use page::SharedPage;
pub use sbi::{Answer, EVENT_GET_INFO, NUM_COUNTERS};

/// Width of all counters.
const WIDTH: u32 = 64;
/// Maximum number of programmable counters: `hpmcounter3` to `hpmcounter31`.
pub const MAX_PROGRAMMABLE: usize = 29;

/// The CSR `cycle`, the first counter.
pub const CYCLE: u32 = 0xc00;
/// The CSR `hpmcounter31`, the last possible counter.
pub const LAST_COUNTER: u32 = 0xc1f;
/// The CSR `time`, which has a number among the counters but is not one of them.
pub const TIME: u32 = 0xc01;
/// The CSR `scountovf`: mask of the counters that have overflowed.
pub const OVERFLOWS: u32 = 0xda0;

/// The counters that the guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Number of programmable counters, from `hpmcounter3` on. `cycle` and `instret` always exist.
    pub programmable: usize,
    /// The programmable counters interrupt when they overflow (`Sscofpmf`).
    pub overflows: bool,
}

/// The fixed counters, each with its only event. They always exist, and their overflows never interrupt.
const FIXED: [(usize, GenericEvent); 2] = [(0, GenericEvent::Cycles), (2, GenericEvent::Instructions)];
/// The first programmable counter.
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

    /// Returns the mask of the counters whose overflows interrupt.
    fn interrupting(self) -> u64 {
        if self.overflows { self.programmable() } else { 0 }
    }
}

/// The guest's configuration of a counter.
#[derive(Debug, Clone, Copy)]
struct Use {
    event: Event,
    /// The privilege levels at which it counts; `None` if it counts at none.
    filter: Option<Filter>,
}

/// The PMU of one RISC-V hart.
pub(crate) struct Riscv<S: Source> {
    shape: Shape,
    policy: Policy,
    unit: Unit<S>,
    /// The guest's configuration of each counter, until the guest resets the counter. In the unit, a counter that was
    /// reset keeps its last selection, so that its backing event can stay: Linux resets a task's counters at each task
    /// switch.
    uses: Vec<Option<Use>>,
    /// Each counter's last configuration, if it can be repeated on the shared page.
    configurations: Vec<Option<Configuration>>,
    /// These have changed since the page was last written.
    has_new_configurations: bool,
}

impl<S: Source> Riscv<S> {
    /// Creates the PMU in its reset state: all counters are 0, not configured, and stopped.
    ///
    /// # Panics
    /// If there are more than [`MAX_PROGRAMMABLE`] counters.
    pub fn new(shape: Shape, source: S) -> Self {
        assert!(shape.programmable <= MAX_PROGRAMMABLE);
        let mut unit = Unit::new(source, shape.size(), WIDTH);
        unit.set_control(0);
        let (uses, configurations) = (vec![None; shape.size()], vec![None; shape.size()]);
        let policy = Policy::default();
        Self { shape, policy, unit, uses, configurations, has_new_configurations: true }
    }

    /// Handles a call of the SBI's PMU extension.
    pub fn call(&mut self, function: u64, arguments: [u64; 6]) -> Answer {
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

    /// Returns whether an event of the SBI's can be counted.
    pub fn has_event(&mut self, index: u64, data: u64) -> bool {
        self.countable(index, data).is_some()
    }

    fn info(&self, counter: u64) -> Result<u64, Error> {
        self.counter_set(counter, 1)?;
        Ok(sbi::info(counter + u64::from(CYCLE), WIDTH))
    }

    /// Returns the mask of the counters that a call is about.
    fn counter_set(&self, base: u64, mask: u64) -> Result<u64, Error> {
        sbi::counter_set(base, mask, self.shape.counters())
    }

    fn configure_matching(
        &mut self,
        base: u64,
        mask: u64,
        config: Config,
        index: u64,
        data: u64,
    ) -> Result<u64, Error> {
        let set = self.counter_set(base, mask)?;
        let event = self.countable(index, data).ok_or(Error::NotSupported)?;
        let wanted = Use { event, filter: config.filter() };
        let counter = self.choose(set, config, wanted).ok_or(Error::NotSupported)?;
        self.configure(counter, wanted);
        let is_plain = !config.skips_match() && !config.starts();
        self.remember(counter, is_plain.then_some([config.0, index, data]));
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
        (self.policy.allows_event(event) && self.unit.bank.can_count(event)).then_some(event)
    }

    /// Chooses the counter of a set for a configuration: the first counter with the `SKIP_MATCH` flag, or else a free
    /// one. Returns `None` if there is none for the event.
    fn choose(&self, set: u64, config: Config, wanted: Use) -> Option<usize> {
        let able = set & (self.shape.programmable() | fixed_for(wanted.event));
        if config.skips_match() {
            let first = set & set.wrapping_neg();
            return members(first & able).next();
        }
        let free = able & !self.used();
        let programmable = free & self.shape.programmable();
        // The overflow of a fixed counter does not interrupt, and the guest does not say whether it wants interrupts
        // before it starts the counter. So if the programmable counters interrupt, a fixed one is taken only if the set
        // has no programmable one.
        let has_choice = self.shape.overflows && set & self.shape.programmable() != 0;
        let best = match free & !programmable {
            fixed if fixed != 0 && !has_choice => fixed,
            _ => programmable,
        };
        let selection = self.selection(wanted);
        // A counter with the same selection may still have its backing event.
        let is_same = |counter: &usize| self.unit.config(*counter).selection == selection;
        members(best).find(is_same).or_else(|| members(best).next())
    }

    /// Returns the mask of the configured counters.
    fn used(&self) -> u64 {
        (0..).zip(&self.uses).fold(0, |set, (counter, used)| set | u64::from(used.is_some()) << counter)
    }

    fn configure(&mut self, counter: usize, wanted: Use) {
        self.uses[counter] = Some(wanted);
        let config = CounterConfig {
            selection: self.selection(wanted),
            enabled: true,
            interrupts: self.shape.interrupting() & 1 << counter != 0,
            branches: None,
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

    /// Starts the stopped counters of a set. Fails if some were not stopped, but starts the others all the same.
    fn start(&mut self, base: u64, mask: u64, flags: u64, value: u64) -> Result<u64, Error> {
        let set = self.counter_set(base, mask)?;
        let sets_value = sbi::start_flags(flags)?;
        let unused = set & !self.used();
        if unused & self.shape.programmable() != 0 {
            return Err(Error::InvalidParameter);
        }
        // A fixed counter can be started without a configuration.
        for (counter, generic) in FIXED.into_iter().filter(|(counter, _)| unused & 1 << counter != 0) {
            self.configure(counter, Use { event: Event::Generic(generic), filter: Some(Filter::All) });
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

    /// Stops the running counters of a set. Fails if some were not running, but stops the others all the same.
    fn stop(&mut self, base: u64, mask: u64, flags: u64) -> Result<u64, Error> {
        let set = self.counter_set(base, mask)?;
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

/// Returns the mask of the fixed counter for an event, or 0 if there is none.
fn fixed_for(event: Event) -> u64 {
    let same = FIXED.iter().filter(|(_, generic)| event == Event::Generic(*generic));
    same.fold(0, |set, (counter, _)| set | 1 << counter)
}

impl<S: Source> Model<S> for Riscv<S> {
    /// Reads a CSR.
    fn read(&mut self, csr: u32) -> Outcome {
        match csr {
            TIME => Outcome::NotHandled,
            CYCLE..=LAST_COUNTER => match usize::try_from(csr - CYCLE) {
                Ok(counter) if counter < self.shape.size() => Outcome::Value(self.unit.read(counter)),
                _ => Outcome::Fault,
            },
            OVERFLOWS if self.shape.overflows => {
                Outcome::Value(self.unit.status() & self.shape.interrupting())
            }
            OVERFLOWS => Outcome::Fault,
            _ => Outcome::NotHandled,
        }
    }

    /// Faults for the PMU's CSRs, all of which are read-only.
    fn write(&mut self, csr: u32, _value: u64) -> Outcome {
        match csr {
            TIME => Outcome::NotHandled,
            CYCLE..=LAST_COUNTER | OVERFLOWS => Outcome::Fault,
            _ => Outcome::NotHandled,
        }
    }

    fn set_policy(&mut self, policy: &Policy) {
        self.policy = policy.clone();
        // First the events, so that no denied one is started anew.
        for counter in members(self.shape.counters()) {
            // A counter that was reset must not keep a selection that the new policy denies.
            let selection = self.uses[counter].and_then(|used| self.selection(used));
            let config = CounterConfig { selection, ..self.unit.config(counter) };
            self.unit.replace_event(counter, config);
            self.remember(counter, None);
        }
        self.unit.set_policy(policy);
    }

    fn save(&mut self) -> state::Registers {
        let saved = |used: &Use| {
            let (index, data) = event::encode(used.event);
            let counts = |modes: [Filter; 2]| used.filter.is_some_and(|filter| modes.contains(&filter));
            let (user, kernel) = (counts([Filter::User, Filter::All]), counts([Filter::Kernel, Filter::All]));
            SbiUse { index, data, user, kernel }
        };
        let uses = self.uses.iter().map(|used| used.as_ref().map(saved)).collect();
        state::Registers::Riscv { overflows: self.shape.overflows, uses }
    }

    fn check(&self, registers: &state::Registers) -> Result<(), Mismatch> {
        let state::Registers::Riscv { overflows, uses } = registers else { return Err(Mismatch::Shape) };
        if *overflows != self.shape.overflows || uses.len() != self.uses.len() {
            return Err(Mismatch::Shape);
        }
        for (counter, used) in uses.iter().enumerate() {
            let Some(used) = used else { continue };
            let event = event::decode(used.index, used.data);
            let able = event.map_or(0, |event| self.shape.programmable() | fixed_for(event));
            check(able & 1 << counter != 0, "counters' events")?;
        }
        Ok(())
    }

    fn restore(&mut self, registers: &state::Registers, unit: &UnitState) {
        let state::Registers::Riscv { uses, .. } = registers else { return };
        self.unit.halt();
        for (counter, used) in uses.iter().enumerate() {
            self.uses[counter] = None;
            self.remember(counter, None);
            if let Some((used, event)) =
                used.and_then(|used| Some((used, event::decode(used.index, used.data)?)))
            {
                self.configure(counter, Use { event, filter: Filter::of(used.user, used.kernel) });
            }
        }
        self.unit.resume(unit);
    }

    fn riscv(&mut self) -> Option<&mut Self> {
        Some(self)
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
