//! Looks at a vCPU that has just left its guest, for the host's profiler: where it is, and by which calls it came
//! there. Only the guest's memory is read, and of that no more than a sample has.

use kvm_bindings::{kvm_regs, kvm_sregs};
use kvm_ioctls::VcpuFd;
use vm_memory::{
    ByteValued, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileMemory, VolatileSlice,
};

use super::orc::{Callers, Registers, USER_CS, Unwinder};
use super::paging::Tables;
use super::stored;

/// Maximum number of callers in a chain: with the instruction itself, as many as Linux' own `perf` takes
/// (`kernel.perf_event_max_stack`).
const MAX_CALLERS: usize = 126;
/// Size of a kernel stack beyond which a frame of the same stack cannot be (`THREAD_SIZE`).
const KERNEL_STACK: u64 = 16 << 10;
/// Size of a page.
const PAGE: u64 = 4 << 10;
/// Where the kernel and its programs have page tables of their own, these are side by side.
const KERNEL_TABLES: u64 = 1 << 12;
/// Registers that a program has when it enters the kernel (`struct pt_regs`, at the end of its kernel stack): its size,
/// and where RBP, RIP and CS are. Kernels for processors with FRED (since Linux 6.9) leave two words behind it.
const ENTRY_REGISTERS: usize = 168;
const ENTRY_RBP: usize = 4;
const ENTRY_RIP: usize = 16;
const ENTRY_CS: usize = 17;
const BEHIND_ENTRY: [u64; 2] = [0, 16];

/// Where Linux has all of the memory, if it does not choose another place (`page_offset_base`).
const ALL_MEMORY: u64 = 0xffff_8880_0000_0000;
/// Where it has its descriptions of all pages, if it does not choose another place (`vmemmap_base`).
const ALL_PAGES: u64 = 0xffff_ea00_0000_0000;

/// Page tables of a guest, by which its memory is read as its kernel reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressSpace {
    root: u64,
    levels: u32,
    /// Where the kernel has all of the memory, one address behind the other: no tables need to be read for that.
    all_memory: Option<u64>,
}

impl AddressSpace {
    /// How far Linux' own addresses are from where Tally loads it: it is linked for the last 2 GiB.
    pub const OF_KERNEL: u64 = 0xffff_ffff_8000_0000;

    /// Address of the first table.
    pub fn root(self) -> u64 {
        self.root
    }

    /// Reads bytes at a virtual address.
    pub fn read(self, memory: &GuestMemoryMmap, address: u64, bytes: &mut [u8]) -> Option<()> {
        let physical = self.all_memory.and_then(|start| address.checked_sub(start));
        let slice = physical.and_then(|at| memory.get_slice(GuestAddress(at), bytes.len()).ok());
        if slice.is_some_and(|slice| slice.copy_to(bytes) == bytes.len()) {
            return Some(());
        }
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
            let known = space.translate(memory, known)?;
            // Unless its place is random, it is a constant.
            let start = symbol("page_offset_base")
                .map_or(Some(ALL_MEMORY), |base| space.read_word(memory, base))
                .filter(|start| space.translate(memory, start.wrapping_add(known.0)) == Some(known));
            Some(Self { all_memory: start, ..space })
        };
        [self.root, self.root & !KERNEL_TABLES].into_iter().find_map(of_kernel)
    }

    /// Returns where the kernel describes the page at address 0 (`vmemmap`).
    pub fn pages(
        self,
        memory: &GuestMemoryMmap,
        symbol: impl Fn(&str) -> Option<u64>,
        _size: u64,
    ) -> Option<u64> {
        // Unless its place is random, it is a constant.
        symbol("vmemmap_base").map_or(Some(ALL_PAGES), |base| self.read_word(memory, base))
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
    registers: Registers,
    /// It executes code of 64 bits.
    is_long: bool,
}

impl Look {
    /// No register says which thread a vCPU runs: the kernel's memory does.
    pub const KNOWS_THREAD: bool = false;

    /// Looks at a vCPU.
    pub fn of(fd: &VcpuFd, memory: &GuestMemoryMmap) -> Option<Self> {
        Some(Self::by(&fd.get_regs().ok()?, &fd.get_sregs().ok()?, memory))
    }

    /// Looks at a vCPU that has just exited. Must be called before anything else is done after the exit.
    pub fn at_exit(fd: &mut VcpuFd, memory: &GuestMemoryMmap) -> Option<Self> {
        Some(Self::by(&stored::general(fd)?, &stored::system(fd)?, memory))
    }

    /// Looks at a vCPU with these registers. Needs no KVM: [`crate::untrusted`] calls this.
    pub fn by(regs: &kvm_regs, sregs: &kvm_sregs, memory: &GuestMemoryMmap) -> Self {
        let space = Tables::of(sregs, memory).map(|tables| AddressSpace {
            root: tables.root(),
            levels: tables.levels(),
            all_memory: None,
        });
        let (instruction, is_user) = (regs.rip, sregs.ss.dpl == 3);
        Self { instruction, is_user, space, registers: registers(regs), is_long: sregs.cs.l == 1 }
    }

    /// Returns the name of its page tables: the same for a program in user mode and in the kernel.
    pub fn table(&self) -> u64 {
        self.space.map_or(0, |space| space.root & !KERNEL_TABLES)
    }

