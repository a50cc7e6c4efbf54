//! The parts of a RISC-V machine other than memory and virtio devices: interrupt controllers, a serial port, the device
//! tree, and the vCPUs' features.

use std::io::Write;
use std::sync::{Arc, Mutex, PoisonError};

use devices::virtio::MmioBus;
use devices::{DebugExit, End, PortDevice, Serial};
use kvm_bindings::{
    KVM_RISCV_SBI_EXT_ID_KVM_RISCV_SBI_EXT_DBCN as CONSOLE, KVM_RISCV_SBI_EXT_ID_KVM_RISCV_SBI_EXT_PMU as PMU,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress};

use super::aia::{self, Controllers};
use super::fingerprint::Fingerprint;
use super::layout::{COM, DEBUG_EXIT, DEBUG_EXIT_LEN, VIRTIO, VMGENID_GSI};
use super::loader::{Entry, Kernel};
use super::pmu::{Link, Model, Pmu};
use super::register::Register;
use super::state::VcpuState;
use super::{fdt, isa, memory, state};
use crate::architecture::{self, FirstVirtio};
use crate::entropy::entropy;
use crate::error::MachineError;
use crate::kvm_error::{KvmError, KvmResultExt};
use crate::vmgenid;

pub type Plan<'a> = architecture::Plan<'a, Pmu>;

/// The devices, and other state that all vCPUs share.
#[derive(Clone)]
pub struct Board {
    serial: Serial,
    virtio: Arc<MmioBus>,
    /// Destination of what the kernel writes with SBI calls.
    output: Arc<Mutex<dyn Write + Send>>,
    controllers: Controllers,
    /// Address of the first vCPU's shared page, if the kernel uses such pages.
    pages: Option<u64>,
}

impl Board {
    /// Writes text of the kernel to the console's output.
    pub fn write_console(&self, text: &[u8]) {
        let mut output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        // If the output fails, the text is lost, as on a serial line.
        let _ = output.write_all(text);
    }

    /// Parameters that every Linux kernel gets: the console, from the first message on; and a panic resets the machine,
    /// which ends it.
    pub const KERNEL_PARAMETERS: &'static str = "console=ttyS0 earlycon=sbi panic=-1";
    /// Interrupt line of the serial port.
    pub const CONSOLE_GSI: u32 = COM.gsi;
    /// On RISC-V each access to a register exits to the VMM: nothing else was tried.
    pub const HAS_READABLE_REGISTERS: bool = false;
    /// Address and interrupt line of the first virtio device.
    pub const VIRTIO: FirstVirtio = VIRTIO;

    /// Returns the guest-physical ranges of RAM of this size: first addresses and lengths.
    pub fn ram(size: u64) -> Vec<(u64, u64)> {
        memory::ranges(size)
    }

    /// Does nothing: KVM requires no part of the VM before the first vCPU here.
    pub fn before_vcpus(_vm: &VmFd) -> Result<(), KvmError> {
        Ok(())
    }

    /// Creates the interrupt controllers, for which KVM requires that all vCPUs exist.
    pub fn after_vcpus(vm: &VmFd, vcpus: &[VcpuFd]) -> Result<Controllers, KvmError> {
        aia::create(vm, u32::try_from(vcpus.len()).unwrap_or(u32::MAX))
    }

