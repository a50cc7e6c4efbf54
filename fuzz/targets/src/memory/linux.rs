//! Makes the named inputs of the corpus: memories of guests whose kernel has nothing but what Tally looks for, as
//! several releases of Linux have it. It has a module, and a thread that one vCPU runs in the kernel and the other in
//! its program, `/srv/bin/prog`.

use super::x86_64::{HAS_FIVE_LEVELS, IS_LONG, IS_USER, WORDS};

/// What differs between releases.
#[derive(Debug)]
pub struct Release {
    /// Name of the input.
    pub name: &'static str,
    banner: &'static str,
    order: Order,
    unwinder: Unwinder,
    levels: u32,
}

/// The order of the tables of symbols.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// Offsets come first. Variables of each CPU have absolute addresses.
    OffsetsFirst,
    OffsetsLast,
    /// Offsets are behind their own places, and all is aligned to 4 bytes.
    OwnPlaces,
}

/// How callers in the kernel are found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unwinder {
    FramePointers,
    /// By tables, in which the stack and the frame have these numbers, and the stack of a caller as well.
    Orc {
        stack: u8,
        frame: u8,
        previous: u8,
    },
}

pub const RELEASES: [Release; 3] = [
    Release {
        name: "linux-6.1-with-frame-pointers",
        banner: "Linux version 6.1.0-44-amd64",
        order: Order::OffsetsFirst,
        unwinder: Unwinder::FramePointers,
        levels: 5,
    },
    Release {
        name: "linux-6.12",
        banner: "Linux version 6.12.1",
        order: Order::OffsetsLast,
        unwinder: Unwinder::Orc { stack: 5, frame: 4, previous: 1 },
        levels: 4,
    },
    Release {
        name: "linux-7.0",
        banner: "Linux version 7.0-rc1",
        order: Order::OwnPlaces,
        unwinder: Unwinder::Orc { stack: 3, frame: 4, previous: 8 },
        levels: 4,
    },
];

impl Release {
    /// Returns whether modules have their code in a structure of its own (before Linux 6.4).
    fn has_layouts(&self) -> bool {
        self.order == Order::OffsetsFirst
    }

    fn has_orc(&self) -> bool {
        self.unwinder != Unwinder::FramePointers
    }

    /// Returns the callers in the kernel.
    pub fn callers(&self) -> &'static [u64] {
        // Frame pointers do not lead to the caller of a function that has no frame yet.
        if self.has_orc() { &CALLERS } else { &CALLERS[1..] }
    }

    fn top_table(&self) -> u64 {
        if self.levels == 5 { FIFTH_TABLE } else { FOURTH_TABLE }
    }
}

/// The build id of the kernel and of the program.
pub const BUILD_ID: [u8; 20] = *b"build id of the file";
/// Address of the module's code.
pub const MODULE: u64 = 0xffff_ffff_c000_0000;
/// Callers in the kernel, and those in the program behind the instruction that has entered it.
const CALLERS: [u64; 3] = [LEAF + 5, FRAMED + 5, SYSTEM_CALL + 3];
pub const ENTRY_AND_CALLERS: [u64; 3] = [PROGRAM + 0x80, PROGRAM + 0x123, PROGRAM + 0x456];

/// Where the kernel has the memory: where it is linked, and all of it again.
const KERNEL: u64 = 0xffff_ffff_8000_0000;
const ALL_MEMORY: u64 = 0xffff_8880_0000_0000;
/// Where the descriptions of the pages are, and the size of one.
const ALL_PAGES: u64 = 0xffff_ea00_0000_0000;
const PAGE: u64 = 64;
/// Functions of the kernel: they are called with two words on their stack, with a frame, and by a program.
const LEAF: u64 = KERNEL + 0x1_0000;
const FRAMED: u64 = LEAF + 0x10;
const SYSTEM_CALL: u64 = LEAF + 0x20;
/// The program's code, and its stack behind that.
const PROGRAM: u64 = 0x40_0000;

