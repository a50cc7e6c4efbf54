//! Executes the stub, the kernel's side of the shared page: a guest whose kernel has it must see the same as one whose
//! register accesses all exit to the VMM.

#![cfg(target_arch = "x86_64")]

mod guests;

use std::rc::Rc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use iced_x86::{Decoder, DecoderOptions, Mnemonic, OpKind};
use proptest::prelude::*;
use vpmu::model::amd::Version;
use vpmu::model::intel::{Shape, Version as IntelVersion};
use vpmu::shared_page::{ACTIVE, FREEZING, IDLE, MAX_SLOTS, Page};
use vpmu::x86::X2APIC_LVTPC;
use vpmu::{Cause, Outcome};
use vpmu_retarget::x86::stub::{Original, Originals, PageLocation, Stub, Value};

use guests::{Act, CONTROL, COUNTER, Does, Guest, MASKED, NMI, Plain, SELECT, STATUS, STATUS_CLEAR};

const SHAPE: Shape = Shape { version: IntelVersion::V5, general: 4, fixed: 3, absent: 0 };
const OLDER: Shape = Shape { version: IntelVersion::V2, ..SHAPE };

const SAMPLING: u64 = 0x53_00c0;

#[test]
fn the_entry_for_overflows_is_noted_and_believed_as_long_as_the_page_is_used() {
    for value in [Value::Whole, Value::Halves] {
        let mut guest = Guest::amd(6, value);
        assert_eq!(guest.kernel.call(guest.kernel.stub.write, X2APIC_LVTPC, NMI), None, "it is KVM's");
        guest.write(SELECT, SAMPLING);
        guest.write(COUNTER, (1 << 48) - 100);
        assert_eq!(guest.runs_only(100), [100]);
        assert_eq!(guest.plain.vcpu.noted, None);
        guest.write(CONTROL, 0);
        guest.write(COUNTER, (1 << 48) - 100);
        guest.write(CONTROL, 1);
        assert_eq!(guest.runs_only(100), [100]);
        assert_eq!(guest.plain.vcpu.noted, Some(NMI));
        guest.plain.write(COUNTER, (1 << 48) - 100);
        assert_eq!(guest.runs_only(100), [100]);
        assert_eq!(guest.plain.vcpu.noted, None, "the kernel may be another by now");
    }
}

/// An Intel guest that samples, and whose kernel has opened its LVT entry.
fn with_an_open_entry(value: Value) -> Guest {
    let mut guest = Guest::intel(SHAPE, value);
    guest.write(X2APIC_LVTPC, NMI);
    guest.write(0x186, SAMPLING);
    guest
}

/// Lets its counter overflow after 100. Returns the counts at which the guest is interrupted.
fn overflow(guest: &mut impl Does) -> Vec<u64> {
    guest.write(0x38f, 0);
    guest.write(0x4c1, (1 << 48) - 100);
    guest.write(0x38f, 1);
    guest.runs(100, |_| ())
}

#[test]
fn intels_overflow_masks_the_entry_and_opening_it_again_is_no_exit() {
    let mut guest = with_an_open_entry(Value::Halves);
    let opens_by_kvm =
        |guest: &Guest| guest.kernel.call(guest.kernel.stub.write, X2APIC_LVTPC, NMI).is_none();
    for _ in 0..3 {
        assert_eq!(overflow(&mut guest), [100]);
        assert_eq!(guest.plain.vcpu.lvt_entry, NMI, "KVM's is open");
        assert_eq!(guest.read(X2APIC_LVTPC), Outcome::Value(NMI | MASKED));
        assert_eq!(overflow(&mut guest), [], "masked");
        assert!(!opens_by_kvm(&guest));
        assert_eq!(guest.read(X2APIC_LVTPC), Outcome::Value(NMI));
        assert!(opens_by_kvm(&guest), "it was open");
    }
    assert_eq!(overflow(&mut guest), [100]);
    guest.write(X2APIC_LVTPC, 0x50);
    assert_eq!(guest.plain.vcpu.lvt_entry, 0x50, "any other value is KVM's");
    assert_eq!(overflow(&mut guest), [100]);
    assert_eq!(guest.read(X2APIC_LVTPC), Outcome::Value(0x50 | MASKED));
    guest.write(X2APIC_LVTPC, 0);
    assert_eq!(guest.read(X2APIC_LVTPC), Outcome::Value(0));
    assert_eq!(guest.kernel.call(guest.kernel.stub.write, X2APIC_LVTPC, 0), None, "0 is a value like others");
}

