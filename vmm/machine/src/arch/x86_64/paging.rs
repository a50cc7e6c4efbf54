//! Accesses a guest's memory by the virtual addresses of a program (SDM volume 3, section 4.5). KVM's `KVM_TRANSLATE`
//! does not tell whether a program may access a page, and is a system call. The host's own profiler reads what the
//! kernel can read as well.

use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::kvm_sregs;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileMemory};

use super::cr::{CR0_PG, CR4_LA57, EFER_LMA};

/// Bits of an entry of a page table.
const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
/// The page was accessed, and written.
const ACCESSED_AND_DIRTY: u64 = 1 << 5 | 1 << 6;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;

/// Number of bits of a virtual address that one level of tables translates, and that are an offset in a page.
const LEVEL_BITS: u32 = 9;
const PAGE_BITS: u32 = 12;
const PAGE: usize = 1 << PAGE_BITS;

/// What a page is accessed for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

/// The page tables that a vCPU uses in 64-bit mode.
pub struct Tables<'a> {
    memory: &'a GuestMemoryMmap,
    root: u64,
    levels: u32,
}

impl<'a> Tables<'a> {
    /// Returns the tables that these registers select, or `None` outside of 64-bit mode.
    pub fn of(sregs: &kvm_sregs, memory: &'a GuestMemoryMmap) -> Option<Self> {
        let is_long = sregs.cr0 & CR0_PG != 0 && sregs.efer & EFER_LMA != 0;
        let levels = if sregs.cr4 & CR4_LA57 == 0 { 4 } else { 5 };
        is_long.then_some(Self { memory, root: sregs.cr3 & ADDRESS, levels })
    }

    /// Reads bytes at a virtual address that a program can access, on one page or two. Returns `None` if it cannot.
    pub fn read_as_program<const N: usize>(&self, address: u64) -> Option<[u8; N]> {
        const { assert!(N <= PAGE) };
        let mut bytes = [0; N];
        let offset = usize::try_from(address).ok()? % PAGE;
        let (first, second) = bytes.split_at_mut(N.min(PAGE - offset));
        self.memory.read_slice(first, self.translate(address, Access::Read)?).ok()?;
        if !second.is_empty() {
            let next = address.checked_add(first.len() as u64)?;
            self.memory.read_slice(second, self.translate(next, Access::Read)?).ok()?;
        }
        Some(bytes)
    }

    /// Returns the tables with a first table at this address.
    pub fn at(root: u64, levels: u32, memory: &'a GuestMemoryMmap) -> Self {
        Self { memory, root: root & ADDRESS, levels }
    }

    /// Reads bytes at a virtual address as the kernel does, in both halves. Returns `None` if a page is not there.
    pub fn read_as_kernel(&self, address: u64, bytes: &mut [u8]) -> Option<()> {
        let (mut address, mut left) = (address, bytes);
        while !left.is_empty() {
            let in_page = PAGE - usize::try_from(address % PAGE as u64).ok()?;
            let (now, later) = left.split_at_mut(in_page.min(left.len()));
            // Several times as fast as `read_slice`, for the few bytes that most are.
            let slice = self.memory.get_slice(self.translate_as_kernel(address)?, now.len()).ok()?;
            slice.copy_to(now);
            address = address.wrapping_add(now.len() as u64);
            left = later;
        }
        Some(())
    }

    /// Translates a virtual address in either half, whoever may access it.
    pub fn translate_as_kernel(&self, address: u64) -> Option<GuestAddress> {
        let is_canonical = address <= self.highest() || address >= !self.highest();
        let Leaf { entry, shift, .. } = is_canonical.then(|| self.leaf(address, PRESENT)).flatten()?;
        Some(page_address(entry, shift, address))
    }

    /// Number of levels of tables.
    pub fn levels(&self) -> u32 {
        self.levels
    }

    /// Address of the first table.
    pub fn root(&self) -> u64 {
        self.root
    }

