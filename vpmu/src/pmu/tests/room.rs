//! The host is never asked for more events at once than the guest has counters, whatever the guest and the operator do:
//! each model on a host that has as many counters as the guest, and that refuses one event more.

use std::cell::Cell;
use std::convert::Infallible;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;

use proptest::prelude::*;

use crate::ebb::{self, Block, Thread};
use crate::model::amd::Version;
use crate::model::intel::{self, Shape};
use crate::model::riscv;
use crate::policy::{Freeze, Policy};
use crate::shared_page::{ACTIVE, FREEZING, LvtNote, Page, Registers};
use crate::source::script::Script;
use crate::unit::Switch;
use crate::x86::Vendor;
use crate::{Access, Cause, Injected, Platform, VirtualPmu};

/// AMD's events for the counters of a guest, without large increments.
const EVENTS: [u64; 6] = [0xc0, 0x76, 0xc2, 0xc3, 0xd1, 0x40];
/// An event that counts in a pair of AMD's counters.
const PAIR: u64 = 0x03;
/// What the second counter of a pair selects.
const MERGE: u64 = 0xf_0040_00ff;
const ENABLE: u64 = 1 << 22;
const INTERRUPT: u64 = 1 << 20;

/// Which PMU the guest has.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Amd(Version),
    Intel(Shape),
    Riscv(riscv::Shape),
}

/// What a counter is to count.
#[derive(Debug, Clone, Copy)]
struct Config {
    event: usize,
    is_user: bool,
    is_enabled: bool,
    /// Event-based branches.
    is_flagged: bool,
}

#[derive(Debug, Clone)]
enum Step {
    /// Sets what a counter counts, and the value.
    Configure(usize, Config, u64),
    /// Sets what the first counter of a pair counts; AMD's only.
    Pair(usize, Config),
    /// Stops a counter, which keeps its event, or takes the event from it.
    Stop(usize, bool),
    /// Stops all counters by global control, sets several anew, as a task switch does, and starts them.
    SwitchTasks(Vec<(usize, Config)>, u64),
    Control(u64),
    Run(u64),
    Time(u64),
    ReleaseIdle,
    Policy(Freeze, bool),
    Switch(usize, Switch),
    Restore,
}

fn config() -> impl Strategy<Value = Config> {
    (0..EVENTS.len(), any::<bool>(), prop::bool::weighted(0.8), prop::bool::weighted(0.2)).prop_map(
        |(event, is_user, is_enabled, is_flagged)| Config { event, is_user, is_enabled, is_flagged },
    )
}

fn step() -> impl Strategy<Value = Step> {
    let counter = || 0_usize..16;
    let freeze = prop_oneof![Just(Freeze::Guest), Just(Freeze::Hybrid), Just(Freeze::Host)];
    prop_oneof![
        8 => (counter(), config(), 1_u64..50_000).prop_map(|(at, config, left)| Step::Configure(at, config, left)),
        4 => (counter(), config()).prop_map(|(counter, config)| Step::Pair(counter, config)),
        3 => (counter(), any::<bool>()).prop_map(|(counter, keeps)| Step::Stop(counter, keeps)),
        4 => (prop::collection::vec((counter(), config()), 0..8), any::<u64>())
            .prop_map(|(configs, control)| Step::SwitchTasks(configs, control | 1)),
        1 => any::<u64>().prop_map(Step::Control),
        6 => (1_u64..60_000).prop_map(Step::Run),
        1 => (0_u64..2_000).prop_map(Step::Time),
        1 => Just(Step::ReleaseIdle),
        1 => (freeze, any::<bool>()).prop_map(|(freeze, ebb)| Step::Policy(freeze, ebb)),
        1 => (counter(), any::<bool>())
            .prop_map(|(at, on)| Step::Switch(at, if on { Switch::On } else { Switch::Off })),
        1 => Just(Step::Restore),
    ]
}

