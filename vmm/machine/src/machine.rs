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

use crate::arch::{self, Model};
use crate::architecture::{Board, Plan, PmuModel};
use crate::error::MachineError;
use crate::kernel::Kernel;
use crate::kvm_error::{KvmError, KvmResultExt};
use crate::loader::kernel::Boot;
use crate::memory::{GuestRam, MemoryError, Size};
use crate::pmu::Pmu;
use crate::vcpu::Vcpu;
use crate::vcpu::mailbox::VcpuHandles;
use crate::virtio::{DeviceServer, Virtio};

/// Configuration of a machine.
pub struct Config<'a> {
    /// The kernel. [`Machine::new`] loads it.
    pub kernel: &'a Kernel,
    /// The initrd, or a multiboot kernel's modules.
    pub initrd: Option<&'a Path>,
    /// cpio archive prepended to the initrd: the modules that a user's kernel needs for Tally's devices.
    pub initrd_prefix: &'a [u8],
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
    pub external_device: Option<&'a dyn Device>,
    /// The other virtio devices.
    pub devices: Vec<Box<dyn Device>>,
}

/// A machine ready to run.
pub struct Machine {
    /// The vCPUs. Each is to be run on a thread of its own.
    pub vcpus: Vec<Vcpu>,
    /// Servers of [`Config::devices`], in that order. Each is to be run on a thread of its own.
    pub device_servers: Vec<DeviceServer>,
    /// Handles for requests to the vCPUs.
    pub vcpu_handles: Arc<VcpuHandles>,
    /// The console's serial port, for input.
    pub console: Serial,
    /// Signalled when the guest has read all of the console's input.
    pub console_room: EventFd,
    /// Transport of the device that the caller serves.
    pub external_transport: Option<Arc<Transport>>,
}

impl Machine {
    /// Maps a guest's memory of this size.
    pub fn memory(size: &Size) -> Result<GuestRam, MemoryError> {
        GuestRam::new(size, arch::Board::ram)
    }

    /// Creates the machine and loads the kernel. Nothing runs yet.
    pub fn new(kvm: &Kvm, mut config: Config) -> Result<Self, MachineError> {
        let vm = Arc::new(kvm.create_vm().operation("create a VM")?);
        Model::configure(config.pmu, &vm)?;
        arch::Board::before_vcpus(&vm)?;
        add_memory(&vm, &config.ram)?;
        let vcpu = |id: u8| vm.create_vcpu(id.into()).operation("create a vCPU");
        let mut fds = (0..config.cpus).map(vcpu).collect::<Result<Vec<_>, _>>()?;
        let controllers = arch::Board::after_vcpus(&vm, &fds)?;

        let command_line = config.command_line;
        let boot = Boot {
            ram: &config.ram,
            command_line,
            initrd: config.initrd,
            initrd_prefix: config.initrd_prefix,
        };
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
        let num_virtio = devices.len() + usize::from(config.external_device.is_some());
        arch::Board::write_tables(&plan, &fds, num_virtio, entry)?;

        let (console, console_room) = serial_port(&vm, (config.console)())?;
        let mut virtio = Virtio::default();
        let memory = &config.ram.mapped;
        let external_transport =
            config.external_device.map(|device| virtio.attach(&vm, memory, device)).transpose()?;
        let server = |device: Box<dyn Device>| {
            Ok(DeviceServer { transport: virtio.attach(&vm, memory, &*device)?, device })
        };
        let device_servers = devices.into_iter().map(server).collect::<Result<_, MachineError>>()?;
        let board = arch::Board::new(kvm, &vm, &plan, &console, virtio.bus(), controllers)?;
        board.set_up_vcpus(kvm, &plan, &mut fds, entry)?;
        let reservation = config.pmu.reserve_host().map(Arc::new);
        let (vcpu_handles, mailboxes) = VcpuHandles::new(config.cpus);
        let vcpu = |(id, (fd, mailbox))| Vcpu {
            id,
            fd,
            board: board.clone(),
            pmu: config.pmu,
            reservation: reservation.clone(),
            policy: config.policy.clone(),
            mailbox,
            vcpus: Arc::clone(&vcpu_handles),
            vm: Arc::clone(&vm),
            ram: config.ram.clone(),
        };
        let vcpus = (0..).zip(fds.into_iter().zip(mailboxes)).map(vcpu).collect();
        Ok(Self { vcpus, device_servers, vcpu_handles, console, console_room, external_transport })
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
        unsafe { vm.set_user_memory_region(region) }.operation("register the guest's memory")?;
    }
    Ok(())
}

fn serial_port(vm: &Arc<VmFd>, output: Box<dyn Write + Send>) -> Result<(Serial, EventFd), MachineError> {
    let room = EventFd::new(libc::EFD_NONBLOCK).map_err(MachineError::Event)?;
    let serial = Serial::new(
        arch::Board::interrupt(vm, arch::Board::CONSOLE_GSI)?,
        room.try_clone().map_err(MachineError::Event)?,
        output,
    );
    Ok((serial, room))
}
