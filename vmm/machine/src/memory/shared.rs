//! Structures in the guest's memory that its kernel and this process use at the same time.

use std::ops::Deref;

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

/// A structure that a guest may write at any time.
///
/// # Safety
/// All fields are atomic integers, or arrays of them: any bytes are a valid value, and accesses cannot race.
pub unsafe trait OfAtomics: 'static {}

/// Such a structure, in the guest's memory.
pub struct InGuest<T: OfAtomics> {
    structure: &'static T,
    _memory: GuestMemoryMmap,
}

impl<T: OfAtomics> InGuest<T> {
    /// Returns the structure at this address, or `None` if it is not aligned or not within the memory.
    pub fn at(address: u64, memory: &GuestMemoryMmap) -> Option<Self> {
        let slice = memory.get_slice(GuestAddress(address), size_of::<T>()).ok()?;
        let structure = slice.ptr_guard().as_ptr().cast::<T>();
        if !structure.is_aligned() {
            return None;
        }
        // SAFETY: the pointer is aligned, and the guest's memory has this many bytes there (`get_slice`). The memory
        // stays mapped as long as `_memory` lives, and no reference outlives this struct (`deref`). Whatever the guest
        // writes is valid (`OfAtomics`).
        let structure = unsafe { &*structure };
        Some(Self { structure, _memory: memory.clone() })
    }
}

impl<T: OfAtomics> Deref for InGuest<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.structure
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use vm_memory::Bytes;

    use super::*;

    struct Pair([AtomicU64; 2]);

    // SAFETY: its only field is an array of atomic integers.
    unsafe impl OfAtomics for Pair {}

    #[test]
    fn a_structure_is_aligned_and_whole_and_shared_with_the_guest() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0x1000), 0x1000)]).unwrap();
        for address in [0, 0xff8, 0x1004, 0x1ff8, 0x2000, u64::MAX - 7] {
            assert!(InGuest::<Pair>::at(address, &memory).is_none(), "{address:#x}");
        }
        let pair = InGuest::<Pair>::at(0x1ff0, &memory).unwrap();
        memory.write_obj(7_u64, GuestAddress(0x1ff8)).unwrap();
        pair.0[0].store(5, Ordering::Relaxed);
        assert_eq!(pair.0[1].load(Ordering::Relaxed), 7);
        assert_eq!(memory.read_obj::<u64>(GuestAddress(0x1ff0)).unwrap(), 5);
    }
}