fn kind() -> impl Strategy<Value = Kind> {
    let version = prop_oneof![Just(intel::Version::V2), Just(intel::Version::V5)];
    let intel = (version, 1_usize..8, 0_usize..4)
        .prop_map(|(version, general, fixed)| Kind::Intel(Shape { version, general, fixed, absent: 0 }));
    let amd = prop_oneof![
        1 => Just(Version::K7),
        2 => Just(Version::Core),
        3 => (1_usize..7).prop_map(Version::V2),
    ];
    let riscv = (0_usize..9, any::<bool>())
        .prop_map(|(programmable, overflows)| Kind::Riscv(riscv::Shape { programmable, overflows }));
    prop_oneof![3 => amd.prop_map(Kind::Amd), 2 => intel, 1 => riscv]
}

impl Kind {
    /// Number of counters that can count.
    fn counters(self) -> usize {
        match self {
            Self::Amd(version) => version.counters(),
            Self::Intel(shape) => shape.general + shape.fixed,
            Self::Riscv(shape) => shape.programmable + 2,
        }
    }

    fn pmu(self, host: Script) -> VirtualPmu<Script> {
        match self {
            Self::Amd(version) => VirtualPmu::amd(version, Vendor::Amd, host),
            Self::Intel(shape) => VirtualPmu::intel(shape, Vendor::Intel, host),
            Self::Riscv(shape) => VirtualPmu::riscv(shape, host),
        }
    }

    fn page_registers(self) -> Option<Registers> {
        match self {
            Self::Amd(version) => version.page_registers(),
            Self::Intel(shape) => shape.page_registers(),
            Self::Riscv(_) => None,
        }
    }

    fn global_control(self) -> Option<u32> {
        match self {
            Self::Amd(Version::V2(_)) => Some(0xc000_0301),
            Self::Amd(_) | Self::Riscv(_) => None,
            Self::Intel(_) => Some(0x38f),
        }
    }
}

struct Memory([Cell<u64>; ebb::SIZE / 8]);

impl Block for Memory {
    fn load(&self, word: usize) -> u64 {
        self.0[word].get()
    }

    fn store(&self, word: usize, value: u64) {
        self.0[word].set(value);
    }
}

/// A vCPU whose thread wants branches for two events.
struct Vcpu(Memory);

impl Vcpu {
    fn new() -> Self {
        let block = Memory(std::array::from_fn(|_| Cell::new(0)));
        block.store(ebb::word::CONTROL, ebb::control::GLOBAL_ENABLE | ebb::control::PMU_ENABLE);
        block.store(ebb::word::HANDLER, 0x1000);
        for (word, value) in [(8, ebb::FLAG | EVENTS[0]), (9, 1000), (12, ebb::FLAG | EVENTS[1]), (13, 10)] {
            block.store(word, value);
        }
        Self(block)
    }
}

impl Platform for Vcpu {
    type Error = Infallible;

    fn inject(&mut self, _lvt_note: Option<LvtNote<'_>>) -> Result<Injected, Infallible> {
        Ok(Injected::AtNextEntry)
    }

    fn uses_shared_page(&mut self) -> bool {
        true
    }

    fn thread(&mut self) -> Option<Thread<'_>> {
        Some(Thread { owner: [1, 2, 3], block: &self.0, instruction: Some(0x2000), highest: (1 << 47) - 1 })
    }
}

/// The page as the guest and the VMM see it.
struct Shared(Rc<Page>);

impl Deref for Shared {
    type Target = Page;

    fn deref(&self) -> &Page {
        &self.0
    }
}

struct Guest {
    kind: Kind,
    pmu: VirtualPmu<Script>,
    host: Script,
    vcpu: Vcpu,
    page: Rc<Page>,
    /// The first counters of pairs, whose second counters have the Merge event.
    pairs: Vec<usize>,
    /// What Intel's fixed counters are set to.
    fixed: u64,
}

impl Guest {
    fn new(kind: Kind, has_page: bool) -> Self {
        let host = Script::with_counters(kind.counters());
        let mut pmu = kind.pmu(host.clone());
        let page = Rc::<Page>::default();
        if has_page {
            pmu.share_page(Box::new(Shared(Rc::clone(&page))));
        }
        Self { kind, pmu, host, vcpu: Vcpu::new(), page, pairs: Vec::new(), fixed: 0 }
    }

    fn exit(&mut self, cause: Cause) {
        let Ok(_) = self.pmu.after_exit(cause, &mut self.vcpu);
    }

