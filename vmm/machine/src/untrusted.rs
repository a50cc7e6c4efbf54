//! What becomes of a kernel's file, of a saved machine, and of what a recording finds in a guest's memory, without a
//! machine: for the fuzz targets, which need no KVM.

use std::io::Cursor;
use std::path::Path;

use devices::virtio::{DeviceState, TransportState};
use devices::{Mismatch, PortDevice, Serial};
#[cfg(target_arch = "x86_64")]
pub use of_memory::{Recorded, record};
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

/// Reads a guest's memory as a recording of its machine does.
#[cfg(target_arch = "x86_64")]
mod of_memory {
    use std::sync::Arc;

    use kvm_bindings::{kvm_regs, kvm_sregs};
    use vm_memory::GuestMemoryMmap;
    use vpmu::event::Filter;
    use vpmu_perf::{Rate, Sampling};

    use crate::arch::Look;
    use crate::recording::kallsyms::Function;
    use crate::recording::linux::{GuestLinux, KernelFunctions, build_id, modules, symbols};
    use crate::recording::modules::Module;
    use crate::recording::sample::{Sample, SampleBuffer};
    use crate::recording::{Plan, RecordOrder, Sampler};

    /// Number of samples of each vCPU: the second one has what the first has left out.
    const SAMPLES: usize = 2;
    /// Maximum number of addresses whose functions are looked for.
    const ADDRESSES: usize = 64;

    /// What a recording has found in a guest's memory.
    #[derive(Debug, Default)]
    pub struct Recorded {
        /// Texts of the symbols of the kernel and of its modules, as `/proc/kallsyms` has them.
        pub symbols: String,
        pub module_symbols: String,
        pub modules: Vec<Module>,
        pub build_id: Option<[u8; 20]>,
        /// Functions at the addresses of symbols, modules and vCPUs.
        pub functions: Vec<Function>,
        pub samples: Vec<Sample>,
    }

    /// Records a machine with this memory and vCPUs with these registers. The kernel's page tables are found by those
    /// of the first one.
    pub fn record(memory: &GuestMemoryMmap, vcpus: &[(kvm_regs, kvm_sregs)]) -> Recorded {
        let mut recorded = Recorded::default();
        let looks: Vec<Look> = vcpus.iter().map(|(regs, sregs)| Look::by(regs, sregs, memory)).collect();
        let symbols = symbols(memory);
        let kernel = symbols.as_ref().zip(looks.first().and_then(|look| look.space));
        if let Some(symbols) = &symbols {
            recorded.symbols = symbols.text();
        }
        let count = u8::try_from(looks.len()).unwrap_or(u8::MAX);
        let linux = kernel.and_then(|(symbols, space)| {
            recorded.build_id = build_id(symbols, space, memory);
            if let Some((modules, text)) = modules(symbols, space, memory) {
                (recorded.modules, recorded.module_symbols) = (modules, text);
            }
            GuestLinux::find(symbols, space, memory, count, true)
        });
        let linux = linux.map(Arc::new);
        if let Some(symbols) = symbols {
            let of_symbols = symbols.iter().map(|(address, ..)| address);
            let of_modules = recorded.modules.iter().map(|module| module.start);
            let of_vcpus = vcpus.iter().map(|(regs, _)| regs.rip);
            let addresses: Vec<u64> = of_symbols.chain(of_modules).chain(of_vcpus).take(ADDRESSES).collect();
            let functions = KernelFunctions::new(symbols.tables().clone(), linux.clone());
            recorded.functions = functions.at(memory, &addresses);
        }
        for (vcpu, look) in (0..count).zip(&looks) {
            let buffer = Arc::new(SampleBuffer::default());
            let (event, rate) = (Sampling::CLOCK, Rate::Period(1));
            let plan = Plan { event, filter: Filter::All, rate, has_chains: true };
            let order = RecordOrder { plan, linux: linux.clone(), buffer: buffer.clone() };
            let mut sampler = Sampler::new(vcpu, memory, order);
            for _ in 0..SAMPLES {
                sampler.add(look, 1);
            }
            recorded.samples.extend(buffer.take(usize::MAX));
        }
        recorded
    }
}