#[test]
fn a_kernel_without_the_stub_finds_no_mask_of_its_predecessor() {
    let mut guest = with_an_open_entry(Value::Whole);
    assert_eq!(overflow(&mut guest), [100]);
    assert_eq!(guest.read(X2APIC_LVTPC), Outcome::Value(NMI | MASKED));
    guest.plain.write(X2APIC_LVTPC, NMI);
    assert_eq!(overflow(&mut guest.plain), [100]);
}

#[test]
fn a_mask_in_memory_that_has_become_another_kernels_masks_nothing() {
    let mut guest = with_an_open_entry(Value::Whole);
    assert_eq!(overflow(&mut guest), [100]);
    guest.kernel.page.active.store(77, Relaxed);
    guest.plain.write(0x4c1, (1 << 48) - 100);
    assert_eq!(guest.runs_only(100), [100]);
}

#[test]
fn between_freeze_and_thaw_a_guest_does_not_leave() {
    for value in [Value::Whole, Value::Halves] {
        let mut guest = Guest::amd(6, value);
        guest.write(CONTROL, 0);
        for counter in 0..6 {
            guest.write(COUNTER + 2 * counter, (1 << 48) - 100);
            guest.write(SELECT + 2 * counter, SAMPLING);
        }
        guest.write(CONTROL, 0x3f);
        assert_eq!(guest.runs_only(110), [100]);
        let before = guest.plain.exits;
        guest.write(CONTROL, 0);
        assert_eq!(guest.read(STATUS), Outcome::Value(0x3f));
        guest.write(STATUS_CLEAR, 0x3e);
        assert_eq!(guest.read(STATUS), Outcome::Value(1));
        for counter in 0..6 {
            // The write that freezes them is an instruction, too.
            assert_eq!(guest.read_counter(counter), Outcome::Value(11));
            assert_eq!(guest.read(COUNTER + 2 * counter), Outcome::Value(11));
            guest.write(COUNTER + 2 * counter, u64::MAX - 49);
            assert_eq!(guest.read_counter(counter), Outcome::Value((1 << 48) - 50));
            guest.write(SELECT + 2 * counter, u64::MAX);
            assert_ne!(
                guest.read(SELECT + 2 * counter),
                Outcome::Value(u64::MAX),
                "reserved bits are dropped"
            );
            guest.write(SELECT + 2 * counter, SAMPLING);
        }
        assert_eq!(guest.plain.exits - before, 1, "for the freeze");
        guest.write(CONTROL, 0x3f);
        assert_eq!(guest.plain.exits - before, 2, "and the thaw");
        assert_eq!(guest.runs_only(60), [50]);
        assert_eq!(guest.read(STATUS), Outcome::Value(0x3f));
        assert_eq!(
            guest.read_counter(0),
            Outcome::Value(11),
            "the read of the status is an instruction, too"
        );
    }
}

#[test]
fn what_cannot_wait_is_done_at_once() {
    let mut guest = Guest::amd(2, Value::Halves);
    guest.write(CONTROL, 0);
    let mut leaves = |register, value| {
        guest.write(CONTROL, 0);
        let before = guest.plain.exits;
        guest.write(register, value);
        guest.plain.exits - before == 1
    };
    assert!(!leaves(SELECT, 5));
    assert!(leaves(0xc000_0303, 1), "the register that sets the status");
    assert!(leaves(0xc001_0000, 5), "a K7 address");
    assert!(leaves(SELECT + 4, 5), "a counter that is not there");
    assert!(leaves(0x10, 5), "somebody else's register");
    assert!(leaves(CONTROL, 1 << 32), "a value that is not 0");
    assert!(!leaves(SELECT, 7), "and control is 0 all the same");
}

#[test]
fn on_intels_pmu_writes_that_fault_still_do() {
    let mut guest = Guest::intel(SHAPE, Value::Whole);
    guest.write(0x38f, 0);
    for (register, value, outcome) in [
        (0x186, 1 << 21, Outcome::Fault),
        (0x186, 0x53_00c0, Outcome::Handled),
        (0x4c1, 1 << 48, Outcome::Fault),
        (0x38d, 1 << 2, Outcome::Fault),
        (0x390, 1 << 40, Outcome::Fault),
        (0x390, 1, Outcome::Handled),
    ] {
        assert_eq!(guest.write(register, value), outcome, "{value:#x} to {register:#x}");
    }
    guest.write(0x38f, 0);
    let before = guest.plain.exits;
    guest.write(0x38d, 0xb);
    guest.write(0x309, 77);
    guest.write(0x4c2, 78);
    assert_eq!(guest.read_counter(1 << 30), Outcome::Value(77));
    assert_eq!(guest.read_counter(1), Outcome::Value(78));
    assert_eq!(guest.plain.exits, before);
}