    /// Writes the device tree into the guest's memory. `virtio` is the number of virtio devices.
    pub fn write_tables(
        plan: &Plan,
        vcpus: &[VcpuFd],
        virtio: usize,
        command_line: &str,
        entry: Entry,
    ) -> Result<(), MachineError> {
        const MMUS: [(u64, &str); 3] = [(8, "riscv,sv39"), (9, "riscv,sv48"), (10, "riscv,sv57")];
        let Some(first) = vcpus.first() else { return Ok(()) };
        let ask = |register: Register| register.get(first).operation("say what a vCPU can do");
        let mut extensions = isa::extensions(first);
        match plan.pmu {
            Pmu::Kvm => {}
            // A PMU with overflow interrupts is offered only if KVM has the extension.
            Pmu::Emulated(model, _) if model.0.overflows => {}
            Pmu::None | Pmu::Emulated(..) => extensions.retain(|name| *name != isa::COUNTER_OVERFLOWS),
        }
        // Host kernels before Linux 6.4 do not have this register. Sv39 is then assumed, which all processors have.
        let mode = Register::SATP_MODE.get(first).unwrap_or(MMUS[0].0);
        let blocks = [
            ("zicbom", "riscv,cbom-block-size", Register::ZICBOM_BLOCK),
            ("zicboz", "riscv,cboz-block-size", Register::ZICBOZ_BLOCK),
        ];
        let has = |name| extensions.contains(&name);
        let blocks = blocks
            .into_iter()
            .filter(|(extension, ..)| has(*extension))
            .filter_map(|(_, name, register)| Some((name, u32::try_from(register.get(first).ok()?).ok()?)));
        let machine = fdt::MachineProperties {
            cpus: plan.cpus.into(),
            mmu: MMUS.iter().find(|(number, _)| *number == mode).map_or(MMUS[0].1, |(_, name)| name),
            blocks: &blocks.collect::<Vec<_>>(),
            ticks: u32::try_from(ask(Register::TICKS)?).unwrap_or(u32::MAX),
            extensions: &extensions,
            memory: plan.ram.size(),
            virtio,
            command_line,
            initrd: (entry.initrd.1 > 0).then(|| entry.initrd.0..entry.initrd.0 + entry.initrd.1),
            seed: entropy(),
        };
        let (address, room) = memory::device_tree(plan.ram.size());
        let tree = fdt::tree(&machine).map_err(|error| MachineError::Firmware(error.to_string()))?;
        if tree.len() as u64 > room {
            return Err(MachineError::Firmware(format!(
                "{} bytes of device tree, where there is room for {room}",
                tree.len()
            )));
        }
        let written = plan.ram.mapped.write_slice(&tree, GuestAddress(address));
        let id = memory::vmgenid(plan.ram.size());
        written
            .and_then(|()| vmgenid::write_new(&plan.ram.mapped, id))
            .map_err(|error| MachineError::Firmware(error.to_string()))
    }

    /// Creates the buses with all devices on them.
    pub fn new(
        _kvm: &Kvm,
        _vm: &Arc<VmFd>,
        plan: &Plan,
        console: &Serial,
        virtio: MmioBus,
        controllers: Controllers,
    ) -> Result<Self, MachineError> {
        let output = Arc::new(Mutex::new((plan.console)()));
        let pages = plan.kernel.pages;
        Ok(Self { serial: console.clone(), virtio: Arc::new(virtio), output, controllers, pages })
    }

    /// Sets what each vCPU can do, and its registers. All but the first wait until the guest's kernel starts them.
    pub fn set_up_vcpus(
        &self,
        _kvm: &Kvm,
        plan: &Plan,
        vcpus: &mut [VcpuFd],
        _kernel: &Kernel,
        entry: Entry,
    ) -> Result<(), KvmError> {
        /// The bit `TM` in `scounteren`.
        const CLOCK: u64 = 1 << 1;
        for fd in &mut *vcpus {
            show_processor(fd, plan.pmu)?;
            // Let programs read the clock, as firmware does. Only Linux kernels with a PMU driver set this bit
            // themselves.
            Register::SCOUNTEREN.set(fd, CLOCK).operation("let programs read the clock")?;
        }
        let Some(first) = vcpus.first() else { return Ok(()) };
        let (tree, _) = memory::device_tree(plan.ram.size());
        for (register, value) in [(Register::PC, entry.pc), (Register::A0, 0), (Register::A1, tree)] {
            register.set(first, value).operation("set the registers")?;
        }
        Ok(())
    }

    /// Reads what KVM holds of the machine. No vCPU may run meanwhile.
    pub fn save(&self, _vm: &VmFd) -> Result<aia::State, KvmError> {
        self.controllers.save()
    }

    /// Reads what KVM holds of a vCPU, whose last exit has been completed.
    pub fn save_vcpu(&self, vcpu: &VcpuFd) -> Result<VcpuState, KvmError> {
        VcpuState::save(vcpu)
    }

