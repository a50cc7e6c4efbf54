//! Builds a virtual machine: memory, interrupt controllers, devices, a loaded kernel, vCPUs.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use devices::virtio::{Device, Transport};
use devices::{Serial, SerialState};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VmFd};
use log::debug;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;
use vpmu::policy::Policy;

use crate::arch::{Board, Fingerprint, Model, Plan};
use crate::architecture::{KernelFacts, Line};
use crate::error::MachineError;
use crate::kernel::Kernel;
use crate::kvm_error::{KvmError, KvmResultExt};
use crate::loader::kernel::Boot;
use crate::memory::{GuestRam, MemoryError, Size};
use crate::pmu::Pmu;
use crate::snapshot::{MachineState, Saver};
use crate::teardown::Keeper;
use crate::vcpu::Vcpu;
use crate::vcpu::mailbox::VcpuHandles;
use crate::virtio::{DeviceServer, Virtio};

/// Configuration of a machine.
pub struct Config<'a> {
    /// How the guest starts.
    pub start: Start<'a>,
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

/// How a guest starts.
pub enum Start<'a> {
    /// With a kernel, which [`Machine::new`] loads.
    Boot {
        /// The kernel.
        kernel: &'a Kernel,
        /// The initrd, or a multiboot kernel's modules.
        initrd: Option<&'a Path>,
        /// cpio archive prepended to the initrd: the modules that a user's kernel needs for Tally's devices.
        initrd_prefix: &'a [u8],
        /// The kernel's command line.
        command_line: &'a str,
    },
    /// Where another one was saved. The memory is that guest's ([`Machine::saved_memory`]), and the devices are of the
    /// same types.
    Restore(Box<MachineState>),
}

/// A machine with nothing in it.
pub struct EmptyMachine {
    vm: VmFd,
    keeper: Option<Keeper>,
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
    /// Creates a machine with nothing in it. Best before the process needs much memory ([`crate::teardown`]).
    pub fn empty(kvm: &Kvm) -> Result<EmptyMachine, KvmError> {
        let vm = kvm.create_vm().operation("create a VM")?;
        let keeper = Keeper::start(&vm)
            .inspect_err(|error| debug!("this process waits for the machine's end: {error}"))
            .ok();
        Ok(EmptyMachine { vm, keeper })
    }

    /// Returns what a machine on this host shows its guest of the processor: a guest that was saved on a host with the
    /// same finds everything as it was.
    pub fn fingerprint(kvm: &Kvm, cpus: u8, pmu: Pmu) -> Result<Fingerprint, KvmError> {
        Board::fingerprint(kvm, cpus, pmu)
    }

    /// Returns in what this host's processor differs from the one where a guest was saved, if the guest would see it.
    pub fn difference(saved: &Fingerprint, here: &Fingerprint) -> Option<String> {
        Board::difference(saved, here)
    }

    /// Maps a guest's memory of this size.
    pub fn memory(size: &Size) -> Result<GuestRam, MemoryError> {
        GuestRam::new(size, Board::ram)
    }

    /// Maps a guest's saved memory of this size.
    pub fn saved_memory(size: &Size, file: &File) -> Result<GuestRam, MemoryError> {
        GuestRam::restored(size, Board::ram, file)
    }

