//! Sampling, and the ring buffer of samples.
//!
//! A sample's address is that of the instruction after the one that overflowed. Periods are even, and each decrement of
//! the loop has an even number among the counted instructions (see `code::BEFORE_LOOP`). So the decrement overflows,
//! and the sample is at the jump.

use perf_event_open_sys::bindings;

use crate::code::{BEFORE_LOOP, COUNTERS, REGISTERS, ROUNDS_REGISTER, branches, instructions, run_in_child};
use crate::event::{Event, count_loop_with_all};
use crate::failure::{Failure, Verdict, checked, equal, within};
use crate::ring::{Record, Ring, Sample};
use crate::worker::this_thread;

const ROUNDS: u64 = 10_000_000;
const TOTAL: u64 = instructions(ROUNDS);
/// A millisecond, if each instruction takes a nanosecond. Linux throttles events with many more samples than that where
/// its interrupts are as slow as in a guest.
const PERIOD: u64 = 1_000_000;

/// Checks that all samples are of this thread, at this address and with this period, and that their times ascend.
fn all_at(samples: &[Sample], address: u64, period: u64) -> Result<(), Failure> {
    for sample in samples {
        equal("the address of a sample", sample.ip, address)?;
        equal("the thread of a sample", sample.task, this_thread())?;
        equal("the period of a sample", sample.period, period)?;
    }
    equal("times ascend", samples.is_sorted_by(|earlier, later| earlier.time < later.time), true)
}

/// There is one sample for each whole period of the count, at the instruction of the overflow.
pub fn sampling() -> Verdict {
    let counter = Event::instructions().every(PERIOD).open()?;
    let mut ring = Ring::map(&counter, 8)?;
    let place = counter.count_loop(ROUNDS)?;
    let samples = ring.samples()?;
    equal("samples", samples.len() as u64, TOTAL / PERIOD)?;
    all_at(&samples, place.jump, PERIOD)?;
    equal("the count", counter.value()?, TOTAL)?;
    let covered: u64 = samples.iter().map(|sample| sample.period).sum();
    within("the count without the periods of the samples", TOTAL - covered, 0..PERIOD)?;
    Ok(format!("{} samples of {TOTAL} instructions", samples.len()))
}

/// Two events with different periods do not disturb each other.
pub fn side_by_side() -> Verdict {
    let period = 350_000;
    let (all, some) = (Event::instructions().every(PERIOD).open()?, Event::branches().every(period).open()?);
    let (mut of_all, mut of_some) = (Ring::map(&all, 8)?, Ring::map(&some, 8)?);
    let place = count_loop_with_all(ROUNDS)?;
    let (of_all, of_some) = (of_all.samples()?, of_some.samples()?);
    equal("samples by instructions", of_all.len() as u64, TOTAL / PERIOD)?;
    all_at(&of_all, place.jump, PERIOD)?;
    equal("samples by branches", of_some.len() as u64, branches(ROUNDS) / period)?;
    all_at(&of_some, place.decrement, period)?;
    equal("the counts", (all.value()?, some.value()?), (TOTAL, branches(ROUNDS)))?;
    Ok(format!("{} samples by instructions, {} by branches", of_all.len(), of_some.len()))
}

/// All counters of the PMU can overflow at the same instruction.
pub fn on_all_counters() -> Verdict {
    let counters = Event::instructions().every(PERIOD).open_each(COUNTERS)?;
    let mut rings = counters.iter().map(|counter| Ring::map(counter, 8)).collect::<Result<Vec<_>, _>>()?;
    let place = count_loop_with_all(ROUNDS)?;
    for (counter, ring) in counters.iter().zip(&mut rings) {
        let samples = ring.samples()?;
        equal("samples of one counter", samples.len() as u64, TOTAL / PERIOD)?;
        all_at(&samples, place.jump, PERIOD)?;
        equal("its count", counter.value()?, TOTAL)?;
    }
    Ok(format!("{} samples of each of {COUNTERS}", TOTAL / PERIOD))
}

