//! Sampling counters, and the buffer that the samples come in.
//!
//! An event that overflows at an instruction is sampled before the next one, so it is known where. Periods are even, and so
//! is the number of each DEC between the calls (see `code::BEFORE_LOOP`): a sample is at the JNZ.

use perf_event_open_sys::bindings;

use crate::code::{BEFORE_LOOP, COUNTERS, REGISTERS, ROUNDS_REGISTER, branches, instructions, run_in_child};
use crate::event::{Event, over_all};
use crate::failure::{Failure, Verdict, checked, equal, within};
use crate::ring::{Record, Ring, Sample};
use crate::worker::this_thread;

const ROUNDS: u64 = 10_000_000;
const TOTAL: u64 = instructions(ROUNDS);
/// A millisecond, if each instruction takes a nanosecond: Linux lets no event have many more samples where its interrupts
/// are as slow as in a guest.
const PERIOD: u64 = 1_000_000;

/// Demands that samples are all of this thread, at that address, a period apart.
fn all_at(samples: &[Sample], address: u64, period: u64) -> Result<(), Failure> {
    for sample in samples {
        equal("the address of a sample", sample.ip, address)?;
        equal("the thread of a sample", sample.task, this_thread())?;
        equal("the period of a sample", sample.period, period)?;
    }
    equal("times go up", samples.is_sorted_by(|earlier, later| earlier.time < later.time), true)
}

/// As many samples as the period fits into the count, each where the counter overflowed, none lost.
pub fn sampling() -> Verdict {
    let counter = Event::instructions().every(PERIOD).open()?;
    let mut ring = Ring::map(&counter, 8)?;
    let place = counter.over(ROUNDS)?;
    let samples = ring.samples()?;
    equal("samples", samples.len() as u64, TOTAL / PERIOD)?;
    all_at(&samples, place.jump, PERIOD)?;
    equal("the count", counter.value()?, TOTAL)?;
    let covered: u64 = samples.iter().map(|sample| sample.period).sum();
    within("what the periods leave of the count", TOTAL - covered, 0..PERIOD)?;
    Ok(format!("{} samples of {TOTAL} instructions", samples.len()))
}

/// Two events with periods of their own do not disturb each other.
pub fn side_by_side() -> Verdict {
    let period = 350_000;
    let (all, some) = (Event::instructions().every(PERIOD).open()?, Event::branches().every(period).open()?);
    let (mut of_all, mut of_some) = (Ring::map(&all, 8)?, Ring::map(&some, 8)?);
    let place = over_all(ROUNDS)?;
    let (of_all, of_some) = (of_all.samples()?, of_some.samples()?);
    equal("samples by instructions", of_all.len() as u64, TOTAL / PERIOD)?;
    all_at(&of_all, place.jump, PERIOD)?;
    equal("samples by branches", of_some.len() as u64, branches(ROUNDS) / period)?;
    all_at(&of_some, place.decrement, period)?;
    equal("the counts", (all.value()?, some.value()?), (TOTAL, branches(ROUNDS)))?;
    Ok(format!("{} samples by instructions, {} by branches", of_all.len(), of_some.len()))
}

/// All counters overflow at the same instruction, again and again.
pub fn on_all_counters() -> Verdict {
    let counters = Event::instructions().every(PERIOD).open_each(COUNTERS)?;
    let mut rings = counters.iter().map(|counter| Ring::map(counter, 8)).collect::<Result<Vec<_>, _>>()?;
    let place = over_all(ROUNDS)?;
    for (counter, ring) in counters.iter().zip(&mut rings) {
        let samples = ring.samples()?;
        equal("samples of one counter", samples.len() as u64, TOTAL / PERIOD)?;
        all_at(&samples, place.jump, PERIOD)?;
        equal("its count", counter.value()?, TOTAL)?;
    }
    Ok(format!("{} samples of each of {COUNTERS}", TOTAL / PERIOD))
}

/// A sample of a group's leader has what all its members had counted by then.
pub fn a_group() -> Verdict {
    let grouped = |event: Event| event.with(|attr| attr.read_format = bindings::PERF_FORMAT_GROUP.into());
    let leader = grouped(Event::instructions())
        .every(PERIOD)
        .with(|attr| attr.sample_type |= u64::from(bindings::PERF_SAMPLE_READ))
        .open()?;
    let member = grouped(Event::branches())
        .open_with(&leader)
        .map_err(|source| Failure::System { action: "join the group".into(), source })?;
    let mut ring = Ring::map(&leader, 8)?;
    let place = leader.over(ROUNDS)?;
    let samples = ring.samples()?;
    equal("samples", samples.len() as u64, TOTAL / PERIOD)?;
    all_at(&samples, place.jump, PERIOD)?;
    for (number, sample) in (1..).zip(&samples) {
        let counted = number * PERIOD;
        // The last DEC has retired, its JNZ has not.
        let jumps = (counted - BEFORE_LOOP - 1) / 2;
        equal("members, leader and member in a sample", &*sample.rest, &[2, counted, jumps][..])?;
    }
    drop(member);
    Ok(format!("{} samples with two counts", samples.len()))
}

