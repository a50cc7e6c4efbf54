//! Names of the functions in samples: the kernel's by its symbols, and programs' by their files, as far as these are on
//! this host. What a guest, or another user's VM, says of files is untrusted: only regular files are read, and no name
//! is taken from a file that is not the one that was mapped.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;

use object::read::elf::{ElfFile64, ProgramHeader};
use object::{Endianness, Object, ObjectSymbol, SymbolKind, elf};
use tally_machine::{Mapping, Sample};

use crate::run::flamegraph::stacks::{name, of_kernel};

/// Maximum numbers that are remembered of processes, of mappings of one, and of files: a guest can make up any number.
const MAX_PROCESSES: usize = 1 << 12;
const MAX_MAPPINGS: usize = 1 << 10;
const MAX_FILES: usize = 256;
/// Maximum size of a file whose symbols are read.
const MAX_SIZE: u64 = 512 << 20;
/// What is not known.
const UNKNOWN: &str = "[unknown]";

/// Functions, in the order of their addresses.
#[derive(Debug, Default)]
struct Symbols(Vec<Symbol>);

#[derive(Debug)]
struct Symbol {
    start: u64,
    /// The address behind it.
    end: u64,
    name: String,
}

impl Symbols {
    fn new(mut symbols: Vec<Symbol>) -> Self {
        symbols.sort_by_key(|symbol| symbol.start);
        Self(symbols)
    }

    /// Returns the name of the function at an address.
    fn at(&self, address: u64) -> Option<&str> {
        let behind = self.0.partition_point(|symbol| symbol.start <= address);
        let symbol = self.0[..behind].last()?;
        (address < symbol.end).then_some(&*symbol.name)
    }
}

/// A file with functions.
#[derive(Debug)]
struct Program {
    functions: Symbols,
    /// Parts of the file: where each begins, how long it is, and its address.
    parts: Vec<[u64; 3]>,
}

impl Program {
    /// Reads the file that a process has mapped, if it is here.
    fn read(mapping: &Mapping) -> Option<Self> {
        let bytes = read(&mapping.path).ok()?;
        let file = ElfFile64::<Endianness>::parse(&*bytes).ok()?;
        if file.build_id().ok()? != mapping.build_id.as_ref().map(|id| &id[..]) {
            return None;
        }
        let (endian, mut parts) = (file.endian(), Vec::new());
        for part in file.elf_program_headers().iter().filter(|part| part.p_type(endian) == elf::PT_LOAD) {
            parts.push([part.p_offset(endian), part.p_filesz(endian), part.p_vaddr(endian)]);
        }
        let symbols = file.symbols().chain(file.dynamic_symbols());
        let function = |symbol: object::read::elf::ElfSymbol64<'_, '_, Endianness>| {
            let is_function = symbol.is_definition() && symbol.kind() == SymbolKind::Text;
            let (start, name) = (symbol.address(), name(symbol.name().ok()?));
            is_function.then(|| Symbol { start, end: start.saturating_add(symbol.size().max(1)), name })
        };
        Some(Self { functions: Symbols::new(symbols.filter_map(function).collect()), parts })
    }

    /// Returns the name of the function at a place in the file.
    fn at(&self, offset: u64) -> Option<&str> {
        let inside =
            |[start, len, _]: &&[u64; 3]| offset.checked_sub(*start).is_some_and(|offset| offset < *len);
        let [start, _, address] = self.parts.iter().find(inside)?;
        self.functions.at(address.checked_add(offset - start)?)
    }
}