#[test]
fn a_guest_that_does_not_say_that_it_has_frozen_them_is_shown_nothing() {
    let mut plain = Plain::amd(6);
    plain.vcpu.has_another_page = true;
    let page = Rc::<Page>::default();
    plain.pmu.share_page(Box::new(Rc::clone(&page)));
    plain.write(CONTROL, 0);
    assert_eq!(page.active.load(Relaxed), 0);
    page.freezing.store(FREEZING, Relaxed);
    plain.exit(Cause::Guest);
    assert_eq!((page.active.load(Relaxed), page.freezing.load(Relaxed)), (0, 0), "another vCPU's page");
    plain.vcpu.has_another_page = false;
    page.freezing.store(FREEZING, Relaxed);
    plain.exit(Cause::Guest);
    assert_eq!((page.active.load(Relaxed), page.freezing.load(Relaxed)), (ACTIVE, 0));
    plain.write(CONTROL, 1);
    assert_eq!(page.active.load(Relaxed), IDLE);
}

#[test]
fn memory_that_has_become_another_kernels_is_left_alone() {
    let mut guest = Guest::amd(2, Value::Whole);
    guest.write(CONTROL, 0);
    guest.write(COUNTER, 5);
    for word in [&guest.kernel.page.active, &guest.kernel.page.dirty, &guest.kernel.page.written[1]] {
        word.store(0xffff_0000_ffff, Relaxed);
    }
    guest.plain.write(COUNTER, 7);
    assert_eq!(guest.plain.read(COUNTER), Outcome::Value(7));
    guest.plain.exit(Cause::Guest);
    assert_eq!(guest.kernel.page.active.load(Relaxed), 0xffff_0000_ffff);
}

#[test]
fn the_code_is_code_and_leaves_the_stack_alone() {
    for registers in [
        Version::V2(6).page_registers().unwrap(),
        SHAPE.page_registers().unwrap(),
        OLDER.page_registers().unwrap(),
    ] {
        let at = 0xffff_ffff_8100_0000;
        let original = Original { entry: at - 64, exit: at - 60 };
        let originals =
            Originals { read: original, write: original, value: Value::Whole, read_counter: original };
        let stub = Stub::new(at, &registers, &originals, PageLocation { first: 0, count: 1 });
        let len = stub.code.len() - 16 * registers.slots.len();
        let mut decoder = Decoder::with_ip(64, &stub.code[..len], at, DecoderOptions::NONE);
        for instruction in &mut decoder {
            assert!(!instruction.is_invalid(), "{:#x}", instruction.ip());
            let uses_stack = [Mnemonic::Push, Mnemonic::Pop, Mnemonic::Call, Mnemonic::Ret];
            assert!(!uses_stack.contains(&instruction.mnemonic()), "{:#x}", instruction.ip());
            if instruction.op0_kind() == OpKind::NearBranch64 {
                let target = instruction.near_branch_target();
                assert!((at..at + len as u64).contains(&target) || target == at - 64 || target == at - 60);
            }
        }
        assert_eq!(decoder.position(), len);
        assert!(registers.slots.len() <= MAX_SLOTS);
    }
}

/// A guest with two counters for its programs, which has frozen them once.
fn with_programs_counted() -> Guest {
    const OF_PROGRAMS: u64 = 0x51_00c0;
    let mut guest = Guest::amd(2, Value::Whole);
    guest.write(CONTROL, 0);
    for counter in 0..2 {
        guest.write(SELECT + 2 * counter, OF_PROGRAMS);
        guest.write(COUNTER + 2 * counter, (1 << 48) - 10_000);
    }
    guest.write(CONTROL, 3);
    guest.plain.host.time_passes(Duration::from_micros(100));
    guest
}

/// What Linux does for an overflow, with that period.
fn handle(guest: &mut Guest, period: u64) {
    guest.plain.host.time_passes(Duration::from_micros(100));
    guest.write(CONTROL, 0);
    let Outcome::Value(status) = guest.read(STATUS) else { panic!("it can be read") };
    for counter in (0..2).filter(|counter| status & 1 << counter != 0) {
        let Outcome::Value(value) = guest.read_counter(counter) else { panic!("it can be read") };
        guest.write(COUNTER + 2 * counter, ((1 << 48) - period).wrapping_add(value) & ((1 << 48) - 1));
    }
    guest.write(STATUS_CLEAR, status);
    guest.write(CONTROL, 3);
}

