//! Finds the callers in a Linux kernel without frame pointers by the tables that it has for its own unwinder (ORC):
//! they say for each piece of code where its caller's stack and frame are (`arch/x86/kernel/unwind_orc.c` in Linux).
//!
//! The guest may have written anything there: the tables have a maximum size, a chain has a maximum length, and only
//! the guest's memory is read.

use std::ops::Range;

/// Maximum number of entries in the kernel's tables, and in those of all modules together: four times as many as a
/// distribution's kernel has.
const MAX_ENTRIES: usize = 1 << 21;
/// Size of an entry: 16 bits of offset for the stack and as many for the frame, 4 bits each for what these are behind,
/// and the rest.
const ENTRY: usize = 6;
/// Where an entry has its type.
const TYPE: u64 = 40;
/// Numbers of the registers in `struct pt_regs`: the general ones, and what an exception stores behind these.
const GENERAL: usize = 15;
const R13: usize = 2;
const RBP: usize = 4;
const R10: usize = 7;
const RAX: usize = 10;
const RDX: usize = 12;
const RDI: usize = 14;
const RIP: u64 = 16;
/// Where RIP, CS and RSP are in what an exception stores.
const OF_EXCEPTION: [u64; 3] = [0, 1, 3];
/// The code segment of Linux' programs of 64 bits (`__USER_CS`).
pub const USER_CS: u64 = 0x33;

/// Reads bytes at an address of the kernel's.
pub type Read<'a> = dyn Fn(u64, &mut [u8]) -> Option<()> + 'a;

/// Where the kernel or a module has its tables.
#[derive(Debug, Clone)]
struct Tables {
    /// Addresses of the code.
    code: Vec<Range<u64>>,
    /// Address of the table of code addresses, and of the table of what belongs to them.
    addresses: u64,
    entries: u64,
    /// Number of entries of each.
    count: u64,
}

/// Tables of a kernel and its modules.
#[derive(Debug)]
pub struct Orc {
    format: Format,
    kernel: Table,
    /// In the order of their addresses.
    modules: Vec<Table>,
}

/// How entries are encoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Format {
    types: Types,
    /// The bit that says that an address is not one that a call returns to. Linux has it since 6.4, and in some
    /// releases of 6.3.
    exact: Option<u64>,
    bases: &'static [Base],
}

/// Numbers of the types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Types {
    /// Up to Linux 6.3: calls are 0, and this bit marks the end of a stack.
    FromCall { end: u64 },
    /// Since Linux 6.4: 0 is unknown, 1 is the end of a stack, and calls are 2.
    FromUnknown,
}

/// What an offset is behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Base {
    Unknown,
    PreviousStack,
    Stack,
    Frame,
    /// What is on the stack, or in the frame.
    OnStack,
    InFrame,
    Register(usize),
}

/// The bases' numbers up to Linux 6.18 or so, and those that newer ones have (`ORC_REG_*`): the kernel does not say
/// which, but nearly all code has its caller's stack behind its own.
const BASES: [&[Base]; 2] = [
    &[
        Base::Unknown,
        Base::PreviousStack,
        Base::Register(RDX),
        Base::Register(RDI),
        Base::Frame,
        Base::Stack,
        Base::Register(R10),
        Base::Register(R13),
        Base::InFrame,
        Base::OnStack,
    ],
    &[
        Base::Unknown,
        Base::Register(RAX),
        Base::Register(RDX),
        Base::Stack,
        Base::Frame,
        Base::Register(RDI),
        Base::Register(R10),
        Base::Register(R13),
        Base::PreviousStack,
        Base::OnStack,
        Base::InFrame,
    ],
];

