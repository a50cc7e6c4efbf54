//! Accesses a guest's memory by virtual addresses (The RISC-V Instruction Set Manual, volume II, "Supervisor-Level
//! ISA": Sv39, Sv48 and Sv57, Svnapot). The guest may have written anything into its tables: each look-up reads as many
//! entries as there are levels, and only the guest's memory.

use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Bits of an entry of a page table.
const VALID: u64 = 1;
const READABLE: u64 = 1 << 1;
const EXECUTABLE: u64 = 1 << 3;
const USER: u64 = 1 << 4;
/// The entry is one of several with the same address, for a range of a power of two of pages (Svnapot).
const NAPOT: u64 = 1 << 63;
/// Where an entry has its address, in pages.
const ENTRY_PAGE: std::ops::Range<u32> = 10..54;
/// The low bits of the address of the only such range that there is, 64 KiB, and their number.
const NAPOT_64_KIB: u64 = 8;
const NAPOT_BITS: u32 = 4;

/// Where `satp` has the scheme; the address of the first table is below, in pages.
const MODE: u32 = 60;
const ROOT: u64 = (1 << 44) - 1;
/// The numbers of Sv39 and Sv57. Each scheme after Sv39 has one more level.
const SV39: u64 = 8;
const SV57: u64 = 10;
const SV39_LEVELS: u32 = 3;

/// Number of bits of a virtual address that one level of tables translates, and that are an offset in a page.
const LEVEL_BITS: u32 = 9;
const PAGE_BITS: u32 = 12;
const PAGE: usize = 1 << PAGE_BITS;

/// Page tables: the address of the first, and their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tables {
    pub root: u64,
    pub levels: u32,
}

impl Tables {
    /// Returns the tables that a value of `satp` selects, or `None` if addresses are not translated.
    pub fn of(satp: u64) -> Option<Self> {
        let levels = match satp >> MODE {
            mode @ SV39..=SV57 => SV39_LEVELS + u32::try_from(mode - SV39).expect("it is small"),
            _ => return None,
        };
        Some(Self { root: (satp & ROOT) << PAGE_BITS, levels })
    }

    /// Returns the number of bits of a virtual address.
    pub fn address_bits(self) -> u32 {
        PAGE_BITS + self.levels * LEVEL_BITS
    }

    /// Reads bytes at a virtual address as the kernel does. Returns `None` if a page is not there.
    pub fn read(self, memory: &GuestMemoryMmap, address: u64, bytes: &mut [u8]) -> Option<()> {
        self.read_if(memory, address, bytes, |_| true)
    }

    /// Reads bytes at a virtual address that a program can read.
    pub fn read_as_program(self, memory: &GuestMemoryMmap, address: u64, bytes: &mut [u8]) -> Option<()> {
        self.read_if(memory, address, bytes, |entry| entry & USER != 0 && entry & READABLE != 0)
    }

    /// Translates a virtual address as the kernel does.
    pub fn translate(self, memory: &GuestMemoryMmap, address: u64) -> Option<GuestAddress> {
        self.translate_if(memory, address, |_| true)
    }

    fn read_if(
        self,
        memory: &GuestMemoryMmap,
        address: u64,
        bytes: &mut [u8],
        allows: impl Fn(u64) -> bool,
    ) -> Option<()> {
        let (mut address, mut left) = (address, bytes);
        while !left.is_empty() {
            let in_page = PAGE - usize::try_from(address % PAGE as u64).ok()?;
            let (now, later) = left.split_at_mut(in_page.min(left.len()));
            memory.read_slice(now, self.translate_if(memory, address, &allows)?).ok()?;
            address = address.wrapping_add(now.len() as u64);
            left = later;
        }
        Some(())
    }

