//! The kernel's switch over the counter CSRs (`csr_read_num` in `drivers/perf/riscv_pmu.c`).
//!
//! A CSR's number is a part of the instruction that reads it, so the kernel has one instruction for each of the 64
//! CSRs. The compiler makes consecutive pairs of `csrr a0, N; ret` of them. No data looks like that, so the pairs prove
//! themselves. How the kernel gets to a pair does not matter, because each pair stays at its address and still returns
//! the counter's value.
//!
//! The pairs of the counters' upper halves (`cycleh` and so on) are dead code: only 32-bit kernels use them, and these
//! CSRs do not exist on 64-bit processors. The new code takes their place.

use std::ops::Range;

use super::code::{FIRST_COUNTER, counter_number, read_counter, read_counter_by};
use super::encode::{RET, SHORT_RET, jump, short_jump};
use super::image::Text;
use super::proof::entered;
use super::stub::Stub;
use super::{Edit, Refusal};

/// The counter CSRs.
const COUNTERS: Range<u16> = FIRST_COUNTER..FIRST_COUNTER + 32;
/// The CSR `time`, which is among them but is no counter. Guests may read it.
const TIME: u16 = 0xc01;
/// The CSRs of the counters' upper halves.
const UPPER_HALVES: Range<u16> = 0xc80..0xca0;
/// `csrr a0, ...`: CSRRS with x0.
const CSRR_A0: u32 = 0x2573;

/// Length of a pair with a return of two bytes.
const SHORT_PAIR: usize = 6;
/// Length of a pair with a return of four bytes.
const LONG_PAIR: usize = 8;

/// The switch.
#[derive(Debug)]
pub struct Switch {
    /// Offset of the first pair.
    pub start: usize,
    pair_len: usize,
    /// The CSRs that the pairs read, in the order of the pairs.
    csrs: Vec<u16>,
}

impl Switch {
    /// Finds the switch.
    pub fn find(text: &Text) -> Result<Self, Refusal> {
        let mut found: Option<Self> = None;
        for run in runs(text) {
            // A function that reads the time consists of such a pair, too.
            if !run.csrs.iter().copied().any(is_counter) {
                continue;
            }
            if let Some(first) = found {
                return Err(Refusal::SecondSwitch { first: first.start, second: run.start });
            }
            found = Some(run);
        }
        let switch = found.ok_or(Refusal::NoSwitch)?;
        let missing = COUNTERS.filter(|csr| is_counter(*csr)).find(|csr| !switch.csrs.contains(csr));
        if let Some(csr) = missing {
            return Err(Refusal::SwitchNotWhole { at: switch.start, csr });
        }
        let is_start = |at: usize| (at - switch.start).is_multiple_of(switch.pair_len);
        match entered(text, switch.range(), |target| !is_start(target)) {
            Some(target) => Err(Refusal::Entered { at: switch.start, target }),
            None => Ok(switch),
        }
    }

    /// Returns the range of its pairs in the image.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.csrs.len() * self.pair_len
    }

    /// Returns the number of counters that it reads.
    pub fn counters(&self) -> usize {
        self.pairs().filter(|(_, csr)| is_counter(*csr)).count()
    }

    /// Returns the room that its dead pairs make; consecutive ones are joined.
    pub fn room(&self) -> Room {
        let mut free: Vec<Range<usize>> = Vec::new();
        for (at, _) in self.pairs().filter(|(_, csr)| UPPER_HALVES.contains(csr)) {
            match free.last_mut() {
                Some(last) if last.end == at => last.end += self.pair_len,
                _ => free.push(at..at + self.pair_len),
            }
        }
        Room { free, switch: self.start }
    }

    /// Returns the edits that make the counters' pairs jump to new code, and the offset of that code, which is put into
    /// the room.
    pub fn retarget(&self, room: &mut Room, stub: Option<&Stub>) -> Result<(usize, Vec<Edit>), Refusal> {
        let new_code = read_counter();
        let code = room.take(new_code.len() * 4)?;
        let new_code = match stub {
            Some(stub) => read_counter_by(code, stub.read_counter)
                .ok_or(Refusal::TooFar { at: code, code: stub.read_counter })?,
            None => new_code,
        };
        let mut edits = vec![Edit::words(code, &new_code)];
        for (at, csr) in self.pairs().filter(|(_, csr)| is_counter(*csr)) {
            let mut edit = Edit::words(at, &[counter_number(csr)]);
            let from = at + edit.bytes.len();
            let too_far = Refusal::TooFar { at: from, code };
            if self.pair_len == SHORT_PAIR {
                edit.bytes.extend(short_jump(from, code).ok_or(too_far)?.to_le_bytes());
            } else {
                edit.bytes.extend(jump(from, code).ok_or(too_far)?.to_le_bytes());
            }
            edits.push(edit);
        }
        Ok((code, edits))
    }

    fn pairs(&self) -> impl Iterator<Item = (usize, u16)> {
        (self.start..).step_by(self.pair_len).zip(self.csrs.iter().copied())
    }
}

/// Room for new code in the switch.
#[derive(Debug)]
pub struct Room {
    free: Vec<Range<usize>>,
    /// Offset of the switch.
    switch: usize,
}

impl Room {
    /// Takes `len` bytes. Returns their offset.
    pub fn take(&mut self, len: usize) -> Result<usize, Refusal> {
        let free =
            self.free.iter_mut().find(|free| free.len() >= len).ok_or(Refusal::NoRoom { at: self.switch })?;
        let at = free.start;
        free.start += len;
        Ok(at)
    }
}

fn is_counter(csr: u16) -> bool {
    COUNTERS.contains(&csr) && csr != TIME
}

/// Returns all runs of consecutive pairs that read counter CSRs.
fn runs(text: &Text) -> Vec<Switch> {
    let mut runs: Vec<Switch> = Vec::new();
    for (at, word) in text.words() {
        let Some(csr) = read_into_a0(word) else { continue };
        let pair_len = if text.parcel(at + 4) == Some(SHORT_RET) {
            SHORT_PAIR
        } else if text.word(at + 4) == Some(RET) {
            LONG_PAIR
        } else {
            continue;
        };
        match runs.last_mut() {
            Some(run) if run.range().end == at && run.pair_len == pair_len => run.csrs.push(csr),
            _ => runs.push(Switch { start: at, pair_len, csrs: vec![csr] }),
        }
    }
    runs
}

/// Returns the counter CSR that an instruction reads into a0, if it does.
fn read_into_a0(word: u32) -> Option<u16> {
    let csr = u16::try_from(word >> 20).ok()?;
    let is_read = word & 0xf_ffff == CSRR_A0;
    (is_read && (COUNTERS.contains(&csr) || UPPER_HALVES.contains(&csr))).then_some(csr)
}
