//! Answers the SBI calls (RISC-V Supervisor Binary Interface) that KVM forwards to Tally: console calls, and the calls
//! that the patched kernel makes to access its PMU.

use vm_memory::{Bytes, GuestAddress};
use vpmu::model::riscv::{Answer, EVENT_GET_INFO};
use vpmu_retarget::riscv::EXTENSION;

use super::board::Board;
use super::pmu::VcpuPmu;
use crate::memory::GuestRam;

const BASE: u64 = 0x10;
const PROBE: u64 = 3;
const CONSOLE: u64 = 0x4442_434e;
const CONSOLE_WRITE: u64 = 0;
const CONSOLE_READ: u64 = 1;
const CONSOLE_WRITE_BYTE: u64 = 2;
const OLD_PUT: u64 = 1;
const OLD_GET: u64 = 2;
const NOTHING_TO_READ: i64 = -1;

const INVALID: Answer = Answer { error: -3, value: 0 };
const INVALID_ADDRESS: Answer = Answer { error: -5, value: 0 };
/// Maximum number of bytes written by one call. The kernel writes the rest with its next calls.
const MAX_WRITE: u64 = 4096;

/// An SBI call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    pub extension: u64,
    pub function: u64,
    /// The arguments, from `a0` to `a5`.
    pub arguments: [u64; 6],
}

/// Handles a call and returns its result.
pub fn answer(call: Call, pmu: &mut VcpuPmu, board: &Board, ram: &GuestRam) -> Answer {
    let Call { extension, function, arguments } = call;
    match (extension, function) {
        (EXTENSION, EVENT_GET_INFO) => event_info(pmu, ram, arguments),
        (EXTENSION, _) => pmu.call(function, arguments),
        (CONSOLE, _) => console(board, ram, function, arguments),
        (BASE, PROBE) => {
            let is_there = arguments[0] == EXTENSION && pmu.is_called();
            Answer { error: 0, value: is_there.into() }
        }
        // The legacy calls return one value and must keep `a1`.
        (OLD_PUT, _) => {
            board.write_console(&arguments[0].to_le_bytes()[..1]);
            Answer { error: 0, value: arguments[1] }
        }
        (OLD_GET, _) => Answer { error: NOTHING_TO_READ, value: arguments[1] },
        _ => Answer::NOT_SUPPORTED,
    }
}

/// Handles the call "event get info" (SBI, 11.11). For each event in a list in the guest's memory, writes whether the
/// event can be counted.
fn event_info(pmu: &mut VcpuPmu, ram: &GuestRam, arguments: [u64; 6]) -> Answer {
    /// Size of an entry: event index, output and event data, of 4, 4 and 8 bytes.
    const ENTRY: u64 = 16;
    /// Maximum number of entries. Linux uses about fifty. Each entry may cost the host a system call.
    const MAX: u64 = 128;
    let [low, high, number, flags, ..] = arguments;
    if flags != 0 || !low.is_multiple_of(ENTRY) || !(1..=MAX).contains(&number) {
        return INVALID;
    }
    let memory = &ram.mapped;
    for at in (0..number).map(|entry| low.checked_add(entry * ENTRY).filter(|_| high == 0)) {
        let Some(at) = at else { return INVALID_ADDRESS };
        let read = memory.read_obj::<u32>(GuestAddress(at)).and_then(|event| {
            let data = memory.read_obj::<u64>(GuestAddress(at | 8))?;
            let answer = u32::from(pmu.has_event(event.into(), data));
            memory.write_obj(answer, GuestAddress(at | 4))
        });
        if read.is_err() {
            return INVALID_ADDRESS;
        }
    }
    Answer { error: 0, value: 0 }
}

/// Handles calls of the debug console (SBI, chapter 12). Reads return no bytes, because input arrives at the serial
/// port.
fn console(board: &Board, ram: &GuestRam, function: u64, arguments: [u64; 6]) -> Answer {
    let [first, low, high, ..] = arguments;
    match function {
        CONSOLE_WRITE => {
            let len = first.min(MAX_WRITE);
            let mut text = vec![0; usize::try_from(len).unwrap_or_default()];
            if high != 0 || ram.mapped.read_slice(&mut text, GuestAddress(low)).is_err() {
                return INVALID;
            }
            board.write_console(&text);
            Answer { error: 0, value: len }
        }
        CONSOLE_READ => Answer { error: 0, value: 0 },
        CONSOLE_WRITE_BYTE => {
            board.write_console(&first.to_le_bytes()[..1]);
            Answer { error: 0, value: 0 }
        }
        _ => Answer::NOT_SUPPORTED,
    }
}