/// Where something is in memory. The symbols come first: so few of them are only found where no other numbers are in
/// front of them.
const SYMBOLS: u64 = 0x100;
const FOURTH_TABLE: u64 = 0x1000;
const FIFTH_TABLE: u64 = 0x1_2000;
const TABLES: [u64; 4] = [0x2000, 0x3000, 0x4000, 0x5000];
const FILE_PAGE: u64 = 0x6000;
const NOTES: u64 = FILE_PAGE + 0x80;
const NOTES_LEN: u64 = 36;
const USER_STACK: u64 = 0x7000;
const STACK: u64 = 0x8000;
/// The program's registers at the end of the kernel's stack.
const ENTRY_REGISTERS: u64 = STACK + (16 << 10) - 168;
/// What is on the kernel's stack when the module is executed: the address to which it returns, and two frames.
const CALLED: u64 = ENTRY_REGISTERS - 56;
const FIRST_FRAME: u64 = ENTRY_REGISTERS - 40;
const SECOND_FRAME: u64 = ENTRY_REGISTERS - 16;
const ORC: [u64; 2] = [0xd000, 0xd100];
const ORC_LEN: u64 = 4;
const MODULE_ORC: [u64; 2] = [0xd200, 0xd300];
/// The thread of each vCPU, and its address if that is absolute.
const CURRENT: u64 = 0xe000;
const ABSOLUTE: u64 = 0x40;
const OFFSETS: u64 = 0xe100;
const TASK: u64 = 0xe200;
const MM: u64 = 0xe300;
const NODES: [u64; 2] = [0xe400, 0xe500];
const REGIONS: [u64; 2] = [0xe600, 0xe640];
const FILE: u64 = 0xe700;
const INODE: u64 = 0xe740;
const CONTENT: u64 = 0xe780;
const CHILDREN: u64 = 0xe7c0;
const FS: u64 = 0xe800;
const MOUNTS: [u64; 2] = [0xe840, 0xe880];
const NAMES: [u64; 5] = [0xe900, 0xe920, 0xe940, 0xe960, 0xe980];
const TEXTS: u64 = 0xea00;
const MODULES: u64 = 0xeb00;
const FUSE: u64 = 0xec00;
const FUSE_SYMBOLS: u64 = 0xed00;
const SYMBOL_TABLE: u64 = 0xed40;
const SYMBOL_NAMES: u64 = 0xede0;
const SYMBOL_KINDS: u64 = 0xedf0;
const BANNER: u64 = 0xee00;
const BASES: [u64; 2] = [0xef00, 0xef08];
const TYPES: u64 = 0x1_1000;

/// Names of members, and their offsets in bits.
type Members = &'static [(&'static str, u32)];

/// Structures of the kernel: the name, the size, and the members. A member without a name is the first structure, which
/// has no name either. A module has `mem`, or the two layouts.
const STRUCTURES: [(&str, u32, Members); 26] = [
    ("", 8, &[("hash", 0), ("len", 32)]),
    ("page", 64, &[]),
    ("task_struct", 48, &[("stack", 0), ("mm", 64), ("fs", 128), ("pid", 192), ("tgid", 224), ("comm", 256)]),
    ("fs_struct", 16, &[("root", 0)]),
    ("mm_struct", 16, &[("mm_mt", 0)]),
    ("maple_tree", 16, &[("ma_root", 64)]),
    ("maple_range_64", 256, &[("parent", 0), ("pivot", 64), ("slot", 1024), ("meta", 1984)]),
    ("maple_arange_64", 256, &[("parent", 0), ("pivot", 64), ("slot", 640), ("gap", 1280), ("meta", 1920)]),
    ("vm_area_struct", 64, &[("vm_start", 0), ("vm_end", 64), ("vm_pgoff", 128), ("vm_file", 192)]),
    ("file", 40, &[("f_mode", 0), ("f_path", 64), ("f_inode", 192), ("f_mapping", 256)]),
    ("backing_file", 56, &[("file", 0), ("user_path", 320)]),
    ("inode", 8, &[("i_size", 0)]),
    ("address_space", 16, &[("i_pages", 0)]),
    ("xarray", 16, &[("xa_head", 64)]),
    ("xa_node", 64, &[("slots", 64)]),
    ("path", 16, &[("mnt", 0), ("dentry", 64)]),
    ("dentry", 24, &[("d_parent", 0), ("d_name", 64)]),
    ("qstr", 16, &[("", 0), ("name", 64)]),
    ("mount", 24, &[("mnt_parent", 0), ("mnt_mountpoint", 64), ("mnt", 128)]),
    ("vfsmount", 8, &[("mnt_root", 0)]),
    (
        "module",
        240,
        &[
            ("state", 0),
            ("list", 64),
            ("name", 192),
            ("mem", 768),
            ("core_layout", 768),
            ("init_layout", 960),
            ("kallsyms", 1664),
            ("arch", 1728),
        ],
    ),
    ("module_memory", 16, &[("base", 0), ("size", 64)]),
    ("module_layout", 24, &[("base", 0), ("size", 64), ("text_size", 96)]),
    ("mod_kallsyms", 32, &[("symtab", 0), ("num_symtab", 64), ("strtab", 128), ("typetab", 192)]),
    ("mod_arch_specific", 24, &[("num_orcs", 0), ("orc_unwind_ip", 64), ("orc_unwind", 128)]),
    (
        "orc_entry",
        6,
        &[("sp_offset", 0), ("bp_offset", 16), ("sp_reg", 32), ("bp_reg", 36), ("type", 40), ("signal", 43)],
    ),
];

