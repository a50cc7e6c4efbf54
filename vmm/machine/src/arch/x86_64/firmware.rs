//! What is left of a BIOS: the ACPI tables, and the address that processors and kernels jump to for a reset.

use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::arch::x86_64::acpi;

/// F000:FFF0, where a BIOS begins. A kernel that believes that there is one jumps here to restart: Linux does on a
/// hardware-reduced machine, where it expects EFI to have done it before.
const RESET_VECTOR: u64 = 0xf_fff0;

/// `mov $0xfe, %al; out %al, $0x64; 1: hlt; jmp 1b` in 16-bit code: asks the keyboard controller for a reset.
const RESET: [u8; 7] = [0xb0, 0xfe, 0xe6, 0x64, 0xf4, 0xeb, 0xfd];

/// Writes it for a machine with that many CPUs and virtio devices.
pub fn write(memory: &GuestMemoryMmap, cpus: u8, virtio: usize) -> Result<(), GuestMemoryError> {
    acpi::write(memory, cpus, virtio)?;
    memory.write_slice(&RESET, GuestAddress(RESET_VECTOR))
}
