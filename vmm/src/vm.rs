//! A virtual machine put together: memory, interrupt controllers, devices, a loaded kernel, vCPUs.

use std::path::Path;
use std::sync::Arc;

use devices::virtio::{Console, Device, Transport};
use devices::{AcpiSleep, DebugExit, FwCfg, Overlap, PortBus, ResetOn, Serial};
use kvm_bindings::{
    CpuId, KVM_MAX_CPUID_ENTRIES, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, Kvm, VmFd};
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;
use vpmu::policy::Policy;

use crate::coalescing::Coalescing;
use crate::console::Output;
use crate::exits::{Exits, Stopwatch};
use crate::kvm::{Doing, KvmError};
use crate::loader::{Boot, Entry, Kernel, LoadError};
use crate::machine::{COM, port};
use crate::mailbox::{Mailbox, Vcpus};
use crate::memory::GuestRam;
use crate::pmu::Pmu;
use crate::vcpu::{Buses, Vcpu};
use crate::virtio::{self, Virtio};
use crate::{cpuid, firmware, registers};

/// Three pages that Intel's processors want below 4 GiB, and one more, out of the way of RAM and devices.
const TSS_ADDRESS: usize = 0xfffb_d000;
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

/// What a machine is made from.
pub struct Config<'a> {
    /// The kernel, not loaded yet.
    pub kernel: &'a Kernel,
    /// The initrd, or a multiboot kernel's modules.
    pub initrd: Option<&'a Path>,
    /// An archive in front of the initrd.
    pub front: &'a [u8],
    /// The kernel's command line.
    pub command_line: &'a str,
    /// How many vCPUs.
    pub cpus: u8,
    /// The guest's memory.
    pub ram: GuestRam,
    /// Which PMU it sees.
    pub pmu: Pmu,
    /// What the operator lets it have of that.
    pub policy: Policy,
    /// Where the console's output goes.
    pub output: Output,
    /// The device by which the default guest's agent is spoken to.
    pub agent: Option<&'a Console>,
    /// The other virtio devices, each with a name for its thread.
    pub devices: Vec<(String, Box<dyn Device>)>,
}

/// A machine that cannot be built.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// KVM refused something.
    #[error(transparent)]
    Kvm(#[from] KvmError),
    /// The kernel cannot be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// Two devices at one place.
    #[error(transparent)]
    Bus(#[from] Overlap),
    /// The host is out of files.
    #[error("cannot make an eventfd: {0}")]
    Event(std::io::Error),
    /// Or of threads.
    #[error("cannot start a device's thread: {0}")]
    Thread(std::io::Error),
    /// The guest's memory does not hold what belongs into its first MiB.
    #[error("cannot write the firmware: {0}")]
    Firmware(vm_memory::GuestMemoryError),
}

/// A machine ready to run.
pub struct Vm {
    /// Its vCPUs, each to be run on a thread of its own.
    pub vcpus: Vec<Vcpu>,
    /// How they are asked.
    pub asked: Arc<Vcpus>,
    /// The console's port, for input.
    pub console: Serial,
    /// Signalled when the console has taken its input.
    pub console_room: EventFd,
    /// The registers of the agent's device.
    pub agent: Option<Arc<Transport>>,
}

impl Vm {
    /// Builds it.
    pub fn new(kvm: &Kvm, mut config: Config) -> Result<Self, VmError> {
        let vm = Arc::new(kvm.create_vm().doing("make a virtual machine")?);
        config.pmu.configure(&vm)?;
        add_interrupt_controllers(&vm)?;
        add_memory(&vm, &config.ram)?;

        let command_line = config.command_line;
        let boot = Boot { ram: &config.ram, command_line, initrd: config.initrd, front: config.front };
        let entry = config.kernel.load(&boot)?;
        let devices = std::mem::take(&mut config.devices);
        let virtio_devices = devices.len() + usize::from(config.agent.is_some());
        firmware::write(&config.ram.mapped, config.cpus, virtio_devices).map_err(VmError::Firmware)?;

        let linux = config.kernel.is_linux();
        let (console, console_room) = serial_port(&vm, config.output.clone())?;
        let ports = ports(&config, &console, linux)?;
        let mut virtio = Virtio::default();
        let memory = &config.ram.mapped;
        let agent = config.agent.map(|console| virtio.attach(&vm, memory, console)).transpose()?;
        for (name, device) in devices {
            let transport = virtio.attach(&vm, memory, &*device)?;
            virtio::serve(&name, transport, device).map_err(VmError::Thread)?;
        }
        let coalesce = linux && kvm.check_extension(Cap::CoalescedPio);
        let coalescing = Arc::new(Coalescing::new(Arc::clone(&vm), coalesce)?);
        let buses = Buses { ports: Arc::new(ports), memory: Arc::new(virtio.bus()) };
        let supported =
            kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).doing("say which CPUID it supports")?;
        let (asked, mailboxes) = Vcpus::new(config.cpus);
        let shared = Shared { vm: &vm, buses: &buses, coalescing: &coalescing, vcpus: &asked };
        let vcpus = (0..)
            .zip(mailboxes)
            .map(|(id, mailbox)| new_vcpu(&shared, id, mailbox, &supported, entry, &config))
            .collect::<Result<_, _>>()?;
        Ok(Self { vcpus, asked, console, console_room, agent })
    }
}

