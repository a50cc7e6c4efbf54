//! Modules of a guest's Linux: where each has its code, and its symbols, as the kernel's list of modules has them
//! (`struct module` in `include/linux/module.h`). The offsets of all members are those of BTF.
//!
//! The guest may have written anything there, and may change it at any time, also while it is read: every walk has an
//! end, all of them together read a limited number of bytes, and what does not fit together is not there.

use std::fmt::Write;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::btf::Types;
use super::kallsyms::Function;
use super::mappings::{Read, word};

/// Maximum number of modules.
pub const MAX_MODULES: usize = 1 << 10;
/// Maximum length of a module's name (`MODULE_NAME_LEN`), and of a symbol's (`KSYM_NAME_LEN`).
pub const MAX_NAME: usize = 64;
const MAX_SYMBOL: usize = 512;
/// Maximum size of the tables of all modules' symbols together, and of the text that is made of them.
const MAX_TABLES: usize = 64 << 20;
const MAX_TEXT: usize = 64 << 20;
/// Maximum size of the tables that are read to name some functions: a few times those of the largest module.
const MAX_TABLES_OF_SOME: usize = 8 << 20;
/// Maximum size of a module's code: on x86 all modules together have 1.5 GiB.
const MAX_CODE: u64 = 1 << 30;
/// A module that the kernel is still reading (`MODULE_STATE_UNFORMED`).
const UNFORMED: u32 = 3;
/// A symbol (`Elf64_Sym`): its size, and where its value is. Its name's offset comes first.
const SYMBOL: usize = 24;
const VALUE: usize = 8;
const PAGE: u64 = 4 << 10;

/// A module of a guest's kernel.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Module {
    /// Its name: letters, digits, `_` and `-`.
    pub name: String,
    /// First address and length of its code.
    pub start: u64,
    pub len: u64,
    /// Size of all that it has in memory, as in `/proc/modules`.
    pub size: u64,
}

/// Where a kernel has what is known of a module.
#[derive(Debug, Clone)]
struct Layout {
    /// Of a module.
    list: u64,
    state: u64,
    name: u64,
    code: u64,
    code_len: u64,
    /// Sizes of its parts.
    sizes: Vec<u64>,
    symbols: u64,
    /// Of a module's symbols: the table and the number of these, the names, and a letter for each.
    table: u64,
    count: u64,
    names: u64,
    kinds: u64,
}

impl Layout {
    fn find(types: &Types) -> Option<Self> {
        let offset = |structure, member| types.offset(structure, member);
        let of_module = |member| offset("module", member);
        let (code, code_len, sizes) = if let Some(parts) = of_module("mem") {
            /// Since Linux 6.4 there are so many parts (`MOD_MEM_NUM_TYPES`), the first of which has the code.
            const PARTS: u64 = 7;
            let [base, size] = ["base", "size"].map(|member| Some(parts + offset("module_memory", member)?));
            let part = types.size("module_memory")?;
            (base?, size?, (0..PARTS).map(|number| Some(size? + number * part)).collect::<Option<_>>()?)
        } else {
            // Before that there were two, of which the first begins with the code.
            let of_part = |part, member| Some(of_module(part)? + offset("module_layout", member)?);
            let size = |part| of_part(part, "size");
            let sizes = vec![size("core_layout")?, size("init_layout")?];
            (of_part("core_layout", "base")?, of_part("core_layout", "text_size")?, sizes)
        };
        Some(Self {
            list: of_module("list")?,
            state: of_module("state")?,
            name: of_module("name")?,
            code,
            code_len,
            sizes,
            symbols: of_module("kallsyms")?,
            table: offset("mod_kallsyms", "symtab")?,
            count: offset("mod_kallsyms", "num_symtab")?,
            names: offset("mod_kallsyms", "strtab")?,
            kinds: offset("mod_kallsyms", "typetab")?,
        })
    }

    /// Reads what is at an address, if it is a module.
    fn module(&self, read: &Read, address: u64) -> Option<Module> {
        let member = |offset: u64| address.wrapping_add(offset);
        let len = u64::from(number(read, member(self.code_len))?);
        let size = |offset: &u64| Some(u64::from(number(read, member(*offset))?));
        let module = Module {
            name: name(read, member(self.name)),
            start: word(read, member(self.code))?,
            len,
            size: self.sizes.iter().map(size).sum::<Option<_>>()?,
        };
        let is_code = module.start >> 63 == 1 && module.start.checked_add(len).is_some();
        let is_formed = number(read, member(self.state))? != UNFORMED;
        (is_formed && is_code && len <= MAX_CODE && !module.name.is_empty()).then_some(module)
    }
}

