//! Builds a virtual machine: memory, interrupt controllers, devices, a loaded kernel, vCPUs.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use devices::Serial;
use devices::virtio::{Device, Transport};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VmFd};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;
use vpmu::policy::Policy;

use crate::arch::Arch;
use crate::architecture::{Architecture, Plan};
use crate::error::MachineError;
use crate::kernel::Kernel;
use crate::kvm_error::{Doing, KvmError};
use crate::loader::kernel::Boot;
use crate::memory::{GuestRam, MemoryError, Size};
use crate::pmu::Pmu;
use crate::vcpu::Vcpu;
use crate::vcpu::mailbox::Vcpus;
use crate::virtio::{self, Virtio};

/// Configuration of a machine.
pub struct Config<'a> {
    /// The kernel. [`Machine::new`] loads it.
    pub kernel: &'a Kernel,
    /// The initrd, or a multiboot kernel's modules.
    pub initrd: Option<&'a Path>,
    /// A cpio archive that is placed in front of the initrd.
    pub front: &'a [u8],
    /// The kernel's command line.
    pub command_line: &'a str,
    /// Number of vCPUs.
    pub cpus: u8,
    /// The guest's memory.
    pub ram: GuestRam,
    /// The PMU that the guest sees.
    pub pmu: Pmu,
    /// The operator's policy for that PMU.
    pub policy: Policy,
    /// Opens the destination of the console's output. It may be called more than once.
    pub console: &'a dyn Fn() -> Box<dyn Write + Send>,
    /// A virtio device whose queues the caller serves. It becomes the first virtio device.
    pub served_outside: Option<&'a dyn Device>,
    /// The other virtio devices, each with the name of the thread that serves it.
    pub devices: Vec<(String, Box<dyn Device>)>,
}

/// A machine ready to run.
pub struct Machine {
    /// The vCPUs. Each is to be run on a thread of its own.
    pub vcpus: Vec<Vcpu>,
    /// Handle for requests to the vCPUs.
    pub asked: Arc<Vcpus>,
    /// The console's serial port, for input.
    pub console: Serial,
    /// Signalled when the guest has read all of the console's input.
    pub console_room: EventFd,
    /// Transport of the device that the caller serves.
    pub served_outside: Option<Arc<Transport>>,
}

impl Machine {
    /// Maps a guest's memory of this size.
    pub fn memory(size: &Size) -> Result<GuestRam, MemoryError> {
        GuestRam::new(size, Arch::ram)
    }

    /// Creates the machine, loads the kernel and starts the threads of the virtio devices. The vCPUs do not run yet.
    pub fn new(kvm: &Kvm, mut config: Config) -> Result<Self, MachineError> {
        let vm = Arc::new(kvm.create_vm().doing("make a virtual machine")?);
        Arch::configure(config.pmu, &vm)?;
        Arch::before_vcpus(&vm)?;
        add_memory(&vm, &config.ram)?;
        let vcpu = |id: u8| vm.create_vcpu(id.into()).doing("make a vCPU");
        let fds = (0..config.cpus).map(vcpu).collect::<Result<Vec<_>, _>>()?;
        let controllers = Arch::after_vcpus(&vm, &fds)?;

        let command_line = config.command_line;
        let boot = Boot { ram: &config.ram, command_line, initrd: config.initrd, front: config.front };
        let entry = config.kernel.load(&boot)?;
        let devices = std::mem::take(&mut config.devices);
        let plan = Plan {
            kernel: config.kernel,
            command_line,
            cpus: config.cpus,
            ram: &config.ram,
            pmu: config.pmu,
            console: config.console,
        };
        Arch::describe(&plan, &fds, devices.len() + usize::from(config.served_outside.is_some()), entry)?;

        let (console, console_room) = serial_port(&vm, (config.console)())?;
        let mut virtio = Virtio::default();
        let memory = &config.ram.mapped;
        let served_outside =
            config.served_outside.map(|device| virtio.attach(&vm, memory, device)).transpose()?;
        for (name, device) in devices {
            let transport = virtio.attach(&vm, memory, &*device)?;
            virtio::serve(&name, transport, device).map_err(MachineError::Thread)?;
        }
        let buses = Arch::buses(kvm, &vm, &plan, &console, virtio.bus(), controllers)?;
        let processors = Arch::processors(kvm)?;
        let (asked, mailboxes) = Vcpus::new(config.cpus);
        let mut vcpus = Vec::new();
        for (id, (mut fd, mailbox)) in (0..).zip(fds.into_iter().zip(mailboxes)) {
            Arch::prepare(&processors, &mut fd, id, entry, &plan, &buses)?;
            vcpus.push(Vcpu {
                id,
                fd,
                buses: buses.clone(),
                pmu: config.pmu,
                policy: config.policy.clone(),
                mailbox,
                vcpus: Arc::clone(&asked),
                vm: Arc::clone(&vm),
                ram: config.ram.clone(),
            });
        }
        Ok(Self { vcpus, asked, console, console_room, served_outside })
    }
}

fn add_memory(vm: &VmFd, ram: &GuestRam) -> Result<(), KvmError> {
    for (slot, region) in (0..).zip(ram.mapped.iter()) {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().raw_value(),
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
        };
        // SAFETY: the region is mapped, and each vCPU keeps it mapped: it holds a reference to the mapping.
        unsafe { vm.set_user_memory_region(region) }.doing("give the guest its memory")?;
    }
    Ok(())
}

fn serial_port(vm: &Arc<VmFd>, output: Box<dyn Write + Send>) -> Result<(Serial, EventFd), MachineError> {
    let room = EventFd::new(libc::EFD_NONBLOCK).map_err(MachineError::Event)?;
    let serial = Serial::new(
        Arch::line(vm, Arch::CONSOLE_GSI)?,
        room.try_clone().map_err(MachineError::Event)?,
        output,
    );
    Ok((serial, room))
}
