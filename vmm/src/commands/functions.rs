//! Names of the functions in samples: the kernel's by its symbols, and programs' by their files, as far as these are on
//! this host. What a guest, or another user's VM, says of files is untrusted: only regular files of ordinary file
//! systems are opened, and only what is the file that was mapped by its build id, or else by its size, gives names.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;

use devices::fs::is_of_a_kernel;
use object::read::elf::{ElfFile64, ElfSymbol64, ProgramHeader};
use object::{Endianness, Object, ObjectSymbol, SymbolKind, elf};
use rustix::fs::{Mode, OFlags, fstat};
use tally_machine::{Function, Mapping, Sample};

use crate::commands::client::GuestSymbols;
use crate::run::flamegraph::stacks::{name, of_kernel};

/// Maximum size of what is remembered of mappings, and number of files: a guest can make up any number.
const MAX_KEPT: usize = 32 << 20;
const MAX_FILES: usize = 256;
/// What a mapping takes beside its path.
const MAPPING_SIZE: usize = 128;
/// Maximum size of a file whose symbols are read, and of all of them; and number of symbols of one.
const MAX_SIZE: u64 = 512 << 20;
const MAX_READ: u64 = 2 << 30;
const MAX_SYMBOLS: usize = 1 << 20;
/// Maximum number and size of the functions of a kernel that are kept if they are asked for one by one.
const MAX_ASKED: usize = 1 << 14;
const MAX_ASKED_SIZE: usize = 1 << 20;
/// What is not known.
const UNKNOWN: &str = "[unknown]";

/// Functions, in the order of their addresses.
#[derive(Debug, Default)]
pub struct Symbols(Vec<Symbol>);

#[derive(Debug)]
struct Symbol {
    start: u64,
    /// The address behind it.
    end: u64,
    name: Box<str>,
}

impl Symbols {
    /// Takes symbols, of which those without a size end where the next one begins.
    fn new(mut symbols: Vec<Symbol>) -> Self {
        symbols.sort_by_key(|symbol| (symbol.start, std::cmp::Reverse(symbol.end)));
        // Of several names of a function the longest function's is the first.
        symbols.dedup_by_key(|symbol| symbol.start);
        let mut next = u64::MAX;
        for symbol in symbols.iter_mut().rev() {
            if symbol.end <= symbol.start {
                symbol.end = next;
            }
            next = symbol.start;
        }
        Self(symbols)
    }

    /// Returns the functions of a kernel and of its modules.
    pub fn of_kernel(symbols: &GuestSymbols) -> Self {
        let mut lines: BTreeMap<&str, Vec<Line>> = BTreeMap::new();
        for line in symbols.text.lines().take(MAX_SYMBOLS).filter_map(Line::read) {
            lines.entry(line.module).or_default().push(line);
        }
        // What is behind the kernel's last symbol is none of its functions.
        let mut functions = functions("", lines.remove("").unwrap_or_default(), 0..0);
        for module in &symbols.modules {
            let code = module.start..module.start.saturating_add(module.len);
            let mut lines = lines.remove(&*module.name).unwrap_or_default();
            lines.retain(|line| code.contains(&line.start));
            functions.extend(self::functions(&format!("[{}]", module.name), lines, code));
        }
        Self::new(functions)
    }

    /// Adds a function.
    fn add(&mut self, symbol: Symbol) {
        let before = self.0.partition_point(|other| other.start <= symbol.start);
        self.0.insert(before, symbol);
    }

    /// Returns the name of the function at an address.
    fn at(&self, address: u64) -> Option<&str> {
        /// There may be smaller functions in it.
        const WITHIN: usize = 8;
        let behind = self.0.partition_point(|symbol| symbol.start <= address);
        let mut before = self.0[..behind].iter().rev().take(WITHIN);
        before.find(|symbol| address < symbol.end).map(|symbol| &*symbol.name)
    }
}

/// A line of `/proc/kallsyms`.
struct Line<'a> {
    start: u64,
    /// The symbol's name, if it is a function's.
    name: Option<&'a str>,
    /// The module's name; empty if it is the kernel's own symbol.
    module: &'a str,
}

impl<'a> Line<'a> {
    fn read(line: &'a str) -> Option<Self> {
        let (symbol, module) = line.split_once('\t').unwrap_or((line, ""));
        let mut words = symbol.split(' ');
        let start = u64::from_str_radix(words.next()?, 16).ok()?;
        let is_function = matches!(words.next()?, "t" | "T" | "w" | "W");
        let module = module.trim_start_matches('[').trim_end_matches(']');
        Some(Self { start, name: words.next().filter(|_| is_function), module })
    }
}