    /// Translates a virtual address, if the entry of its page allows that.
    fn translate_if(
        self,
        memory: &GuestMemoryMmap,
        address: u64,
        allows: impl Fn(u64) -> bool,
    ) -> Option<GuestAddress> {
        let unused = u64::BITS - self.address_bits();
        let is_canonical = (address.cast_signed() << unused >> unused).cast_unsigned() == address;
        if !is_canonical {
            return None;
        }
        let mut table = self.root;
        for level in (0..self.levels).rev() {
            let shift = PAGE_BITS + level * LEVEL_BITS;
            let index = address >> shift & ((1 << LEVEL_BITS) - 1);
            let entry: u64 = memory.read_obj(GuestAddress(table.checked_add(index * 8)?)).ok()?;
            if entry & VALID == 0 {
                return None;
            }
            let page = (entry & ((1 << ENTRY_PAGE.end) - 1)) >> ENTRY_PAGE.start;
            if entry & (READABLE | EXECUTABLE) == 0 {
                table = page << PAGE_BITS;
                continue;
            }
            let (page, shift) = match entry & NAPOT {
                0 => (page, shift),
                _ if level == 0 && page & ((1 << NAPOT_BITS) - 1) == NAPOT_64_KIB => {
                    (page & !NAPOT_64_KIB, shift + NAPOT_BITS)
                }
                _ => return None,
            };
            let inside = (1 << shift) - 1;
            let start = page << PAGE_BITS;
            // A large page is at a multiple of its size.
            return (start & inside == 0 && allows(entry)).then_some(GuestAddress(start | address & inside));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::Address;

    use super::*;

    const KERNEL: u64 = VALID | READABLE | EXECUTABLE;

    fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap()
    }

    fn entry(address: u64, bits: u64) -> u64 {
        address >> PAGE_BITS << ENTRY_PAGE.start | bits
    }

    #[test]
    fn addresses_of_each_scheme_are_translated() {
        for mode in SV39..=SV57 {
            let memory = memory();
            let tables = Tables::of(mode << MODE | 1).unwrap();
            // The first entry of each table leads to the next one, the last to a page of 4 KiB, one of 64 KiB, and one
            // of a program.
            for level in 1..u64::from(tables.levels) {
                memory
                    .write_obj(entry((level + 1) << PAGE_BITS, VALID), GuestAddress(level << PAGE_BITS))
                    .unwrap();
            }
            let last = GuestAddress(u64::from(tables.levels) << PAGE_BITS);
            memory.write_obj(entry(0x7_0000, KERNEL), last).unwrap();
            for number in 16..32 {
                let bits = KERNEL | NAPOT;
                let address = 0x8_0000 | NAPOT_64_KIB << PAGE_BITS;
                memory.write_obj(entry(address, bits), last.unchecked_add(8 * number)).unwrap();
            }
            memory.write_obj(entry(0x9_0000, VALID | READABLE | USER), last.unchecked_add(8)).unwrap();
            memory.write_slice(b"page", GuestAddress(0x9_0010)).unwrap();
            let place = |address| tables.translate(&memory, address).map(|found| found.0);
            assert_eq!(place(0x123), Some(0x7_0123));
            assert_eq!([0x1_0000, 0x1_3456, 0x1_ffff].map(place), [0x8_0000, 0x8_3456, 0x8_ffff].map(Some));
            assert_eq!(place(0x2000), None, "no entry");
            assert_eq!(place(1 << tables.address_bits()), None, "no address of this scheme");
            let mut bytes = [0; 4];
            assert_eq!(tables.read_as_program(&memory, 0x1010, &mut bytes), Some(()));
            assert_eq!(bytes, *b"page");
            assert_eq!(tables.read_as_program(&memory, 0x10, &mut bytes), None);
            assert_eq!(tables.read(&memory, 0x10, &mut bytes), Some(()));
        }
        assert_eq!([0, 7 << MODE, 11 << MODE].map(Tables::of), [None; 3]);
    }

    #[test]
    fn a_large_page_is_at_a_multiple_of_its_size() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 8 << 20)]).unwrap();
        let tables = Tables::of(SV39 << MODE).unwrap();
        memory.write_obj(entry(0x1000, VALID), GuestAddress(0)).unwrap();
        memory.write_obj(entry(0x40_0000, KERNEL), GuestAddress(0x1000)).unwrap();
        memory.write_obj(entry(0x40_1000, KERNEL), GuestAddress(0x1008)).unwrap();
        assert_eq!(tables.translate(&memory, 0x1f_1234), Some(GuestAddress(0x5f_1234)));
        assert_eq!(tables.translate(&memory, 0x20_0000), None);
    }

    proptest! {
        #[test]
        fn any_tables_lead_into_the_memory_or_nowhere(
            words in prop::collection::vec(any::<u64>(), 64),
            satp in any::<u64>(),
            address in any::<u64>(),
        ) {
            let memory = memory();
            for (number, word) in words.iter().enumerate() {
                // Half of them are likely to lead on.
                let word = if number % 2 == 0 { entry(word % (1 << 20), word >> 56 | VALID) } else { *word };
                memory.write_obj(word, GuestAddress((number as u64 * 0x248) & ((1 << 20) - 1))).unwrap();
            }
            if let Some(tables) = Tables::of(satp & !(ROOT & !0xff)) {
                let mut bytes = [0; 64];
                let _ = tables.read(&memory, address, &mut bytes);
                let _ = tables.read_as_program(&memory, address % (1 << 20), &mut bytes);
            }
        }
    }
}