/// Where a kernel has the list of its modules.
#[derive(Debug)]
pub struct Listed {
    layout: Layout,
    head: u64,
}

impl Listed {
    /// Finds out how a kernel with these types describes its modules. `head` is the address of its list of them.
    pub fn find(types: &Types, head: u64) -> Option<Self> {
        Layout::find(types).map(|layout| Self { layout, head })
    }

    /// Reads the list as it is now.
    pub fn read(&self, read: &Read) -> Modules {
        let Self { layout, head } = self;
        let mut found = Vec::new();
        let mut next = word(read, *head);
        for _ in 0..MAX_MODULES {
            let Some(link) = next.filter(|link| link != head) else { break };
            let address = link.wrapping_sub(layout.list);
            found.extend(layout.module(read, address).map(|module| (address, module)));
            next = word(read, link);
        }
        Modules { layout: layout.clone(), found }
    }
}

/// Modules of a kernel.
#[derive(Debug)]
pub struct Modules {
    layout: Layout,
    /// Each with the address of the kernel's description of it, in the order of the kernel's list.
    found: Vec<(u64, Module)>,
}

impl Modules {
    /// Returns the modules.
    pub fn iter(&self) -> impl Iterator<Item = &Module> {
        self.found.iter().map(|(_, module)| module)
    }

    /// Returns the addresses of the kernel's descriptions of them, with their code.
    pub fn places(&self) -> Vec<(u64, Range<u64>)> {
        self.found
            .iter()
            .map(|(address, module)| (*address, module.start..module.start + module.len))
            .collect()
    }

    /// Returns the text that `/proc/kallsyms` has for their symbols, but for the letters of those that are exported,
    /// which are small here.
    pub fn text(&self, read: &Read) -> String {
        let (mut text, mut left) = (String::new(), MAX_TABLES);
        for (address, module) in &self.found {
            let _ = self.add_symbols(read, *address, module, &mut left, &mut text);
        }
        text
    }

    fn add_symbols(
        &self,
        read: &Read,
        address: u64,
        module: &Module,
        left: &mut usize,
        text: &mut String,
    ) -> Option<()> {
        let tables = SymbolTables::read(&self.layout, read, address, left)?;
        for (value, kind, name) in tables.iter() {
            if text.len() >= MAX_TEXT {
                break;
            }
            let name: String = name.iter().map(|byte| printable(*byte)).collect();
            let kind = printable(kind).to_ascii_lowercase();
            let _ = writeln!(text, "{value:016x} {kind} {name}\t[{}]", module.name);
        }
        Some(())
    }

    /// Returns the functions at these addresses. Each ends where the next symbol of the module begins, or with its
    /// code. What is before the first has the module's name.
    pub fn functions(&self, addresses: &[u64], read: &Read) -> Vec<Function> {
        let (mut functions, mut left) = (Vec::new(), MAX_TABLES_OF_SOME);
        for (address, module) in &self.found {
            let code = module.start..module.start + module.len;
            let mut within = addresses.iter().filter(|address| code.contains(address)).peekable();
            if within.peek().is_none() {
                continue;
            }
            let tables = SymbolTables::read(&self.layout, read, *address, &mut left).unwrap_or_default();
            let mut symbols: Vec<_> = tables.iter().filter(|(value, ..)| code.contains(value)).collect();
            // A function's name, if data has the same address.
            symbols.sort_by_key(|(value, kind, _)| (*value, is_of_function(*kind)));
            functions.extend(within.filter_map(|address| function(*address, &symbols, code.clone(), module)));
        }
        functions
    }
}

/// Returns the function of a module at an address. `symbols` are those in its code, in their order.
fn function(
    address: u64,
    symbols: &[(u64, u8, &[u8])],
    code: Range<u64>,
    module: &Module,
) -> Option<Function> {
    let behind = symbols.partition_point(|(value, ..)| *value <= address);
    let end = symbols.get(behind).map_or(code.end, |(value, ..)| *value);
    let of_module = format!("[{}]", module.name);
    let Some((start, kind, name)) = behind.checked_sub(1).map(|last| symbols[last]) else {
        return Some(Function { start: code.start, end, name: of_module });
    };
    let name: String = name.iter().map(|byte| printable(*byte)).collect();
    is_of_function(kind).then(|| Function { start, end, name: format!("{name} {of_module}") })
}

/// Returns whether a symbol's letter is that of a function.
fn is_of_function(kind: u8) -> bool {
    matches!(kind, b't' | b'T' | b'w' | b'W')
}

/// Symbols of a module.
#[derive(Default)]
struct SymbolTables {
    table: Vec<u8>,
    kinds: Vec<u8>,
    names: Vec<u8>,
}

