//! A guest's Linux, as far as its memory says it: its symbols, which of its threads a vCPU runs, and whose code that
//! is. The guest may have written anything there, and may change it at any time: what does not fit together is not
//! there.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::btf::{self, Types};
use super::kallsyms::{DIGITS, Effort, Function, SIZES, Symbols, Tables};
use super::mappings::{Mappings, Region};
use super::modules::{Listed, Module};
use super::sample::{Mapping, Task};
use crate::arch::{AddressSpace, Look, Unwinder};

/// Maximum size of the part of a memory where symbols are looked for: a kernel is not loaded higher.
const SEARCHED: u64 = 4 << 30;
/// Size of the parts in which a memory is read.
const PART: usize = 1 << 20;
/// Maximum number of places that look like a table of tokens, and of those that are one and belong to no symbols.
const MAX_LOOKS: usize = 1000;
const MAX_ATTEMPTS: usize = 8;
const PAGE: usize = 4 << 10;
/// More than the size of a table of tokens.
const TOKENS: usize = 16 << 10;

/// A guest's kernel that says which thread a vCPU runs.
#[derive(Debug)]
pub struct GuestLinux {
    space: AddressSpace,
    /// Where the address of the thread's structure is, for each vCPU, unless that is in a register.
    current: Vec<Option<GuestAddress>>,
    thread: u64,
    process: u64,
    name: u64,
    stack: u64,
    /// Which files its programs have mapped, if it says so.
    mappings: Option<Mappings>,
    /// Where it describes the page at address 0, and the size of a description.
    pages: Option<(u64, u64)>,
    /// Where it lists its modules, if it says so.
    modules: Option<Listed>,
    /// How its callers are found, if that is wanted.
    pub unwinder: Option<Unwinder>,
}

/// Names functions of a guest's kernel by what its memory says of them when it is asked.
#[derive(Debug)]
pub struct KernelFunctions {
    tables: Tables,
    linux: Option<Arc<GuestLinux>>,
}

impl KernelFunctions {
    /// Names functions by these tables, and by the kernel's list of its modules.
    pub fn new(tables: Tables, linux: Option<Arc<GuestLinux>>) -> Self {
        Self { tables, linux }
    }

    /// Returns the functions at these addresses, as far as they have names.
    pub fn at(&self, memory: &GuestMemoryMmap, addresses: &[u64]) -> Vec<Function> {
        let start = self.tables.address.wrapping_sub(AddressSpace::OF_KERNEL);
        let read = |offset: usize, bytes: &mut [u8]| {
            memory.read_slice(bytes, GuestAddress(start.checked_add(offset as u64)?)).ok()
        };
        let (mut found, mut others) = (Vec::new(), Vec::new());
        for address in addresses {
            match self.tables.function(*address, &read) {
                Some(function) => found.push(function),
                None => others.push(*address),
            }
        }
        if let Some(linux) = self.linux.as_ref().filter(|_| !others.is_empty()) {
            let read = |address: u64, bytes: &mut [u8]| linux.space.read(memory, address, bytes);
            let modules = linux.modules.as_ref().map(|listed| listed.read(&read));
            found.extend(modules.into_iter().flat_map(|modules| modules.functions(&others, &read)));
        }
        found
    }

    /// Returns the modules that the kernel has now, and the text that `/proc/kallsyms` has for their symbols.
    pub fn modules(&self, memory: &GuestMemoryMmap) -> (Vec<Module>, String) {
        let Some((linux, listed)) =
            self.linux.as_ref().and_then(|linux| Some((linux, linux.modules.as_ref()?)))
        else {
            return Default::default();
        };
        let read = |address: u64, bytes: &mut [u8]| linux.space.read(memory, address, bytes);
        let modules = listed.read(&read);
        (modules.iter().cloned().collect(), modules.text(&read))
    }
}

/// A thread that a vCPU runs.
pub struct Running {
    /// The thread.
    pub task: Task,
    /// Address of the kernel's description of it.
    address: u64,
    /// Lowest address of its kernel stack.
    pub stack: u64,
}