impl Format {
    /// Returns how a kernel encodes its entries. `bit` returns where `struct orc_entry` has a member.
    fn find(bit: &dyn Fn(&str) -> Option<u64>, entries: &[[u8; ENTRY]]) -> Option<Self> {
        let is_as_known =
            [("sp_offset", 0), ("bp_offset", 16), ("sp_reg", 32), ("bp_reg", 36), ("type", TYPE)]
                .into_iter()
                .all(|(member, at)| bit(member) == Some(at));
        let flag = |member| bit(member).filter(|bit| (TYPE..8 * ENTRY as u64).contains(bit));
        let types = flag("end").map_or(Types::FromUnknown, |end| Types::FromCall { end });
        let behind_stack = |bases: &&'static [Base]| {
            let stack = bases.iter().position(|base| *base == Base::Stack);
            entries.iter().filter(|entry| Some(usize::from(entry[4] & 0xf)) == stack).count()
        };
        let bases = BASES.into_iter().max_by_key(behind_stack)?;
        is_as_known.then_some(Self { types, exact: flag("signal"), bases })
    }

    /// Decodes an entry. Returns `None` if the kernel's unwinder would not go on there.
    fn decode(self, entry: [u8; ENTRY]) -> Option<Entry> {
        let [stack_low, stack_high, frame_low, frame_high, bases, rest] = entry;
        let offset = |low, high| i64::from(i16::from_le_bytes([low, high]));
        let base = |number: u8| self.bases.get(usize::from(number)).copied();
        let has = |bit: u64| u64::from(rest) >> (bit - TYPE) & 1 == 1;
        let kind = match self.types {
            Types::FromCall { end } if has(end) => return None,
            Types::FromCall { .. } => rest & 3,
            Types::FromUnknown => (rest & 7).checked_sub(2)?,
        };
        let kind = *[Kind::Call, Kind::Registers, Kind::Exception].get(usize::from(kind))?;
        Some(Entry {
            kind,
            // Without the bit, it is what was interrupted.
            is_exact: self.exact.map_or(kind != Kind::Call, has),
            stack: (base(bases & 0xf)?, offset(stack_low, stack_high)),
            frame: (base(bases >> 4)?, offset(frame_low, frame_high)),
        })
    }
}

/// What is where a caller's stack begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// In front of it is the address to which the call returns.
    Call,
    /// All registers of what was interrupted, or only those that an exception stores.
    Registers,
    Exception,
}

/// How the caller of a piece of code is found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    kind: Kind,
    is_exact: bool,
    stack: (Base, i64),
    frame: (Base, i64),
}

/// The tables of the kernel or of a module.
#[derive(Debug)]
struct Table {
    code: Vec<Range<u64>>,
    /// Address of the first of the addresses, each of which is an offset behind its own place.
    start: u64,
    addresses: Vec<u8>,
    entries: Vec<u8>,
    pieces: Pieces,
}

/// Pieces of code of 2^`bits` bytes. For each there is the number of entries up to its begin, where the search for one
/// begins.
#[derive(Debug)]
struct Pieces {
    bits: u32,
    entries: Vec<u32>,
}

impl Table {
    fn read(tables: &Tables, left: &mut usize, read: &Read) -> Option<Self> {
        let count = usize::try_from(tables.count).ok().filter(|count| (1..=*left).contains(count))?;
        *left -= count;
        let bytes = |address, size| {
            let mut bytes = vec![0; size * count];
            read(address, &mut bytes)?;
            Some(bytes)
        };
        let addresses = bytes(tables.addresses, size_of::<i32>())?;
        let entries = bytes(tables.entries, ENTRY)?;
        Some(Self::new(tables.code.clone(), tables.addresses, addresses, entries))
    }

    fn new(code: Vec<Range<u64>>, start: u64, addresses: Vec<u8>, entries: Vec<u8>) -> Self {
        let pieces = Pieces { bits: 0, entries: Vec::new() };
        let mut table = Self { code, start, addresses, entries, pieces };
        table.pieces = table.pieces();
        table
    }

    /// Divides the code into not much more pieces than there are entries.
    fn pieces(&self) -> Pieces {
        let (first, end) = (self.first(), self.code.iter().map(|code| code.end).max().unwrap_or(0));
        let (len, most) = (end.saturating_sub(first), self.addresses.len() as u64 / 4);
        let bits = (0..u64::BITS - 1).find(|bits| len >> bits <= most).unwrap_or(u64::BITS - 1);
        let mut number = 0;
        let entries = (0..(len >> bits) + 2).map(|piece| {
            let begin = first.saturating_add(piece << bits);
            while self.address(number).is_some_and(|address| address <= begin) {
                number += 1;
            }
            u32::try_from(number).unwrap_or(u32::MAX)
        });
        Pieces { bits, entries: entries.collect() }
    }