fn add_interrupt_controllers(vm: &VmFd) -> Result<(), KvmError> {
    vm.set_tss_address(TSS_ADDRESS).doing("place the TSS")?;
    vm.set_identity_map_address(IDENTITY_MAP_ADDRESS).doing("place the identity map")?;
    vm.create_irq_chip().doing("make the interrupt controllers")?;
    let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    vm.create_pit2(pit).doing("make the timer")
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
        // SAFETY: the region is mapped, and stays so as long as there are vCPUs: each has a share in it.
        unsafe { vm.set_user_memory_region(region) }.doing("give the guest its memory")?;
    }
    Ok(())
}

fn ports(config: &Config, console: &Serial, linux: bool) -> Result<PortBus, Overlap> {
    let mut bus = PortBus::default();
    bus.attach(COM.base, Serial::PORTS, console.clone())?;
    bus.attach(port::KEYBOARD, 1, ResetOn::KEYBOARD)?;
    bus.attach(port::DEBUG_EXIT, 4, DebugExit)?;
    bus.attach(port::SLEEP, 2, AcpiSleep)?;
    bus.attach(port::RESET, 1, ResetOn::ACPI)?;
    if !linux {
        bus.attach(port::FW_CFG, 2, FwCfg::new(config.cpus.into(), config.ram.size()))?;
    }
    Ok(bus)
}

fn serial_port(vm: &VmFd, output: Output) -> Result<(Serial, EventFd), VmError> {
    let event = || EventFd::new(libc::EFD_NONBLOCK).map_err(VmError::Event);
    let (interrupt, room) = (event()?, event()?);
    vm.register_irqfd(&interrupt, COM.gsi).doing("connect the serial port's interrupt")?;
    let serial = Serial::new(interrupt, room.try_clone().map_err(VmError::Event)?, output);
    Ok((serial, room))
}

/// What all vCPUs have a share in.
struct Shared<'a> {
    vm: &'a Arc<VmFd>,
    buses: &'a Buses,
    coalescing: &'a Arc<Coalescing>,
    vcpus: &'a Arc<Vcpus>,
}

fn new_vcpu(
    shared: &Shared,
    id: u8,
    mailbox: Mailbox,
    supported: &CpuId,
    entry: Entry,
    config: &Config,
) -> Result<Vcpu, KvmError> {
    let mut fd = shared.vm.create_vcpu(id.into()).doing("make a vCPU")?;
    let identity = config.pmu.identity();
    let cpuid = cpuid::for_vcpu(supported, id, config.cpus, config.pmu, identity)?;
    fd.set_cpuid2(&cpuid).doing("set a vCPU's CPUID")?;
    let immunities = cpuid::immunities(supported, identity);
    registers::prepare(&fd, id == 0, entry, &config.ram.mapped, config.pmu, immunities)?;
    if cpuid::is_intels_on_amd(supported, identity)
        && let Some(sysret) = config.kernel.sysret()
    {
        registers::ignore_narrow_syscalls(&fd, sysret)?;
    }
    shared.coalescing.attach(&mut fd)?;
    Ok(Vcpu {
        id,
        fd,
        buses: shared.buses.clone(),
        coalescing: Arc::clone(shared.coalescing),
        pmu: config.pmu,
        policy: config.policy.clone(),
        mailbox,
        vcpus: Arc::clone(shared.vcpus),
        exits: Exits::default(),
        stopwatch: Stopwatch::default(),
        vm: Arc::clone(shared.vm),
        ram: config.ram.clone(),
        has_slate: config.kernel.has_slates(),
    })
}