/// With `PERF_SAMPLE_READ`, a sample of a group's leader has the counts of all members.
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
    let place = leader.count_loop(ROUNDS)?;
    let samples = ring.samples()?;
    equal("samples", samples.len() as u64, TOTAL / PERIOD)?;
    all_at(&samples, place.jump, PERIOD)?;
    for (number, sample) in (1..).zip(&samples) {
        let counted = number * PERIOD;
        // The last decrement has retired, its jump has not.
        let jumps = (counted - BEFORE_LOOP - 1) / 2;
        equal("members, leader and member in a sample", &*sample.rest, &[2, counted, jumps][..])?;
    }
    drop(member);
    Ok(format!("{} samples with two counts", samples.len()))
}

/// A new period (`PERF_EVENT_IOC_PERIOD`) takes effect at once.
pub fn changed_period() -> Verdict {
    let counter = Event::instructions().every(PERIOD).open()?;
    let mut ring = Ring::map(&counter, 8)?;
    let mut seen = Vec::new();
    for period in [PERIOD, PERIOD * 2, PERIOD * 3] {
        counter.request(bindings::PERIOD, (&raw const period) as u64)?;
        let place = counter.count_loop(ROUNDS)?;
        let samples = ring.samples()?;
        equal("samples", samples.len() as u64, TOTAL / period)?;
        all_at(&samples, place.jump, period)?;
        seen.push(samples.len());
    }
    equal("the count", counter.value()?, 3 * TOTAL)?;
    Ok(format!("{seen:?} samples"))
}

/// Returns an event whose samples have the user registers, which make a sample five times as long. In [`Sample::rest`]
/// they follow a word with their ABI.
fn with_registers() -> Event {
    Event::instructions().every(PERIOD).with(|attr| {
        attr.sample_type |= u64::from(bindings::PERF_SAMPLE_REGS_USER);
        attr.sample_regs_user = REGISTERS;
    })
}

/// Number of samples with registers that fit into a page.
const FITTING: u64 = 4096 / (8 + 4 * 8 + 8 + REGISTERS.count_ones() as u64 * 8);

/// A buffer that is read in time loses no samples when it wraps around. The registers in a sample are those at the
/// overflow.
pub fn ring_buffer() -> Verdict {
    let counter = with_registers().open()?;
    let mut ring = Ring::map(&counter, 1)?;
    let page = ring.page();
    equal("offset and size of the buffer", (page.data_offset, page.data_size), (4096, 4096))?;
    let (mut samples, mut total, rounds) = (0, 0, 4_500_000);
    for _ in 0..10 {
        counter.count_loop(rounds)?;
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

/// A full buffer loses samples. Once there is room again, a record says how many were lost, and samples follow.
pub fn ring_buffer_full() -> Verdict {
    let counter = with_registers().open()?;
    let mut ring = Ring::map(&counter, 1)?;
    counter.count_loop(2 * ROUNDS)?;
    let overflows = counter.value()? / PERIOD;
    equal("samples kept", ring.samples()?.len() as u64, FITTING)?;
    // The record with the number of lost samples precedes the next sample.
    counter.count_loop(ROUNDS / 2)?;
    let records = ring.records();
    let lost = overflows - FITTING;
    equal("the first record after it", records.first(), Some(&Record::Lost(lost)))?;
    let after = records.iter().filter(|record| matches!(record, Record::Sample(_))).count();
    equal("records after that, and samples", (records.len() - 1, after as u64), (after, TOTAL / 2 / PERIOD))?;
    Ok(format!("{FITTING} kept, {lost} lost, {after} after it"))
}

/// The buffer also has records of mappings, of new names and of children.
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
    // SAFETY: the kernel chooses a free range of addresses.
    let area = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0) };
    // SAFETY: the name is a string that ends with a zero.
    checked("set the thread's name", unsafe { libc::prctl(libc::PR_SET_NAME, c"renamed".as_ptr()) })?;
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
    equal("address and length of the mapping", mapped, (area as u64, length as u64))?;
    equal("the name", name_body[8..].starts_with(b"renamed\0"), true)?;
    // The process IDs of the child and, in the upper half, of its parent.
    equal("the parent", number(fork_body, 0) >> 32, u64::from(std::process::id()))?;
    Ok("a mapping, a name, a child".into())
}