/// Reads a regular file. Opening what is none does nothing to it.
fn read(path: &str) -> io::Result<Vec<u8>> {
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() || found.len() > MAX_SIZE {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut bytes = Vec::new();
    file.take(MAX_SIZE).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Names the functions of a guest.
#[derive(Debug)]
pub struct Functions {
    kernel: Symbols,
    processes: HashMap<u32, Vec<Mapping>>,
    files: HashMap<(String, Option<[u8; 20]>), Option<Program>>,
    reads_files: bool,
}

impl Functions {
    /// Names functions of a kernel with these symbols, as in `/proc/kallsyms`, and of programs, if their files may be
    /// read.
    pub fn new(kernel: &str, reads_files: bool) -> Self {
        let symbol = |line: &str| {
            let mut words = line.split(' ');
            let start = u64::from_str_radix(words.next()?, 16).ok()?;
            let is_function = words.next()?.eq_ignore_ascii_case("t");
            is_function.then(|| Some(Symbol { start, end: u64::MAX, name: words.next()?.to_owned() }))?
        };
        let kernel = Symbols::new(kernel.lines().filter_map(symbol).collect());
        Self { kernel, processes: HashMap::new(), files: HashMap::new(), reads_files }
    }

    /// Returns the names of a sample's frames, from the process to the function in which it is.
    pub fn frames(&mut self, sample: &Sample) -> Vec<String> {
        for mapping in &sample.mappings {
            self.add(mapping);
        }
        let process = sample.task.as_ref().map(|task| task.process);
        let mut frames = vec![match &sample.task {
            Some(task) => name(&format!("{}-{}", task.name, task.process)),
            None => format!("cr3-{:x}", sample.table),
        }];
        let own = sample.is_user.then_some(&sample.instruction);
        let user = sample.user.iter().rev().chain(own);
        frames.extend(user.map(|address| self.of_program(process, *address)));
        if !sample.is_user {
            let kernel = sample.kernel.iter().rev().chain([&sample.instruction]);
            frames.extend(kernel.map(|address| of_kernel(self.kernel.at(*address).unwrap_or(UNKNOWN))));
        }
        frames
    }

    fn add(&mut self, mapping: &Mapping) {
        let is_new = !self.processes.contains_key(&mapping.process);
        if is_new && self.processes.len() >= MAX_PROCESSES {
            self.processes.clear();
        }
        let mappings = self.processes.entry(mapping.process).or_default();
        let end = |mapping: &Mapping| mapping.start.saturating_add(mapping.len);
        mappings.retain(|other| end(other) <= mapping.start || end(mapping) <= other.start);
        if mappings.len() >= MAX_MAPPINGS {
            mappings.clear();
        }
        mappings.push(mapping.clone());
    }

    /// Returns the name of a program's function, or else that of its file.
    fn of_program(&mut self, process: Option<u32>, address: u64) -> String {
        let mappings = process.and_then(|process| self.processes.get(&process));
        let offset =
            |mapping: &Mapping| address.checked_sub(mapping.start).filter(|offset| *offset < mapping.len);
        let found = mappings
            .and_then(|mappings| mappings.iter().find_map(|mapping| Some((mapping, offset(mapping)?))));
        let Some((mapping, offset)) = found else { return UNKNOWN.to_owned() };
        let key = (mapping.path.clone(), mapping.build_id);
        if !self.files.contains_key(&key) && self.files.len() >= MAX_FILES {
            self.files.clear();
        }
        let program = self.files.entry(key);
        let program = program.or_insert_with(|| self.reads_files.then(|| Program::read(mapping)).flatten());
        let function = program.as_ref().and_then(|program| program.at(offset.checked_add(mapping.offset)?));
        let file = || name(&format!("[{}]", mapping.path.rsplit('/').next().unwrap_or_default()));
        function.map_or_else(file, str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use tally_machine::Task;

    use super::*;

    const KERNEL: &str =
        "ffffffff81000000 T _text\nffffffff81000010 t sys_read\nffffffff81000020 D jiffies\n";

    #[inline(never)]
    fn a_function_of_this_program() {}

    /// Returns where this program has mapped one of its functions, as its kernel says it.
    fn own_mapping(address: u64) -> Mapping {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let mut mappings = maps.lines().map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let (start, end) = words[0].split_once('-').unwrap();
            let (start, path) = (number(start), words.get(5).unwrap_or(&"").to_string());
            let (len, offset) = (number(end) - start, number(words[2]));
            Mapping { process: 7, start, len, offset, path, build_id: None }
        });
        mappings.find(|mapping| (mapping.start..mapping.start + mapping.len).contains(&address)).unwrap()
    }

    fn sample(is_user: bool, instruction: u64, mappings: Vec<Mapping>) -> Sample {
        let task = Some(Task { process: 7, thread: 8, name: "a;b".into() });
        let (time, vcpu, period, table, kernel, user) = (0, 0, 1, 0, Vec::new(), Vec::new());
        Sample { time, vcpu, is_user, instruction, period, table, task, kernel, user, mappings }
    }

    #[test]
    fn functions_of_the_kernel_are_named_by_its_symbols() {
        let mut functions = Functions::new(KERNEL, true);
        let user = vec![0x40_0000];
        let sample = Sample { user, ..sample(false, 0xffff_ffff_8100_0025, Vec::new()) };
        assert_eq!(functions.frames(&sample), ["a_b-7", UNKNOWN, "sys_read_[k]"]);
    }

    #[test]
    fn functions_of_a_program_are_named_by_its_file_if_it_is_the_same() {
        let address = a_function_of_this_program as *const () as u64;
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let file = ElfFile64::<Endianness>::parse(&*bytes).unwrap();
        let build_id = file.build_id().unwrap().map(|id| *id.first_chunk().unwrap());
        let own = Mapping { build_id, ..own_mapping(address) };
        let frame = |mapping: &Mapping, reads_files| {
            let mut functions = Functions::new(KERNEL, reads_files);
            functions.frames(&sample(true, address, vec![mapping.clone()])).pop().unwrap()
        };
        let named = frame(&own, true);
        assert!(named.contains("a_function_of_this_program"), "{named}");
        let file = format!("[{}]", own.path.rsplit('/').next().unwrap());
        let other = Mapping { build_id: Some([1; 20]), ..own.clone() };
        assert_eq!([frame(&own, false), frame(&other, true)], [file.clone(), file]);
        let device = Mapping { path: "/dev/zero".into(), ..own };
        assert_eq!(frame(&device, true), "[zero]");
    }

    #[test]
    fn a_later_mapping_replaces_what_was_there() {
        let mut functions = Functions::new(KERNEL, false);
        let mapping = |path: &str, start| {
            let (process, len, offset, build_id) = (7, 0x2000, 0, None);
            Mapping { process, start, len, offset, path: path.into(), build_id }
        };
        let first = sample(true, 0x40_1000, vec![mapping("/bin/old", 0x40_0000)]);
        assert_eq!(functions.frames(&first)[1..], ["[old]"]);
        let second = sample(true, 0x40_1000, vec![mapping("/bin/new", 0x40_1000)]);
        assert_eq!(functions.frames(&second)[1..], ["[new]"]);
        assert_eq!(functions.frames(&sample(true, 0x40_0000, Vec::new()))[1..], [UNKNOWN]);
    }
}
