//! The device tree, which describes the machine to the kernel (Devicetree Specification 0.4, and Linux' bindings).

use std::ops::Range;

use devices::virtio::Transport;
use kvm_bindings::{KVM_DEV_RISCV_APLIC_SIZE, KVM_DEV_RISCV_IMSIC_SIZE};
use vm_fdt::{FdtWriter, FdtWriterResult};

use super::aia::{self, imsic};
use super::layout::{COM, VIRTIO, VMGENID_GSI, aia as place};
use super::memory;
use crate::vmgenid;

/// The properties in which machines differ.
pub struct MachineProperties<'a> {
    /// Number of CPUs.
    pub cpus: u32,
    /// Names of each CPU's ISA extensions.
    pub extensions: &'a [&'a str],
    /// The largest virtual-memory scheme of the CPUs.
    pub mmu: &'a str,
    /// Block sizes of the cache-block instructions (Zicbom, Zicboz), each with the name of its property.
    pub blocks: &'a [(&'a str, u32)],
    /// Frequency of the clock in Hz.
    pub ticks: u32,
    /// Size of RAM in bytes.
    pub memory: u64,
    /// Number of virtio devices.
    pub virtio: usize,
    /// The kernel's command line.
    pub command_line: &'a str,
    /// Addresses of the initrd, if there is one.
    pub initrd: Option<Range<u64>>,
    /// Randomness for the kernel's generator. Without it, the kernel has none for a long time, and every random number
    /// costs it thousands of instructions: Linux takes one for each system call.
    pub seed: Seed,
}

/// Randomness for the kernel's generator: as much as fills it.
pub type Seed = [u8; 64];

/// Number of the supervisor external interrupt.
const SUPERVISOR_EXTERNAL: u32 = 9;
/// Interrupt type: a rising edge.
const RISING_EDGE: u32 = 1;
/// Phandles of the nodes that other nodes refer to.
const APLIC: u32 = 1;
const IMSIC: u32 = 2;
const FIRST_CPU: u32 = 16;

/// Returns the device tree blob.
pub fn tree(machine: &MachineProperties) -> FdtWriterResult<Vec<u8>> {
    let mut fdt = FdtWriter::new()?;
    let root = fdt.begin_node("")?;
    fdt.property_u32("#address-cells", 2)?;
    fdt.property_u32("#size-cells", 2)?;
    fdt.property_string("compatible", "tally,machine")?;
    fdt.property_string("model", "Tally")?;
    chosen(&mut fdt, machine)?;
    let memory = fdt.begin_node(&format!("memory@{:x}", memory::RAM))?;
    fdt.property_string("device_type", "memory")?;
    fdt.property_array_u64("reg", &[memory::RAM, memory::usable(machine.memory)])?;
    fdt.end_node(memory)?;
    cpus(&mut fdt, machine)?;
    let soc = fdt.begin_node("soc")?;
    fdt.property_u32("#address-cells", 2)?;
    fdt.property_u32("#size-cells", 2)?;
    fdt.property_string("compatible", "simple-bus")?;
    fdt.property_null("ranges")?;
    interrupts(&mut fdt, machine.cpus)?;
    serial(&mut fdt)?;
    vmgenid(&mut fdt, memory::vmgenid(machine.memory))?;
    for index in 0..machine.virtio {
        let address = VIRTIO.address(index);
        let node = fdt.begin_node(&format!("virtio@{address:x}"))?;
        fdt.property_string("compatible", "virtio,mmio")?;
        fdt.property_array_u64("reg", &[address, Transport::SIZE])?;
        line(&mut fdt, VIRTIO.gsi(index))?;
        fdt.end_node(node)?;
    }
    fdt.end_node(soc)?;
    fdt.end_node(root)?;
    fdt.finish()
}

fn chosen(fdt: &mut FdtWriter, machine: &MachineProperties) -> FdtWriterResult<()> {
    let node = fdt.begin_node("chosen")?;
    fdt.property_string("bootargs", machine.command_line)?;
    fdt.property_string("stdout-path", &format!("/soc/serial@{:x}", COM.base))?;
    fdt.property("rng-seed", &machine.seed)?;
    if let Some(initrd) = &machine.initrd {
        fdt.property_u64("linux,initrd-start", initrd.start)?;
        fdt.property_u64("linux,initrd-end", initrd.end)?;
    }
    fdt.end_node(node)
}

