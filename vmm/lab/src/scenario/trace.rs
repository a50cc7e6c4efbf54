//! What a simulated host executes for a while, counted by address: its kernel, its programs, and what it runs as a
//! guest. A script begins the trace by writing [`MARK`] to its console, and it ends after a number of instructions.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};
use std::ops::Range;
use std::thread;

use crate::error::Result;
use crate::simulator::machine::Tracer;

/// What a script writes to `/dev/console` to begin a trace.
pub const MARK: &str = "tally-lab: trace";

/// Who executes an instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Side {
    Host,
    HostProgram,
    Guest,
    GuestProgram,
    /// The firmware, on RISC-V.
    Firmware,
}

/// How QEMU's flags of a block tell who executes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flags {
    /// An AMD processor: they have the privilege level, and whether a guest runs.
    Amd,
    /// A RISC-V processor: they have the privilege level, and whether the kernel is the host's. A program is that of
    /// the kernel which was executed last, or the guest's if that was at `entry`, the host's way into a guest.
    Riscv {
        /// Addresses of the function by which the host enters a guest.
        entry: Range<u64>,
    },
}

/// Numbers of instructions by who executed them and where.
#[derive(Debug)]
pub struct Trace {
    flags: Flags,
    /// Whose program is executed if one is, where the flags do not tell.
    program: Side,
    executed: HashMap<(Side, u64), u64>,
    /// Number of instructions that are still to be traced.
    left: u64,
}

impl Trace {
    /// Creates a trace of this many instructions.
    pub fn new(instructions: u64, flags: Flags) -> Self {
        Self { flags, program: Side::HostProgram, executed: HashMap::new(), left: instructions }
    }

    /// Returns whether as many instructions were traced as it was to be.
    pub fn is_complete(&self) -> bool {
        self.left == 0
    }

    /// Returns how often the instruction at an address was executed.
    pub fn times(&self, side: Side, address: u64) -> u64 {
        self.executed.get(&(side, address)).copied().unwrap_or(0)
    }

    /// Returns all addresses that were executed, and how often.
    pub fn all(&self) -> impl Iterator<Item = (Side, u64, u64)> {
        self.executed.iter().map(|(&(side, address), &times)| (side, address, times))
    }

    /// Reads the log of a machine to its end, and turns it off when the trace is complete.
    pub(crate) fn read(&mut self, log: impl Read, tracer: &Tracer) -> Result<()> {
        let mut log = BufReader::with_capacity(1 << 20, log);
        let mut line = Vec::new();
        while self.left > 0 && log.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            self.add(&line);
            line.clear();
        }
        thread::scope(|scope| {
            // The machine may have to write more before it takes the request.
            let ending = scope.spawn(|| tracer.set(false));
            let _ = std::io::copy(&mut log, &mut std::io::sink());
            ending.join().unwrap_or(Ok(()))
        })
    }

    /// Adds a line of QEMU's log: `Trace CPU: HOST [CS/ADDRESS/FLAGS/...] SYMBOL`, of a block of one instruction.
    pub(crate) fn add(&mut self, line: &[u8]) {
        let Some((address, flags)) = place(line) else { return };
        let side = match &self.flags {
            Flags::Amd => on_amd(flags),
            Flags::Riscv { entry } => {
                let side = on_riscv(flags).unwrap_or(self.program);
                self.program = match side {
                    Side::Host if !entry.contains(&address) => Side::HostProgram,
                    Side::Host | Side::Guest => Side::GuestProgram,
                    _ => self.program,
                };
                side
            }
        };
        *self.executed.entry((side, address)).or_default() += 1;
        self.left -= 1;
    }
}

/// Returns the address and the flags of a line.
fn place(line: &[u8]) -> Option<(u64, u32)> {
    let line = std::str::from_utf8(line).ok()?.strip_prefix("Trace ")?;
    let mut fields = line.split_once('[')?.1.split('/').skip(1);
    let address = u64::from_str_radix(fields.next()?, 16).ok()?;
    let flags = u32::from_str_radix(fields.next()?, 16).ok()?;
    Some((address, flags))
}

fn on_amd(flags: u32) -> Side {
    /// Privilege level, and whether a guest runs, in QEMU's `hflags`.
    const LEVEL: u32 = 3;
    const IS_GUEST: u32 = 1 << 21;
    match (flags & IS_GUEST != 0, flags & LEVEL != 0) {
        (false, false) => Side::Host,
        (false, true) => Side::HostProgram,
        (true, false) => Side::Guest,
        (true, true) => Side::GuestProgram,
    }
}

/// Returns `None` for programs.
fn on_riscv(flags: u32) -> Option<Side> {
    /// Privilege level, and whether it may access a guest's memory as the guest does (HLSX), in QEMU's `TB_FLAGS`.
    const LEVEL: u32 = 3;
    const IS_HOST: u32 = 1 << 15;
    match (flags & LEVEL, flags & IS_HOST != 0) {
        (0, _) => None,
        (1, true) => Some(Side::Host),
        (1, false) => Some(Side::Guest),
        _ => Some(Side::Firmware),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_counted_by_side_and_address() {
        let mut trace = Trace::new(4, Flags::Amd);
        for line in [
            "Trace 0: 0x7f3594000880 [0000000000000000/ffffffff81000000/00c000b0/ff020001] \n",
            "Trace 0: 0x7f3594000880 [0000000000000000/ffffffff81000000/00c000b0/ff020001] \n",
            "Trace 0: 0x7f3594000880 [0000000000000000/ffffffff81000000/00e000b0/ff020001] \n",
            "Stopped execution of TB chain before 0x7f3594000880 [ffffffff81000000] \n",
            "Trace 0: 0x7f3594000880 [0000000000000000/0000000000401000/00c000b3/ff020001] \n",
        ] {
            assert!(!trace.is_complete());
            trace.add(line.as_bytes());
        }
        assert!(trace.is_complete());
        assert_eq!(trace.times(Side::Host, 0xffff_ffff_8100_0000), 2);
        assert_eq!(trace.times(Side::Guest, 0xffff_ffff_8100_0000), 1);
        assert_eq!(trace.times(Side::HostProgram, 0x40_1000), 1);
        assert_eq!(trace.all().count(), 3);
    }

    #[test]
    fn on_riscv_a_program_is_that_of_the_kernel_before_it() {
        let mut trace = Trace::new(9, Flags::Riscv { entry: 0x2000..0x2010 });
        let (host, guest) = (1 | 1 << 15, 1);
        for (address, flags) in [
            (0x1000, host),
            (0x10, 0),
            (0x2008, host),
            (0x20, 0),
            (0x9000, 3),
            (0x20, 0),
            (0x1000, guest),
            (0x20, 0),
            (0x1000, host),
        ] {
            trace.add(format!("Trace 0: 0x0 [0/{address:x}/{flags:x}/0] \n").as_bytes());
        }
        assert_eq!(trace.times(Side::HostProgram, 0x10), 1);
        assert_eq!(trace.times(Side::GuestProgram, 0x20), 3);
        assert_eq!([Side::Host, Side::Guest].map(|side| trace.times(side, 0x1000)), [2, 1]);
        assert_eq!(trace.times(Side::Firmware, 0x9000), 1);
    }
}