#[test]
fn a_sample_of_a_program_is_one_exit_as_long_as_the_period_stays() {
    let mut guest = with_programs_counted();
    let before = guest.plain.exits;
    let periods =
        |first: u64, step: u64, number: u64| (0..number).map(|n| first + n * step).collect::<Vec<_>>();
    let at = guest.runs(100_005, |guest| handle(guest, 10_000));
    assert_eq!(at, periods(10_000, 10_000, 10));
    assert_eq!(guest.plain.exits - before, 10);
    assert_eq!(guest.runs(9_995, |guest| handle(guest, 20_000)), [9_995]);
    assert_eq!(guest.plain.exits - before, 12, "another period has to be told");
    assert_eq!(guest.runs(40_000, |guest| handle(guest, 20_000)), [20_000, 40_000]);
    assert_eq!(guest.plain.exits - before, 14);
    assert_eq!(guest.read_counter(0), Outcome::Value((1 << 48) - 20_000));
    assert_eq!(guest.read(STATUS), Outcome::Value(0));
}

#[test]
fn a_kernel_that_handles_an_overflow_later_loses_no_counts() {
    let mut guest = with_programs_counted();
    assert_eq!(guest.runs_only(10_700), [10_000]);
    handle(&mut guest, 10_000);
    // It was shown what there was when it was interrupted, and the rest is no less there.
    assert_eq!(guest.read_counter(1), Outcome::Value((1 << 48) - 9_300));
    assert_eq!(guest.runs_only(9_300), [9_300]);
}

#[test]
fn an_offer_is_for_memory_that_is_still_the_kernels() {
    let mut guest = with_programs_counted();
    guest.kernel.page.active.store(77, Relaxed);
    guest.runs_only(10_000);
    assert_eq!(guest.kernel.page.active.load(Relaxed), 77);
}

fn acts(writes: Vec<(u32, Vec<u64>)>, counters: Vec<u32>) -> impl Strategy<Value = Vec<Act>> {
    let registers: Vec<u32> = writes.iter().map(|(register, _)| *register).collect();
    let write = proptest::sample::select(writes).prop_flat_map(|(register, values)| {
        proptest::sample::select(values).prop_map(move |value| Act::Write(register, value))
    });
    let act = prop_oneof![
        8 => write,
        3 => proptest::sample::select(registers).prop_map(Act::Read),
        3 => proptest::sample::select(counters).prop_map(Act::ReadCounter),
        2 => (1..200_000_u64).prop_map(Act::Runs),
        1 => Just(Act::Leave),
    ];
    proptest::collection::vec(act, 1..80)
}

fn amds_acts() -> impl Strategy<Value = Vec<Act>> {
    let selects = vec![0, 0x13_00c0, 0x43_00c0, SAMPLING, 0x51_0076, 0x51_00c0, 0x51_00c0, u64::MAX];
    let values = vec![0, 1, 77, (1 << 48) - 10_000, (1 << 48) - 100_000, u64::MAX - 50_000];
    let mut writes = vec![
        (CONTROL, vec![0, 0, 0, 7, 3, 5]),
        (CONTROL, vec![0, 7]),
        (STATUS_CLEAR, vec![1, 2, 7, u64::MAX]),
        (STATUS, vec![0]),
        (0xc000_0303, vec![1, 6]),
        (0xc001_0005, vec![5]),
        (X2APIC_LVTPC, vec![NMI, NMI | MASKED, 0]),
    ];
    for counter in 0..3 {
        writes.push((SELECT + 2 * counter, selects.clone()));
        writes.push((COUNTER + 2 * counter, values.clone()));
    }
    acts(writes, vec![0, 1, 2, 3])
}

fn intels_acts() -> impl Strategy<Value = Vec<Act>> {
    let values = vec![0, 77, (1 << 48) - 10_000, u64::MAX - 50_000, 0xffff_8000];
    let mut writes = vec![
        (0x38f, vec![0, 0, 0, 3 | 7 << 32, 1 << 32, 1]),
        (0x38f, vec![0, 3 | 7 << 32]),
        (0x390, vec![1, 3, 1 << 32, 1 << 59, 1 << 62, 1 << 63, 1 << 40]),
        (0x391, vec![1, 1 << 59]),
        (0x38e, vec![0]),
        (0x38d, vec![0, 0xa, 0xb, 0xbb, 0xb0b, 0x4]),
        (0x1d9, vec![0, 1 << 12]),
        (0x392, vec![0]),
        (X2APIC_LVTPC, vec![NMI, NMI, NMI, NMI | MASKED, 0, 0x50]),
    ];
    for counter in 0..2 {
        writes.push((0x186 + counter, vec![0, 0x53_00c0, 0x43_00c0, 0x51_00c0, 0x51_00c0, 1 << 40]));
        writes.push((0xc1 + counter, values.clone()));
        writes.push((0x4c1 + counter, values.clone()));
        writes.push((0x309 + counter, values.clone()));
    }
    acts(writes, vec![0, 1, 1 << 30, 1 | 1 << 30, 9])
}