fn cpus(fdt: &mut FdtWriter, machine: &MachineProperties) -> FdtWriterResult<()> {
    let node = fdt.begin_node("cpus")?;
    fdt.property_u32("#address-cells", 1)?;
    fdt.property_u32("#size-cells", 0)?;
    fdt.property_u32("timebase-frequency", machine.ticks)?;
    for cpu in 0..machine.cpus {
        let node = fdt.begin_node(&format!("cpu@{cpu:x}"))?;
        fdt.property_string("device_type", "cpu")?;
        fdt.property_string("compatible", "riscv")?;
        fdt.property_string("status", "okay")?;
        fdt.property_u32("reg", cpu)?;
        fdt.property_string("mmu-type", machine.mmu)?;
        fdt.property_string("riscv,isa", &super::isa::named(machine.extensions))?;
        fdt.property_string("riscv,isa-base", "rv64i")?;
        let names = machine.extensions.iter().map(|&name| name.to_owned()).collect();
        fdt.property_string_list("riscv,isa-extensions", names)?;
        for (name, size) in machine.blocks {
            fdt.property_u32(name, *size)?;
        }
        let controller = fdt.begin_node("interrupt-controller")?;
        fdt.property_string("compatible", "riscv,cpu-intc")?;
        fdt.property_null("interrupt-controller")?;
        fdt.property_u32("#interrupt-cells", 1)?;
        fdt.property_phandle(FIRST_CPU + cpu)?;
        fdt.end_node(controller)?;
        fdt.end_node(node)?;
    }
    fdt.end_node(node)
}

fn interrupts(fdt: &mut FdtWriter, cpus: u32) -> FdtWriterResult<()> {
    let node = fdt.begin_node(&format!("interrupt-controller@{:x}", place::IMSIC))?;
    fdt.property_string("compatible", "riscv,imsics")?;
    fdt.property_array_u64("reg", &[imsic(0), u64::from(cpus) * u64::from(KVM_DEV_RISCV_IMSIC_SIZE)])?;
    fdt.property_null("interrupt-controller")?;
    fdt.property_u32("#interrupt-cells", 0)?;
    fdt.property_null("msi-controller")?;
    fdt.property_u32("#msi-cells", 0)?;
    fdt.property_u32("riscv,num-ids", aia::IDS)?;
    let parents: Vec<u32> = (0..cpus).flat_map(|cpu| [FIRST_CPU + cpu, SUPERVISOR_EXTERNAL]).collect();
    fdt.property_array_u32("interrupts-extended", &parents)?;
    fdt.property_phandle(IMSIC)?;
    fdt.end_node(node)?;

    let node = fdt.begin_node(&format!("interrupt-controller@{:x}", place::APLIC))?;
    fdt.property_string("compatible", "riscv,aplic")?;
    fdt.property_array_u64("reg", &[place::APLIC, KVM_DEV_RISCV_APLIC_SIZE.into()])?;
    fdt.property_null("interrupt-controller")?;
    fdt.property_u32("#interrupt-cells", 2)?;
    fdt.property_u32("msi-parent", IMSIC)?;
    fdt.property_u32("riscv,num-sources", place::SOURCES)?;
    fdt.property_phandle(APLIC)?;
    fdt.end_node(node)
}

fn serial(fdt: &mut FdtWriter) -> FdtWriterResult<()> {
    /// Clock of a PC's UART in Hz. A bit takes 16 cycles at the highest speed.
    const CLOCK: u32 = 1_843_200;
    let node = fdt.begin_node(&format!("serial@{:x}", COM.base))?;
    fdt.property_string("compatible", "ns16550a")?;
    fdt.property_array_u64("reg", &[COM.base, devices::Serial::PORTS.into()])?;
    fdt.property_u32("clock-frequency", CLOCK)?;
    line(fdt, COM.gsi)?;
    fdt.end_node(node)
}

/// The VM generation ID. Linux has a driver since 6.10.
fn vmgenid(fdt: &mut FdtWriter, address: u64) -> FdtWriterResult<()> {
    let node = fdt.begin_node(&format!("generation@{address:x}"))?;
    fdt.property_string("compatible", "microsoft,vmgenid")?;
    fdt.property_array_u64("reg", &[address, vmgenid::LEN as u64])?;
    line(fdt, VMGENID_GSI)?;
    fdt.end_node(node)
}

fn line(fdt: &mut FdtWriter, gsi: u32) -> FdtWriterResult<()> {
    fdt.property_u32("interrupt-parent", APLIC)?;
    fdt.property_array_u32("interrupts", &[gsi, RISING_EDGE])
}