    pub fn memory(&self) -> &'a GuestMemoryMmap {
        self.memory
    }

    /// Returns the highest virtual address of a program.
    pub fn highest(&self) -> u64 {
        (1 << (PAGE_BITS + LEVEL_BITS * self.levels - 1)) - 1
    }

    /// Translates a virtual address that a program can read. Returns `None` if it cannot.
    pub fn translate_to_read(&self, address: u64) -> Option<GuestAddress> {
        self.translate(address, Access::Read)
    }

    /// Translates a virtual address that a program can write, for a write there. Returns `None` if it cannot.
    pub fn translate_to_write(&self, address: u64) -> Option<GuestAddress> {
        // The entry may change while it is noted that the page is written.
        self.translate(address, Access::Write).or_else(|| self.translate(address, Access::Write))
    }

    /// Notes in a page's entry that the page is written, as the processor does. Returns `None` if the entry was changed
    /// meanwhile.
    fn note_write(&self, at: GuestAddress, entry: u64) -> Option<()> {
        let slice = self.memory.get_slice(at, size_of::<u64>()).ok()?;
        let word = slice.get_atomic_ref::<AtomicU64>(0).ok()?;
        word.compare_exchange(entry, entry | ACCESSED_AND_DIRTY, Ordering::AcqRel, Ordering::Relaxed).ok()?;
        Some(())
    }

    /// Translates a virtual address in the lower half, where programs are.
    fn translate(&self, address: u64, access: Access) -> Option<GuestAddress> {
        if address > self.highest() {
            return None;
        }
        let rights = match access {
            Access::Read => PRESENT | USER,
            Access::Write => PRESENT | USER | WRITABLE,
        };
        let Leaf { at, entry, shift } = self.leaf(address, rights)?;
        if access == Access::Write && entry & ACCESSED_AND_DIRTY != ACCESSED_AND_DIRTY {
            self.note_write(at, entry)?;
        }
        Some(page_address(entry, shift, address))
    }

    /// Returns the entry of the page with this virtual address, if the entries of all levels have these rights.
    fn leaf(&self, address: u64, rights: u64) -> Option<Leaf> {
        let mut shift = PAGE_BITS + LEVEL_BITS * self.levels;
        let mut table = self.root;
        loop {
            shift -= LEVEL_BITS;
            let index = address >> shift & ((1 << LEVEL_BITS) - 1);
            let at = GuestAddress(table + index * 8);
            let entry: u64 = self.memory.load(at, Ordering::Relaxed).ok()?;
            if entry & rights != rights {
                return None;
            }
            let may_be_page = shift < PAGE_BITS + 3 * LEVEL_BITS;
            if shift == PAGE_BITS || may_be_page && entry & LARGE != 0 {
                return Some(Leaf { at, entry, shift });
            }
            table = entry & ADDRESS;
        }
    }
}

/// The entry of a page.
struct Leaf {
    at: GuestAddress,
    entry: u64,
    /// The page has 2^`shift` bytes.
    shift: u32,
}

