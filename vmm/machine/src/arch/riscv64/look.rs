//! Looking at a vCPU for the host's profiler, which RISC-V has not yet: no vCPU is seen, and nothing is read.

use std::ops::Range;

use kvm_ioctls::VcpuFd;
use vm_memory::{GuestAddress, GuestMemoryMmap};

/// Page tables of a guest.
#[allow(dead_code, reason = "no vCPU is looked at yet")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AddressSpace(());

impl AddressSpace {
    /// Where Linux has its descriptions of all pages: there are none to be read.
    pub const PAGES: u64 = 0;

    /// Reads bytes at a virtual address.
    pub fn read(self, _memory: &GuestMemoryMmap, _address: u64, _bytes: &mut [u8]) -> Option<()> {
        None
    }

    /// Reads a word at a virtual address.
    pub fn read_word(self, _memory: &GuestMemoryMmap, _address: u64) -> Option<u64> {
        None
    }

    /// Translates a virtual address.
    pub fn translate(self, _memory: &GuestMemoryMmap, _address: u64) -> Option<GuestAddress> {
        None
    }

    /// Returns the tables that Linux has for itself.
    pub fn of_kernel(self, _memory: &GuestMemoryMmap, _symbol: impl Fn(&str) -> Option<u64>) -> Option<Self> {
        None
    }
}

/// Where a vCPU is.
#[allow(dead_code, reason = "no vCPU is looked at yet")]
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// Its instruction pointer.
    pub instruction: u64,
    /// It is in user mode.
    pub is_user: bool,
    /// Its page tables.
    pub space: Option<AddressSpace>,
}

impl Look {
    /// vCPUs of this architecture can be looked at.
    pub const IS_AVAILABLE: bool = false;

    /// Looks at a vCPU.
    pub fn of(_fd: &VcpuFd, _memory: &GuestMemoryMmap) -> Option<Self> {
        None
    }

    /// Returns the name of its page tables.
    pub fn table(&self) -> u64 {
        0
    }

    /// Returns the return addresses of its callers in a program.
    pub fn callers(&self, _memory: &GuestMemoryMmap) -> Vec<u64> {
        Vec::new()
    }

    /// Returns those of its callers in the kernel, and where a program has entered that.
    pub fn kernel_callers(
        &self,
        _memory: &GuestMemoryMmap,
        _unwinder: &Unwinder,
        _kernel_stack: u64,
    ) -> [Vec<u64>; 2] {
        Default::default()
    }
}

/// How the callers in a kernel are found.
#[derive(Debug)]
pub struct Unwinder(());

impl Unwinder {
    /// Finds out how a kernel keeps its callers.
    pub fn find(
        _symbol: &dyn Fn(&str) -> Option<u64>,
        _bit: &dyn Fn(&str, &str) -> Option<u64>,
        _modules: &[(u64, Range<u64>)],
        _read: &dyn Fn(u64, &mut [u8]) -> Option<()>,
    ) -> Self {
        Self(())
    }

    /// Returns whether callers in the kernel are found.
    pub fn is_known(&self) -> bool {
        false
    }
}