/// Returns the functions among the symbols of the kernel or of a module. Each ends where the next symbol begins, of a
/// function or of data, and the last one with the module's `code`. What is before the first has the module's name.
fn functions(module: &str, mut lines: Vec<Line>, code: Range<u64>) -> Vec<Symbol> {
    lines.sort_by_key(|line| (line.start, line.name.is_some()));
    let (mut functions, mut next) = (Vec::new(), code.end);
    for Line { start, name, .. } in lines.into_iter().rev() {
        if let Some(name) = name.filter(|_| next > start) {
            let name = if module.is_empty() { name.to_owned() } else { format!("{name} {module}") };
            functions.push(Symbol { start, end: next, name: name.into() });
        }
        next = start;
    }
    if next > code.start && !code.is_empty() {
        functions.push(Symbol { start: code.start, end: next, name: module.into() });
    }
    functions
}

/// A file with functions.
#[derive(Debug)]
struct Program {
    size: u64,
    build_id: Option<Box<[u8]>>,
    functions: Symbols,
    /// Parts of the file: where each begins, how long it is, and its address.
    parts: Vec<[u64; 3]>,
}

impl Program {
    /// Reads a file, if it is not too large. What was read of it is subtracted from `left`.
    fn read(path: &str, left: &mut u64) -> Option<Self> {
        let bytes = read(path, MAX_SIZE.min(*left)).ok()?;
        *left -= bytes.len() as u64;
        let file = ElfFile64::<Endianness>::parse(&*bytes).ok()?;
        let (endian, mut parts) = (file.endian(), Vec::new());
        for part in file.elf_program_headers().iter().filter(|part| part.p_type(endian) == elf::PT_LOAD) {
            parts.push([part.p_offset(endian), part.p_filesz(endian), part.p_vaddr(endian)]);
        }
        let symbols = file.symbols().chain(file.dynamic_symbols());
        let function = |symbol: ElfSymbol64<'_, '_, Endianness>| {
            let is_function = symbol.is_definition() && symbol.kind() == SymbolKind::Text;
            let (start, name) = (symbol.address(), name(symbol.name().ok()?).into());
            is_function.then(|| Symbol { start, end: start.saturating_add(symbol.size()), name })
        };
        Some(Self {
            size: bytes.len() as u64,
            build_id: file.build_id().ok()?.map(Into::into),
            functions: Symbols::new(symbols.filter_map(function).take(MAX_SYMBOLS).collect()),
            parts,
        })
    }

    /// Returns whether this is the file that was mapped.
    fn is_of(&self, mapping: &Mapping) -> bool {
        match (&self.build_id, &mapping.build_id) {
            (Some(id), Some(mapped)) => **id == mapped[..],
            (None, None) => self.size == mapping.size,
            _ => false,
        }
    }

    /// Returns the name of the function at a place in the file.
    fn at(&self, offset: u64) -> Option<&str> {
        let inside =
            |[start, len, _]: &&[u64; 3]| offset.checked_sub(*start).is_some_and(|offset| offset < *len);
        let [start, _, address] = self.parts.iter().find(inside)?;
        self.functions.at(address.checked_add(offset - start)?)
    }
}

/// Reads a regular file of at most this size. Nothing else is opened: to open a device can do something to it.
fn read(path: &str, most: u64) -> io::Result<Vec<u8>> {
    let refused = || io::Error::from(io::ErrorKind::InvalidInput);
    let place = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let found = fstat(&place)?;
    let is_regular = found.st_mode & libc::S_IFMT == libc::S_IFREG;
    if !is_regular || !u64::try_from(found.st_size).is_ok_and(|size| size <= most) || is_of_a_kernel(&place)?
    {
        return Err(refused());
    }
    let same = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&place));
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(same)?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Names the functions of a guest.
#[derive(Debug)]
pub struct Functions {
    /// Those of the kernel and its modules: all, or those that were asked for.
    kernel: Symbols,
    /// Size of the names of those that were asked for.
    asked_size: usize,
    /// What each has mapped, with the time of the sample that said so.
    processes: HashMap<u32, Vec<(u64, Mapping)>>,
    /// Size of what is remembered of processes.
    kept: usize,
    files: HashMap<String, Option<Program>>,
    /// How much of files may still be read.
    left: u64,
}

impl Functions {
    /// Names functions of a kernel, and of programs, if their files may be read.
    pub fn new(kernel: Symbols, reads_files: bool) -> Self {
        let left = if reads_files { MAX_READ } else { 0 };
        Self { kernel, asked_size: 0, processes: HashMap::new(), kept: 0, files: HashMap::new(), left }
    }

