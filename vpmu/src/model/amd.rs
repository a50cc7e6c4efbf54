//! AMD's PMUs: the four counters of the K7, the six of `PerfCtrExtCore`, and those with PerfMonV2's global registers (APM
//! volume 2, section 13.2).
//!
//! The older ones are the newest with something missing, so there is one model.

mod register;
mod select;

#[cfg(test)]
mod tests;

use crate::Outcome;
use crate::bank::Bank;
use crate::notice::Notice;
use crate::source::Source;
use crate::x86::{self, Leaf};
use register::Register;
use select::Select;

/// Counters have 48 bits; the manual has software write zeroes above them, and the hardware ignores what it writes.
const WIDTH: u32 = 48;
/// There can be no more core counters than these.
pub const MOST_COUNTERS: usize = 6;
const _: () = assert!(MOST_COUNTERS == (x86::RDPMC_LAST - x86::RDPMC_FIRST) as usize + 1);
/// What was there before there was a CPUID bit for it.
pub const K7_COUNTERS: usize = 4;

/// What the guest's CPUID says of its counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// Nothing: the four counters that every processor since the K7 has.
    K7,
    /// `PerfCtrExtCore`: six, at addresses of their own; the first four also at the K7's.
    Core,
    /// PerfMonV2 with so many counters: global control and status beside them.
    V2(usize),
}

impl Version {
    /// How many counters it has.
    pub fn counters(self) -> usize {
        match self {
            Self::K7 => K7_COUNTERS,
            Self::Core => MOST_COUNTERS,
            Self::V2(counters) => counters,
        }
    }

    /// Whether it has the addresses of `PerfCtrExtCore`.
    fn has_core_addresses(self) -> bool {
        self != Self::K7
    }

    fn has_global_registers(self) -> bool {
        matches!(self, Self::V2(_))
    }

    /// Puts it into what CPUID says at `function`, out of which every PMU was taken. The highest extended function must
    /// be at least [`Self::LAST_FUNCTION`].
    pub fn show(self, function: u32, leaf: &mut Leaf) {
        const PERF_CTR_EXT_CORE: u32 = 1 << 23;
        const PERF_MON_V2: u32 = 1;
        match (function, self) {
            (0x8000_0001, Self::Core | Self::V2(_)) => leaf.ecx |= PERF_CTR_EXT_CORE,
            (Self::LAST_FUNCTION, Self::V2(counters)) => {
                leaf.eax |= PERF_MON_V2;
                // Bits 3..0: the number of core counters.
                leaf.ebx |= u32::try_from(counters).unwrap_or(0) & 0xf;
            }
            _ => {}
        }
    }

    /// The last CPUID function in which there is something to show.
    pub const LAST_FUNCTION: u32 = 0x8000_0022;
}

/// One vCPU's PMU.
pub struct Amd<S: Source> {
    version: Version,
    bank: Bank<S>,
    selects: Vec<Select>,
    /// Global control; all ones where there is none.
    control: u64,
    /// Global status.
    status: u64,
    interrupt: bool,
}

impl<S: Source> Amd<S> {
    /// The PMU after reset. Global control then has all counters on, for those who do not know it.
    pub fn new(version: Version, source: S) -> Self {
        let counters = version.counters();
        Self {
            version,
            bank: Bank::new(source, counters, WIDTH),
            selects: vec![Select::default(); counters],
            control: all(counters),
            status: 0,
            interrupt: false,
        }
    }

    /// The guest reads an MSR, or by RDPMC, which the loader has made an RDMSR of, a counter.
    pub fn read(&mut self, msr: u32) -> Outcome {
        let outcome = match Register::at(msr, self.version) {
            Register::Select(counter) => Outcome::Value(self.selects[counter].value()),
            Register::Counter(counter) => Outcome::Value(self.bank.read(counter)),
            Register::Status => {
                self.bank.look_at_all();
                self.take_overflows();
                Outcome::Value(self.status)
            }
            Register::Control => Outcome::Value(self.control),
            Register::StatusClear | Register::StatusSet => Outcome::Value(0),
            Register::Absent => Outcome::Fault,
            Register::Other => Outcome::NotMine,
        };
        self.take_overflows();
        outcome
    }

    /// The guest writes an MSR.
    pub fn write(&mut self, msr: u32, value: u64) -> Outcome {
        let counters = all(self.bank.size());
        match Register::at(msr, self.version) {
            Register::Select(counter) => self.select(counter, Select::from(value)),
            Register::Counter(counter) => self.bank.write(counter, value),
            Register::Control => {
                self.control = value & counters;
                self.bank.run(self.running());
            }
            Register::StatusClear => {
                self.bank.look_at_all();
                self.take_overflows();
                self.status &= !value;
            }
            Register::StatusSet => self.status |= value & counters,
            Register::Status | Register::Absent => return Outcome::Fault,
            Register::Other => return Outcome::NotMine,
        }
        self.take_overflows();
        Outcome::Handled
    }

    /// A signal has come: some alarm is due, or none.
    pub fn alarm(&mut self) {
        self.bank.look_at_all();
        self.take_overflows();
    }

    /// Some time has passed: counters that have lost their hardware are found out, and what no counter uses is given back.
    pub fn time_has_passed(&mut self) {
        self.bank.look_at_all();
        self.take_overflows();
        self.bank.release_idle();
    }

    /// Whether it holds counters of the host.
    pub fn holds_counters(&self) -> bool {
        self.bank.is_backed()
    }

    /// Whether the PMU has asked for an interrupt since this was last asked.
    pub fn take_interrupt(&mut self) -> bool {
        std::mem::take(&mut self.interrupt)
    }

    /// What the operator is to know since this was last asked.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.bank.take_notices()
    }

    fn select(&mut self, counter: usize, select: Select) {
        // Overflows up to now are those of the old selection.
        self.bank.run(self.running() & !(1 << counter));
        self.take_overflows();
        self.selects[counter] = select;
        self.bank.configure(counter, select.selection(), select.alarm());
        self.bank.run(self.running());
    }

    fn running(&self) -> u64 {
        let enabled = (0..).zip(&self.selects).filter(|(_, select)| select.is_enabled());
        enabled.fold(0, |set, (counter, _)| set | 1 << counter) & self.control
    }

    /// Status has a bit for every overflow; an interrupt comes for those whose counter asks for one.
    fn take_overflows(&mut self) {
        let overflowed = self.bank.take_overflowed();
        self.status |= overflowed;
        self.interrupt |= (0..)
            .zip(&self.selects)
            .any(|(counter, select)| overflowed & 1 << counter != 0 && select.interrupts());
    }
}

/// So many counters as a set.
fn all(counters: usize) -> u64 {
    (1 << counters) - 1
}