/// Makes the input of a release.
pub fn input(release: &Release) -> Vec<u8> {
    let five_levels = if release.levels == 5 { HAS_FIVE_LEVELS } else { 0 };
    let frame = if release.has_orc() { SECOND_FRAME } else { FIRST_FRAME };
    let in_kernel = [all(CALLED), all(frame), MODULE + 9];
    let in_program = [PROGRAM + 0x1800, PROGRAM + 0x1100, PROGRAM + 0x10];
    let mut input = vec![1];
    for (bits, registers) in [(0, in_kernel), (IS_USER, in_program)] {
        vcpu(&mut input, IS_LONG | five_levels | bits, registers, release.top_table());
    }
    let mut pieces = Pieces(input);
    page_tables(&mut pieces, release);
    program(&mut pieces);
    thread(&mut pieces, release);
    regions(&mut pieces);
    file(&mut pieces);
    module(&mut pieces, release);
    if let Unwinder::Orc { stack, frame, previous } = release.unwinder {
        unwinder(&mut pieces, stack, frame, previous);
    }
    pieces.add(BANNER, release.banner.as_bytes());
    pieces.words(BASES[0], &[ALL_MEMORY, ALL_PAGES]);
    pieces.add(TYPES, &types(release));
    pieces.add(SYMBOLS, &symbols(release));
    pieces.0
}

/// Returns the kernel's address of a place in memory, and where it is in all of the memory.
fn kernel(place: u64) -> u64 {
    KERNEL + place
}

fn all(place: u64) -> u64 {
    ALL_MEMORY + place
}

/// Adds the registers of a vCPU: RSP, RBP and RIP, and CR3.
fn vcpu(input: &mut Vec<u8>, bits: u8, [stack, frame, instruction]: [u64; 3], table: u64) {
    let mut words = [0; WORDS];
    (words[4], words[5], words[16], words[17]) = (stack, frame, instruction, table);
    input.push(bits);
    input.extend(words.iter().flat_map(|word| word.to_le_bytes()));
}

/// Pieces of a memory, in an input.
struct Pieces(Vec<u8>);

impl Pieces {
    fn add(&mut self, place: u64, bytes: &[u8]) {
        let len = u16::try_from(bytes.len()).expect("it is short");
        self.0.extend(&place.to_le_bytes()[..3]);
        self.0.extend(len.to_le_bytes());
        self.0.push(0);
        self.0.extend(bytes);
    }

    fn words(&mut self, place: u64, words: &[u64]) {
        self.add(place, &words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>());
    }
}

