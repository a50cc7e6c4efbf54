//! What a PC is made of beside memory and virtio devices: interrupt controllers, ports, firmware, and its vCPUs' CPUID.

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

/// Three pages that Intel's processors want below 4 GiB, and one more, out of the way of RAM and devices.
const TSS_ADDRESS: usize = 0xfffb_d000;
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

/// What a Linux kernel has to be told: its console; that a panic ends in a reset, which ends the machine; and that there is no
/// PCI bus to look for.
pub const KERNEL_WORDS: &str = "console=ttyS0 8250.nr_uarts=1 panic=-1 pci=off";

type Plan<'a> = architecture::Plan<'a, Format, Pmu>;

/// Where a vCPU finds devices, and what else it has a share in.
#[derive(Clone)]
pub struct Buses {
    /// Those with I/O ports.
    pub ports: Arc<PortBus>,
    /// Those with registers in memory.
    pub memory: Arc<MmioBus>,
    /// The console bytes that KVM holds back.
    pub coalescing: Arc<Coalescing>,
    /// Whether the kernel can access the PMU's registers without leaving the guest.
    pub has_shared_pages: bool,
}

impl Buses {
    /// Those of a machine.
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
    /// Reads a device's register in memory.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        self.memory.read(address, data);
    }

    /// Writes to one.
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

/// A device's interrupt line.
pub fn line(vm: &Arc<VmFd>, gsi: u32) -> Result<impl Interrupt + 'static, MachineError> {
    let event = EventFd::new(libc::EFD_NONBLOCK).map_err(MachineError::Event)?;
    vm.register_irqfd(&event, gsi).doing("connect a device's interrupt")?;
    Ok(event)
}

/// What has to be there before the first vCPU.
pub fn before_vcpus(vm: &VmFd) -> Result<(), KvmError> {
    vm.set_tss_address(TSS_ADDRESS).doing("place the TSS")?;
    vm.set_identity_map_address(IDENTITY_MAP_ADDRESS).doing("place the identity map")?;
    vm.create_irq_chip().doing("make the interrupt controllers")?;
    let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
    vm.create_pit2(pit).doing("make the timer")
}

/// What comes after the last one: nothing.
#[expect(clippy::unnecessary_wraps, reason = "other processors' machines need more")]
pub fn after_vcpus(_vm: &VmFd, _vcpus: &[VcpuFd]) -> Result<Controllers, KvmError> {
    Ok(Controllers)
}

/// What has come after the last one.
pub struct Controllers;

/// Tells the kernel what there is.
pub fn describe(
    plan: &Plan,
    _vcpus: &[VcpuFd],
    virtio_devices: usize,
    _entry: Entry,
) -> Result<(), MachineError> {
    firmware::write(&plan.ram.mapped, plan.cpus, virtio_devices)
        .map_err(|error| MachineError::Firmware(error.to_string()))
}

/// What vCPUs are made with.
pub struct Processors(CpuId);

impl Processors {
    /// Those of the host's kind.
    pub fn new(kvm: &Kvm) -> Result<Self, KvmError> {
        kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).doing("say which CPUID it supports").map(Self)
    }

    /// Prepares one, which has this number.
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