    /// Returns addresses in the kernel, which samples are at, whose functions have not been asked for.
    pub fn unknown(&self, samples: &[Sample]) -> Vec<u64> {
        let in_kernel = samples.iter().filter(|sample| !sample.is_user).map(|sample| sample.instruction);
        let unknown: BTreeSet<u64> = in_kernel.filter(|address| self.kernel.at(*address).is_none()).collect();
        unknown.into_iter().collect()
    }

    /// Adds functions of the kernel that were asked for at these addresses.
    pub fn add_of_kernel(&mut self, addresses: &[u64], functions: Vec<Function>) {
        if self.kernel.0.len() > MAX_ASKED || self.asked_size > MAX_ASKED_SIZE {
            // They are asked for once more.
            (self.kernel, self.asked_size) = (Symbols::default(), 0);
        }
        for Function { start, end, name } in functions {
            // Several of the addresses may be in it.
            if self.kernel.at(start).is_none() {
                self.asked_size += name.len();
                self.kernel.add(Symbol { start, end, name: name.into() });
            }
        }
        for address in addresses {
            if self.kernel.at(*address).is_none() {
                let end = address.saturating_add(1);
                self.kernel.add(Symbol { start: *address, end, name: UNKNOWN.into() });
            }
        }
    }

    /// Adds the functions of modules.
    pub fn add_modules(&mut self, symbols: &GuestSymbols) {
        let mut functions = std::mem::take(&mut self.kernel).0;
        functions.extend(Symbols::of_kernel(symbols).0);
        self.kernel = Symbols::new(functions);
    }

    /// Returns the name of a sample's thread, or else the address of its page tables.
    pub fn command(sample: &Sample) -> String {
        sample.task.as_ref().map_or_else(|| format!("cr3-{:x}", sample.table), |task| name(&task.name))
    }

    /// Returns the name of the function in which a sample is.
    pub fn function(&mut self, sample: &Sample) -> String {
        for mapping in &sample.mappings {
            self.add(sample.time, mapping);
        }
        if sample.is_user {
            self.of_program(sample.task.as_ref().map(|task| task.process), sample.instruction)
        } else {
            self.kernel_function(sample.instruction)
        }
    }

    /// Returns the names of a sample's frames, from the process to the function in which it is.
    pub fn frames(&mut self, sample: &Sample) -> Vec<String> {
        let innermost = self.function(sample);
        let process = sample.task.as_ref().map(|task| task.process);
        let number = process.map_or_else(String::new, |process| format!("-{process}"));
        let mut frames = vec![Self::command(sample) + &number];
        frames.extend(sample.user.iter().rev().map(|address| self.of_program(process, *address)));
        let kernel = sample.kernel.iter().rev().map(|address| of_kernel(&self.kernel_function(*address)));
        frames.extend(kernel);
        frames.push(if sample.is_user { innermost } else { of_kernel(&innermost) });
        frames
    }

    fn kernel_function(&self, address: u64) -> String {
        name(self.kernel.at(address).unwrap_or(UNKNOWN))
    }

    /// Takes a mapping in place of what was there earlier: samples of several vCPUs come in any order.
    fn add(&mut self, time: u64, mapping: &Mapping) {
        let size = |mapping: &Mapping| MAPPING_SIZE + mapping.path.len();
        let end = |mapping: &Mapping| mapping.start.saturating_add(mapping.len);
        if self.kept > MAX_KEPT {
            // The VM says it once more, as it also remembers only so many.
            self.processes.clear();
            self.kept = 0;
        }
        let mappings = self.processes.entry(mapping.process).or_default();
        let overlaps = |other: &Mapping| end(other) > mapping.start && end(mapping) > other.start;
        if mappings.iter().any(|(later, other)| *later > time && overlaps(other)) {
            return;
        }
        let before = mappings.len();
        mappings.retain(|(_, other)| {
            self.kept -= if overlaps(other) { size(other) } else { 0 };
            !overlaps(other)
        });
        if mappings.len() < before {
            mappings.shrink_to_fit();
        }
        self.kept += size(mapping);
        mappings.push((time, mapping.clone()));
    }

