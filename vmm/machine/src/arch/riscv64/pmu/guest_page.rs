//! A vCPU's shared page in the guest's memory (see [`vpmu::sbi_page`]).

use std::ops::Deref;

use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap};
use vpmu::sbi_page::Page;

/// The shared page of a vCPU.
pub struct GuestPage {
    page: &'static Page,
    _memory: GuestMemoryMmap,
}

impl GuestPage {
    /// Returns the page of a vCPU, given the address of the first one. Returns `None` if the page is not within the
    /// guest's memory.
    pub fn new(vcpu: u8, first: u64, memory: &GuestMemoryMmap) -> Option<Self> {
        let address = first.checked_add(u64::from(vcpu) * Page::STRIDE as u64)?;
        let slice = memory.get_slice(GuestAddress(address), size_of::<Page>()).ok()?;
        #[expect(clippy::cast_ptr_alignment, reason = "checked below")]
        let page = slice.ptr_guard().as_ptr().cast::<Page>();
        if !page.is_aligned() {
            return None;
        }
        // SAFETY: the pointer is aligned, and the guest's memory has this many bytes there (`get_slice`). The memory
        // stays mapped as long as `_memory` lives, and no reference to the page outlives this struct (`deref`). All
        // fields are atomic integers, for which every value is valid.
        let page = unsafe { &*page };
        Some(Self { page, _memory: memory.clone() })
    }
}

impl Deref for GuestPage {
    type Target = Page;

    fn deref(&self) -> &Page {
        self.page
    }
}