impl SymbolTables {
    /// Reads those of the module with a description at this address.
    fn read(layout: &Layout, read: &Read, address: u64, left: &mut usize) -> Option<Self> {
        let symbols = word(read, address.wrapping_add(layout.symbols))?;
        let member = |offset| word(read, symbols.wrapping_add(offset));
        let count = usize::try_from(number(read, symbols.wrapping_add(layout.count))?).ok()?;
        let table = some(read, member(layout.table)?, count.checked_mul(SYMBOL)?, left);
        let kinds = some(read, member(layout.kinds)?, count, left);
        let longest = table.as_chunks().0.iter().filter_map(name_of).max()?;
        let names = some(read, member(layout.names)?, longest.checked_add(MAX_SYMBOL)?, left);
        Some(Self { table, kinds, names })
    }

    /// Returns value, kind and name of each symbol that has a name.
    fn iter(&self) -> impl Iterator<Item = (u64, u8, &[u8])> {
        self.table.as_chunks().0.iter().zip(&self.kinds).filter_map(|(symbol, kind)| {
            let rest = self.names.get(name_of(symbol)?..)?;
            let rest = &rest[..rest.len().min(MAX_SYMBOL)];
            let name = &rest[..memchr::memchr(0, rest).unwrap_or(rest.len())];
            let value = u64::from_le_bytes(*symbol[VALUE..].first_chunk().expect("it is longer"));
            (!name.is_empty()).then_some((value, *kind, name))
        })
    }
}

/// Returns where a symbol's name is.
fn name_of(symbol: &[u8; SYMBOL]) -> Option<usize> {
    usize::try_from(u32::from_le_bytes(*symbol.first_chunk().expect("it is longer"))).ok()
}

/// Reads so many bytes, as far as they are in memory and as `left` allows.
fn some(read: &Read, address: u64, len: usize, left: &mut usize) -> Vec<u8> {
    let len = len.min(*left);
    *left -= len;
    let mut bytes = Vec::new();
    while bytes.len() < len {
        let at = address.wrapping_add(bytes.len() as u64);
        let in_page = usize::try_from(PAGE - at % PAGE).expect("it is no larger than a page");
        let before = bytes.len();
        bytes.resize(len.min(before + in_page), 0);
        if read(at, &mut bytes[before..]).is_none() {
            bytes.truncate(before);
            break;
        }
    }
    bytes
}

fn number(read: &Read, address: u64) -> Option<u32> {
    let mut bytes = [0; 4];
    read(address, &mut bytes)?;
    Some(u32::from_le_bytes(bytes))
}

fn printable(byte: u8) -> char {
    if byte.is_ascii_graphic() { char::from(byte) } else { '?' }
}

/// Returns a module's name, which may end with a zero.
fn name(read: &Read, address: u64) -> String {
    let bytes = some(read, address, MAX_NAME, &mut { MAX_NAME });
    let of_name = bytes.into_iter().take_while(|byte| *byte != 0).map(char::from);
    of_name.map(|c| if is_of_name(c) { c } else { '?' }).collect()
}

