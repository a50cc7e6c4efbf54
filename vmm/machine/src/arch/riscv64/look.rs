//! Looks at a vCPU that has just left its guest, for the host's profiler: where it is, and by which calls it came
//! there. Only the guest's memory is read, and of that no more than a sample has.
//!
//! Linux for RISC-V is compiled with frame pointers. `s0` is the address behind a function's frame, whose last words
//! are its caller's `s0` and the address to which it returns (`arch/riscv/kernel/stacktrace.c` in Linux).

use std::ops::Range;

use kvm_ioctls::VcpuFd;
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::memory::RAM;
use super::paging::Tables;
use super::register::Register;

/// Maximum number of callers in a chain: with the instruction itself, as many as Linux' own `perf` takes
/// (`kernel.perf_event_max_stack`).
const MAX_CALLERS: usize = 126;
/// Size of a kernel stack (`THREAD_SIZE`).
const KERNEL_STACK: u64 = 16 << 10;
/// Registers at an exception, on the kernel's stack (`struct pt_regs`): its size, and where `epc`, `ra`, `s0` and
/// `status` are, in words.
const ENTRY_REGISTERS: usize = 288;
const ENTRY_PC: usize = 0;
const ENTRY_RA: usize = 1;
const ENTRY_S0: usize = 8;
const ENTRY_STATUS: usize = 32;
/// The exception came in the kernel (`SR_SPP`).
const FROM_KERNEL: u64 = 1 << 8;
/// KVM's number of user mode (`KVM_RISCV_MODE_U`).
const USER_MODE: u64 = 0;
/// Size of the kernel's description of a page, as a power of two (`STRUCT_PAGE_MAX_SHIFT`).
const PAGE_DESCRIPTION_BITS: u32 = 6;
const PAGE_BITS: u32 = 12;

/// Page tables of a guest, by which its memory is read as its kernel reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressSpace(Tables);

impl AddressSpace {
    /// How far Linux' own addresses are from where Tally loads it: it is linked for the last 2 GiB, and loaded 2 MiB
    /// behind the begin of the memory.
    pub const OF_KERNEL: u64 = 0xffff_ffff_8000_0000 - (RAM + (2 << 20));

    /// Reads bytes at a virtual address.
    pub fn read(self, memory: &GuestMemoryMmap, address: u64, bytes: &mut [u8]) -> Option<()> {
        self.0.read(memory, address, bytes)
    }

    /// Reads a word at a virtual address.
    pub fn read_word(self, memory: &GuestMemoryMmap, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(memory, address, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Translates a virtual address.
    pub fn translate(self, memory: &GuestMemoryMmap, address: u64) -> Option<GuestAddress> {
        self.0.translate(memory, address)
    }

    /// Returns the tables that Linux has for itself and never frees. `symbol` returns the address of one of its
    /// symbols.
    pub fn of_kernel(self, memory: &GuestMemoryMmap, symbol: impl Fn(&str) -> Option<u64>) -> Option<Self> {
        let root = self.translate(memory, symbol("swapper_pg_dir")?)?.0;
        let space = Self(Tables { root, ..self.0 });
        space.translate(memory, symbol("init_task")?)?;
        Some(space)
    }

    /// Returns where the kernel would describe the page at address 0, if it has descriptions of `size` bytes side by
    /// side (`vmemmap`): below the addresses of `vmalloc`, which are below those of all memory.
    pub fn pages(
        self,
        memory: &GuestMemoryMmap,
        symbol: impl Fn(&str) -> Option<u64>,
        size: u64,
    ) -> Option<u64> {
        // The first word of `kernel_map`.
        let all_memory = self.read_word(memory, symbol("kernel_map")?)?;
        let vmalloc = all_memory.checked_sub(all_memory.wrapping_neg() >> 1)?;
        let bits = self.0.address_bits() - PAGE_BITS - 1 + PAGE_DESCRIPTION_BITS;
        let start = vmalloc.checked_sub(1 << bits)?;
        let first = match symbol("vmemmap_start_pfn") {
            Some(number) => self.read_word(memory, number)?,
            None => self.read_word(memory, symbol("phys_ram_base")?)? >> PAGE_BITS,
        };
        start.checked_sub(first.checked_mul(size)?)
    }
}

/// Where a vCPU is.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// Its instruction pointer.
    pub instruction: u64,
    /// It is in user mode.
    pub is_user: bool,
    /// Its page tables.
    pub space: Option<AddressSpace>,
    /// `ra`, `sp`, `tp` and `s0`.
    caller: u64,
    stack: u64,
    thread: u64,
    frame: u64,
    scratch: u64,
}

impl Look {
    /// The registers say which thread a vCPU runs.
    pub const KNOWS_THREAD: bool = true;