    /// Returns the address of an entry.
    fn address(&self, entry: usize) -> Option<u64> {
        let offset = *self.addresses.as_chunks().0.get(entry)?;
        let place = self.start.wrapping_add(4 * entry as u64);
        Some(place.wrapping_add_signed(i32::from_le_bytes(offset).into()))
    }

    /// Returns the first address of its code.
    fn first(&self) -> u64 {
        self.code.first().map_or(u64::MAX, |code| code.start)
    }

    fn has(&self, address: u64) -> bool {
        self.code.iter().any(|code| code.contains(&address))
    }

    /// Returns the entry of an address: the last one whose own is no higher.
    fn entry(&self, address: u64) -> Option<[u8; ENTRY]> {
        let Pieces { bits, entries } = &self.pieces;
        let piece = usize::try_from(address.checked_sub(self.first())? >> bits).ok()?;
        let number = |piece: usize| entries.get(piece).map(|number| *number as usize);
        // The tables are sorted. What a guest has in their place has no order, and any entry will do.
        let (mut low, mut high) = (number(piece)?, number(piece + 1)?);
        while low < high {
            let middle = low + (high - low) / 2;
            if self.address(middle)? <= address {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        self.entries.as_chunks().0.get(low.saturating_sub(1)).copied()
    }
}

/// Registers of a vCPU in its kernel.
#[derive(Debug, Clone, Copy)]
pub struct Registers {
    pub instruction: u64,
    pub stack: u64,
    /// The general ones, as `struct pt_regs` has them.
    pub general: [u64; GENERAL],
}

impl Registers {
    /// Returns RBP.
    pub fn frame(&self) -> u64 {
        self.general[RBP]
    }
}

/// The callers in a kernel.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Callers {
    /// Return addresses, the latest first, and addresses of what was interrupted.
    pub kernel: Vec<u64>,
    /// The frame pointer and the instruction of the program that has entered the kernel, if the chain leads to it.
    pub program: Option<[u64; 2]>,
}

/// Where a chain has come.
struct State {
    instruction: u64,
    stack: u64,
    frame: u64,
    is_exact: bool,
    /// Registers of what was interrupted last, and its code segment, unless there were calls since.
    general: Option<[u64; GENERAL]>,
    segment: Option<u64>,
}

impl Orc {
    /// Reads the tables of a kernel and of its modules. `bit` returns where its `struct orc_entry` has a member.
    fn find(
        kernel: &Tables,
        modules: &[Tables],
        bit: &dyn Fn(&str) -> Option<u64>,
        read: &Read,
    ) -> Option<Self> {
        let kernel = Table::read(kernel, &mut { MAX_ENTRIES }, read)?;
        let format = Format::find(bit, kernel.entries.as_chunks().0)?;
        let mut left = MAX_ENTRIES;
        let tables = modules.iter().filter_map(|tables| Table::read(tables, &mut left, read));
        let mut modules: Vec<Table> = tables.collect();
        modules.sort_by_key(Table::first);
        Some(Self { format, kernel, modules })
    }

    fn table(&self, address: u64) -> Option<&Table> {
        let behind = self.modules.partition_point(|module| module.first() <= address);
        let module = behind.checked_sub(1).and_then(|last| self.modules.get(last));
        [&self.kernel].into_iter().chain(module).find(|table| table.has(address))
    }