/// The kernel's half has large pages, and the program two small ones.
fn page_tables(pieces: &mut Pieces, release: &Release) {
    let [upper, of_kernel, middle, lower] = TABLES;
    let (present, of_program, large) = (0b11, 0b111, 1 << 7);
    pieces.words(FOURTH_TABLE, &[upper | of_program]);
    for (place, entry) in [
        (FOURTH_TABLE + 8 * 273, of_kernel | present),
        (FOURTH_TABLE + 8 * 511, of_kernel | present),
        (upper, middle | of_program),
        (of_kernel, large | present),
        (of_kernel + 8 * 510, large | present),
        (middle + 8 * 2, lower | of_program),
    ] {
        pieces.words(place, &[entry]);
    }
    if release.levels == 5 {
        for half in [0, 511] {
            pieces.words(FIFTH_TABLE + 8 * half, &[FOURTH_TABLE | of_program]);
        }
    }
    pieces.words(lower, &[FILE_PAGE | of_program, USER_STACK | of_program]);
}

/// The first page of the program's file (ELF), its stack, and its registers when it has entered the kernel.
fn program(pieces: &mut Pieces) {
    let mut header = vec![0; 64 + 56];
    header[..6].copy_from_slice(b"\x7fELF\x02\x01");
    (header[32], header[56], header[64], header[72], header[96]) = (64, 1, 4, 0x80, 36);
    pieces.add(FILE_PAGE, &header);
    let note = [4_u32, 20, 3].map(u32::to_le_bytes).concat();
    pieces.add(NOTES, &[&note, &b"GNU\0"[..], &BUILD_ID].concat());
    let [_, first, second] = ENTRY_AND_CALLERS;
    pieces.words(USER_STACK + 0x100, &[PROGRAM + 0x1200, first]);
    pieces.words(USER_STACK + 0x200, &[0, second]);
    let mut registers = [0; 21];
    (registers[4], registers[16], registers[17]) = (PROGRAM + 0x1100, ENTRY_AND_CALLERS[0], 0x33);
    pieces.words(ENTRY_REGISTERS, &registers);
}

/// The thread of both vCPUs, and its callers in the kernel.
fn thread(pieces: &mut Pieces, release: &Release) {
    pieces.words(CURRENT, &[all(TASK), all(TASK)]);
    let first = if release.order == Order::OffsetsFirst { kernel(CURRENT) - ABSOLUTE } else { 0 };
    pieces.words(OFFSETS, &[first, first + 8]);
    pieces
        .words(TASK, &[all(STACK), all(MM), all(FS), 7 << 32 | 8, u64::from_le_bytes(*b"sh\0\0\0\0\0\0"), 0]);
    let [leaf, framed, system_call] = CALLERS;
    pieces.words(CALLED, &[leaf, 0, all(SECOND_FRAME), framed, 0, 0, system_call]);
}

/// The tree of the process' regions.
fn regions(pieces: &mut Pieces) {
    let (leaf, above) = (1 << 3 | 4, 3 << 3 | 6);
    pieces.words(MM + 8, &[all(NODES[0]) | above]);
    pieces.words(NODES[0] + 8, &[PROGRAM - 1, PROGRAM + 0xf_ffff]);
    pieces.words(NODES[0] + 80, &[0, all(NODES[1]) | leaf, 0]);
    pieces.words(NODES[0] + 240, &[2]);
    pieces.words(NODES[1] + 8, &[PROGRAM - 1, PROGRAM + 0xfff, PROGRAM + 0x1fff]);
    pieces.words(NODES[1] + 128, &[0, all(REGIONS[0]), all(REGIONS[1]), 0]);
    pieces.words(NODES[1] + 248, &[3]);
    pieces.words(REGIONS[0], &[PROGRAM, PROGRAM + 0x1000, 0, all(FILE)]);
    pieces.words(REGIONS[1], &[PROGRAM + 0x1000, PROGRAM + 0x2000, 0, 0]);
}