    /// Looks at a vCPU.
    pub fn of(fd: &VcpuFd, _memory: &GuestMemoryMmap) -> Option<Self> {
        let get = |register: Register| register.get(fd).ok();
        Some(Self {
            instruction: get(Register::PC)?,
            is_user: get(Register::MODE)? == USER_MODE,
            space: Tables::of(get(Register::SATP)?).map(AddressSpace),
            caller: get(Register::RA)?,
            stack: get(Register::SP)?,
            thread: get(Register::TP)?,
            frame: get(Register::S0)?,
            scratch: get(Register::SSCRATCH)?,
        })
    }

    /// Looks at a vCPU that has just exited.
    pub fn at_exit(fd: &mut VcpuFd, memory: &GuestMemoryMmap) -> Option<Self> {
        Self::of(fd, memory)
    }

    /// Returns the name of its page tables: the same for a program in user mode and in the kernel.
    pub fn table(&self) -> u64 {
        self.space.map_or(0, |space| space.0.root)
    }

    /// Returns the address of the kernel's description of the thread: in the kernel `tp` has it, and while a program
    /// runs, `sscratch`. In the first instructions of the kernel they are exchanged.
    pub fn thread(&self) -> Option<u64> {
        [self.scratch, self.thread].into_iter().find(|address| is_of_kernel(*address))
    }

    /// Returns the return addresses of its callers in a program, the latest first, as far as frame pointers lead to
    /// them.
    pub fn callers(&self, memory: &GuestMemoryMmap) -> Vec<u64> {
        match self.space {
            Some(space) if self.is_user => user_callers(space, memory, self.frame, self.caller),
            _ => Vec::new(),
        }
    }

