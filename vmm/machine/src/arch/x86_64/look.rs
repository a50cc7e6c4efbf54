//! Looks at a vCPU that has just left its guest, for the host's profiler: where it is, and by which calls it came
//! there. Only the guest's memory is read, and of that no more than a sample has.

use kvm_ioctls::VcpuFd;
use vm_memory::{GuestAddress, GuestMemoryMmap};

use super::paging::Tables;

/// Maximum number of callers in a chain: with the instruction itself, as many as Linux' own `perf` takes
/// (`kernel.perf_event_max_stack`).
const MAX_CALLERS: usize = 126;
/// Size of a kernel stack beyond which a frame of the same stack cannot be (`THREAD_SIZE`).
const KERNEL_STACK: u64 = 16 << 10;
/// Where the kernel and its programs have page tables of their own, these are side by side.
const KERNEL_TABLES: u64 = 1 << 12;
/// Registers that a program has when it enters the kernel (`struct pt_regs`, at the end of its kernel stack): its size,
/// and where RBP, RIP and CS are.
const ENTRY_REGISTERS: usize = 168;
const ENTRY_RBP: usize = 4;
const ENTRY_RIP: usize = 16;
const ENTRY_CS: usize = 17;
/// The code segment of Linux' programs of 64 bits (`__USER_CS`).
const USER_CS: u64 = 0x33;

/// Page tables of a guest, by which its memory is read as its kernel reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressSpace {
    root: u64,
    levels: u32,
}

impl AddressSpace {
    /// Where Linux has its descriptions of all pages, if it does not choose another place (`vmemmap_base`).
    pub const PAGES: u64 = 0xffff_ea00_0000_0000;

    /// Address of the first table.
    pub fn root(self) -> u64 {
        self.root
    }

    /// Reads bytes at a virtual address.
    pub fn read(self, memory: &GuestMemoryMmap, address: u64, bytes: &mut [u8]) -> Option<()> {
        self.tables(memory).read_as_kernel(address, bytes)
    }

    /// Reads a word at a virtual address.
    pub fn read_word(self, memory: &GuestMemoryMmap, address: u64) -> Option<u64> {
        let mut bytes = [0; 8];
        self.read(memory, address, &mut bytes)?;
        Some(u64::from_le_bytes(bytes))
    }

    /// Translates a virtual address.
    pub fn translate(self, memory: &GuestMemoryMmap, address: u64) -> Option<GuestAddress> {
        self.tables(memory).translate_as_kernel(address)
    }

    /// Returns the tables that Linux has for itself and never frees. `symbol` returns the address of one of its
    /// symbols.
    pub fn of_kernel(self, memory: &GuestMemoryMmap, symbol: impl Fn(&str) -> Option<u64>) -> Option<Self> {
        let (tables, known) = (symbol("init_top_pgt")?, symbol("init_task")?);
        let of_kernel = |root| {
            let space = Self { root, ..self };
            space.translate(memory, known)?;
            let space = Self { root: space.translate(memory, tables)?.0, ..self };
            space.translate(memory, known).map(|_| space)
        };
        [self.root, self.root & !KERNEL_TABLES].into_iter().find_map(of_kernel)
    }

    fn tables(self, memory: &GuestMemoryMmap) -> Tables<'_> {
        Tables::at(self.root, self.levels, memory)
    }
}

/// Where a vCPU is.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// Its instruction pointer.
    pub instruction: u64,
    /// It is in user mode.
    pub is_user: bool,
    /// Its page tables, in 64-bit mode.
    pub space: Option<AddressSpace>,
    /// RBP and RSP.
    frame: u64,
    stack: u64,
    /// It executes code of 64 bits.
    is_long: bool,
}

impl Look {
    /// vCPUs of this architecture can be looked at.
    pub const IS_AVAILABLE: bool = true;

    /// Looks at a vCPU.
    pub fn of(fd: &VcpuFd, memory: &GuestMemoryMmap) -> Option<Self> {
        let (regs, sregs) = (fd.get_regs().ok()?, fd.get_sregs().ok()?);
        let space = Tables::of(&sregs, memory)
            .map(|tables| AddressSpace { root: tables.root(), levels: tables.levels() });
        let (instruction, is_user) = (regs.rip, sregs.ss.dpl == 3);
        Some(Self { instruction, is_user, space, frame: regs.rbp, stack: regs.rsp, is_long: sregs.cs.l == 1 })
    }

    /// Returns the name of its page tables: the same for a program in user mode and in the kernel.
    pub fn table(&self) -> u64 {
        self.space.map_or(0, |space| space.root & !KERNEL_TABLES)
    }

    /// Returns the return addresses of its callers at the same privilege level, the latest first, as far as frame
    /// pointers lead to them.
    pub fn callers(&self, memory: &GuestMemoryMmap) -> Vec<u64> {
        match self.space {
            Some(space) if self.is_user && self.is_long => user_callers(space, memory, self.frame),
            Some(space) if !self.is_user => kernel_callers(space, memory, self.frame, self.stack),
            _ => Vec::new(),
        }
    }

    /// Returns the instruction at which the program of a kernel stack has entered the kernel, and before it that of its
    /// callers, the latest first. Empty if no program has, or the vCPU is in it.
    pub fn entered_from(&self, memory: &GuestMemoryMmap, kernel_stack: u64) -> Vec<u64> {
        let registers = |space: AddressSpace| {
            let at = kernel_stack.checked_add(KERNEL_STACK - ENTRY_REGISTERS as u64)?;
            let mut bytes = [0; ENTRY_REGISTERS];
            space.read(memory, at, &mut bytes)?;
            let (words, _) = bytes.as_chunks::<8>();
            Some([ENTRY_RBP, ENTRY_RIP, ENTRY_CS].map(|word| u64::from_le_bytes(words[word])))
        };
        let Some(space) = self.space.filter(|_| !self.is_user) else { return Vec::new() };
        match registers(space) {
            Some([frame, instruction, USER_CS]) => {
                [vec![instruction], user_callers(space, memory, frame)].concat()
            }
            _ => Vec::new(),
        }
    }
}

/// Follows a program's frame pointers as Linux' `perf` does: whatever is there is an address, up to the maximum number.
fn user_callers(space: AddressSpace, memory: &GuestMemoryMmap, frame: u64) -> Vec<u64> {
    let (mut callers, mut frame) = (Vec::new(), frame);
    let tables = space.tables(memory);
    while callers.len() < MAX_CALLERS {
        let Some(words) = tables.read_as_program::<16>(frame) else { break };
        let [next, caller] = pair(words);
        callers.push(caller);
        frame = next;
    }
    callers
}

/// Follows the kernel's frame pointers on its stack, upwards.
fn kernel_callers(space: AddressSpace, memory: &GuestMemoryMmap, frame: u64, stack: u64) -> Vec<u64> {
    let (mut callers, mut frame, mut lowest) = (Vec::new(), frame, stack);
    let is_of_kernel = |address: u64| address >> 63 == 1;
    while callers.len() < MAX_CALLERS
        && frame >= lowest
        && frame - lowest < KERNEL_STACK
        && frame.is_multiple_of(8)
    {
        let mut words = [0; 16];
        if space.read(memory, frame, &mut words).is_none() {
            break;
        }
        let [next, caller] = pair(words);
        if !is_of_kernel(caller) {
            break;
        }
        callers.push(caller);
        (lowest, frame) = (frame.saturating_add(16), next);
    }
    callers
}

fn pair(bytes: [u8; 16]) -> [u64; 2] {
    let (words, _) = bytes.as_chunks::<8>();
    [0, 1].map(|word| u64::from_le_bytes(words[word]))
}