    /// Writes a register: on the page while that is there for it, as the guest's stub does.
    fn write(&mut self, register: u32, value: u64) {
        let registers = self.kind.page_registers().filter(|_| self.page.active.load(Relaxed) == ACTIVE);
        let slot = registers.and_then(|all| {
            all.slots.iter().position(|slot| slot.register == register && value & !slot.write_mask == 0)
        });
        if let Some(slot) = slot {
            self.page.written[slot].store(value, Relaxed);
            self.page.dirty.fetch_or(1 << slot, Relaxed);
            return;
        }
        let _ = self.pmu.access(Access::Write(register, value));
        self.exit(Cause::Guest);
    }

    fn call(&mut self, function: u64, arguments: [u64; 5]) {
        let [first, second, third, fourth, fifth] = arguments;
        let _ = self.pmu.call(function, [first, second, third, fourth, fifth, 0]);
        self.exit(Cause::Guest);
    }

    /// Writes a counter's select. Linux stops a pair before it uses the second counter for something else.
    fn select(&mut self, counter: usize, value: u64) {
        let number = u32::try_from(counter).unwrap();
        match self.kind {
            Kind::Amd(version) => {
                let select = if matches!(version, Version::K7) {
                    0xc001_0000 + number
                } else {
                    0xc001_0200 + 2 * number
                };
                self.write(select, value);
            }
            Kind::Intel(shape) if counter < shape.general => self.write(0x186 + number, value),
            Kind::Intel(shape) => {
                let shift = 4 * (counter - shape.general);
                let nibble = match (value & ENABLE, value & (3 << 16)) {
                    (0, _) => 0,
                    (_, 0x1_0000) => 0xa,
                    (_, 0x2_0000) => 0x9,
                    _ => 0xb,
                };
                self.fixed = self.fixed & !(0xf << shift) | nibble << shift;
                self.write(0x38d, self.fixed);
            }
            Kind::Riscv(_) => {}
        }
    }

    /// Stops the pair that a counter belongs to, as Linux does: the first counter keeps its event, the second is free.
    fn stop_pair(&mut self, counter: usize) {
        let first = counter & !1;
        if let Some(at) = self.pairs.iter().position(|pair| *pair == first) {
            self.pairs.remove(at);
            self.select(first, PAIR | 0x11_0000);
            self.select(first + 1, 0);
        }
    }

    fn configure(&mut self, counter: usize, config: Config, left: u64) {
        let counter = counter % self.kind.counters();
        if let Kind::Riscv(_) = self.kind {
            // Cycles, time and instructions come first, and time has no counter.
            let number = if counter == 0 { 0 } else { counter as u64 + 1 };
            let event = [1, 2, 5, 6, 0x1_0019, 0x1_001b][config.event];
            let flags = 2 | u64::from(config.is_user) << 5 | u64::from(config.is_enabled) << 2;
            self.call(4, [number, 1, 1, 0, 0]);
            return self.call(2, [number, 1, flags, event, 0]);
        }
        self.stop_pair(counter);
        let flag = if config.is_flagged { ebb::FLAG } else { 0 };
        let modes = if config.is_user || config.is_flagged { 1 } else { 3 } << 16;
        let enable = if config.is_enabled { ENABLE } else { 0 };
        self.select(counter, EVENTS[config.event] | modes | INTERRUPT | enable | flag);
        self.write_value(counter, left);
    }

    fn write_value(&mut self, counter: usize, left: u64) {
        let number = u32::try_from(counter).unwrap();
        let register = match self.kind {
            Kind::Amd(Version::K7) => 0xc001_0004 + number,
            Kind::Amd(_) => 0xc001_0201 + 2 * number,
            Kind::Intel(shape) if counter < shape.general => 0xc1 + number,
            Kind::Intel(shape) => 0x309 + number - u32::try_from(shape.general).unwrap(),
            Kind::Riscv(_) => return,
        };
        self.write(register, left.wrapping_neg());
    }