/// Finds the kernel's symbols in a memory.
pub fn symbols(memory: &GuestMemoryMmap) -> Option<Symbols> {
    let (mut looks, mut attempts, mut effort) = (0, 0, Effort::default());
    for region in memory.iter().filter(|region| region.start_addr().0 < SEARCHED) {
        let (start, end) = (region.start_addr().0, region.start_addr().0 + region.len());
        let mut at = start;
        let mut part = vec![0; PART + DIGITS.len()];
        while at < end.min(SEARCHED) {
            let len = part.len().min(usize::try_from(end - at).ok()?);
            memory.read_slice(&mut part[..len], GuestAddress(at)).ok()?;
            for found in memchr::memmem::find_iter(&part[..len], DIGITS) {
                let digits = at + found as u64;
                looks += 1;
                if looks > MAX_LOOKS || attempts > MAX_ATTEMPTS {
                    return None;
                }
                if !around(memory, start..end, digits, TOKENS, TOKENS, |bytes, at, _| {
                    Symbols::has_tokens(bytes, at)
                })? {
                    continue;
                }
                attempts += 1;
                for [before, behind] in SIZES {
                    let read = |bytes: &[u8], at, address| Symbols::read(bytes, at, address, &mut effort);
                    let symbols = around(memory, start..end, digits, before, behind, read)?;
                    if symbols.is_some() {
                        return symbols;
                    }
                }
            }
            at += PART as u64;
        }
    }
    None
}

/// Reads a part of the memory around the digits at an address, and calls `look` with it, with their offset, and with
/// the kernel's address of the part. Linux maps itself at this distance from where it is linked to be loaded, and Tally
/// loads it there.
fn around<T>(
    memory: &GuestMemoryMmap,
    region: std::ops::Range<u64>,
    digits: u64,
    before: usize,
    behind: usize,
    look: impl FnOnce(&[u8], usize, u64) -> T,
) -> Option<T> {
    let start = (digits.saturating_sub(before as u64) & !7).max(region.start);
    let end = digits.saturating_add(behind as u64).min(region.end);
    let mut bytes = vec![0; usize::try_from(end - start).ok()?];
    memory.read_slice(&mut bytes, GuestAddress(start)).ok()?;
    Some(look(&bytes, usize::try_from(digits - start).ok()?, start.wrapping_add(AddressSpace::OF_KERNEL)))
}

impl GuestLinux {
    /// Finds out how a kernel with these symbols says which thread a vCPU runs, and, if that is wanted, who called its
    /// functions. `space` are the page tables of a vCPU.
    pub fn find(
        symbols: &Symbols,
        space: AddressSpace,
        memory: &GuestMemoryMmap,
        vcpus: u8,
        has_chains: bool,
    ) -> Option<Self> {
        let symbol = |name: &str| symbols.address(name);
        let space = space.of_kernel(memory, symbol)?;
        let current = if Look::KNOWS_THREAD { Vec::new() } else { current(symbol, space, memory, vcpus)? };
        let types = types(symbols, space, memory)?;
        let types = Types::read(&types)?;
        let page = types.size("page").filter(|size| *size > 0);
        let offset = |member| types.offset("task_struct", member);
        let modules = symbol("modules").and_then(|head| Listed::find(&types, head));
        Some(Self {
            space,
            current,
            thread: offset("pid")?,
            process: offset("tgid")?,
            name: offset("comm")?,
            stack: offset("stack")?,
            mappings: version(symbols, space, memory).and_then(|version| Mappings::find(&types, version)),
            pages: page.and_then(|size| Some((space.pages(memory, symbol, size)?, size))),
            unwinder: has_chains.then(|| unwinder(symbols, &types, modules.as_ref(), space, memory)),
            modules,
        })
    }