/// What kernels do for an overflow, or anything else. They freeze the counters first and thaw them last, before a
/// program runs again, as the module says.
fn handlers(
    whatever: impl Strategy<Value = Vec<Act>>,
    freeze: Act,
    inner: Vec<Vec<Act>>,
    thaw: Act,
) -> impl Strategy<Value = Vec<Act>> {
    let len = inner.len();
    let usual = proptest::sample::subsequence(inner, 0..=len)
        .prop_map(move |inner| [vec![freeze], inner.concat(), vec![thaw]].concat());
    let whatever = whatever.prop_map(move |acts| [vec![freeze], acts, vec![thaw]].concat());
    prop_oneof![1 => whatever, 3 => usual]
}

fn amds_handlers() -> impl Strategy<Value = Vec<Act>> {
    let inner = (0..3).flat_map(|counter| {
        let value = |period| {
            vec![Act::ReadCounter(counter), Act::Write(COUNTER + 2 * counter, (1_u64 << 48) - period)]
        };
        [value(10_000), value(100_000), vec![Act::Write(SELECT + 2 * counter, 0x51_00c0)]]
    });
    let inner = [vec![Act::Read(STATUS)], vec![Act::Write(STATUS_CLEAR, 7)]].into_iter().chain(inner);
    handlers(amds_acts(), Act::Write(CONTROL, 0), inner.collect(), Act::Write(CONTROL, 7))
}

fn intels_handlers() -> impl Strategy<Value = Vec<Act>> {
    let inner = (0..2).flat_map(|counter| {
        let value = |register, period: u64| vec![Act::Write(register, (1 << 48) - period)];
        [value(0x4c1 + counter, 10_000), value(0x309 + counter, 10_000), value(0x309 + counter, 50_000)]
    });
    let clear = Act::Write(0x390, 3 | 7 << 32);
    let open = Act::Write(X2APIC_LVTPC, NMI);
    let inner = [vec![Act::Read(0x38e)], vec![clear, Act::ReadCounter(1 << 30)], vec![open], vec![open]]
        .into_iter()
        .chain(inner);
    handlers(intels_acts(), Act::Write(0x38f, 0), inner.collect(), Act::Write(0x38f, 3 | 7 << 32))
}

/// Does it all in a guest with a shared page, and in one without.
fn compare(mut guest: Guest, mut plain: Plain, acts: &[Act], handler: &[Act]) {
    for act in acts {
        assert_eq!(guest.does(*act, handler), plain.does(*act, handler), "{act:x?}");
    }
    assert_eq!(guest.plain.vcpu.interrupts, plain.vcpu.interrupts);
    assert!(guest.plain.exits <= plain.exits);
}

/// Words of the page that are scribbled on.
const WORDS: usize = 6 + 2 * (MAX_SLOTS + 1);

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_guest_sees_the_same_with_a_shared_page_as_without_on_amds_pmu(
        acts in amds_acts(), handler in amds_handlers(), halves: bool,
    ) {
        let value = if halves { Value::Halves } else { Value::Whole };
        compare(Guest::amd(3, value), Plain::amd(3), &acts, &handler);
    }

    #[test]
    fn a_guest_sees_the_same_with_a_shared_page_as_without_on_intels_pmu(
        acts in intels_acts(), handler in intels_handlers(), newer: bool, halves: bool,
    ) {
        let shape = if newer { SHAPE } else { OLDER };
        let value = if halves { Value::Halves } else { Value::Whole };
        compare(Guest::intel(shape, value), Plain::intel(shape), &acts, &handler);
    }

    #[test]
    fn whatever_a_guest_writes_on_its_page_is_what_it_could_write_to_registers(
        acts in intels_acts(),
        scribbles in proptest::collection::vec((0..WORDS, prop_oneof![any::<u64>(), Just(0), Just(NMI)]), 80),
    ) {
        let mut guest = Guest::intel(SHAPE, Value::Whole);
        for (act, (word, scribble)) in acts.iter().zip(scribbles) {
            let page = &*guest.kernel.page;
            let words = page.written.iter().chain(&page.shown);
            let all = [&page.active, &page.freezing, &page.dirty, &page.cleared, &page.lvt_entry, &page.lvt_mask]
                .into_iter()
                .chain(words);
            all.skip(word).take(1).for_each(|word| word.store(scribble, Relaxed));
            drop(guest.does(*act, &[]));
        }
    }
}
