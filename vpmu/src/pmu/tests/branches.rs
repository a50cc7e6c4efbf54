//! Event-based branches, of a thread whose block the test writes.

use std::cell::Cell;
use std::convert::Infallible;

use proptest::prelude::*;

use super::{SAMPLING_PROGRAMS, SELECT};
use crate::ebb::{Block, FLAG, SIZE, Thread, control, word};
use crate::model::amd::Version;
use crate::policy::Policy;
use crate::shared_page::LvtNote;
use crate::source::script::Script;
use crate::x86::Vendor;
use crate::{Access, Cause, Injected, Outcome, Platform, VirtualPmu};

const COUNTER: u32 = SELECT + 1;
const HANDLER: u64 = 0x40_1000;
const HERE: u64 = 0x40_2000;
const ENABLED: u64 = control::GLOBAL_ENABLE | control::PMU_ENABLE;
const FLAGGED: u64 = SAMPLING_PROGRAMS | FLAG;
/// Numbers of the first slot's words.
const EVENT: usize = 8;
const PERIOD: usize = 9;
const LEFT: usize = 10;
const OVERFLOWS: usize = 11;

struct Memory([Cell<u64>; SIZE / 8]);

impl Block for Memory {
    fn load(&self, word: usize) -> u64 {
        self.0[word].get()
    }

    fn store(&self, word: usize, value: u64) {
        self.0[word].set(value);
    }
}

/// A vCPU with one thread.
struct Vcpu {
    block: Memory,
    has_block: bool,
    is_user: bool,
    branches: Vec<u64>,
}

impl Platform for Vcpu {
    type Error = Infallible;

    fn inject(&mut self, _lvt_note: Option<LvtNote<'_>>) -> Result<Injected, Infallible> {
        Ok(Injected::AtNextEntry)
    }

    fn thread(&mut self) -> Option<Thread<'_>> {
        let instruction = self.is_user.then_some(HERE);
        let (block, owner) = (&self.block, [1, 2, 3]);
        self.has_block.then_some(Thread { owner, block, instruction, highest: (1 << 47) - 1 })
    }

    fn go_on_at(&mut self, address: u64) -> Result<(), Infallible> {
        self.branches.push(address);
        Ok(())
    }
}

struct Guest {
    pmu: VirtualPmu<Script>,
    host: Script,
    vcpu: Vcpu,
}

impl Guest {
    fn with_period(period: u64) -> Self {
        let host = Script::default();
        let pmu = VirtualPmu::amd(Version::Core, Vendor::Amd, host.clone());
        let block = Memory(std::array::from_fn(|_| Cell::new(0)));
        block.store(word::CONTROL, ENABLED);
        block.store(word::HANDLER, HANDLER);
        block.store(EVENT, FLAG | 0xc0);
        block.store(PERIOD, period);
        let vcpu = Vcpu { block, has_block: true, is_user: true, branches: Vec::new() };
        Self { pmu, host, vcpu }
    }

    fn write(&mut self, register: u32, value: u64) {
        assert_eq!(self.pmu.access(Access::Write(register, value)), Outcome::Handled);
        let Ok(_next) = self.pmu.after_exit(Cause::Guest, &mut self.vcpu);
    }

    fn start(&mut self) {
        self.write(SELECT, FLAGGED);
    }

    fn stop(&mut self) {
        self.write(SELECT, FLAGGED & !(1 << 22));
    }

    /// Runs the guest; its handler returns at once.
    fn run(&mut self, counts: u64) {
        let host = self.host.clone();
        host.guest_runs(counts, |_| {
            let Ok(_next) = self.pmu.after_exit(Cause::Alarm, &mut self.vcpu);
            let control = self.vcpu.block.load(word::CONTROL);
            if control & ENABLED == 0 {
                self.vcpu.block.store(word::CONTROL, ENABLED);
            }
        });
    }

    fn count(&mut self) -> u64 {
        let Outcome::Value(count) = self.pmu.access(Access::Read(COUNTER)) else { panic!("it is there") };
        count
    }

    fn words(&self) -> [u64; 2] {
        [LEFT, OVERFLOWS].map(|word| self.vcpu.block.load(word))
    }
}

#[test]
fn a_program_goes_on_at_its_handler_after_each_period() {
    let mut guest = Guest::with_period(10_000);
    guest.start();
    assert_eq!(guest.words(), [10_000, 0], "it is served");
    guest.run(35_000);
    assert_eq!(guest.vcpu.branches, [HANDLER; 3]);
    assert_eq!(guest.vcpu.block.load(word::RETURN), HERE);
    guest.stop();
    assert_eq!((guest.words(), guest.count()), ([5_000, 3], 35_000));
    assert_eq!(guest.host.take_started().len(), 1, "its companion shares the host's event");
}