fn page_address(entry: u64, shift: u32, address: u64) -> GuestAddress {
    let offset = (1 << shift) - 1;
    GuestAddress(entry & ADDRESS & !offset | address & offset)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::GuestMemoryMmap;

    use super::*;

    const MEMORY: usize = 1 << 20;
    const ACCESSIBLE: u64 = PRESENT | USER;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY)]).expect("there is memory")
    }

    fn sregs(levels: u32) -> kvm_sregs {
        let cr4 = if levels == 5 { CR4_LA57 } else { 0 };
        // The lower bits of CR3 are the PCID.
        kvm_sregs { cr0: CR0_PG, cr3: 0x1000 | 7, cr4, efer: EFER_LMA, ..Default::default() }
    }

    /// Maps a page of 2^`bits` bytes at `address` to `to`. The tables lie one after the other from 0x1000 on. `spoiled`
    /// is a level whose entry lacks these bits.
    fn map(
        memory: &GuestMemoryMmap,
        levels: u32,
        address: u64,
        bits: u32,
        to: u64,
        spoiled: Option<(u32, u64)>,
    ) {
        let mut table = 0x1000;
        for level in (1..=levels).rev() {
            let shift = PAGE_BITS + LEVEL_BITS * (level - 1);
            let is_page = shift == bits;
            let next = if !is_page {
                table + 0x1000
            } else if bits == PAGE_BITS {
                to
            } else {
                to | LARGE
            };
            let missing = spoiled.filter(|(at, _)| *at == level).map_or(0, |(_, bits)| bits);
            let entry = (next | ACCESSIBLE | 1 << 63) & !missing;
            memory.write_obj(entry, GuestAddress(table + (address >> shift & 511) * 8)).expect("in memory");
            if is_page {
                return;
            }
            table += 0x1000;
        }
    }

    proptest! {
        #[test]
        fn an_address_is_translated_by_the_entries_of_all_levels(
            levels in 4..=5_u32,
            address in 0..1_u64 << 47,
            bits in prop::sample::select(vec![12_u32, 21, 30]),
        ) {
            let memory = memory();
            let to = if bits == PAGE_BITS { 0x8_0000 } else { 0 };
            map(&memory, levels, address, bits, to, None);
            let tables = Tables { memory: &memory, root: 0x1000, levels };
            let translated = tables.translate(address, Access::Read).map(|address| address.0);
            prop_assert_eq!(translated, Some(to | address & ((1 << bits) - 1)));
        }

        #[test]
        fn what_a_program_cannot_access_is_not_read(
            address in 0..1_u64 << 47,
            level in 1..=4_u32,
            bit in prop::sample::select(vec![PRESENT, USER]),
        ) {
            let memory = memory();
            map(&memory, 4, address, PAGE_BITS, 0x8_0000, Some((level, bit)));
            let tables = Tables { memory: &memory, root: 0x1000, levels: 4 };
            prop_assert_eq!(tables.translate(address, Access::Read), None);
        }

        #[test]
        fn no_tables_and_no_address_are_trouble(
            words in prop::collection::vec((0..MEMORY as u64 / 8, any::<u64>()), 0..64),
            root in any::<u64>(),
            address in any::<u64>(),
            levels in 4..=5_u32,
        ) {
            let memory = memory();
            for (at, word) in words {
                memory.write_obj(word | ACCESSIBLE, GuestAddress(at * 8)).expect("in memory");
            }
            let sregs = kvm_sregs { cr3: root, ..sregs(levels) };
            let tables = Tables::of(&sregs, &memory).expect("64-bit mode");
            let _ = tables.read_as_program::<2>(address);
            let _ = tables.read_as_kernel(address, &mut [0; 5000]);
        }
    }

    #[test]
    fn what_is_written_is_dirty_afterwards_and_has_to_be_writable() {
        let memory = memory();
        map(&memory, 4, 0x7000_1000, PAGE_BITS, 0x8_0000, None);
        let tables = Tables::of(&sregs(4), &memory).expect("64-bit mode");
        assert_eq!(tables.translate_to_write(0x7000_1008), None, "read-only");
        // The tables lie one after the other.
        let entries = [(0x1000, 39), (0x2000, 30), (0x3000, 21), (0x4000, 12)]
            .map(|(table, shift)| GuestAddress(table + (0x7000_1000 >> shift & 511) * 8));
        for at in entries {
            let before: u64 = memory.read_obj(at).expect("in memory");
            memory.write_obj(before | WRITABLE, at).expect("in memory");
        }
        assert_eq!(tables.translate_to_write(0x7000_1008), Some(GuestAddress(0x8_0008)));
        let written: u64 = memory.read_obj(entries[3]).expect("in memory");
        assert_eq!(written & ACCESSED_AND_DIRTY, ACCESSED_AND_DIRTY);
        assert_eq!(tables.translate_to_write(tables.highest() + 1), None);
    }

    #[test]
    fn a_page_that_is_copied_when_it_is_written_is_left_to_the_guest() {
        let address = 0x7000_1000;
        for bits in [PAGE_BITS, 21, 30] {
            let memory = memory();
            let to = if bits == PAGE_BITS { 0x8_0000 } else { 0 };
            map(&memory, 5, address, bits, to, None);
            let tables = Tables::of(&sregs(5), &memory).expect("64-bit mode");
            let entries: Vec<GuestAddress> = (bits..PAGE_BITS + 5 * LEVEL_BITS)
                .step_by(9)
                .map(|shift| {
                    GuestAddress(
                        0x1000 * u64::from(5 - (shift - PAGE_BITS) / 9) + (address >> shift & 511) * 8,
                    )
                })
                .collect();
            let entry = |at: GuestAddress| -> u64 { memory.read_obj(at).expect("in memory") };
            // Read-only at any level is read-only.
            for read_only in 0..entries.len() {
                for (number, at) in entries.iter().enumerate() {
                    let writable = if number == read_only { 0 } else { WRITABLE };
                    memory.write_obj(entry(*at) & !WRITABLE | writable, *at).expect("in memory");
                }
                let before: Vec<u64> = entries.iter().map(|at| entry(*at)).collect();
                assert_eq!(tables.translate_to_write(address), None, "{bits} bits, level {read_only}");
                assert_eq!(
                    entries.iter().map(|at| entry(*at)).collect::<Vec<_>>(),
                    before,
                    "no entry changes"
                );
            }
            for at in &entries {
                memory.write_obj(entry(*at) | WRITABLE, *at).expect("in memory");
            }
            let offset = address & ((1 << bits) - 1);
            assert_eq!(tables.translate_to_write(address), Some(GuestAddress(to | offset)), "{bits} bits");
            assert_eq!(entry(entries[0]) & ACCESSED_AND_DIRTY, ACCESSED_AND_DIRTY, "{bits} bits");
            // Another vCPU makes the page read-only between the walk and the write.
            let stale = entry(entries[0]) & !ACCESSED_AND_DIRTY;
            memory.write_obj(stale & !WRITABLE, entries[0]).expect("in memory");
            assert_eq!(tables.note_write(entries[0], stale), None, "{bits} bits");
            assert_eq!(entry(entries[0]), stale & !WRITABLE, "the guest's entry stands");
        }
    }

    #[test]
    fn an_instruction_may_lie_on_two_pages() {
        let memory = memory();
        map(&memory, 4, 0x7000_1000, PAGE_BITS, 0x8_0000, None);
        let last = 0x7000_1000 + 0xfff;
        memory.write_slice(&[0x0f], GuestAddress(0x8_0fff)).expect("in memory");
        let tables = Tables::of(&sregs(4), &memory).expect("64-bit mode");
        assert_eq!(tables.read_as_program::<2>(last), None, "the second page is not there");
        map(&memory, 4, 0x7000_2000, PAGE_BITS, 0x9_0000, None);
        memory.write_slice(&[0x33], GuestAddress(0x9_0000)).expect("in memory");
        assert_eq!(tables.read_as_program(last), Some([0x0f, 0x33]));
    }

    #[test]
    fn the_kernels_half_is_read_as_the_kernel_reads_it() {
        let memory = memory();
        let address = 0xffff_8000_0000_0000 | 0x7000_1000;
        map(&memory, 4, address, PAGE_BITS, 0x8_0000, Some((1, USER)));
        memory.write_slice(b"kernel", GuestAddress(0x8_0ffe)).expect("in memory");
        map(&memory, 4, address + 0x1000, PAGE_BITS, 0x8_1000, None);
        let tables = Tables::of(&sregs(4), &memory).expect("64-bit mode");
        let mut bytes = [0; 6];
        assert_eq!(tables.read_as_kernel(address + 0xffe, &mut bytes), Some(()));
        assert_eq!(&bytes, b"kernel");
        assert_eq!(tables.read_as_kernel(address + 0x1fff, &mut bytes), None, "the third page is not there");
        assert_eq!(tables.translate_as_kernel(0x0000_8000_7000_1000), None, "between the halves");
    }

    #[test]
    fn outside_of_64_bit_mode_there_are_no_such_tables() {
        let memory = memory();
        for sregs in [kvm_sregs { efer: 0, ..sregs(4) }, kvm_sregs { cr0: 1, ..sregs(4) }] {
            assert!(Tables::of(&sregs, &memory).is_none());
        }
    }
}
