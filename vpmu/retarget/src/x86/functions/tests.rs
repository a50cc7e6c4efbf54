//! Small kernels with a table of functions, with the code that compilers have made of Linux over the years.

use std::ops::Range;

use super::super::filling::{FILLING, room};
use super::super::{Kind, find};
use super::*;

const TEXT: u64 = 0xffff_ffff_8100_0000;
const DATA: u64 = 0xffff_ffff_8200_0000;
const RETURNS: u64 = 0xffff_ffff_8300_0000;
const UNWIND: u64 = 0xffff_ffff_8400_0000;

/// PUSH RBX; MOV ECX, EDI; RDMSR; SHL RDX, 32; OR RAX, RDX; POP RBX; RET
const READ: &[u8] = &[0x53, 0x89, 0xf9, 0x0f, 0x32, 0x48, 0xc1, 0xe2, 32, 0x48, 9, 0xd0, 0x5b, 0xc3];
/// MOV EAX, ESI; MOV ECX, EDI; WRMSR; XCHG AX, AX; RET
const WRITE_HALVES: &[u8] = &[0x89, 0xf0, 0x89, 0xf9, 0x0f, 0x30, 0x66, 0x90, 0xc3];
/// ENDBR64; MOV RDX, RSI; MOV ECX, EDI; MOV EAX, ESI; SHR RDX, 32; WRMSR; JMP, which `.return_sites` lists as a return
const WRITE_WHOLE: &[u8] = &[
    0xf3, 0x0f, 0x1e, 0xfa, 0x48, 0x89, 0xf2, 0x89, 0xf9, 0x89, 0xf0, 0x48, 0xc1, 0xea, 32, 0x0f, 0x30, 0xe9,
    0, 0, 0, 0,
];
/// MOV ECX, EDI; RDPMC; RET
const READ_COUNTER: &[u8] = &[0x89, 0xf9, 0x0f, 0x33, 0xc3];
const ANYTHING: &[u8] = &[0xc3];

/// A kernel with five functions, their table, and filling.
struct Small {
    text: Vec<u8>,
    entries: Vec<u64>,
    unwind: Vec<u64>,
    data: Vec<u64>,
    returns: Vec<u64>,
}

impl Small {
    fn new(functions: [&[u8]; 5]) -> Self {
        let (mut text, mut entries, mut returns) = (Vec::new(), Vec::new(), Vec::new());
        for function in functions {
            entries.push(TEXT + text.len() as u64);
            text.extend_from_slice(function);
            if function.ends_with(&[0xe9, 0, 0, 0, 0]) {
                returns.push(TEXT + text.len() as u64 - 5);
            }
            text.resize(text.len().next_multiple_of(32), FILLING);
        }
        let mut data = vec![7; 3];
        data.extend(&entries);
        data.push(9);
        // The unwind table has the functions, their ends, and the last byte of the text.
        let ends = entries.iter().zip(functions).map(|(entry, function)| entry + function.len() as u64);
        let mut unwind: Vec<u64> = entries.iter().copied().chain(ends).collect();
        text.resize(text.len() + 4096, FILLING);
        text.push(0xc3);
        unwind.push(TEXT + text.len() as u64 - 1);
        unwind.sort_unstable();
        Self { text, entries, unwind, data, returns }
    }

    fn with_image<R>(&self, act: impl FnOnce(&Image) -> R) -> R {
        let relative = |table: u64, addresses: &[u64]| -> Vec<u8> {
            let places = (table..).step_by(4);
            let distances = addresses.iter().zip(places).map(|(address, at)| address.wrapping_sub(at));
            distances.flat_map(|distance| distance.to_le_bytes().into_iter().take(4)).collect()
        };
        let data: Vec<u8> = self.data.iter().flat_map(|word| word.to_le_bytes()).collect();
        let (returns, unwind) = (relative(RETURNS, &self.returns), relative(UNWIND, &self.unwind));
        let section = |name, address, bytes, content| Section { name, address, bytes, content };
        act(&Image {
            sections: vec![
                section(".text", TEXT, &self.text, Content::Code),
                section(".data", DATA, &data, Content::Data),
                section(".return_sites", RETURNS, &returns, Content::Data),
                section(".orc_unwind_ip", UNWIND, &unwind, Content::Data),
            ],
            symbols: Vec::new(),
            kind: Kind::Linux,
        })
    }

    fn table(&self) -> Option<Table> {
        self.with_image(|image| table(image, &find(image).sites))
    }
}

