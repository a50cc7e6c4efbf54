//! Finds what the stub for the shared page needs in a kernel: the kernel's calls, and room for code and pages.
//!
//! Nothing of this is necessary for the PMU. A kernel in which something is not found gets no stub, and each of its
//! calls exits.

use std::collections::BTreeMap;
use std::ops::Range;

use vpmu::sbi_page::Page;

use super::decode::{Flow, decode};
use super::ids::Load;
use super::image::Text;
use super::proof::entered;
use super::register::Register;
use super::stub::{Stub, Surroundings};

/// Alignment of the kernel's sections, if their permissions differ (`SECTION_ALIGN` with `CONFIG_STRICT_KERNEL_RWX`).
/// The kernel maps its sections in units of this size, and reserves the memory of the last unit to its end.
const SECTION: usize = 2 << 20;
/// Length of the zeros at the end of the text that show that nothing is there.
const PADDING: usize = 64 << 10;
/// Room for the code, at the end of these zeros.
const CODE: usize = 4096;
/// Maximum distance from the load of an id to its call.
const REACH: usize = 128;
/// Least number of places at which a kernel reads the number of its CPU.
const MIN_READS: usize = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Call {
    at: usize,
    /// The function that it calls.
    target: usize,
}

/// Where a kernel makes its calls, and the stub for them.
#[derive(Debug)]
pub struct Plan {
    /// Offsets of the calls: AUIPC and JALR, both with RA.
    pub calls: Vec<usize>,
    /// Offset of the stub's code.
    pub at: usize,
    pub stub: Stub,
    /// Offset of the first page.
    pub pages: usize,
}

impl Plan {
    /// Makes the plan for a kernel that needs `memory` bytes from its beginning, with so many CPUs. `switch` is the
    /// range of the switch that reads counters, which is in the text.
    pub fn new(text: &Text, loads: &[Load], switch: &Range<usize>, memory: u64, cpus: u8) -> Option<Self> {
        let calls: Vec<Call> = loads.iter().filter_map(|load| call_after(text, load)).collect();
        let call = calls.first()?.target;
        if calls.iter().any(|other| other.target != call) {
            return None;
        }
        let at = room(text, switch.end)?;
        let pages = pages(memory, cpus)?;
        let around = Surroundings { call, pages, count: cpus, cpu: cpu_number(text)? };
        let stub = Stub::new(at, &around).filter(|stub| stub.code.len() * 4 <= CODE)?;
        let calls = calls.iter().map(|call| call.at).collect();
        Some(Self { calls, at, stub, pages })
    }
}

/// Returns the call that follows the load of an id into A7.
fn call_after(text: &Text, load: &Load) -> Option<Call> {
    let mut at = load.second + 4;
    while load.register == Register::A7 && at < load.second + REACH {
        let instruction = decode(text, at)?;
        if instruction.writes == Register::RA {
            let target = call_target(text, at)?;
            return entered(text, at + 2..at + 8, |_| true).is_none().then_some(Call { at, target });
        }
        if instruction.writes == Register::A7 || instruction.flow != Flow::Next {
            return None;
        }
        at += instruction.len;
    }
    None
}

/// Returns the offset that AUIPC and JALR at an offset call.
fn call_target(text: &Text, at: usize) -> Option<usize> {
    const AUIPC_RA: (u32, u32) = (0x097, 0xfff);
    const JALR_RA_RA: (u32, u32) = (0x080e7, 0xf_ffff);
    let (upper, lower) = (text.word(at)?, text.word(at + 4)?);
    let is_call = upper & AUIPC_RA.1 == AUIPC_RA.0 && lower & JALR_RA_RA.1 == JALR_RA_RA.0;
    let distance = i64::from((upper & !0xfff).cast_signed()) + i64::from(lower.cast_signed() >> 20);
    let target = usize::try_from(i64::try_from(at).ok()?.checked_add(distance)?).ok()?;
    decode(text, target).filter(|_| is_call)?;
    Some(target)
}

/// Returns the offset of unused space at the end of the kernel's text, which ends after `after`.
fn room(text: &Text, after: usize) -> Option<usize> {
    let end = after.checked_next_multiple_of(SECTION)?;
    let ends =
        (0..).map_while(|number| end.checked_add(number * SECTION)).take_while(|end| *end <= text.end());
    let is_padding = |end: usize| {
        end.checked_sub(PADDING).is_some_and(|start| {
            start >= after && text.places(start).take(PADDING / 2).all(|at| text.parcel(at) == Some(0))
        })
    };
    ends.into_iter().find(|end| is_padding(*end)).map(|end| end - CODE)
}

/// Returns the offset of the pages: at the end of the memory that the kernel reserves for itself.
fn pages(memory: u64, cpus: u8) -> Option<usize> {
    let memory = usize::try_from(memory).ok()?;
    let end = memory.checked_next_multiple_of(SECTION)?;
    end.checked_sub(usize::from(cpus) * Page::STRIDE).filter(|pages| *pages >= memory.next_multiple_of(4096))
}

/// Returns the offset of the CPU's number in the structure that `tp` points to. The kernel never writes it by `tp`, and
/// reads it more often than anything else of which this is true.
fn cpu_number(text: &Text) -> Option<i32> {
    const MASK: u32 = 0xf_f07f;
    const LW_TP: u32 = 0x2_2003;
    const SW_TP: u32 = 0x2_2023;
    let mut reads: BTreeMap<i32, usize> = BTreeMap::new();
    let mut written = Vec::new();
    for (_, word) in text.words() {
        if word & MASK == LW_TP {
            *reads.entry(word.cast_signed() >> 20).or_default() += 1;
        } else if word & MASK == SW_TP {
            written.push((word.cast_signed() >> 25 << 5) | (word >> 7 & 0x1f).cast_signed());
        }
    }
    reads.retain(|offset, _| !written.contains(offset));
    let (offset, number) = reads.iter().max_by_key(|(_, number)| **number)?;
    let others = reads.iter().filter(|(other, _)| *other != offset).map(|(_, number)| *number).max();
    (*number >= MIN_READS && others.unwrap_or_default() <= *number / 4).then_some(*offset)
}
