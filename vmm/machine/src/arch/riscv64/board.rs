//! What a RISC-V machine is made of beside memory and virtio devices: interrupt controllers, a serial port, the device tree,
//! and what its vCPUs can do.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use devices::virtio::MmioBus;
use devices::{DebugExit, End, Interrupt, PortDevice, Serial};
use kvm_bindings::{
    KVM_RISCV_SBI_EXT_ID_KVM_RISCV_SBI_EXT_DBCN as CONSOLE, KVM_RISCV_SBI_EXT_ID_KVM_RISCV_SBI_EXT_PMU as PMU,
};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress};

use super::aia::{self, Controllers};
use super::loader::{Entry, Format};
use super::machine::{COM, DEBUG_EXIT, DEBUG_EXIT_LEN};
use super::pmu::Pmu;
use super::register::Register;
use super::{fdt, isa, memory};
use crate::architecture;
use crate::error::MachineError;
use crate::kvm_error::{Doing, KvmError};

/// What a Linux kernel has to be told: its console, from the first message on; and that a panic ends in a reset, which ends the
/// machine.
pub const KERNEL_WORDS: &str = "console=ttyS0 earlycon=sbi panic=-1";

type Plan<'a> = architecture::Plan<'a, Format, Pmu>;

/// Where a vCPU finds devices.
#[derive(Clone)]
pub struct Buses {
    serial: Serial,
    virtio: Arc<MmioBus>,
    /// What the kernel says by calls of the SBI goes there.
    output: Arc<Mutex<dyn Write + Send>>,
    /// What interrupts it.
    pub controllers: Controllers,
}

impl Buses {
    /// Those of a machine.
    #[expect(clippy::unnecessary_wraps, reason = "on other processors devices can be in each other's way")]
    pub fn new(
        _kvm: &Kvm,
        _vm: &Arc<VmFd>,
        plan: &Plan,
        console: &Serial,
        virtio: MmioBus,
        controllers: Controllers,
    ) -> Result<Self, MachineError> {
        let output = Arc::new(Mutex::new((plan.console)()));
        Ok(Self { serial: console.clone(), virtio: Arc::new(virtio), output, controllers })
    }

    /// A load from anywhere that is no memory.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match within(address, COM.base, Serial::PORTS.into(), data.len()) {
            Some(offset) => self.serial.read(offset, data),
            None => self.virtio.read(address, data),
        }
    }

    /// A store to anywhere that is no memory.
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

    /// The kernel says something by a call of the SBI.
    pub fn say(&self, text: &[u8]) {
        let mut output = self.output.lock().unwrap_or_else(PoisonError::into_inner);
        // What nobody takes any more is lost, as on a serial line.
        let _ = output.write_all(text);
    }
}

/// How far behind a device's first register an access is, if all of it is the device's.
fn within(address: u64, base: u64, len: u64, width: usize) -> Option<u16> {
    let offset = address.checked_sub(base)?;
    let end = offset.checked_add(width as u64)?;
    (end <= len).then_some(())?;
    u16::try_from(offset).ok()
}

/// A device's interrupt line.
///
/// KVM turns an eventfd into a line that is raised and never lowered, which is one interrupt and no more. So it is told by
/// itself.
struct Line {
    vm: Arc<VmFd>,
    gsi: u32,
}

impl Interrupt for Line {
    fn raise(&self) -> io::Result<()> {
        self.vm.set_irq_line(self.gsi, true)?;
        Ok(self.vm.set_irq_line(self.gsi, false)?)
    }
}

/// Makes one.
#[expect(clippy::unnecessary_wraps, reason = "on other processors it takes an eventfd")]
pub fn line(vm: &Arc<VmFd>, gsi: u32) -> Result<impl Interrupt + 'static, MachineError> {
    Ok(Line { vm: Arc::clone(vm), gsi })
}

/// What has to be there before the first vCPU: nothing.
#[expect(clippy::unnecessary_wraps, reason = "other processors' machines need more")]
pub fn before_vcpus(_vm: &VmFd) -> Result<(), KvmError> {
    Ok(())
}

/// What comes after the last one.
pub fn after_vcpus(vm: &VmFd, vcpus: &[VcpuFd]) -> Result<Controllers, KvmError> {
    aia::create(vm, u32::try_from(vcpus.len()).unwrap_or(u32::MAX))
}