const HALVES: [&[u8]; 5] = [READ, WRITE_HALVES, ANYTHING, ANYTHING, READ_COUNTER];
const WHOLE: [&[u8]; 5] = [READ, WRITE_WHOLE, ANYTHING, ANYTHING, READ_COUNTER];

#[test]
fn the_table_is_found_with_its_functions_and_their_arguments() {
    for (functions, value, exit) in [(HALVES, Value::Halves, 8), (WHOLE, Value::Whole, 17)] {
        let kernel = Small::new(functions);
        let table = kernel.table().expect("the kernel has a table");
        let [read, write, .., read_counter] = kernel.entries[..] else { panic!() };
        assert_eq!(table.address, DATA + 24);
        assert_eq!(table.originals.read, Original { entry: read, exit: read + 13 });
        assert_eq!(table.originals.write, Original { entry: write, exit: write + exit });
        assert_eq!(table.originals.read_counter, Original { entry: read_counter, exit: read_counter + 4 });
        assert_eq!(table.originals.value, value);
    }
}

#[test]
fn a_table_of_other_functions_is_not_taken() {
    let [read, write, .., read_counter] = HALVES;
    // Takes the address of the value: MOV EAX, [RSI]; MOV ECX, EDI; WRMSR; RET
    let by_address: &[u8] = &[0x8b, 0x06, 0x89, 0xf9, 0x0f, 0x30, 0xc3];
    // Takes the upper half of a 32-bit value: MOV EDX, ESI; MOV ECX, EDI; MOV EAX, ESI; SHR RDX, 32; WRMSR; RET
    let narrow: &[u8] = &[0x89, 0xf2, 0x89, 0xf9, 0x89, 0xf0, 0x48, 0xc1, 0xea, 32, 0x0f, 0x30, 0xc3];
    // Branches first: TEST EDI, EDI; JE +0
    let branches = [&[0x85, 0xff, 0x74, 0][..], write].concat();
    // Jumps, instead of returning, unless `.return_sites` lists the jump.
    let jumps = [&write[..8], &[0xe9, 0, 0, 0, 0]].concat();
    for functions in [
        [write, read, ANYTHING, ANYTHING, read_counter],
        [read, by_address, ANYTHING, ANYTHING, read_counter],
        [read, narrow, ANYTHING, ANYTHING, read_counter],
        [read, &branches, ANYTHING, ANYTHING, read_counter],
        [read_counter, write, ANYTHING, ANYTHING, ANYTHING],
    ] {
        assert_eq!(Small::new(functions).table(), None, "{functions:x?}");
    }
    let mut kernel = Small::new([read, &jumps, ANYTHING, ANYTHING, read_counter]);
    assert!(kernel.table().is_some(), "the jump is a return");
    kernel.returns.clear();
    assert_eq!(kernel.table(), None, "the jump is no return");
}

#[test]
fn of_two_tables_neither_is_taken() {
    let mut kernel = Small::new(HALVES);
    kernel.data.extend_from_within(..);
    assert_eq!(kernel.table(), None);
}

#[test]
fn a_kernel_with_a_second_rdpmc_has_no_table() {
    let kernel = Small::new([READ, WRITE_HALVES, READ_COUNTER, ANYTHING, READ_COUNTER]);
    assert_eq!(kernel.with_image(|image| find(image).sites.len()), 2);
    assert_eq!(kernel.table(), None);
}

#[test]
fn there_is_room_in_the_filling_where_no_function_begins() {
    let mut kernel = Small::new(HALVES);
    let anywhere = 0..u64::MAX;
    let find = |kernel: &Small, len, within: &Range<u64>| kernel.with_image(|image| room(image, len, within));
    let filled = TEXT + 5 * 32;
    let room = find(&kernel, 1000, &anywhere).expect("the filling is large enough");
    assert!(room >= filled + 256 && room + 1000 + 256 <= filled + 4096, "{room:#x}");
    assert_eq!(find(&kernel, 4000, &anywhere), None, "too much");
    let within = room + 256..filled + 4096;
    let there = find(&kernel, 1000, &within).expect("there is enough in this part");
    assert!(there >= within.start + 256 && there + 1000 + 256 <= within.end, "{there:#x}");
    assert_eq!(find(&kernel, 1000, &(within.start..within.start + 1024)), None, "too small a part");
    kernel.unwind.push(room + 500);
    kernel.unwind.sort_unstable();
    let elsewhere = find(&kernel, 1000, &anywhere).expect("the rest is large enough");
    assert!(elsewhere > room + 500, "{elsewhere:#x}");
    kernel.unwind.clear();
    assert_eq!(find(&kernel, 1000, &anywhere), None, "nothing tells where functions are");
}