    /// Returns the thread that a vCPU runs.
    pub fn running(&self, memory: &GuestMemoryMmap, vcpu: u8, look: &Look) -> Option<Running> {
        let in_memory = || memory.read_obj((*self.current.get(usize::from(vcpu))?)?).ok();
        let task = look.thread().or_else(in_memory)?;
        let read = |offset: u64, bytes: &mut [u8]| self.space.read(memory, task.wrapping_add(offset), bytes);
        let number = |offset| {
            let mut bytes = [0; 4];
            read(offset, &mut bytes)?;
            Some(u32::from_le_bytes(bytes))
        };
        let mut name = [0; 16];
        read(self.name, &mut name)?;
        let mut stack = [0; 8];
        read(self.stack, &mut stack)?;
        Some(Running {
            task: Task { process: number(self.process)?, thread: number(self.thread)?, name: text(&name) },
            address: task,
            stack: u64::from_le_bytes(stack),
        })
    }

    /// Returns whether the callers of its functions are found.
    pub fn has_callers(&self) -> bool {
        self.unwinder.as_ref().is_some_and(Unwinder::is_known)
    }

    /// Returns whether it says which files its programs have mapped.
    pub fn has_mappings(&self) -> bool {
        self.mappings.is_some()
    }

    /// Returns the region of a running thread's process in which an address is.
    pub fn region(&self, memory: &GuestMemoryMmap, running: &Running, address: u64) -> Option<Region> {
        let read = |address: u64, bytes: &mut [u8]| self.space.read(memory, address, bytes);
        self.mappings.as_ref()?.region(&read, running.address, address)
    }

    /// Returns what a region of a running thread's process is: a part of a file, or memory without one.
    pub fn mapping(&self, memory: &GuestMemoryMmap, running: &Running, region: &Region) -> Option<Mapping> {
        let mapping = Mapping {
            process: running.task.process,
            start: region.start,
            len: region.end - region.start,
            offset: region.offset,
            path: String::new(),
            size: 0,
            build_id: None,
        };
        if region.file == 0 {
            return Some(mapping);
        }
        let mappings = self.mappings.as_ref()?;
        let read = |address: u64, bytes: &mut [u8]| self.space.read(memory, address, bytes);
        // A file without a path, such as one in memory, is no other file.
        let Some(path) = mappings.path(&read, running.address, region.file) else { return Some(mapping) };
        let page = mappings.first_page(&read, region.file).and_then(|page| self.page(memory, page));
        Some(Mapping {
            path: text(&path),
            size: mappings.size(&read, region.file).unwrap_or(0),
            build_id: page.and_then(|page| elf_build_id(&page)),
            ..mapping
        })
    }

    /// Returns the content of the page with a description at this address.
    fn page(&self, memory: &GuestMemoryMmap, description: u64) -> Option<[u8; PAGE]> {
        let (start, size) = self.pages?;
        let number = description.checked_sub(start)?.checked_div(size)?;
        let mut page = [0; PAGE];
        memory.read_slice(&mut page, GuestAddress(number.checked_mul(PAGE as u64)?)).ok()?;
        Some(page)
    }
}

/// Returns where the address of the thread's structure is, for each vCPU.
fn current(
    symbol: impl Fn(&str) -> Option<u64>,
    space: AddressSpace,
    memory: &GuestMemoryMmap,
    vcpus: u8,
) -> Option<Vec<Option<GuestAddress>>> {
    // Linux 6.2 to 6.14 have it at the beginning of a structure.
    let current = symbol("current_task").or_else(|| symbol("pcpu_hot"))?;
    let offsets = symbol("__per_cpu_offset")?;
    let of_vcpu = |vcpu: u8| {
        let offset = space.read_word(memory, offsets.wrapping_add(8 * u64::from(vcpu)))?;
        space.translate(memory, current.wrapping_add(offset))
    };
    Some((0..vcpus).map(of_vcpu).collect())
}