/// Tells the kernel what there is.
pub fn describe(plan: &Plan, vcpus: &[VcpuFd], virtio: usize, entry: Entry) -> Result<(), MachineError> {
    const MMUS: [(u64, &str); 3] = [(8, "riscv,sv39"), (9, "riscv,sv48"), (10, "riscv,sv57")];
    let Some(first) = vcpus.first() else { return Ok(()) };
    let ask = |register: Register| register.get(first).doing("say what a vCPU can do");
    let mut extensions = isa::extensions(first);
    match plan.pmu {
        Pmu::Kvm => {}
        // That is offered only where KVM has it.
        Pmu::Emulated(shown, _) if shown.0.overflows => {}
        Pmu::None | Pmu::Emulated(..) => extensions.retain(|name| *name != isa::COUNTER_OVERFLOWS),
    }
    // Kernels before Linux 6.4 do not say: then it is the one that all have.
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
    let machine = fdt::Machine {
        cpus: plan.cpus.into(),
        mmu: MMUS.iter().find(|(number, _)| *number == mode).map_or(MMUS[0].1, |(_, name)| name),
        blocks: &blocks.collect::<Vec<_>>(),
        ticks: u32::try_from(ask(Register::TICKS)?).unwrap_or(u32::MAX),
        extensions: &extensions,
        memory: plan.ram.size(),
        virtio,
        command_line: plan.command_line,
        initrd: (entry.initrd.1 > 0).then(|| entry.initrd.0..entry.initrd.0 + entry.initrd.1),
    };
    let (address, room) = memory::device_tree(plan.ram.size());
    let tree = fdt::tree(&machine).map_err(|error| MachineError::Firmware(error.to_string()))?;
    if tree.len() as u64 > room {
        return Err(MachineError::Firmware(format!(
            "{} bytes of device tree, where there is room for {room}",
            tree.len()
        )));
    }
    plan.ram
        .mapped
        .write_slice(&tree, GuestAddress(address))
        .map_err(|error| MachineError::Firmware(error.to_string()))
}

/// What vCPUs are made with.
pub struct Processors(());

impl Processors {
    /// Those of the host's kind.
    #[expect(clippy::unnecessary_wraps, reason = "other processors have to be asked")]
    pub fn new(_kvm: &Kvm) -> Result<Self, KvmError> {
        Ok(Self(()))
    }

    /// Prepares one, which has this number. All but the first wait for the kernel to start them.
    pub fn prepare(
        &self,
        fd: &mut VcpuFd,
        id: u8,
        entry: Entry,
        plan: &Plan,
        _buses: &Buses,
    ) -> Result<(), KvmError> {
        /// In the register of what programs may read.
        const CLOCK: u64 = 1 << 1;
        // Kernels before Linux 6.6 have no such call: the guest's does without, too.
        let _ = Register::sbi(CONSOLE).set(fd, 1);
        if plan.pmu != Pmu::Kvm {
            // A KVM without its own has nothing to switch off.
            let _ = Register::sbi(PMU).set(fd, 0);
        }
        // As firmware leaves it. Linux with a PMU's driver does so by itself, and programs need their clock.
        Register::SCOUNTEREN.set(fd, CLOCK).doing("let programs read the clock")?;
        if super::needs_retargeting(plan.pmu) {
            // Kernels put other instructions over those that were changed if they know the vendor to have them.
            for register in [Register::VENDOR, Register::ARCHITECTURE, Register::IMPLEMENTATION] {
                register.set(fd, 0).doing("set who made a vCPU")?;
            }
        }
        if id == 0 {
            let (tree, _) = memory::device_tree(plan.ram.size());
            for (register, value) in
                [(Register::PC, entry.pc), (Register::A0, id.into()), (Register::A1, tree)]
            {
                register.set(fd, value).doing("set the registers")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_access_is_a_devices_if_all_of_it_is() {
        assert_eq!(within(0x1007, 0x1000, 8, 1), Some(7));
        assert_eq!(within(0x1007, 0x1000, 8, 2), None);
        assert_eq!(within(0xfff, 0x1000, 8, 1), None);
        assert_eq!(within(u64::MAX, 0, u64::MAX, 1), None);
    }
}