    /// Creates the machine, and loads the kernel or restores the state. Nothing runs yet. The second result saves the
    /// machine while it runs.
    pub fn new(kvm: &Kvm, machine: EmptyMachine, config: Config) -> Result<(Self, Saver), MachineError> {
        let Config { start, cpus, ram, pmu, policy, console, external_device, mut devices } = config;
        if let Start::Restore(state) = &start {
            state.restore_devices(&mut devices)?;
        }
        let EmptyMachine { vm, keeper } = machine;
        let vm = Arc::new(vm);
        Model::configure(pmu, &vm)?;
        Board::before_vcpus(&vm)?;
        add_memory(&vm, &ram)?;
        let vcpu = |id: u8| vm.create_vcpu(id.into()).operation("create a vCPU");
        let mut fds = (0..cpus).map(vcpu).collect::<Result<Vec<_>, _>>()?;
        let controllers = Board::after_vcpus(&vm, &fds)?;

        let num_virtio = devices.len() + usize::from(external_device.is_some());
        let kernel = start.kernel();
        let is_restored = matches!(start, Start::Restore(_));
        let plan = Plan { kernel, is_restored, cpus, ram: &ram, pmu, console };
        let (entry, restored) = match start {
            Start::Restore(state) => (None, Some(state)),
            Start::Boot { kernel, initrd, initrd_prefix, command_line } => {
                let entry = kernel.load(&Boot { ram: &ram, command_line, initrd, initrd_prefix })?;
                Board::write_tables(&plan, &fds, num_virtio, command_line, entry)?;
                (Some((kernel, entry)), None)
            }
        };

        let saved_console = restored.as_ref().map(|state| &state.console);
        let (serial, console_room) = serial_port(&vm, console(), saved_console)?;
        let mut virtio = Virtio::default();
        let memory = &ram.mapped;
        let external_transport =
            external_device.map(|device| virtio.attach(&vm, memory, device)).transpose()?;
        let attach = |device: Box<dyn Device>| {
            Ok(DeviceServer { transport: virtio.attach(&vm, memory, &*device)?, device })
        };
        let device_servers = devices.into_iter().map(attach).collect::<Result<_, MachineError>>()?;
        let mut transports = virtio.transports();
        let board = Board::new(kvm, &vm, &plan, &serial, virtio.bus(), controllers)?;
        if let Some((kernel, entry)) = entry {
            board.set_up_vcpus(kvm, &plan, &mut fds, kernel, entry)?;
        }
        let pmu_states = match restored {
            Some(state) => state.restore(kvm, &vm, &board, &plan, &mut fds, &transports)?,
            None => vec![None; fds.len()],
        };
        let reservation = pmu.reserve_host().map(Arc::new);
        let (vcpu_handles, mailboxes) = VcpuHandles::new(cpus);
        let saver = Saver {
            vm: Arc::clone(&vm),
            board: board.clone(),
            kernel,
            vcpus: Arc::clone(&vcpu_handles),
            console: serial.clone(),
            external_device: external_transport.clone(),
            devices: transports.split_off(usize::from(external_transport.is_some())),
            ram: ram.clone(),
        };
        let vcpu = |(id, ((fd, mailbox), saved_pmu))| Vcpu {
            id,
            fd,
            board: board.clone(),
            pmu,
            reservation: reservation.clone(),
            policy: policy.clone(),
            mailbox,
            vcpus: Arc::clone(&vcpu_handles),
            vm: Arc::clone(&vm),
            ram: ram.clone(),
            saved_pmu,
        };
        let vcpus = (0..).zip(fds.into_iter().zip(mailboxes).zip(pmu_states)).map(vcpu).collect();
        let console = serial;
        // Until the process ends.
        std::mem::forget(keeper);
        let machine = Self { vcpus, device_servers, vcpu_handles, console, console_room, external_transport };
        Ok((machine, saver))
    }
}

impl Start<'_> {
    /// Returns what the board has to know of the kernel.
    fn kernel(&self) -> KernelFacts {
        match self {
            Self::Boot { kernel, .. } => kernel.facts(),
            Self::Restore(saved) => saved.kernel,
        }
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

fn serial_port(
    vm: &Arc<VmFd>,
    output: Box<dyn Write + Send>,
    saved: Option<&SerialState>,
) -> Result<(Serial, EventFd), MachineError> {
    let room = EventFd::new(libc::EFD_NONBLOCK).map_err(MachineError::Event)?;
    let signalled = room.try_clone().map_err(MachineError::Event)?;
    let line = Line::new(vm, Board::CONSOLE_GSI);
    let serial = match saved {
        Some(saved) => Serial::restored(saved, line, signalled, output).map_err(MachineError::Restore)?,
        None => Serial::new(line, signalled, output),
    };
    Ok((serial, room))
}