    /// Sets what KVM holds of a new machine and its vCPUs. The guest's memory has been restored before.
    pub fn restore<'a>(
        &self,
        _kvm: &Kvm,
        vm: &VmFd,
        plan: &Plan,
        vcpus: &mut [VcpuFd],
        state: &aia::State,
        vcpu_states: impl Iterator<Item = &'a VcpuState>,
    ) -> Result<(), KvmError> {
        for (number, (fd, state)) in vcpus.iter_mut().zip(vcpu_states).enumerate() {
            show_processor(fd, plan.pmu)?;
            state.restore(fd, number == 0)?;
        }
        self.controllers.restore(state)?;
        // Its random generator is that of every other guest that was restored from this state.
        vmgenid::write_new(&plan.ram.mapped, memory::vmgenid(plan.ram.size()))
            .expect("the last page of RAM is mapped");
        vmgenid::announce(vm, VMGENID_GSI)
    }

    /// Returns what a machine on this host shows its guest of the processor: a guest that was saved on a host with the
    /// same finds everything as it was. Creates a vCPU to ask: KVM says nothing about the processor otherwise.
    pub fn fingerprint(kvm: &Kvm, _cpus: u8, pmu: Pmu) -> Result<Fingerprint, KvmError> {
        let vm = kvm.create_vm().operation("create a VM")?;
        let vcpu = vm.create_vcpu(0).operation("create a vCPU")?;
        show_processor(&vcpu, pmu)?;
        Ok(Fingerprint::new(&state::read_all(&vcpu)?))
    }

    /// Returns [`Self::fingerprint`] of a machine that runs. A thread that saves may not create a vCPU, and need not.
    pub fn saved_fingerprint(
        _kvm: &Kvm,
        _cpus: u8,
        _pmu: Pmu,
        first: &VcpuState,
    ) -> Result<Fingerprint, KvmError> {
        Ok(Fingerprint::new(&first.registers))
    }

    /// Returns in what this host differs from the one where a guest was saved, if its guest would see it.
    pub fn difference(saved: &Fingerprint, here: &Fingerprint) -> Option<String> {
        saved.difference(here)
    }

    /// Returns what a vCPU's emulated PMU needs from the board.
    pub fn pmu_link(&self) -> Link {
        Link { controllers: self.controllers.clone(), pages: self.pages }
    }

    /// Handles a load from an address that is not RAM.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match within(address, COM.base, Serial::PORTS.into(), data.len()) {
            Some(offset) => self.serial.read(offset, data),
            None => self.virtio.read(address, data),
        }
    }

    /// Handles a store to an address that is not RAM. Returns how the machine ends if the store ends it.
    pub fn write(&self, address: u64, data: &[u8]) -> Option<End> {
        if let Some(offset) = within(address, COM.base, Serial::PORTS.into(), data.len()) {
            return self.serial.write(offset, data);
        }
        if let Some(offset) = within(address, DEBUG_EXIT, DEBUG_EXIT_LEN, data.len()) {
            return DebugExit.write(offset, data);
        }
        self.virtio.write(address, data);
        None
    }
}

/// Sets the SBI extensions that a vCPU has, and whose processor it shows.
fn show_processor(fd: &VcpuFd, pmu: Pmu) -> Result<(), KvmError> {
    // Forward calls of the SBI debug console to Tally. This fails on host kernels before Linux 6.6. The guest then has
    // no debug console.
    let _ = Register::sbi(CONSOLE).set(fd, 1);
    if pmu != Pmu::Kvm {
        // Disable KVM's own SBI PMU. This fails if KVM has none.
        let _ = Register::sbi(PMU).set(fd, 0);
    }
    if Model::needs_retargeting(pmu) {
        // For some vendors Linux overwrites the patched instructions with others (alternatives). Show no vendor.
        for register in [Register::VENDOR, Register::ARCHITECTURE, Register::IMPLEMENTATION] {
            register.set(fd, 0).operation("set a vCPU's vendor registers")?;
        }
    }
    Ok(())
}

/// Returns the offset of an access in a device's registers. Returns `None` if the access is not completely inside them.
fn within(address: u64, base: u64, len: u64, width: usize) -> Option<u16> {
    let offset = address.checked_sub(base)?;
    let end = offset.checked_add(width as u64)?;
    (end <= len).then_some(())?;
    u16::try_from(offset).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_must_be_completely_inside_a_devices_registers() {
        assert_eq!(within(0x1007, 0x1000, 8, 1), Some(7));
        assert_eq!(within(0x1007, 0x1000, 8, 2), None);
        assert_eq!(within(0xfff, 0x1000, 8, 1), None);
        assert_eq!(within(u64::MAX, 0, u64::MAX, 1), None);
    }
}