    /// Returns the callers of what a vCPU executes, at most this many. `word` reads a word at an address.
    pub fn callers(
        &self,
        registers: &Registers,
        most: usize,
        word: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Callers {
        let Registers { instruction, stack, general, .. } = *registers;
        let frame = registers.frame();
        let mut state =
            State { instruction, stack, frame, is_exact: true, general: Some(general), segment: None };
        let mut callers = Callers::default();
        while callers.kernel.len() < most && self.step(&mut state, word).is_some() {
            if let Some(segment) = state.segment.filter(|segment| segment & 3 == 3) {
                // What has entered the kernel is a program.
                let general = state.general.filter(|_| segment == USER_CS);
                callers.program = general.map(|general| [general[RBP], state.instruction]);
                break;
            }
            if self.table(state.instruction).is_none() {
                break;
            }
            callers.kernel.push(state.instruction);
        }
        callers
    }

    /// Goes to the caller, or to what was interrupted. Returns `None` at the end.
    fn step(&self, state: &mut State, word: &mut dyn FnMut(u64) -> Option<u64>) -> Option<()> {
        // A call may be the last instruction of its function: what is behind it is no part of that.
        let address = if state.is_exact { state.instruction } else { state.instruction.wrapping_sub(1) };
        let entry = self.format.decode(self.table(address)?.entry(address)?)?;
        let (base, offset) = entry.stack;
        let stack = match base {
            Base::Stack => state.stack.wrapping_add_signed(offset),
            Base::Frame => state.frame.wrapping_add_signed(offset),
            Base::OnStack => word(state.stack)?.wrapping_add_signed(offset),
            Base::InFrame => word(state.frame.wrapping_add_signed(offset))?,
            Base::Register(number) => state.general?[number],
            Base::Unknown | Base::PreviousStack => return None,
        };
        // Calls only lead upwards, unless they have changed to another stack.
        if entry.kind == Kind::Call && base == Base::Stack && stack <= state.stack {
            return None;
        }
        state.is_exact = entry.is_exact;
        match entry.kind {
            Kind::Call => {
                state.instruction = word(stack.wrapping_sub(8))?;
                state.stack = stack;
                (state.general, state.segment) = (None, None);
            }
            Kind::Registers | Kind::Exception => {
                let mut member = |number: u64| word(stack.wrapping_add(8 * number));
                let exception = if entry.kind == Kind::Registers {
                    let mut general = [0; GENERAL];
                    for (register, number) in general.iter_mut().zip(0..) {
                        *register = member(number)?;
                    }
                    state.general = Some(general);
                    RIP
                } else {
                    0
                };
                let [instruction, segment, stack] = OF_EXCEPTION.map(|number| member(exception + number));
                (state.instruction, state.segment, state.stack) = (instruction?, Some(segment?), stack?);
            }
        }
        let (base, offset) = entry.frame;
        state.frame = match base {
            Base::Unknown => state.general.map_or(state.frame, |general| general[RBP]),
            Base::PreviousStack => word(stack.wrapping_add_signed(offset))?,
            Base::Frame => word(state.frame.wrapping_add_signed(offset))?,
            _ => return None,
        };
        Some(())
    }
}

/// How the callers in a kernel are found.
#[derive(Debug)]
pub enum Unwinder {
    FramePointers,
    Orc(Orc),
    /// Its tables cannot be read.
    Unknown,
}

impl Unwinder {
    /// Finds out how a kernel keeps its callers. `symbol` returns the address of a symbol of its, `bit` where a
    /// structure has a member, and `modules` are the addresses of its descriptions of modules, with their code.
    pub fn find(
        symbol: &dyn Fn(&str) -> Option<u64>,
        bit: &dyn Fn(&str, &str) -> Option<u64>,
        modules: &[(u64, Range<u64>)],
        read: &Read,
    ) -> Self {
        let size = |start, stop| Some(symbol(stop)?.wrapping_sub(symbol(start)?)).filter(|size| *size > 0);
        let Some(size) = size("__start_orc_unwind_ip", "__stop_orc_unwind_ip") else {
            return Self::FramePointers;
        };
        let code = |start, end| Some(symbol(start)?..symbol(end)?);
        let parts = [("_stext", "_etext"), ("_sinittext", "_einittext")];
        let kernel = || {
            Some(Tables {
                code: parts.into_iter().filter_map(|(start, end)| code(start, end)).collect(),
                addresses: symbol("__start_orc_unwind_ip")?,
                entries: symbol("__start_orc_unwind")?,
                count: size / size_of::<i32>() as u64,
            })
        };
        let of_module = OfModule::find(bit);
        let tables = |(module, code): &(u64, Range<u64>)| of_module.as_ref()?.tables(*module, code, read);
        let modules: Vec<Tables> = modules.iter().filter_map(tables).collect();
        let of_entry = |member: &str| bit("orc_entry", member);
        kernel()
            .and_then(|kernel| Orc::find(&kernel, &modules, &of_entry, read))
            .map_or(Self::Unknown, Self::Orc)
    }