/// A new period holds from the moment that it is set.
pub fn changed_period() -> Verdict {
    let counter = Event::instructions().every(PERIOD).open()?;
    let mut ring = Ring::map(&counter, 8)?;
    let mut seen = Vec::new();
    for period in [PERIOD, PERIOD * 2, PERIOD * 3] {
        counter.request(bindings::PERIOD, (&raw const period) as u64)?;
        let place = counter.over(ROUNDS)?;
        let samples = ring.samples()?;
        equal("samples", samples.len() as u64, TOTAL / period)?;
        all_at(&samples, place.jump, period)?;
        seen.push(samples.len());
    }
    equal("the count", counter.value()?, 3 * TOTAL)?;
    Ok(format!("{seen:?} samples"))
}

/// Samples with the registers of user mode, which make them five times as long: the first of `REGISTERS` is behind a word
/// that says how wide they are.
fn with_registers() -> Event {
    Event::instructions().every(PERIOD).with(|attr| {
        attr.sample_type |= u64::from(bindings::PERF_SAMPLE_REGS_USER);
        attr.sample_regs_user = REGISTERS;
    })
}

/// How many samples with registers fit into a page.
const FITTING: u64 = 4096 / (8 + 4 * 8 + 8 + REGISTERS.count_ones() as u64 * 8);

/// The buffer is used round and round, and loses nothing as long as somebody reads it in time. What was in the registers is
/// what the overflow found there.
pub fn ring_buffer() -> Verdict {
    let counter = with_registers().open()?;
    let mut ring = Ring::map(&counter, 1)?;
    let page = ring.page();
    equal("where the buffer begins and its size", (page.data_offset, page.data_size), (4096, 4096))?;
    let (mut samples, mut total, rounds) = (0, 0, 4_500_000);
    for _ in 0..10 {
        counter.over(rounds)?;
        for sample in ring.samples()? {
            samples += 1;
            let left = rounds - (samples * PERIOD - total - BEFORE_LOOP).div_ceil(2);
            equal("rounds left in a sample", sample.rest[1 + ROUNDS_REGISTER], left)?;
        }
        total += instructions(rounds);
        equal("samples so far", samples, total / PERIOD)?;
    }
    equal("the count", counter.value()?, total)?;
    let written = ring.page().data_head;
    within("bytes written", written, 4 * 4096..)?;
    equal("bytes read", ring.page().data_tail, written)?;
    Ok(format!("{samples} samples, {written} bytes through a page"))
}

/// A buffer that nobody reads fills up; what found no room is counted, and after that it goes on.
pub fn ring_buffer_full() -> Verdict {
    let counter = with_registers().open()?;
    let mut ring = Ring::map(&counter, 1)?;
    counter.over(2 * ROUNDS)?;
    let overflows = counter.value()? / PERIOD;
    equal("samples kept", ring.samples()?.len() as u64, FITTING)?;
    // The next record that finds room is preceded by the number of those that did not.
    counter.over(ROUNDS / 2)?;
    let records = ring.records();
    let lost = overflows - FITTING;
    equal("the first record after it", records.first(), Some(&Record::Lost(lost)))?;
    let after = records.iter().filter(|record| matches!(record, Record::Sample(_))).count();
    equal("records after that, and samples", (records.len() - 1, after as u64), (after, TOTAL / 2 / PERIOD))?;
    Ok(format!("{FITTING} kept, {lost} lost, {after} after it"))
}

/// Mappings, names and children are told as well.
pub fn other_records() -> Verdict {
    let counter = Event::instructions()
        .with(|attr| {
            attr.set_mmap(1);
            attr.set_comm(1);
            attr.set_task(1);
        })
        .open()?;
    let mut ring = Ring::map(&counter, 1)?;
    counter.enable()?;
    let (length, access) = (3 * 4096, libc::PROT_READ | libc::PROT_EXEC);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the kernel chooses a place that is free.
    let area = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0) };
    // SAFETY: the name is a string that ends with a zero.
    checked("take a name", unsafe { libc::prctl(libc::PR_SET_NAME, c"renamed".as_ptr()) })?;
    run_in_child(counter.call(bindings::ENABLE, 0), 1, counter.call(bindings::DISABLE, 0))?;
    let records = ring.records();
    let [Record::Other(map, map_body), Record::Other(name, name_body), Record::Other(fork, fork_body)] =
        &records[..]
    else {
        return equal("records", records, Vec::new()).map(|()| String::new());
    };
    let kinds = (bindings::PERF_RECORD_MMAP, bindings::PERF_RECORD_COMM, bindings::PERF_RECORD_FORK);
    equal("kinds of records", (*map, *name, *fork), kinds)?;
    let number =
        |body: &[u8], at: usize| u64::from_le_bytes(body[at..at + 8].try_into().expect("eight bytes"));
    let mapped = (number(map_body, 8), number(map_body, 16));
    equal("where and how long the mapping is", mapped, (area as u64, length as u64))?;
    equal("the name", name_body[8..].starts_with(b"renamed\0"), true)?;
    // The child's number and its parent's.
    equal("the parent", number(fork_body, 0) >> 32, u64::from(std::process::id()))?;
    Ok("a mapping, a name, a child".into())
}