    /// Returns the return addresses of its callers in the kernel, the latest first, and then the instruction at which a
    /// program has entered that, with its callers. `kernel_stack` is the lowest address of the thread's stack.
    pub fn kernel_callers(
        &self,
        memory: &GuestMemoryMmap,
        unwinder: &Unwinder,
        kernel_stack: u64,
    ) -> [Vec<u64>; 2] {
        let Some(space) = self.space.filter(|_| !self.is_user) else { return Default::default() };
        let kernel = unwinder.callers(self, &|address, bytes| space.read(memory, address, bytes));
        let user = program(space, memory, kernel_stack).map(|[instruction, caller, frame]| {
            [vec![instruction], user_callers(space, memory, frame, caller)].concat()
        });
        [kernel, user.unwrap_or_default()]
    }
}

/// Returns the instruction, `ra` and `s0` with which the program of a kernel stack has entered the kernel, if one has.
fn program(space: AddressSpace, memory: &GuestMemoryMmap, kernel_stack: u64) -> Option<[u64; 3]> {
    let at = kernel_stack.checked_add(KERNEL_STACK - ENTRY_REGISTERS as u64)?;
    let word = exception(&|address, bytes| space.read(memory, address, bytes), at)?;
    let [instruction, caller, frame] = [ENTRY_PC, ENTRY_RA, ENTRY_S0].map(|number| word[number]);
    let is_program = word[ENTRY_STATUS] & FROM_KERNEL == 0 && instruction != 0 && !is_of_kernel(instruction);
    is_program.then_some([instruction, caller, frame])
}

/// Reads bytes at an address of the kernel's.
type Read<'a> = dyn Fn(u64, &mut [u8]) -> Option<()> + 'a;

/// Returns the words of the registers at an exception.
fn exception(read: &Read, address: u64) -> Option<[u64; ENTRY_REGISTERS / 8]> {
    let mut bytes = [0; ENTRY_REGISTERS];
    read(address, &mut bytes)?;
    let (words, _) = bytes.as_chunks::<8>();
    Some(std::array::from_fn(|number| u64::from_le_bytes(words[number])))
}

/// Returns a frame's words: its caller's `s0`, and where it returns to.
fn frame_words(read: &Read, behind: u64) -> Option<[u64; 2]> {
    let mut bytes = [0; 16];
    read(behind.checked_sub(16)?, &mut bytes)?;
    let (words, _) = bytes.as_chunks::<8>();
    Some([0, 1].map(|number| u64::from_le_bytes(words[number])))
}

fn is_of_kernel(address: u64) -> bool {
    address >> 63 == 1
}

/// Follows a program's frame pointers as Linux' `perf` does: the latest caller is in `ra`, the others are in frames.
/// Whatever is there is an address, up to the maximum number.
fn user_callers(space: AddressSpace, memory: &GuestMemoryMmap, frame: u64, caller: u64) -> Vec<u64> {
    let read = |address, bytes: &mut [u8]| space.0.read_as_program(memory, address, bytes);
    let (mut callers, mut frame, mut latest) =
        (Vec::new(), frame, Some(caller).filter(|caller| *caller != 0));
    while callers.len() < MAX_CALLERS && frame != 0 && (callers.is_empty() || frame.is_multiple_of(8)) {
        let Some([next, saved]) = frame_words(&read, frame) else { break };
        let caller = latest.take().unwrap_or(saved);
        if caller == 0 {
            break;
        }
        callers.push(caller);
        frame = next;
    }
    callers
}

/// How the callers in a kernel are found: by frame pointers, also over exceptions.
#[derive(Debug)]
pub struct Unwinder {
    /// Code that handles exceptions, and has no frame.
    exceptions: Range<u64>,
}

impl Unwinder {
    /// Finds out where a kernel handles exceptions.
    pub fn find(
        symbol: &dyn Fn(&str) -> Option<u64>,
        _bit: &dyn Fn(&str, &str) -> Option<u64>,
        _modules: &[(u64, Range<u64>)],
        _read: &dyn Fn(u64, &mut [u8]) -> Option<()>,
    ) -> Self {
        let start = symbol("handle_exception").unwrap_or(0);
        // Older kernels only have where it returns to.
        let end = symbol("ret_from_exception_end").or_else(|| symbol("ret_from_exception")?.checked_add(1));
        Self { exceptions: start..end.unwrap_or(start) }
    }

    /// Returns whether callers in the kernel are found.
    pub fn is_known(&self) -> bool {
        true
    }

    fn callers(&self, look: &Look, read: &Read) -> Vec<u64> {
        let (mut callers, mut frame, mut stack) = (Vec::new(), look.frame, look.stack);
        // A frame is on the same stack, above the one before.
        let is_valid = |frame: u64, stack: u64| {
            let lowest = stack.saturating_add(16);
            let end = stack.checked_next_multiple_of(KERNEL_STACK).unwrap_or(0);
            (lowest..=end).contains(&frame) && frame.is_multiple_of(8)
        };
        while callers.len() < MAX_CALLERS && is_valid(frame, stack) {
            let Some([next, caller]) = frame_words(read, frame) else { break };
            stack = frame;
            if callers.is_empty() && is_valid(caller, stack) && is_of_kernel(look.caller) {
                // A function that calls no other keeps its caller in `ra`, and has one word in its frame.
                callers.push(look.caller);
                frame = caller;
                continue;
            }
            if !is_of_kernel(caller) {
                break;
            }
            callers.push(caller);
            frame = next;
            if self.exceptions.contains(&caller) {
                let Some(word) = exception(read, stack) else { break };
                if !is_of_kernel(word[ENTRY_PC]) || callers.len() == MAX_CALLERS {
                    break;
                }
                callers.push(word[ENTRY_PC]);
                frame = word[ENTRY_S0];
            }
        }
        callers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_address_may_be_that_of_a_symbol() {
        let older = |name: &str| (name != "ret_from_exception_end").then_some(u64::MAX);
        let unwinder = Unwinder::find(&older, &|_, _| None, &[], &|_, _| None);
        assert!(unwinder.exceptions.is_empty());
        let unwinder = Unwinder::find(&|_| None, &|_, _| None, &[], &|_, _| None);
        assert!(unwinder.exceptions.is_empty());
    }
}
