//! The parts of a PC other than memory and virtio devices: interrupt controllers, I/O ports, firmware, and the initial
//! state of the vCPUs.

use std::sync::Arc;

use devices::virtio::MmioBus;
use devices::{AcpiSleep, DebugExit, End, FwCfg, Overlap, PortBus, ResetOn, Serial};
use kvm_bindings::{CpuId, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config};
use kvm_ioctls::{Cap, Kvm, VcpuFd, VmFd};

use super::coalescing::Coalescing;
use super::fingerprint::Fingerprint;
use super::layout::{COM, VIRTIO, port};
use super::loader::{Entry, Kernel};
use super::pmu::{Link, Pmu};
use super::state::{MachineState, VcpuState};
use super::{cpuid, firmware, memory, registers, state};
use crate::architecture::{self, FirstVirtio};
use crate::error::MachineError;
use crate::kvm_error::{KvmError, KvmResultExt};
use crate::vmgenid;

/// Guest-physical addresses of the three pages of the TSS and the one page of the identity map, which KVM needs on
/// Intel hosts. They are below 4 GiB, where the guest has neither RAM nor devices.
const TSS_ADDRESS: usize = 0xfffb_d000;
const IDENTITY_MAP_ADDRESS: u64 = 0xfffb_c000;

pub type Plan<'a> = architecture::Plan<'a, Pmu>;

/// Device buses of a machine, and other state that its vCPUs share.
#[derive(Clone)]
pub struct Board {
    /// Devices with I/O ports.
    pub ports: Arc<PortBus>,
    /// Devices with memory-mapped registers.
    pub memory: Arc<MmioBus>,
    /// Coalesced writes to the console.
    pub coalescing: Arc<Coalescing>,
    /// What a vCPU's emulated PMU needs from the board.
    pmu_link: Link,
    /// Numbers of the MSRs that a snapshot has.
    msrs: Arc<[u32]>,
}

/// Interrupt controllers that are created after the vCPUs: none, as KVM's are created before.
pub struct Controllers;

impl Board {
    /// Parameters that every Linux kernel gets: the console; a panic resets the machine, which ends it; and there is no
    /// PCI bus to probe.
    pub const KERNEL_PARAMETERS: &'static str = "console=ttyS0 8250.nr_uarts=1 panic=-1 pci=off";
    /// Interrupt line of the serial port.
    pub const CONSOLE_GSI: u32 = COM.gsi;
    /// Virtio devices' registers are in read-only memory of the guest, if KVM has that.
    pub const HAS_READABLE_REGISTERS: bool = true;
    /// Address and interrupt line of the first virtio device.
    pub const VIRTIO: FirstVirtio = VIRTIO;

    /// Returns the guest-physical ranges of RAM of this size: first addresses and lengths.
    pub fn ram(size: u64) -> Vec<(u64, u64)> {
        memory::ranges(size)
    }

    /// Creates the parts of the VM that KVM requires before the first vCPU is created.
    pub fn before_vcpus(vm: &VmFd) -> Result<(), KvmError> {
        vm.set_tss_address(TSS_ADDRESS).operation("place the TSS")?;
        vm.set_identity_map_address(IDENTITY_MAP_ADDRESS).operation("place the identity map")?;
        vm.create_irq_chip().operation("create the interrupt controllers")?;
        let pit = kvm_pit_config { flags: KVM_PIT_SPEAKER_DUMMY, ..Default::default() };
        vm.create_pit2(pit).operation("create the PIT")
    }

    /// Does nothing: KVM's interrupt controllers are created before the vCPUs.
    pub fn after_vcpus(_vm: &VmFd, _vcpus: &[VcpuFd]) -> Result<Controllers, KvmError> {
        Ok(Controllers)
    }

    /// Writes the ACPI tables into the guest's memory. `virtio` is the number of virtio devices.
    pub fn write_tables(
        plan: &Plan,
        _vcpus: &[VcpuFd],
        virtio: usize,
        _command_line: &str,
        _entry: Entry,
    ) -> Result<(), MachineError> {
        firmware::write(&plan.ram.mapped, plan.cpus, virtio)
            .map_err(|error| MachineError::Firmware(error.to_string()))
    }

    /// Creates the buses with all devices on them.
    pub fn new(
        kvm: &Kvm,
        vm: &Arc<VmFd>,
        plan: &Plan,
        console: &Serial,
        memory: MmioBus,
        _controllers: Controllers,
    ) -> Result<Self, MachineError> {
        let linux = plan.kernel.is_linux;
        // A restored guest may transmit by interrupt already.
        let coalesce = linux && !plan.is_restored && kvm.check_extension(Cap::CoalescedPio);
        Ok(Self {
            ports: Arc::new(ports(plan, console)?),
            memory: Arc::new(memory),
            coalescing: Arc::new(Coalescing::new(Arc::clone(vm), coalesce)?),
            pmu_link: Link { has_shared_pages: plan.kernel.pages.is_some(), is_linux: linux },
            msrs: state::msrs(kvm)?.into(),
        })
    }