    /// Returns whether callers in the kernel are found.
    pub fn is_known(&self) -> bool {
        !matches!(self, Self::Unknown)
    }
}

/// Where a module says where its tables are (`struct mod_arch_specific`). All modules have it at the same offsets: they
/// are looked up once, because a guest may have many modules and a long description of its types.
struct OfModule {
    addresses: u64,
    entries: u64,
    count: u64,
}

impl OfModule {
    fn find(bit: &dyn Fn(&str, &str) -> Option<u64>) -> Option<Self> {
        let part = bit("module", "arch")?;
        let offset = |name: &str| Some(part.checked_add(bit("mod_arch_specific", name)?)? / 8);
        Some(Self {
            addresses: offset("orc_unwind_ip")?,
            entries: offset("orc_unwind")?,
            count: offset("num_orcs")?,
        })
    }

    /// Returns where the module at an address, which has this code, has its tables.
    fn tables(&self, module: u64, code: &Range<u64>, read: &Read) -> Option<Tables> {
        let word = |offset: u64| {
            let mut bytes = [0; 8];
            read(module.wrapping_add(offset), &mut bytes)?;
            Some(u64::from_le_bytes(bytes))
        };
        let mut count = [0; 4];
        read(module.wrapping_add(self.count), &mut count)?;
        Some(Tables {
            code: vec![code.clone()],
            addresses: word(self.addresses)?,
            entries: word(self.entries)?,
            count: u32::from_le_bytes(count).into(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    const CODE: u64 = 0xffff_ffff_8100_0000;
    const MODULE: u64 = 0xffff_ffff_c000_0000;
    const STACK: u64 = 0xffff_c900_0001_0000;

    /// Where a release has what is no offset and no base.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct Release {
        end: Option<u64>,
        exact: Option<u64>,
        call: u8,
        bases: usize,
    }

    /// Linux 6.1, 6.3, 6.4 and the newest.
    const RELEASES: [Release; 4] = [
        Release { end: Some(42), exact: None, call: 0, bases: 0 },
        Release { end: Some(43), exact: Some(42), call: 0, bases: 0 },
        Release { end: None, exact: Some(43), call: 2, bases: 0 },
        Release { end: None, exact: Some(43), call: 2, bases: 1 },
    ];

    impl Release {
        fn bit(self, member: &str) -> Option<u64> {
            let known = [("sp_offset", 0), ("bp_offset", 16), ("sp_reg", 32), ("bp_reg", 36), ("type", TYPE)];
            let known = known.into_iter().find(|(name, _)| *name == member).map(|(_, bit)| bit);
            match member {
                "end" => self.end,
                "signal" => self.exact,
                _ => known,
            }
        }

        fn entry(self, kind: Kind, stack: (Base, i16), frame: (Base, i16)) -> [u8; ENTRY] {
            let number = |base| BASES[self.bases].iter().position(|other| *other == base).unwrap();
            let exact = self.exact.filter(|_| kind != Kind::Call).map_or(0, |bit| 1 << (bit - TYPE));
            let bases = u8::try_from(number(stack.0) | number(frame.0) << 4).unwrap();
            let offsets = [stack.1.to_le_bytes(), frame.1.to_le_bytes()].concat();
            let [one, two, three, four] = offsets[..] else { unreachable!("there are two") };
            [one, two, three, four, bases, (self.call + kind as u8) | exact]
        }

        /// An entry where the stack ends.
        fn end(self) -> [u8; ENTRY] {
            [0, 0, 0, 0, 0, self.end.map_or(1, |bit| 1 << (bit - TYPE))]
        }
    }

    /// Functions of a kernel, each of 16 bytes: one that is called with two words on its stack, one that is called with
    /// a frame, an interrupt's entry, an exception's, the entry of system calls, and one where the stack ends; and of a
    /// module, one that is called with nothing on its stack.
    const LEAF: u64 = CODE;
    const FRAMED: u64 = CODE + 0x10;
    const INTERRUPT: u64 = CODE + 0x20;
    const EXCEPTION: u64 = CODE + 0x30;
    const SYSTEM_CALL: u64 = CODE + 0x40;
    const START: u64 = CODE + 0x50;
    const END: u64 = CODE + 0x60;

    /// Returns a kernel with these functions, and what its tables are read from.
    fn kernel(release: Release) -> Option<Orc> {
        let nothing = (Base::Unknown, 0);
        let entries = [
            release.entry(Kind::Call, (Base::Stack, 24), nothing),
            release.entry(Kind::Call, (Base::Frame, 16), (Base::PreviousStack, -16)),
            release.entry(Kind::Registers, (Base::Stack, 0), nothing),
            release.entry(Kind::Exception, (Base::Stack, 0), nothing),
            release.entry(Kind::Registers, (Base::Stack, 0), nothing),
            release.end(),
        ];
        // Most code is of the first kind.
        let more = [release.entry(Kind::Call, (Base::Stack, 8), nothing); 10];
        let of_module = [release.entry(Kind::Call, (Base::Stack, 8), nothing)];
        let mut memory = BTreeMap::new();
        let mut tables = |code: Range<u64>, entries: &[[u8; ENTRY]]| {
            let (addresses, start) = (code.end + 0x1000, code.start);
            for (place, number) in (addresses..).step_by(4).zip(0..entries.len() as u64) {
                let offset = (start + 16 * number).wrapping_sub(place).cast_signed();
                memory.extend((place..).zip(i32::try_from(offset).unwrap().to_le_bytes()));
            }
            memory.extend((addresses + 0x1000..).zip(entries.concat()));
            let (entries, count) = (addresses + 0x1000, entries.len() as u64);
            Tables { code: vec![code], addresses, entries, count }
        };
        let kernel = tables(CODE..END, &[&entries[..], &more].concat());
        let module = tables(MODULE..MODULE + 16, &of_module);
        let read = |address: u64, bytes: &mut [u8]| {
            for (byte, place) in bytes.iter_mut().zip(address..) {
                *byte = *memory.get(&place)?;
            }
            Some(())
        };
        Orc::find(&kernel, &[module], &|member| release.bit(member), &read)
    }

    /// Returns the callers of an instruction by a stack.
    fn callers(orc: &Orc, instruction: u64, frame: u64, words: &[u64]) -> Callers {
        let mut general = [0; GENERAL];
        general[RBP] = frame;
        let mut word = |address: u64| {
            let offset = usize::try_from(address.checked_sub(STACK)?).ok()?;
            words.get(offset / 8).copied().filter(|_| offset.is_multiple_of(8))
        };
        orc.callers(&Registers { instruction, stack: STACK, general }, 126, &mut word)
    }

    #[test]
    fn callers_are_found_by_the_tables_of_each_release() {
        for release in RELEASES {
            let orc = kernel(release).expect("it has tables");
            // A module's function was called by a leaf, that by the last instruction of a function with a frame, and
            // that by the first one of its stack.
            let words = [LEAF + 5, 0, 0, FRAMED + 0x10, 0, 7, START + 1];
            let found = callers(&orc, MODULE + 9, STACK + 40, &words);
            assert_eq!(found.kernel, [LEAF + 5, FRAMED + 0x10, START + 1], "{release:?}");
            assert_eq!(found.program, None);
        }
    }

    #[test]
    fn chains_lead_over_interrupts_to_the_program() {
        for release in RELEASES {
            let orc = kernel(release).expect("it has tables");
            // An interrupt came at the first instruction of a leaf, which the entry of system calls has called.
            let mut words = vec![0; GENERAL];
            words[RBP] = 0x7000;
            let at = |word: usize| STACK + 8 * word as u64;
            words.extend([0, LEAF, 0x10, 0, at(21), 0x18, 1, 2, SYSTEM_CALL + 3]);
            words.extend([0; GENERAL]);
            words[24 + RBP] = 0x7ffe_0000;
            words.extend([0, 0x40_1000, USER_CS, 0, 0x7ffe_1000, 0x2b]);
            let found = callers(&orc, INTERRUPT + 2, 0, &words);
            assert_eq!(found.kernel, [LEAF, SYSTEM_CALL + 3], "{release:?}");
            assert_eq!(found.program, Some([0x7ffe_0000, 0x40_1000]));
            // An exception in a program of 32 bits, and one in a program that it does not have the frame of.
            let program = |segment| [0x40_1000, segment, 0, 0x7ffe_1000, 0x2b];
            assert_eq!(callers(&orc, EXCEPTION, 5, &program(0x23)), Callers::default());
            let known = Callers { kernel: Vec::new(), program: Some([5, 0x40_1000]) };
            assert_eq!(callers(&orc, EXCEPTION, 5, &program(USER_CS)), known);
        }
    }

    #[test]
    fn a_chain_ends_where_the_kernels_own_unwinder_ends() {
        for release in RELEASES {
            let orc = kernel(release).expect("it has tables");
            let none: [u64; 0] = [];
            let kernel = |instruction, frame, words: &[u64]| callers(&orc, instruction, frame, words).kernel;
            assert_eq!(
                kernel(LEAF, 0, &[1, 2, START + 4, 1]),
                [START + 4],
                "{release:?}: the end of the stack"
            );
            assert_eq!(kernel(LEAF, 0, &[1, 2]), none, "the stack is not in memory");
            assert_eq!(kernel(LEAF, 0, &[1, 2, 0x40_1000]), none, "no code");
            assert_eq!(kernel(END + 5, 0, &[1, 2, LEAF]), none, "no tables");
            // A frame that is its own caller's.
            let frame = [STACK, FRAMED + 4];
            assert_eq!(kernel(FRAMED, STACK, &frame).len(), 126);
        }
    }

    #[test]
    fn tables_that_are_not_as_known_are_none() {
        let release = RELEASES[2];
        let entry = release.entry(Kind::Call, (Base::Stack, 8), (Base::Unknown, 0));
        assert!(Format::find(&|member| release.bit(member), &[entry]).is_some());
        for moved in ["sp_reg", "type"] {
            let bit = |member: &str| release.bit(member).map(|bit| bit + u64::from(member == moved));
            assert_eq!(Format::find(&bit, &[entry]), None);
        }
    }

    #[test]
    fn types_are_not_searched_again_for_each_module() {
        let searches = |modules: usize| {
            let count = std::cell::Cell::new(0);
            let bit = |_: &str, _: &str| {
                count.set(count.get() + 1);
                Some(0)
            };
            let symbol = |name: &str| Some(if name.starts_with("__stop") { 8 } else { 0 });
            let read = |_: u64, bytes: &mut [u8]| {
                bytes.fill(0);
                Some(())
            };
            let _ = Unwinder::find(&symbol, &bit, &vec![(MODULE, MODULE..MODULE + 16); modules], &read);
            count.get()
        };
        assert_eq!(searches(1000), searches(1));
    }

    proptest! {
        #[test]
        fn whatever_a_guest_has_there_is_no_trouble(
            entries in prop::collection::vec(any::<[u8; ENTRY]>(), 1..20),
            offsets in prop::collection::vec(any::<i32>(), 20),
            words in prop::collection::vec(any::<u64>(), 0..40),
            release in prop::sample::select(RELEASES.to_vec()),
            instruction in CODE..END,
            frame in any::<u64>(),
        ) {
            let format = Format::find(&|member| release.bit(member), &entries).expect("it is as known");
            let addresses: Vec<u8> =
                offsets[..entries.len()].iter().flat_map(|offset| offset.to_le_bytes()).collect();
            let table =
                |code| Table::new(vec![code], u64::MAX - 8, addresses.clone(), entries.concat());
            let orc = Orc { format, kernel: table(CODE..END), modules: vec![table(0..u64::MAX)] };
            prop_assert!(callers(&orc, instruction, frame, &words).kernel.len() <= 126);
        }
    }
}