/// Returns the build id of a program or a library, if it is in the first page of the file.
fn elf_build_id(page: &[u8]) -> Option<[u8; 20]> {
    const SEGMENT: usize = 56;
    const MAX_SEGMENTS: usize = 64;
    const NOTE: u64 = 4;
    let number = |at: usize, len: usize| {
        let bytes = page.get(at..at.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    };
    let word = |at: usize| usize::try_from(number(at, 8)?).ok();
    // 64 bits, little-endian.
    let (segments, count) = (page.starts_with(b"\x7fELF\x02\x01").then(|| word(32))??, number(56, 2)?);
    (0..usize::try_from(count).ok()?.min(MAX_SEGMENTS)).find_map(|index| {
        let segment = segments.checked_add(SEGMENT * index)?;
        let (kind, offset, size) =
            (number(segment, 4)?, word(segment.checked_add(8)?)?, word(segment.checked_add(32)?)?);
        let notes = page.get(offset..offset.checked_add(size)?.min(page.len()))?;
        (kind == NOTE).then(|| build_id_of(notes))?
    })
}

/// Returns the kernel's build id, by which its debug information is found.
pub fn build_id(symbols: &Symbols, space: AddressSpace, memory: &GuestMemoryMmap) -> Option<[u8; 20]> {
    /// All notes of a kernel are far shorter.
    const MAX_NOTES: u64 = 16 << 10;
    let address = |name: &str| symbols.address(name);
    let space = space.of_kernel(memory, address)?;
    let (start, stop) = (address("__start_notes")?, address("__stop_notes")?);
    let mut notes = vec![0; usize::try_from(stop.checked_sub(start)?.min(MAX_NOTES)).ok()?];
    space.read(memory, start, &mut notes)?;
    build_id_of(&notes)
}

/// Returns the build id that is one of these notes (ELF's): length of the name, length of the content, type, name,
/// content.
fn build_id_of(notes: &[u8]) -> Option<[u8; 20]> {
    const BUILD_ID: u32 = 3;
    let mut rest = notes;
    loop {
        let (header, behind) = rest.split_at_checked(12)?;
        let ([name, content, kind], _) = header.as_chunks::<4>() else { unreachable!("it has three words") };
        let padded =
            |len: &[u8; 4]| usize::try_from(u32::from_le_bytes(*len).checked_next_multiple_of(4)?).ok();
        let (name, behind) = behind.split_at_checked(padded(name)?)?;
        let (content, behind) = behind.split_at_checked(padded(content)?)?;
        if name == b"GNU\0" && u32::from_le_bytes(*kind) == BUILD_ID {
            return content.first_chunk().copied();
        }
        rest = behind;
    }
}

/// Returns how a kernel with these symbols and types keeps its callers.
fn unwinder(
    symbols: &Symbols,
    types: &Types,
    modules: Option<&Listed>,
    space: AddressSpace,
    memory: &GuestMemoryMmap,
) -> Unwinder {
    let symbol = |name: &str| symbols.address(name);
    let bit = |structure: &str, member: &str| types.bit(structure, member);
    let read = |address: u64, bytes: &mut [u8]| space.read(memory, address, bytes);
    let places = modules.map(|listed| listed.read(&read).places()).unwrap_or_default();
    Unwinder::find(&symbol, &bit, &places, &read)
}

/// Returns the modules of a kernel, and the text that `/proc/kallsyms` has for their symbols.
pub fn modules(
    symbols: &Symbols,
    space: AddressSpace,
    memory: &GuestMemoryMmap,
) -> Option<(Vec<Module>, String)> {
    let symbol = |name: &str| symbols.address(name);
    let space = space.of_kernel(memory, symbol)?;
    let types = types(symbols, space, memory)?;
    let read = |address: u64, bytes: &mut [u8]| space.read(memory, address, bytes);
    let modules = Listed::find(&Types::read(&types)?, symbol("modules")?)?.read(&read);
    Some((modules.iter().cloned().collect(), modules.text(&read)))
}

/// Returns the first two numbers of the kernel's version, from what it says of itself: `Linux version 6.12.1-...`.
fn version(symbols: &Symbols, space: AddressSpace, memory: &GuestMemoryMmap) -> Option<[u32; 2]> {
    let mut banner = [0; 32];
    space.read(memory, symbols.address("linux_banner")?, &mut banner)?;
    version_of(&banner)
}

fn version_of(banner: &[u8]) -> Option<[u32; 2]> {
    let rest = banner.strip_prefix(b"Linux version ")?;
    let mut numbers =
        rest.split(|byte| !byte.is_ascii_digit()).map(|digits| str::from_utf8(digits).ok()?.parse().ok());
    Some([numbers.next()??, numbers.next()??])
}

/// Returns the kernel's description of its types.
fn types(symbols: &Symbols, space: AddressSpace, memory: &GuestMemoryMmap) -> Option<Vec<u8>> {
    let [start, stop] = ["__start_BTF", "__stop_BTF"].map(|name| symbols.address(name));
    let (start, size) = (start?, stop?.checked_sub(start?)?);
    let size = usize::try_from(size.min(btf::MAX_SIZE)).ok()?;
    let mut bytes = vec![0; size];
    space.read(memory, start, &mut bytes)?;
    Some(bytes)
}

/// Returns the name of a thread or a file, which may end with a zero. A guest's control characters are replaced.
fn text(name: &[u8]) -> String {
    let bytes = name.iter().take_while(|byte| **byte != 0);
    bytes.map(|byte| if matches!(byte, b' '..=b'~') { char::from(*byte) } else { '?' }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recording::kallsyms::tests::{BASE, Order, tables};

    #[test]
    fn symbols_are_found_wherever_they_are_in_the_memory() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 8 << 20)]).expect("there is memory");
        assert_eq!(symbols(&memory), None);
        let given = [(0, "T_text"), (16, "tsys_read")];
        let (bytes, digits) = tables(&given, Order::OffsetsLast);
        // What looks like it is not always it, and it may lie in two parts.
        memory.write_slice(DIGITS, GuestAddress(0x1000)).expect("in memory");
        let at = (3 * PART - digits - 7) & !7;
        memory.write_slice(&bytes, GuestAddress(at as u64)).expect("in memory");
        let found = symbols(&memory).expect("they are there");
        assert_eq!(found.address("sys_read"), Some(BASE + 16));
    }

    #[test]
    fn a_build_id_is_found_among_other_notes() {
        let note = |name: &[u8], kind: u32, content: &[u8]| {
            let lengths = [name.len(), content.len()].map(|len| u32::try_from(len).unwrap().to_le_bytes());
            [&lengths.concat(), &kind.to_le_bytes()[..], name, content].concat()
        };
        let notes = [note(b"Xen\0", 3, &[1; 4]), note(b"GNU\0", 3, &[7; 20])].concat();
        assert_eq!(build_id_of(&notes), Some([7; 20]));
        assert_eq!(build_id_of(&notes[..50]), None);
        assert_eq!(build_id_of(&[0xff; 100]), None);
    }

    #[test]
    fn a_kernels_version_is_in_its_banner() {
        assert_eq!(version_of(b"Linux version 6.12.48+deb13-amd"), Some([6, 12]));
        assert_eq!(version_of(b"Linux version 7.0-rc1 (builder@"), Some([7, 0]));
        assert_eq!([&b"Linux version six"[..], b"Darwin", b""].map(version_of), [None; 3]);
    }

    #[test]
    fn a_programs_build_id_is_in_its_first_page() {
        let program = std::fs::read(std::env::current_exe().expect("it runs")).expect("it can be read");
        let id = elf_build_id(&program[..PAGE]).expect("the linker gives it one");
        assert!(program.windows(20).any(|window| window == id));
        assert_eq!(elf_build_id(&program[..64]), None);
        assert_eq!(elf_build_id(&[]), None);
    }

    #[test]
    fn a_threads_name_cannot_draw_on_a_terminal() {
        assert_eq!(text(b"kworker/0:1\0rest"), "kworker/0:1");
        assert_eq!(text(b"a\x1b[2J\xff b\n"), "a?[2J? b?");
    }
}