/// The program's file, which is below an overlay, with the names that lead to it over a mount.
fn file(pieces: &mut Pieces) {
    // Linux 6.14 has moved the bit.
    let is_backing = 1 << 24 | 1 << 25;
    let name = |number: usize| all(NAMES[number]);
    let mount = |number: usize| all(MOUNTS[number]) + 16;
    pieces.words(FILE, &[is_backing, mount(0), name(0), all(INODE), all(CONTENT), mount(1), name(4)]);
    pieces.words(INODE, &[4096]);
    pieces.words(CONTENT + 8, &[all(CHILDREN) | 2]);
    pieces.words(CHILDREN + 8, &[ALL_PAGES + FILE_PAGE / 4096 * PAGE]);
    pieces.words(FS, &[mount(0), name(0)]);
    pieces.words(MOUNTS[0], &[all(MOUNTS[0]), name(0), name(0)]);
    pieces.words(MOUNTS[1], &[all(MOUNTS[0]), name(1), name(2)]);
    for (number, (parent, text)) in
        [(0, "/"), (0, "srv"), (2, "/"), (2, "bin"), (3, "prog")].into_iter().enumerate()
    {
        let place = TEXTS + 16 * number as u64;
        pieces.add(place, text.as_bytes());
        pieces.words(NAMES[number], &[name(parent), (text.len() as u64) << 32, all(place)]);
    }
}

/// The module, with its symbols and its tables for the unwinder.
fn module(pieces: &mut Pieces, release: &Release) {
    pieces.words(MODULES, &[all(FUSE) + 8]);
    pieces.words(FUSE, &[0, kernel(MODULES)]);
    pieces.add(FUSE + 24, b"fuse");
    let text_size = if release.has_layouts() { 0x1000 << 32 } else { 0 };
    pieces.words(FUSE + 96, &[MODULE, text_size | 0x1000]);
    pieces.words(FUSE + 208, &[all(FUSE_SYMBOLS), 1, kernel(MODULE_ORC[0]), kernel(MODULE_ORC[1])]);
    let [names, kinds] = [SYMBOL_NAMES, SYMBOL_KINDS].map(all);
    pieces.words(FUSE_SYMBOLS, &[all(SYMBOL_TABLE), 2, names, kinds]);
    pieces.words(SYMBOL_TABLE, &[1, MODULE, 0, 6, MODULE + 0x10, 0]);
    pieces.add(SYMBOL_NAMES, b"\0read\0write\0");
    pieces.add(SYMBOL_KINDS, b"tT");
}

/// The unwinder's tables: of each function the address, and where its caller's stack and frame are.
fn unwinder(pieces: &mut Pieces, stack: u8, frame: u8, previous: u8) {
    // Calls have the number 2, and registers 3, of which the program's counter is exact.
    let tables = [
        (LEAF, [24, 0, 0, 0, stack, 2]),
        (FRAMED, [16, 0, 0xf0, 0xff, frame | previous << 4, 2]),
        (SYSTEM_CALL, [0, 0, 0, 0, stack, 3 | 1 << 3]),
        (SYSTEM_CALL + 0x10, [0, 0, 0, 0, 0, 1]),
    ];
    let of_module = [(MODULE, [8, 0, 0, 0, stack, 2])];
    for ([addresses, entries], table) in [(ORC, &tables[..]), (MODULE_ORC, &of_module)] {
        let offset =
            |(place, address): (u64, u64)| u32::try_from(address - kernel(place)).expect("it is near");
        let places = (addresses..).step_by(4).zip(table.iter().map(|(address, _)| *address));
        pieces.add(addresses, &places.flat_map(|pair| offset(pair).to_le_bytes()).collect::<Vec<_>>());
        pieces.add(entries, &table.iter().flat_map(|(_, entry)| *entry).collect::<Vec<u8>>());
    }
}

/// The description of the types (BTF).
fn types(release: &Release) -> Vec<u8> {
    const STRUCT: u32 = 4 << 24;
    const HAS_SIZES: u32 = 1 << 31;
    let mut strings = vec![0];
    let mut string = |text: &str| {
        if text.is_empty() {
            return 0;
        }
        let start = u32::try_from(strings.len()).expect("they are short");
        strings.extend(text.bytes().chain([0]));
        start
    };
    let mut types = Vec::new();
    for (name, size, members) in STRUCTURES {
        let is_there = |(member, _): &&(&str, u32)| match *member {
            "mem" => !release.has_layouts(),
            "core_layout" | "init_layout" => release.has_layouts(),
            _ => true,
        };
        let members: Vec<_> = members.iter().filter(is_there).collect();
        let count = u32::try_from(members.len()).expect("there are few");
        types.extend([string(name), HAS_SIZES | STRUCT | count, size]);
        for (member, bit) in members {
            types.extend([string(member), 1, *bit]);
        }
    }
    let types: Vec<u8> = types.into_iter().flat_map(u32::to_le_bytes).collect();
    let [of_types, of_strings] =
        [&types, &strings].map(|part| u32::try_from(part.len()).expect("it is short"));
    let header = [0x0001_eb9f, 24, 0, of_types, of_types, of_strings].map(u32::to_le_bytes).concat();
    [header, types, strings].concat()
}