    /// Sets each vCPU's CPUID, registers, and ring of coalesced writes. All but the first wait until the guest's kernel
    /// starts them.
    pub fn set_up_vcpus(
        &self,
        kvm: &Kvm,
        plan: &Plan,
        vcpus: &mut [VcpuFd],
        kernel: &Kernel,
        entry: Entry,
    ) -> Result<(), KvmError> {
        let shown = plan.pmu.shown_processor();
        let supported = show_processor(kvm, plan, vcpus)?;
        let immunities = cpuid::immunities(&supported, shown);
        for (id, fd) in (0..).zip(vcpus) {
            registers::prepare(fd, id == 0, entry, &plan.ram.mapped, plan.pmu, immunities)?;
            if cpuid::is_intels_on_amd(&supported, shown)
                && let Some(sysret) = kernel.sysret()
            {
                registers::ignore_narrow_syscalls(fd, sysret)?;
            }
            self.coalescing.attach(fd)?;
        }
        Ok(())
    }

    /// Reads what KVM holds of the machine. No vCPU may run meanwhile.
    pub fn save(&self, vm: &VmFd) -> Result<MachineState, KvmError> {
        MachineState::save(vm)
    }

    /// Reads what KVM holds of a vCPU, whose last exit has been completed.
    pub fn save_vcpu(&self, vcpu: &VcpuFd) -> Result<VcpuState, KvmError> {
        VcpuState::save(vcpu, &self.msrs)
    }

    /// Sets what KVM holds of a new machine and its vCPUs. The guest's memory has been restored before.
    pub fn restore<'a>(
        &self,
        kvm: &Kvm,
        vm: &VmFd,
        plan: &Plan,
        vcpus: &mut [VcpuFd],
        state: &MachineState,
        vcpu_states: impl Iterator<Item = &'a VcpuState>,
    ) -> Result<(), KvmError> {
        show_processor(kvm, plan, vcpus)?;
        for (number, (fd, state)) in vcpus.iter_mut().zip(vcpu_states).enumerate() {
            self.coalescing.attach(fd)?;
            state.restore(fd, number == 0)?;
        }
        // Last: what is pending in the I/O APIC is delivered to the local APICs.
        state.restore(vm)?;
        // Its random generator is that of every other guest that was restored from this state.
        vmgenid::write_new(&plan.ram.mapped, memory::low::VMGENID).expect("every guest has the first MiB");
        vmgenid::announce(vm, super::vmgenid::GSI)
    }

    /// Returns what a machine on this host shows its guest of the processor: a guest that was saved on a host with the
    /// same finds everything as it was.
    pub fn fingerprint(kvm: &Kvm, cpus: u8, pmu: Pmu) -> Result<Fingerprint, KvmError> {
        let cpuid = cpuid::for_vcpu(&cpuid::supported(kvm)?, 0, cpus, pmu, pmu.shown_processor())?;
        Ok(Fingerprint::new(&cpuid, state::msrs(kvm)?))
    }

    /// Returns [`Self::fingerprint`] while machines run, given the first vCPU of one that is saved.
    pub fn saved_fingerprint(
        kvm: &Kvm,
        cpus: u8,
        pmu: Pmu,
        _first: &VcpuState,
    ) -> Result<Fingerprint, KvmError> {
        Self::fingerprint(kvm, cpus, pmu)
    }

    /// Returns in what this host differs from the one where a guest was saved, if its guest would see it.
    pub fn difference(saved: &Fingerprint, here: &Fingerprint) -> Option<String> {
        saved.difference(here)
    }

    /// Returns what a vCPU's emulated PMU needs from the board.
    pub fn pmu_link(&self) -> Link {
        self.pmu_link
    }

    /// Handles a guest's read from a device's register in memory (MMIO).
    pub fn read(&self, address: u64, data: &mut [u8]) {
        self.memory.read(address, data);
    }

    /// Handles a guest's write to a device's register in memory (MMIO), which never ends the machine here.
    pub fn write(&self, address: u64, data: &[u8]) -> Option<End> {
        self.memory.write(address, data);
        None
    }
}

/// Sets each vCPU's CPUID. Returns what KVM supports.
fn show_processor(kvm: &Kvm, plan: &Plan, vcpus: &[VcpuFd]) -> Result<CpuId, KvmError> {
    let shown = plan.pmu.shown_processor();
    let supported = cpuid::supported(kvm)?;
    for (id, fd) in (0..).zip(vcpus) {
        let cpuid = cpuid::for_vcpu(&supported, id, plan.cpus, plan.pmu, shown)?;
        fd.set_cpuid2(&cpuid).operation("set a vCPU's CPUID")?;
    }
    Ok(supported)
}

fn ports(plan: &Plan, console: &Serial) -> Result<PortBus, Overlap> {
    let mut bus = PortBus::default();
    bus.attach(COM.base, Serial::PORTS, console.clone())?;
    bus.attach(port::KEYBOARD, 1, ResetOn::KEYBOARD)?;
    bus.attach(port::DEBUG_EXIT, 4, DebugExit)?;
    bus.attach(port::SLEEP, 2, AcpiSleep)?;
    bus.attach(port::RESET, 1, ResetOn::ACPI)?;
    if !plan.kernel.is_linux {
        bus.attach(port::FW_CFG, 2, FwCfg::new(plan.cpus.into(), plan.ram.size()))?;
    }
    Ok(bus)
}