    /// Sets two counters for an event of large increments as Linux does: the second one first.
    fn pair(&mut self, counter: usize, config: Config) {
        let first = (counter % self.kind.counters()) & !1;
        if !matches!(self.kind, Kind::Amd(_)) || first + 1 >= self.kind.counters() {
            return;
        }
        let modes = if config.is_user { 1 } else { 3 } << 16;
        self.select(first + 1, MERGE);
        self.select(first, PAIR | modes | ENABLE);
        if !self.pairs.contains(&first) {
            self.pairs.push(first);
        }
    }

    fn control(&mut self, counters: u64) {
        let Some(control) = self.kind.global_control() else { return };
        let counters = match self.kind {
            Kind::Intel(shape) => counters & (((1 << shape.general) - 1) | (((1 << shape.fixed) - 1) << 32)),
            _ => counters,
        };
        if counters == 0 {
            self.page.freezing.store(FREEZING, Relaxed);
        }
        let _ = self.pmu.access(Access::Write(control, counters));
        self.exit(Cause::Guest);
    }

    fn does(&mut self, step: &Step) {
        match step {
            Step::Configure(counter, config, left) => self.configure(*counter, *config, *left),
            Step::Pair(counter, config) => self.pair(*counter, *config),
            Step::Stop(counter, keeps) => {
                let counter = counter % self.kind.counters();
                self.stop_pair(counter);
                if let Kind::Riscv(_) = self.kind {
                    self.call(4, [counter as u64, 1, u64::from(!keeps), 0, 0]);
                } else {
                    self.select(counter, if *keeps { EVENTS[counter % EVENTS.len()] | 3 << 16 } else { 0 });
                }
            }
            Step::SwitchTasks(configs, control) => {
                self.control(0);
                for (number, (counter, config)) in configs.iter().enumerate() {
                    if number % 3 == 2 {
                        self.pair(*counter, *config);
                    } else {
                        self.configure(*counter, *config, 10_000);
                    }
                }
                self.control(*control);
            }
            Step::Control(counters) => self.control(*counters),
            Step::Run(counts) => {
                let host = self.host.clone();
                host.guest_runs(*counts, |_| self.exit(Cause::Alarm));
            }
            Step::Time(milliseconds) => {
                self.host.time_passes(std::time::Duration::from_millis(*milliseconds));
                self.exit(Cause::Kick);
            }
            Step::ReleaseIdle => self.pmu.model.unit().bank.release_idle(),
            Step::Policy(freeze, ebb) => {
                self.pmu.set_policy(&Policy { freeze: *freeze, ebb: *ebb, ..Policy::default() });
            }
            Step::Switch(counter, to) => {
                self.pmu.set_counter_switch(counter % self.kind.counters(), *to);
            }
            Step::Restore => {
                let state = self.pmu.save();
                self.pmu.restore(&state).unwrap();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_host_is_never_asked_for_more_events_than_the_guest_has_counters(
        kind in kind(),
        has_page in any::<bool>(),
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let mut guest = Guest::new(kind, has_page);
        for step in &steps {
            guest.does(step);
            let refused = guest.host.take_without_room();
            prop_assert!(refused.is_empty(), "{:?}: {:?}", step, refused);
        }
    }
}

/// Six counters: an event that takes two of them, and four others.
fn with_a_pair() -> Guest {
    let mut guest = Guest::new(Kind::Amd(Version::V2(6)), false);
    let config = |event| Config { event, is_user: true, is_enabled: true, is_flagged: false };
    guest.pair(0, config(0));
    (2..6).for_each(|counter| guest.configure(counter, config(counter), 10_000));
    guest
}

#[test]
fn a_pair_that_stands_still_makes_room_for_the_event_that_has_its_second_counter() {
    let mut guest = with_a_pair();
    let config = Config { event: 1, is_user: true, is_enabled: true, is_flagged: false };
    assert_eq!(guest.host.counters(), 5, "one of which takes two counters");
    guest.configure(1, config, 10_000);
    assert_eq!(guest.host.take_without_room(), []);
    assert_eq!(guest.host.counters(), 5);
}

#[test]
fn a_pair_that_stands_still_keeps_its_event_as_long_as_nobody_needs_the_hardware() {
    let mut guest = with_a_pair();
    guest.host.take_started();
    guest.stop_pair(0);
    guest.pair(0, Config { event: 0, is_user: true, is_enabled: true, is_flagged: false });
    assert_eq!(guest.host.take_started(), []);
}
