//! That counters share what counts for them is nothing that anybody sees by them: a bank against one for each counter.

use proptest::prelude::*;

use super::*;
use crate::event::{Filter, Scope};
use crate::report::State;
use crate::source::script::{REFUSED, Script};

const COUNTERS: usize = 6;

#[derive(Debug, Clone)]
enum Step {
    Configure(usize, Option<Selection>, Alarm),
    ReplaceEvent(usize, Option<Selection>),
    Run(u64),
    Read(usize),
    Write(usize, u64),
    GuestRuns(u64),
    TimePasses(Duration),
    Starve(bool),
    Update,
    Poll,
    ReleaseIdle,
    SetPolicy(u64),
}

fn selection() -> impl Strategy<Value = Option<Selection>> {
    let of = |event, filter| Some(Selection { event, filter, scope: Scope::Guest });
    prop_oneof![
        6 => Just(of(Event::Raw(0xc0), Filter::All)),
        3 => Just(of(Event::Raw(0xc0), Filter::User)),
        3 => Just(of(Event::Raw(0x76), Filter::All)),
        1 => Just(of(REFUSED, Filter::All)),
        1 => Just(None),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let counter = || 0..COUNTERS;
    let alarm = prop_oneof![3 => Just(Alarm::AtOverflow), 1 => Just(Alarm::Off)];
    // Many at once, too: these go on or stop together.
    let running = prop_oneof![Just(0), Just(first(COUNTERS)), 0..=first(COUNTERS)];
    let distance = prop_oneof![Just(100_000_u64), 1_u64..20, 1_u64..50_000, 1_u64..=1 << 48, 1_u64..];
    let counts = prop_oneof![Just(100_000_u64), 1_u64..20, 1_u64..50_000, 1_u64..1 << 47];
    let period = prop_oneof![Just(1), 1_u64..30_000];
    prop_oneof![
        4 => (counter(), selection(), alarm).prop_map(|(counter, selection, alarm)| Step::Configure(counter, selection, alarm)),
        1 => (counter(), selection()).prop_map(|(counter, selection)| Step::ReplaceEvent(counter, selection)),
        6 => running.prop_map(Step::Run),
        2 => counter().prop_map(Step::Read),
        8 => (counter(), distance).prop_map(|(counter, distance)| Step::Write(counter, distance.wrapping_neg())),
        8 => counts.prop_map(Step::GuestRuns),
        2 => (0_u64..100_000_000).prop_map(|time| Step::TimePasses(Duration::from_nanos(time))),
        1 => any::<bool>().prop_map(Step::Starve),
        1 => Just(Step::Update),
        1 => Just(Step::Poll),
        1 => Just(Step::ReleaseIdle),
        1 => period.prop_map(Step::SetPolicy),
    ]
}

/// Counters on a host of their own: all in one bank, or each in its own.
struct Counters {
    host: Script,
    banks: Vec<Bank<Script>>,
    interrupting: u64,
}

impl Counters {
    fn new(banks: usize, width: u32) -> Self {
        let host = Script::default();
        let bank = || Bank::new(host.clone(), COUNTERS / banks, width);
        Self { banks: (0..banks).map(|_| bank()).collect(), host: host.clone(), interrupting: 0 }
    }

    /// The bank of a counter, and its number there.
    fn of(&mut self, counter: usize) -> (&mut Bank<Script>, usize) {
        let size = COUNTERS / self.banks.len();
        (&mut self.banks[counter / size], counter % size)
    }

    fn each(&mut self, does: impl FnMut(&mut Bank<Script>)) {
        self.banks.iter_mut().for_each(does);
    }

    /// The counters that have overflowed and are to interrupt. When others are found depends on who looks when.
    fn interrupts(&mut self) -> u64 {
        let size = COUNTERS / self.banks.len();
        let sets = (0..).zip(&mut self.banks).map(|(number, bank)| bank.take_overflowed() << (number * size));
        sets.fold(0, |all, set| all | set) & self.interrupting
    }

    /// What is read, if something is, and the counts at which counters interrupt.
    fn does(&mut self, step: &Step) -> (Option<u64>, Vec<(u64, u64)>) {
        let mut read = None;
        let mut interrupts = Vec::new();
        match *step {
            Step::Configure(counter, selection, alarm) => {
                let (bank, number) = self.of(counter);
                bank.configure(number, selection, alarm);
                interrupts.push((0, self.interrupts()));
                self.interrupting &= !(1 << counter);
                self.interrupting |= u64::from(alarm == Alarm::AtOverflow) << counter;
            }
            Step::ReplaceEvent(counter, selection) => {
                let (bank, number) = self.of(counter);
                bank.replace_event(number, selection);
            }
            Step::Run(running) => {
                let size = COUNTERS / self.banks.len();
                for (number, bank) in self.banks.iter_mut().enumerate() {
                    bank.run(running >> (number * size) & first(size));
                }
            }
            Step::Read(counter) => {
                let (bank, number) = self.of(counter);
                read = Some(bank.read(number));
            }
            Step::Write(counter, value) => {
                let (bank, number) = self.of(counter);
                bank.write(number, value);
            }
            Step::GuestRuns(counts) => self.host.clone().guest_runs(counts, |left| {
                self.each(|bank| {
                    bank.alarm(false);
                });
                interrupts.push((counts - left, self.interrupts()));
            }),
            Step::TimePasses(time) => self.host.time_passes(time),
            Step::Starve(starved) => self.host.starve(starved),
            Step::Update => self.each(Bank::update_running),
            Step::Poll => self.each(Bank::poll),
            Step::ReleaseIdle => self.each(Bank::release_idle),
            Step::SetPolicy(period) => {
                let min_period = period.try_into().expect("it is not 0");
                self.each(|bank| bank.set_policy(&Policy { min_period, ..Policy::default() }));
            }
        }
        interrupts.push((0, self.interrupts()));
        interrupts.retain(|(_, counters)| *counters != 0);
        (read, interrupts)
    }

    /// What host events count for counters. There are no others but those that counters have left, and that the banks
    /// know.
    fn selections(&self) -> Vec<Selection> {
        let events = || self.banks.iter().flat_map(|bank| &bank.events);
        assert_eq!(events().count(), self.host.selections().len());
        events().filter(|event| event.users != 0).map(|event| event.selection).collect()
    }

    /// What the operator is told of a counter.
    fn report(&mut self, counter: usize) -> (u64, State, u64) {
        let (bank, number) = self.of(counter);
        let report = bank.report(number, |selection| selection.to_string());
        (report.value, report.state, report.overflows)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn whatever_happens_counters_that_share_are_as_those_that_do_not(
        steps in proptest::collection::vec(step(), 1..120),
        width in prop_oneof![Just(48_u32), Just(64_u32)],
    ) {
        let (mut sharing, mut apart) = (Counters::new(1, width), Counters::new(COUNTERS, width));
        for step in &steps {
            prop_assert_eq!(sharing.does(step), apart.does(step), "{:?}", step);
            let held = sharing.selections();
            for (number, selection) in held.iter().enumerate() {
                prop_assert!(!held[..number].contains(selection), "{:?}", held);
            }
            let apart = apart.selections();
            prop_assert!(held.iter().all(|selection| apart.contains(selection)), "{:?} {:?}", held, apart);
            prop_assert!(apart.iter().all(|selection| held.contains(selection)), "{:?} {:?}", held, apart);
        }
        for counters in [&mut sharing, &mut apart] {
            counters.host.starve(false);
            counters.each(Bank::update_all);
        }
        for counter in 0..COUNTERS {
            prop_assert_eq!(sharing.report(counter), apart.report(counter), "{}", counter);
        }
    }
}

#[test]
fn counters_of_any_width_overflow_at_their_very_count_however_far_that_is() {
    let selection = Selection { event: Event::Raw(0xc0), filter: Filter::All, scope: Scope::Guest };
    for width in [1, 32, 47, 48, 63, 64] {
        for distance in [1, 1000, FAR - 1, FAR, FAR + 1, 3 * FAR + 7, u64::MAX] {
            let distance = distance.min(u64::MAX >> (64 - width));
            let host = Script::default();
            let mut bank = Bank::new(host.clone(), 1, width);
            bank.configure(0, Some(selection), Alarm::AtOverflow);
            bank.write(0, distance.wrapping_neg());
            bank.run(1);
            let mut overflows = Vec::new();
            host.guest_runs(distance, |left| {
                bank.alarm(false);
                if bank.take_overflowed() != 0 {
                    overflows.push(left);
                }
            });
            assert_eq!((overflows, bank.read(0)), (vec![0], 0), "{width} bits, {distance:#x}");
            bank.write(0, u64::MAX);
            assert_eq!(bank.read(0), u64::MAX >> (64 - width));
        }
    }
}

#[test]
fn events_that_change_counters_while_all_stand_still_go_on() {
    let of = |event| Some(Selection { event: Event::Raw(event), filter: Filter::User, scope: Scope::Guest });
    let host = Script::with_counters(2);
    let mut bank = Bank::new(host.clone(), 2, 48);
    (0..2).for_each(|counter| bank.configure(counter, of(counter as u64), Alarm::Off));
    bank.run(3);
    host.guest_runs(100, |_| {});
    host.take_started();
    bank.run(0);
    bank.configure(0, of(1), Alarm::Off);
    bank.configure(1, of(0), Alarm::Off);
    bank.run(3);
    host.guest_runs(10, |_| {});
    assert_eq!((host.take_started(), bank.read(0), bank.read(1)), (vec![], 110, 110));
    // What nothing counts for any more is closed, and never stands in the way.
    bank.run(0);
    bank.configure(0, of(2), Alarm::Off);
    bank.run(1);
    assert_eq!((host.take_started(), host.take_without_room()), (of(2).into_iter().collect(), vec![]));
    assert_eq!(host.selections(), [of(0), of(2)].map(Option::unwrap));
    bank.run(0);
    bank.configure(0, None, Alarm::Off);
    bank.release_idle();
    assert_eq!(host.selections(), [of(0).unwrap()]);
}