/// Returns whether the name of a module has such characters.
pub fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BASE: u64 = 0xffff_ffff_c000_0000;
    /// Where the list, two modules, their symbols, the table of these, the names and the kinds are.
    const HEAD: usize = 0x10;
    const MODULES: [usize; 2] = [0x100, 0x200];
    const SYMBOLS: usize = 0x300;
    const TABLE: usize = 0x400;
    const KINDS: usize = 0x500;
    const NAMES: usize = 0xfe0;
    const SIZE: usize = 0x1000;

    fn layout() -> Layout {
        let (table, count, names, kinds) = (0, 8, 16, 24);
        Layout {
            list: 8,
            state: 0,
            name: 24,
            code: 96,
            code_len: 104,
            sizes: vec![104, 108],
            symbols: 112,
            table,
            count,
            names,
            kinds,
        }
    }

    fn write(memory: &mut [u8], at: usize, words: &[u64]) {
        for (word, place) in words.iter().zip(memory[at..].chunks_mut(8)) {
            place.copy_from_slice(&word.to_le_bytes());
        }
    }

    /// A kernel with two modules: one with two symbols, and one that it still reads.
    fn kernel() -> Vec<u8> {
        let mut memory = vec![0; SIZE];
        let at = |offset: usize| BASE + offset as u64;
        write(&mut memory, HEAD, &[at(MODULES[0] + 8)]);
        write(&mut memory, MODULES[0], &[0, at(MODULES[1] + 8)]);
        write(&mut memory, MODULES[1], &[u64::from(UNFORMED), at(HEAD)]);
        for (module, name) in MODULES.into_iter().zip(["fuse", "unformed"]) {
            memory[module + 24..][..name.len()].copy_from_slice(name.as_bytes());
            write(&mut memory, module + 96, &[BASE, 0x3000 << 32 | 0x2000, at(SYMBOLS)]);
        }
        write(&mut memory, SYMBOLS, &[at(TABLE), 4, at(NAMES), at(KINDS)]);
        // The first symbol has no name. The last one's name is behind the memory.
        for (number, (name, value)) in
            [(0, 0), (1, BASE), (6, BASE + 0x10), (0x200, 0)].into_iter().enumerate()
        {
            write(&mut memory, TABLE + SYMBOL * number, &[name, value]);
        }
        memory[KINDS..][..4].copy_from_slice(b"atTt");
        memory[NAMES..][..14].copy_from_slice(b"\0read\0wri\x1b\ne\0x");
        memory
    }

    fn reader(memory: &[u8]) -> impl Fn(u64, &mut [u8]) -> Option<()> {
        |address, bytes| {
            let start = usize::try_from(address.checked_sub(BASE)?).ok()?;
            bytes.copy_from_slice(memory.get(start..start.checked_add(bytes.len())?)?);
            Some(())
        }
    }

    fn find(memory: &[u8]) -> Modules {
        Listed { layout: layout(), head: BASE + HEAD as u64 }.read(&reader(memory))
    }

    #[test]
    fn modules_and_their_symbols_are_those_of_the_kernels_list() {
        let memory = kernel();
        let modules = find(&memory);
        let fuse = Module { name: "fuse".into(), start: BASE, len: 0x2000, size: 0x5000 };
        assert_eq!(modules.iter().collect::<Vec<_>>(), [&fuse]);
        let expected = "ffffffffc0000000 t read\t[fuse]\nffffffffc0000010 t wri??e\t[fuse]\n";
        assert_eq!(modules.text(&reader(&memory)), expected);
    }

    #[test]
    fn functions_of_modules_are_found_by_their_addresses() {
        let memory = kernel();
        let modules = find(&memory);
        let at = |address| modules.functions(&[address], &reader(&memory)).pop();
        let function = |start, end, name: &str| Some(Function { start, end, name: name.into() });
        assert_eq!(at(BASE + 0xf), function(BASE, BASE + 0x10, "read [fuse]"));
        assert_eq!(at(BASE + 0x10), function(BASE + 0x10, BASE + 0x2000, "wri??e [fuse]"));
        assert_eq!([BASE - 1, BASE + 0x2000].map(at), [None, None]);
        // Data has no function, and code in front of all symbols has the module's name.
        let mut memory = memory;
        memory[KINDS + 2] = b'd';
        write(&mut memory, TABLE + SYMBOL + VALUE, &[BASE + 8]);
        let modules = find(&memory);
        let at = |address| modules.functions(&[address], &reader(&memory)).pop();
        assert_eq!(at(BASE + 7), function(BASE, BASE + 8, "[fuse]"));
        assert_eq!(at(BASE + 8), function(BASE + 8, BASE + 0x10, "read [fuse]"));
        assert_eq!(at(BASE + 0x10), None);
    }

    #[test]
    fn a_module_that_is_its_own_next_one_is_no_trouble() {
        let mut memory = kernel();
        write(&mut memory, MODULES[0] + 8, &[BASE + MODULES[0] as u64 + 8]);
        assert_eq!(find(&memory).iter().count(), MAX_MODULES);
    }

    #[test]
    fn what_all_modules_together_say_has_a_limit() {
        let memory = kernel();
        let read = reader(&memory);
        let mut left = 20;
        assert_eq!(some(&read, BASE, 16, &mut left).len(), 16);
        assert_eq!((some(&read, BASE, 16, &mut left).len(), left), (4, 0));
        assert_eq!(some(&read, BASE + SIZE as u64, 16, &mut 16).len(), 0, "it is not in memory");
    }

    proptest! {
        #[test]
        fn whatever_a_guest_writes_there_is_no_trouble(
            changes in prop::collection::vec((0..SIZE, any::<u8>()), 0..40),
        ) {
            let mut memory = kernel();
            for (at, byte) in changes {
                memory[at] = byte;
            }
            let modules = find(&memory);
            let text = modules.text(&reader(&memory));
            prop_assert!(text.chars().all(|c| c.is_ascii_graphic() || matches!(c, ' ' | '\t' | '\n')));
            for Function { start, end, name } in modules.functions(&[BASE, BASE + 0x1fff], &reader(&memory)) {
                prop_assert!(start < end && name.chars().all(|c| matches!(c, ' '..='~')));
            }
        }
    }
}