    /// Returns the address of the kernel's description of the thread, which no register has.
    pub fn thread(&self) -> Option<u64> {
        None
    }

    /// Returns the return addresses of its callers in a program, the latest first, as far as frame pointers lead to
    /// them.
    pub fn callers(&self, memory: &GuestMemoryMmap) -> Vec<u64> {
        match self.space {
            Some(space) if self.is_user && self.is_long => {
                user_callers(space, memory, self.registers.frame())
            }
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
        let Callers { kernel, program } = match unwinder {
            Unwinder::Orc(orc) => {
                let mut stack = Stack { tables: space.tables(memory), page: None };
                orc.callers(&self.registers, MAX_CALLERS, &mut |address| stack.word(address))
            }
            Unwinder::FramePointers => {
                let Registers { stack, .. } = self.registers;
                let kernel = kernel_callers(space, memory, self.registers.frame(), stack);
                Callers { kernel, program: None }
            }
            Unwinder::Unknown => Callers::default(),
        };
        let user = program
            .or_else(|| entry(space, memory, kernel_stack))
            .map(|[frame, instruction]| [vec![instruction], user_callers(space, memory, frame)].concat());
        [kernel, user.unwrap_or_default()]
    }
}

/// Returns registers in the order of `struct pt_regs`.
fn registers(regs: &kvm_regs) -> Registers {
    let kvm_regs { r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, rax, rcx, rdx, rsi, rdi, .. } = *regs;
    let general = [r15, r14, r13, r12, rbp, rbx, r11, r10, r9, r8, rax, rcx, rdx, rsi, rdi];
    Registers { instruction: regs.rip, stack: regs.rsp, general }
}

/// Returns the frame pointer and the instruction at which the program of a kernel stack has entered the kernel, if one
/// has.
fn entry(space: AddressSpace, memory: &GuestMemoryMmap, kernel_stack: u64) -> Option<[u64; 2]> {
    let end = kernel_stack.checked_add(KERNEL_STACK)?;
    BEHIND_ENTRY.into_iter().find_map(|behind| {
        let mut bytes = [0; ENTRY_REGISTERS];
        space.read(memory, end.checked_sub(behind + ENTRY_REGISTERS as u64)?, &mut bytes)?;
        let (words, _) = bytes.as_chunks::<8>();
        let word = |number: usize| u64::from_le_bytes(words[number]);
        (word(ENTRY_CS) == USER_CS).then(|| [ENTRY_RBP, ENTRY_RIP].map(word))
    })
}

/// Reads words of a stack, of which most are on the same page.
struct Stack<'a> {
    tables: Tables<'a>,
    page: Option<Page<'a>>,
}

impl Stack<'_> {
    fn word(&mut self, address: u64) -> Option<u64> {
        if let Some(word) = self.page.as_ref().and_then(|page| page.get(address)) {
            return Some(word);
        }
        let page = Page::at(self.tables.memory(), address, |page| self.tables.translate_as_kernel(page))?;
        let word = page.get(address);
        self.page = Some(page);
        word.or_else(|| {
            let mut bytes = [0; 8];
            self.tables.read_as_kernel(address, &mut bytes)?;
            Some(u64::from_le_bytes(bytes))
        })
    }
}

/// A page of the guest's memory at a virtual address.
struct Page<'a> {
    address: u64,
    content: VolatileSlice<'a>,
}

impl<'a> Page<'a> {
    /// Returns the page in which an address is.
    fn at(
        memory: &'a GuestMemoryMmap,
        address: u64,
        translate: impl FnOnce(u64) -> Option<GuestAddress>,
    ) -> Option<Self> {
        let address = address & !(PAGE - 1);
        let content = memory.get_slice(translate(address)?, usize::try_from(PAGE).ok()?).ok()?;
        Some(Self { address, content })
    }

    /// Reads what is at an address, if all of it is on this page.
    fn get<T: ByteValued>(&self, address: u64) -> Option<T> {
        let offset = usize::try_from(address.checked_sub(self.address)?).ok()?;
        self.content.get_ref(offset).ok().map(|word| word.load())
    }
}

/// Follows a program's frame pointers as Linux' `perf` does: whatever is there is an address, up to the maximum number.
fn user_callers(space: AddressSpace, memory: &GuestMemoryMmap, frame: u64) -> Vec<u64> {
    let (mut callers, mut frame) = (Vec::new(), frame);
    let mut frames = Frames { tables: space.tables(memory), page: None };
    while callers.len() < MAX_CALLERS {
        let Some([next, caller]) = frames.frame(frame) else { break };
        callers.push(caller);
        frame = next;
    }
    callers
}

/// Reads a program's frames, of which most are on the same page.
struct Frames<'a> {
    tables: Tables<'a>,
    page: Option<Page<'a>>,
}

impl Frames<'_> {
    fn frame(&mut self, address: u64) -> Option<[u64; 2]> {
        if let Some(words) = self.page.as_ref().and_then(|page| page.get(address)) {
            return Some(words);
        }
        let page = Page::at(self.tables.memory(), address, |page| self.tables.translate_to_read(page))?;
        let words = page.get(address);
        self.page = Some(page);
        words.or_else(|| self.tables.read_as_program::<16>(address).map(pair))
    }
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
