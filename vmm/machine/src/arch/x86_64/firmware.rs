//! The firmware that the guest finds: the ACPI tables, the VM generation ID, and code at the BIOS entry point that
//! resets the machine.

use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use crate::arch::x86_64::{acpi, memory::low};
use crate::vmgenid;

/// F000:FFF0, the BIOS entry point. Some kernels jump here to restart. Linux does so on a hardware-reduced machine,
/// where it expects EFI to have restarted the machine before.
const RESET_VECTOR: u64 = 0xf_fff0;

/// `mov $0xfe, %al; out %al, $0x64; 1: hlt; jmp 1b` in 16-bit code: resets the machine by the
/// keyboard controller.
const RESET: [u8; 7] = [0xb0, 0xfe, 0xe6, 0x64, 0xf4, 0xeb, 0xfd];

/// Writes the firmware for a machine with `cpus` CPUs and `virtio` virtio devices.
pub fn write(memory: &GuestMemoryMmap, cpus: u8, virtio: usize) -> Result<(), GuestMemoryError> {
    acpi::write(memory, cpus, virtio)?;
    vmgenid::write_new(memory, low::VMGENID)?;
    memory.write_slice(&RESET, GuestAddress(RESET_VECTOR))
}