#[test]
fn an_overflow_waits_while_the_program_has_disabled_branches() {
    let mut guest = Guest::with_period(10_000);
    guest.vcpu.block.store(word::CONTROL, control::PMU_ENABLE);
    guest.start();
    guest.run(25_000);
    assert!(guest.vcpu.branches.is_empty());
    assert_eq!(guest.vcpu.block.load(word::CONTROL), control::PMU_ENABLE | control::OCCURRED);
    // The next overflow finds them enabled.
    guest.vcpu.block.store(word::CONTROL, ENABLED | control::OCCURRED);
    guest.run(5_000);
    assert_eq!((guest.vcpu.branches.len(), guest.words()[1]), (1, 3));
}

#[test]
fn in_the_kernel_a_branch_waits_for_the_next_event_of_the_program() {
    let mut guest = Guest::with_period(10_000);
    guest.start();
    guest.vcpu.is_user = false;
    guest.run(10_000);
    assert!(guest.vcpu.branches.is_empty());
    guest.vcpu.is_user = true;
    guest.run(1);
    assert_eq!(guest.vcpu.branches, [HANDLER]);
    guest.run(9_999);
    assert_eq!((guest.vcpu.branches.len(), guest.words()), (2, [10_000, 2]), "the period is as long as ever");
}

#[test]
fn no_thread_and_no_handler_end_branches_until_the_next_start() {
    let mut guest = Guest::with_period(10_000);
    guest.start();
    guest.vcpu.has_block = false;
    guest.run(50_000);
    guest.vcpu.has_block = true;
    guest.run(50_000);
    assert!(guest.vcpu.branches.is_empty());
    guest.stop();
    guest.start();
    guest.vcpu.block.store(word::HANDLER, 1 << 47);
    guest.run(50_000);
    assert_eq!((guest.vcpu.branches.len(), guest.words()[1]), (0, 1), "an address of the kernel's");
}

#[test]
fn a_policy_can_switch_branches_off() {
    let mut guest = Guest::with_period(10_000);
    guest.pmu.set_policy(&Policy { ebb: false, ..Policy::default() });
    guest.start();
    guest.run(50_000);
    assert_eq!((guest.vcpu.branches.len(), guest.words(), guest.count()), (0, [0, 0], 0));
}

#[test]
fn a_policy_limits_how_often_programs_are_branched() {
    let branches = |policy| {
        let mut guest = Guest::with_period(1_000);
        guest.pmu.set_policy(&policy);
        guest.start();
        guest.run(100_000);
        guest.stop();
        assert_eq!(guest.words(), [1_000, 100], "all overflows are counted");
        guest.vcpu.branches.len()
    };
    let default = Policy::default();
    assert_eq!(branches(default.clone()), 100);
    assert_eq!(branches(Policy { min_period: 10_000.try_into().unwrap(), ..default.clone() }), 10);
    // No time passes here, so there is one burst.
    assert_eq!(branches(Policy { max_interrupts_per_second: 50.try_into().ok(), ..default }), 5);
}

#[test]
fn a_saved_pmu_branches_where_it_would_have() {
    let mut guest = Guest::with_period(10_000);
    guest.start();
    guest.run(12_000);
    let state = guest.pmu.save();
    let mut other = Guest::with_period(10_000);
    other.pmu.restore(&state).unwrap();
    assert_eq!(other.pmu.save(), state);
    other.run(8_000);
    assert_eq!(other.vcpu.branches, [HANDLER]);
    other.stop();
    assert_eq!(other.words(), [10_000, 1]);
}

proptest! {
    /// Whatever the thread does and however often it is switched: what was counted is what the overflows and the rest
    /// of the period come to, and no branch comes that the thread has not enabled.
    #[test]
    fn no_overflow_is_lost_and_none_comes_twice(
        period in 1..20_000_u64,
        min_period in prop::sample::select(vec![1_u64, 1, 5_000]),
        steps in prop::collection::vec((0..50_000_u64, 0..5_u8), 1..20),
    ) {
        let mut guest = Guest::with_period(period);
        guest.pmu.set_policy(&Policy { min_period: min_period.try_into().unwrap(), ..Policy::default() });
        guest.start();
        for (counts, what) in steps {
            match what {
                0 => guest.vcpu.is_user = !guest.vcpu.is_user,
                1 => {
                    let control = guest.vcpu.block.load(word::CONTROL) ^ control::GLOBAL_ENABLE;
                    guest.vcpu.block.store(word::CONTROL, control);
                }
                2 => {
                    guest.stop();
                    guest.start();
                }
                3 => {
                let state = guest.pmu.save();
                guest.pmu.restore(&state).unwrap();
            }
                _ => {}
            }
            let (before, enabled) = (guest.vcpu.branches.len(), guest.vcpu.block.load(word::CONTROL));
            guest.run(counts);
            if !guest.vcpu.is_user || enabled & ENABLED != ENABLED {
                prop_assert_eq!(guest.vcpu.branches.len(), before);
            }
        }
        guest.stop();
        let [left, overflows] = guest.words();
        prop_assert_eq!(guest.count(), overflows * period + period - left);
        prop_assert!(guest.vcpu.branches.len() as u64 <= overflows);
    }
}
