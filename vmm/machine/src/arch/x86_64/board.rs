//! The parts of a PC other than memory and virtio devices: interrupt controllers, I/O ports, firmware, and the initial
//! state of the vCPUs.

use std::sync::Arc;

use devices::virtio::MmioBus;
use devices::{AcpiSleep, DebugExit, End, FwCfg, Interrupt, Overlap, PortBus, ResetOn, Serial};
use kvm_bindings::{CpuId, KVM_MAX_CPUID_ENTRIES, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};
use vmm_sys_util::eventfd::EventFd;

use super::coalescing::Coalescing;
use super::loader::{Entry, Format};
use super::machine::{COM, port};
use super::pmu::Pmu;
use super::{cpuid, firmware, registers};
use crate::architecture;
use crate::error::MachineError;
use crate::kvm_error::{Doing, KvmError};

/// Guest-physical addresses of the three pages of the TSS and the one page of the identity map, which KVM needs on
/// Intel hosts. They are below 4 GiB, where the guest has neither RAM nor devices.
const TSS_ADDRESS: usize = 0xfffb_d000;
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

/// Parameters for every Linux kernel: its console; that a panic resets the machine, which ends it; and that there is no
/// PCI bus to probe.
pub const KERNEL_WORDS: &str = "console=ttyS0 8250.nr_uarts=1 panic=-1 pci=off";

type Plan<'a> = architecture::Plan<'a, Format, Pmu>;

/// Device buses of a machine, and other state that its vCPUs share.
#[derive(Clone)]
pub struct Buses {
    /// Devices with I/O ports.
    pub ports: Arc<PortBus>,
    /// Devices with memory-mapped registers.
    pub memory: Arc<MmioBus>,
    /// Coalesced writes to the console.
    pub coalescing: Arc<Coalescing>,
    /// True if the guest's kernel can access the PMU's registers without an exit (see [`vpmu::shared_page`]).
    pub has_shared_pages: bool,
}

impl Buses {
    /// Creates the buses of a machine and attaches its devices.
    pub fn new(
        kvm: &Kvm,
        vm: &Arc<VmFd>,
        plan: &Plan,
        console: &Serial,
        memory: MmioBus,
        _controllers: Controllers,
    ) -> Result<Self, MachineError> {
        let linux = plan.kernel.format.is_linux();
        let coalesce = linux && kvm.check_extension(Cap::CoalescedPio);
        Ok(Self {
            ports: Arc::new(ports(plan, console, linux)?),
            memory: Arc::new(memory),
            coalescing: Arc::new(Coalescing::new(Arc::clone(vm), coalesce)?),
            has_shared_pages: plan.kernel.has_shared_pages(),
        })
    }
}

impl Buses {
    /// Reads a device's memory-mapped register.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        self.memory.read(address, data);
    }

    /// Writes to a device's memory-mapped register. Such a write never ends the machine.
    pub fn write(&self, address: u64, data: &[u8]) -> Option<End> {
        self.memory.write(address, data);
        None
    }
}

fn ports(plan: &Plan, console: &Serial, linux: bool) -> Result<PortBus, Overlap> {
    let mut bus = PortBus::default();
    bus.attach(COM.base, Serial::PORTS, console.clone())?;
    bus.attach(port::KEYBOARD, 1, ResetOn::KEYBOARD)?;
    bus.attach(port::DEBUG_EXIT, 4, DebugExit)?;
    bus.attach(port::SLEEP, 2, AcpiSleep)?;
    bus.attach(port::RESET, 1, ResetOn::ACPI)?;
    if !linux {
        bus.attach(port::FW_CFG, 2, FwCfg::new(plan.cpus.into(), plan.ram.size()))?;
    }
    Ok(bus)
}

/// Connects a device's interrupt line to the interrupt controllers.
pub fn line(vm: &Arc<VmFd>, gsi: u32) -> Result<impl Interrupt + 'static, MachineError> {
    let event = EventFd::new(libc::EFD_NONBLOCK).map_err(MachineError::Event)?;
    vm.register_irqfd(&event, gsi).doing("connect a device's interrupt")?;
    Ok(event)
}

/// Creates what KVM needs before the first vCPU.
pub fn before_vcpus(vm: &VmFd) -> Result<(), KvmError> {
    vm.set_tss_address(TSS_ADDRESS).doing("place the TSS")?;
    vm.set_identity_map_address(IDENTITY_MAP_ADDRESS).doing("place the identity map")?;
    vm.create_irq_chip().doing("make the interrupt controllers")?;
    let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    vm.create_pit2(pit).doing("make the timer")
}

/// Creates what KVM needs after the last vCPU: nothing on x86.
#[expect(clippy::unnecessary_wraps, reason = "other processors' machines need more")]
pub fn after_vcpus(_vm: &VmFd, _vcpus: &[VcpuFd]) -> Result<Controllers, KvmError> {
    Ok(Controllers)
}

/// Interrupt controllers that are created after the vCPUs: none, as KVM's are created before.
pub struct Controllers;

/// Describes the machine to the kernel, by the ACPI tables.
pub fn describe(
    plan: &Plan,
    _vcpus: &[VcpuFd],
    virtio_devices: usize,
    _entry: Entry,
) -> Result<(), MachineError> {
    firmware::write(&plan.ram.mapped, plan.cpus, virtio_devices)
        .map_err(|error| MachineError::Firmware(error.to_string()))
}

/// CPUID that KVM supports on this host, from which each vCPU's CPUID is made.
pub struct Processors(CpuId);

impl Processors {
    /// Asks KVM for the supported CPUID.
    pub fn new(kvm: &Kvm) -> Result<Self, KvmError> {
        kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).doing("say which CPUID it supports").map(Self)
    }

    /// Prepares the vCPU of number `id`: its CPUID, its registers, and its ring of coalesced writes.
    pub fn prepare(
        &self,
        fd: &mut VcpuFd,
        id: u8,
        entry: Entry,
        plan: &Plan,
        buses: &Buses,
    ) -> Result<(), KvmError> {
        let (supported, identity) = (&self.0, plan.pmu.identity());
        let cpuid = cpuid::for_vcpu(supported, id, plan.cpus, plan.pmu, identity)?;
        fd.set_cpuid2(&cpuid).doing("set a vCPU's CPUID")?;
        let immunities = cpuid::immunities(supported, identity);
        registers::prepare(fd, id == 0, entry, &plan.ram.mapped, plan.pmu, immunities)?;
        if cpuid::is_intels_on_amd(supported, identity)
            && let Some(sysret) = plan.kernel.sysret()
        {
            registers::ignore_narrow_syscalls(fd, sysret)?;
        }
        buses.coalescing.attach(fd)
    }
}