    /// Returns the name of a program's function, or else that of its file.
    fn of_program(&mut self, process: Option<u32>, address: u64) -> String {
        let mappings = process.and_then(|process| self.processes.get(&process));
        let offset =
            |mapping: &Mapping| address.checked_sub(mapping.start).filter(|offset| *offset < mapping.len);
        let found = mappings
            .and_then(|mappings| mappings.iter().find_map(|(_, mapping)| Some((mapping, offset(mapping)?))));
        let Some((mapping, offset)) = found.filter(|(mapping, _)| !mapping.path.is_empty()) else {
            return UNKNOWN.to_owned();
        };
        if !self.files.contains_key(&mapping.path) && self.files.len() < MAX_FILES {
            let program = (self.left > 0).then(|| Program::read(&mapping.path, &mut self.left)).flatten();
            self.files.insert(mapping.path.clone(), program);
        }
        let program =
            self.files.get(&mapping.path).and_then(Option::as_ref).filter(|program| program.is_of(mapping));
        let function = program.and_then(|program| program.at(offset.checked_add(mapping.offset)?));
        let file = || name(&format!("[{}]", mapping.path.rsplit('/').next().unwrap_or_default()));
        function.map_or_else(file, str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use tally_machine::{Module, Task};

    use super::*;

    const KERNEL: &str = "ffffffff81000000 T _text
ffffffff81000010 t sys_read
ffffffff81000010 T alias
ffffffff81000020 W weak
ffffffff81000030 D jiffies
ffffffff81000040 T _etext
ffffffffc0000010 t fuse_read\t[fuse]
ffffffffc0000020 t fuse_write\t[fuse]
ffffffffc0008000 d fuse_data\t[fuse]
ffffffffc2000000 t gone\t[gone]
";

    fn kernel() -> Symbols {
        let module = |name: &str, start| Module { name: name.into(), start, len: 0x1000, size: 0x9000 };
        let modules = vec![module("fuse", 0xffff_ffff_c000_0000), module("stripped", 0xffff_ffff_c100_0000)];
        Symbols::of_kernel(&GuestSymbols { text: KERNEL.into(), modules })
    }

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
            Mapping { process: 7, start, len, offset, path, size: 0, build_id: None }
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
        let mut functions = Functions::new(kernel(), true);
        let of_kernel = |address: u64| sample(false, 0xffff_ffff_8100_0000 + address, Vec::new());
        let called = Sample { user: vec![0x40_0000], ..of_kernel(0x25) };
        assert_eq!(functions.frames(&called), ["a_b-7", UNKNOWN, "weak_[k]"]);
        assert!(["sys_read", "alias"].contains(&&*functions.function(&of_kernel(0x1f))));
        // Data, and what is behind all symbols.
        assert_eq!([0x30, 0x1000].map(|address| functions.function(&of_kernel(address))), [UNKNOWN; 2]);
    }

    #[test]
    fn functions_of_the_kernel_are_asked_for_once() {
        let mut functions = Functions::new(Symbols::default(), false);
        let at = |address: u64| sample(false, address, Vec::new());
        let samples = [at(0x17), at(0x10), at(0x40), at(0x17), sample(true, 0x50, Vec::new())];
        let asked = functions.unknown(&samples);
        assert_eq!(asked, [0x10, 0x17, 0x40]);
        let read = || Function { start: 0x10, end: 0x20, name: "sys_read".into() };
        functions.add_of_kernel(&asked, vec![read(), read()]);
        let named = [0x10, 0x1f, 0x40].map(|address| functions.function(&at(address)));
        assert_eq!(named, ["sys_read", "sys_read", UNKNOWN]);
        assert_eq!(functions.kernel.0.len(), 2);
        assert_eq!(functions.unknown(&[at(0x1f), at(0x40), at(0x41)]), [0x41]);
        // What is kept has an end, whatever is answered.
        for address in 0..2 * MAX_ASKED as u64 {
            let endless = Function { start: u64::MAX, end: 0, name: "x".repeat(200) };
            functions.add_of_kernel(&[address], vec![endless]);
            assert!(functions.unknown(&[at(address)]).is_empty());
        }
        assert!(functions.kernel.0.len() <= MAX_ASKED + 2);
    }

    #[test]
    fn functions_of_modules_are_named_within_the_modules_code() {
        let mut functions = Functions::new(kernel(), true);
        let mut of_module =
            |address: u64| functions.function(&sample(false, 0xffff_ffff_c000_0000 + address, Vec::new()));
        let expected = ["[fuse]", "fuse_read [fuse]", "fuse_write [fuse]", "[stripped]"];
        assert_eq!([0, 0x1f, 0xfff, 0x100_0fff].map(&mut of_module), expected);
        // Data of a module, between modules, and a module that is not in the list.
        assert_eq!([0x1000, 0x8000, 0x101_0000, 0x200_0000].map(&mut of_module), [UNKNOWN; 4]);
    }

    #[test]
    fn functions_of_a_module_that_is_loaded_later_are_named_as_well() {
        let mut functions = Functions::new(kernel(), true);
        let at = |address: u64| sample(false, 0xffff_ffff_c200_0000 + address, Vec::new());
        assert_eq!(functions.function(&at(0x10)), UNKNOWN);
        let module = Module { name: "late".into(), start: 0xffff_ffff_c200_0000, len: 0x1000, size: 0x1000 };
        let text = "ffffffffc2000010 t late_read\t[late]\n".into();
        functions.add_modules(&GuestSymbols { text, modules: vec![module] });
        assert_eq!([0x10, 0x1000].map(|at_| functions.function(&at(at_))), ["late_read [late]", UNKNOWN]);
        assert_eq!(functions.function(&sample(false, 0xffff_ffff_c000_0010, Vec::new())), "fuse_read [fuse]");
    }

    #[test]
    fn functions_of_a_program_are_named_by_its_file_if_it_is_the_same() {
        let address = a_function_of_this_program as *const () as u64;
        let bytes = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let file = ElfFile64::<Endianness>::parse(&*bytes).unwrap();
        let build_id = file.build_id().unwrap().map(|id| *id.first_chunk().unwrap());
        let own = Mapping { build_id, ..own_mapping(address) };
        let frame = |mapping: &Mapping, reads_files| {
            let mut functions = Functions::new(kernel(), reads_files);
            functions.frames(&sample(true, address, vec![mapping.clone()])).pop().unwrap()
        };
        let named = frame(&own, true);
        assert!(named.contains("a_function_of_this_program"), "{named}");
        let file = format!("[{}]", own.path.rsplit('/').next().unwrap());
        let other = Mapping { build_id: Some([1; 20]), ..own.clone() };
        assert_eq!([frame(&own, false), frame(&other, true)], [file.clone(), file]);
        for special in ["/dev/zero", "/proc/self/status", "/sys/kernel/notes", "/"] {
            let special = Mapping { path: special.into(), build_id: None, ..own.clone() };
            assert!(frame(&special, true).starts_with('['), "{special:?}");
            assert!(read(&special.path, MAX_SIZE).is_err(), "{special:?}");
        }
    }

    #[test]
    fn a_function_goes_to_the_next_one_or_as_far_as_its_size_says() {
        let symbol = |start, end, name: &str| Symbol { start, end, name: name.into() };
        let symbols = Symbols::new(vec![
            symbol(0x40, 0x40, "last"),
            symbol(0x10, 0x10, "alias"),
            symbol(0x10, 0x30, "large"),
            symbol(0x18, 0x1c, "within"),
            symbol(0x34, 0x34, "assembly"),
        ]);
        let at = |address| symbols.at(address).unwrap_or_default();
        let expected = ["", "large", "within", "large", "", "assembly", "last"];
        assert_eq!([0xf, 0x10, 0x18, 0x1c, 0x30, 0x3f, 0x1000].map(at), expected);
    }

    #[test]
    fn a_file_without_a_build_id_is_known_by_its_size() {
        let program = |build_id: Option<&[u8]>| {
            let (functions, parts) = (Symbols::default(), Vec::new());
            Program { size: 7, build_id: build_id.map(Into::into), functions, parts }
        };
        let mapping = |size, build_id| Mapping {
            size,
            build_id,
            ..own_mapping(a_function_of_this_program as *const () as u64)
        };
        assert!(program(None).is_of(&mapping(7, None)) && !program(None).is_of(&mapping(8, None)));
        assert!(program(Some(&[1; 20])).is_of(&mapping(8, Some([1; 20]))));
        assert!(
            !program(Some(&[1; 20])).is_of(&mapping(7, None))
                && !program(None).is_of(&mapping(7, Some([1; 20])))
        );
    }

    #[test]
    fn a_later_mapping_replaces_what_was_there() {
        let mut functions = Functions::new(kernel(), false);
        let mapping = |path: &str, start| {
            let (process, len, offset, size, build_id) = (7, 0x2000, 0, 0, None);
            Mapping { process, start, len, offset, path: path.into(), size, build_id }
        };
        let first = sample(true, 0x40_1000, vec![mapping("/bin/old", 0x40_0000)]);
        assert_eq!(functions.frames(&first)[1..], ["[old]"]);
        let second = sample(true, 0x40_1000, vec![mapping("/bin/new", 0x40_1000)]);
        assert_eq!(functions.frames(&second)[1..], ["[new]"]);
        assert_eq!(functions.frames(&sample(true, 0x40_0000, Vec::new()))[1..], [UNKNOWN]);
        // Code without a file.
        let third = sample(true, 0x40_1000, vec![mapping("", 0x40_1000)]);
        assert_eq!(functions.frames(&third)[1..], [UNKNOWN]);
        assert_eq!(functions.kept, MAPPING_SIZE);
    }
}
