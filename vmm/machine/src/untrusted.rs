//! What becomes of a kernel's file, and of a saved machine, without a machine: for the fuzz targets, which need no KVM.

use std::io::Cursor;
use std::path::Path;

use devices::virtio::{DeviceState, TransportState};
use devices::{Mismatch, PortDevice, Serial};
use vmm_sys_util::eventfd::EventFd;
use vpmu::state::PmuState;

use crate::arch;
use crate::loader::error::{LoadError, Problem};
use crate::loader::image;
use crate::loader::kernel::{Boot, Kernel};
use crate::memory::GuestRam;
use crate::snapshot::MachineState;

/// Size of the guest's memory.
const MEMORY: &str = "16M";

/// Reads a kernel of this host's architecture from the content of its file, patches it, and loads it into a guest's
/// memory. Returns the unpacked and patched image.
pub fn load(file: &[u8]) -> Result<Vec<u8>, LoadError> {
    let path = Path::new("kernel");
    let (format, image) = arch::Format::read(&mut Cursor::new(file), file.len() as u64)
        .map_err(|problem| problem.with(path))?;
    let mut kernel = Kernel::new(path, image, format);
    let _ = kernel.release();
    arch::Format::retarget_without_kvm(&mut kernel)?;
    let size = MEMORY.parse().expect("it is a size");
    let ram = GuestRam::new(&size, arch::Board::ram)
        .map_err(|error| Problem::Read(std::io::Error::other(error)).with(path))?;
    let boot = Boot { ram: &ram, command_line: "console=ttyS0", initrd: None, initrd_prefix: &[] };
    kernel.format.load(path, &kernel.image, &boot)?;
    Ok(std::mem::take(&mut kernel.image))
}

/// Reads a RISC-V kernel from the content of its file, on hosts of every architecture. Returns the unpacked image.
pub fn read_riscv_image(file: &[u8]) -> Result<Vec<u8>, LoadError> {
    let read = image::read(&mut Cursor::new(file), file.len() as u64);
    read.map(|(_, image)| image).map_err(|problem| problem.with(Path::new("kernel")))
}

/// Returns the virtio devices of a saved machine: their registers, and what they know beyond these.
pub fn saved_devices(machine: &MachineState) -> Vec<(&TransportState, Option<&DeviceState>)> {
    let others = machine.devices.iter().map(|device| (&device.transport, device.own.as_ref()));
    machine.external_device.iter().map(|device| (device, None)).chain(others).collect()
}

/// Returns the PMUs of a saved machine.
pub fn saved_pmus(machine: &MachineState) -> Vec<&PmuState> {
    machine.vcpus.iter().filter_map(|vcpu| vcpu.pmu.as_ref()).collect()
}

/// Restores the serial port of a saved machine, and uses each of its registers. What a guest reads that was saved like
/// this is no longer than its port's FIFO.
pub fn restore_console(machine: &MachineState) -> Result<(), Mismatch> {
    let event = || EventFd::new(libc::EFD_NONBLOCK).expect("there is a file descriptor");
    let serial = Serial::restored(&machine.console, event(), event(), std::io::sink())?;
    for offset in 0..8 {
        serial.read(offset, &mut [0]);
        serial.write(offset, &[0x5a]);
    }
    let _ = serial.receive(&[0x5a; 128]);
    Ok(())
}