/// The tables of the symbols. Each character is a token.
fn symbols(release: &Release) -> Vec<u8> {
    let mut symbols = vec![
        (release.top_table(), "Dinit_top_pgt"),
        (NOTES, "R__start_notes"),
        (NOTES + NOTES_LEN, "R__stop_notes"),
        (OFFSETS, "D__per_cpu_offset"),
        (TASK, "Dinit_task"),
        (MODULES, "dmodules"),
        (BANNER, "Rlinux_banner"),
        (BASES[0], "Dpage_offset_base"),
        (BASES[1], "Dvmemmap_base"),
        (LEAF - KERNEL, "T_stext"),
        (SYSTEM_CALL + 0x20 - KERNEL, "T_etext"),
        (TYPES, "R__start_BTF"),
        (TYPES + types(release).len() as u64, "R__stop_BTF"),
    ];
    if release.has_orc() {
        symbols.extend([
            (ORC[0], "r__start_orc_unwind_ip"),
            (ORC[0] + 4 * ORC_LEN, "r__stop_orc_unwind_ip"),
            (ORC[1], "r__start_orc_unwind"),
        ]);
    }
    let is_first = release.order == Order::OffsetsFirst;
    if !is_first {
        symbols.push((CURRENT, "Dcurrent_task"));
    }
    symbols.sort_unstable();
    let place = |place: u64| i32::try_from(place).expect("it is in memory");
    // If there are absolute addresses, the others are negative.
    let mut offsets: Vec<i32> =
        symbols.iter().map(|(at, _)| if is_first { -1 - place(*at) } else { place(*at) }).collect();
    if is_first {
        symbols.insert(0, (ABSOLUTE, "Acurrent_task"));
        offsets.insert(0, place(ABSOLUTE));
    }
    let alignment = if release.order == Order::OwnPlaces { 4 } else { 8 };
    let pad = |bytes: &mut Vec<u8>| bytes.resize(bytes.len().next_multiple_of(alignment), 0);
    let add_offsets = |bytes: &mut Vec<u8>| {
        for offset in &offsets {
            let own = if release.order == Order::OwnPlaces { place(SYMBOLS + bytes.len() as u64) } else { 0 };
            bytes.extend((offset - own).to_le_bytes());
        }
        if release.order != Order::OwnPlaces {
            pad(bytes);
            bytes.extend(KERNEL.to_le_bytes());
        }
    };
    let mut bytes = Vec::new();
    if is_first {
        add_offsets(&mut bytes);
    }
    bytes.extend(u32::try_from(symbols.len()).expect("there are few").to_le_bytes());
    pad(&mut bytes);
    for (_, name) in &symbols {
        bytes.push(u8::try_from(name.len()).expect("it is short"));
        bytes.extend(name.bytes());
    }
    pad(&mut bytes);
    // The only marker.
    bytes.extend([0; 4]);
    pad(&mut bytes);
    if !is_first {
        // The order of the names by the alphabet, which is not looked at.
        bytes.extend(symbols.iter().flat_map(|_| [0, 0, 1]));
        pad(&mut bytes);
    }
    let (mut index, start) = (Vec::new(), bytes.len());
    for token in 0..=u8::MAX {
        index.extend(u16::try_from(bytes.len() - start).expect("they are short").to_le_bytes());
        match token {
            b'!'..=b'~' => bytes.extend([token, 0]),
            _ => bytes.extend(b"xy\0"),
        }
    }
    pad(&mut bytes);
    bytes.extend(index);
    if !is_first {
        add_offsets(&mut bytes);
    }
    bytes
}
