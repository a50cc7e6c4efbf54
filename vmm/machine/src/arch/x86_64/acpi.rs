//! The ACPI tables. They tell the guest which CPUs and devices it has, how to power itself off, and which legacy
//! devices are absent.
//!
//! The machine is a "hardware-reduced" one (ACPI 6.5, section 4.1): it announces no PIC, keyboard controller, CMOS
//! clock or VGA. A kernel then does not probe for these devices, which is the main reason why it boots fast.

use acpi_tables::aml::{
    Device, EISAName, IO, Interrupt, Memory32Fixed, Name, Package, Path, ResourceTemplate, Scope,
};
use acpi_tables::fadt::{FADTBuilder, Flags};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, aml::ZERO};
use devices::virtio::Transport;
use devices::{AcpiSleep, ResetOn};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use super::layout::{COM, VIRTIO, port};
use super::memory::low;
use super::vmgenid;

const OEM: [u8; 6] = *b"TALLY ";
const OEM_TABLE: [u8; 8] = *b"TALLYVMM";
const OEM_REVISION: u32 = 1;
const IO_APIC: u32 = 0xfec0_0000;
const LOCAL_APIC: u32 = 0xfee0_0000;

/// Writes the tables for `cpus` CPUs and `virtio` virtio devices. The root pointer (RSDP) is at [`low::ACPI`].
pub fn write(memory: &GuestMemoryMmap, cpus: u8, virtio: usize) -> Result<(), GuestMemoryError> {
    let mut next = low::ACPI + Rsdp::len() as u64;
    let mut put = |table: &[u8]| {
        // Firmware aligns tables to 16 bytes.
        let at = next.next_multiple_of(16);
        next = at + table.len() as u64;
        memory.write_slice(table, GuestAddress(at)).map(|()| at)
    };

    let dsdt = put(&dsdt(virtio))?;
    let mut xsdt = XSDT::new(OEM, OEM_TABLE, OEM_REVISION);
    xsdt.add_entry(put(&bytes(&fadt(dsdt)))?);
    xsdt.add_entry(put(&bytes(&madt(cpus)))?);
    let xsdt = put(&bytes(&xsdt))?;
    memory.write_slice(&bytes(&Rsdp::new(OEM, xsdt)), GuestAddress(low::ACPI))
}

fn bytes(table: &dyn Aml) -> Vec<u8> {
    let mut bytes = Vec::new();
    table.to_aml_bytes(&mut bytes);
    bytes
}

fn dsdt(virtio_devices: usize) -> Vec<u8> {
    let mut body = Vec::new();
    // The interrupts of the serial port and of virtio devices are edge-triggered.
    let interrupt = |gsi| Interrupt::new(true, true, false, false, gsi);
    let ports = IO::new(COM.base, COM.base, 1, 8);
    add_device(&mut body, "COM1", &EISAName::new("PNP0501"), 0, vec![&ports, &interrupt(COM.gsi)]);
    for index in 0..virtio_devices {
        let address = u32::try_from(VIRTIO.address(index)).expect("devices are below 4 GiB");
        let registers = u32::try_from(Transport::SIZE).expect("registers take a page");
        let registers = Memory32Fixed::new(true, address, registers);
        let resources: Vec<&dyn Aml> = vec![&registers];
        let interrupt = interrupt(VIRTIO.gsi(index));
        add_device(
            &mut body,
            &format!("VIO{index}"),
            &"LNRO0005",
            index,
            [resources, vec![&interrupt]].concat(),
        );
    }
    vmgenid::describe(&mut body);
    let s5 = Package::new(vec![&AcpiSleep::S5, &ZERO, &ZERO, &ZERO]);
    Name::new(Path::new("_S5_"), &s5).to_aml_bytes(&mut body);

    let mut table = Sdt::new(*b"DSDT", 36, 6, OEM, OEM_TABLE, OEM_REVISION);
    table.append_slice(&body);
    table.as_slice().to_vec()
}

/// Adds a device with the hardware ID `id` to `body`. Devices with the same hardware ID differ in `number`, their
/// `_UID`.
fn add_device(body: &mut Vec<u8>, name: &str, id: &dyn Aml, number: usize, resources: Vec<&dyn Aml>) {
    let resources = ResourceTemplate::new(resources);
    let (id, number, resources) = (
        Name::new(Path::new("_HID"), id),
        Name::new(Path::new("_UID"), &number),
        Name::new(Path::new("_CRS"), &resources),
    );
    let device = Device::new(Path::new(name), vec![&id, &number, &resources]);
    Scope::new(Path::new("_SB_"), vec![&device]).to_aml_bytes(body);
}

fn fadt(dsdt: u64) -> acpi_tables::fadt::FADT {
    const VGA_NOT_PRESENT: u16 = 1 << 2;
    const CMOS_RTC_NOT_PRESENT: u16 = 1 << 5;
    let register = |port: u16| GAS::new(AddressSpace::SystemIo, 8, 0, AccessSize::ByteAccess, port.into());

    let mut fadt = FADTBuilder::new(OEM, OEM_TABLE, OEM_REVISION)
        .dsdt_64(dsdt)
        .flag(Flags::Wbinvd)
        .flag(Flags::PwrButton)
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup)
        .flag(Flags::HwReducedAcpi);
    fadt.iapc_boot_arch = (VGA_NOT_PRESENT | CMOS_RTC_NOT_PRESENT).into();
    fadt.reset_reg = register(port::RESET);
    fadt.reset_value = ResetOn::ACPI.0;
    fadt.sleep_control_reg = register(port::SLEEP);
    fadt.sleep_status_reg = register(port::SLEEP + 1);
    fadt.finalize()
}

fn madt(cpus: u8) -> MADT {
    let mut madt = MADT::new(OEM, OEM_TABLE, OEM_REVISION, LocalInterruptController::Address(LOCAL_APIC));
    for id in 0..cpus {
        madt.add_structure(ProcessorLocalApic::new(id, id, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(0, IO_APIC, 0));
    madt
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tables(cpus: u8) -> Vec<u8> {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        write(&memory, cpus, 3).unwrap();
        let mut area = vec![0; 0x2_0000];
        memory.read_slice(&mut area, GuestAddress(low::ACPI)).unwrap();
        area
    }

    fn table<'a>(area: &'a [u8], signature: &[u8]) -> &'a [u8] {
        let at = area.windows(4).position(|w| w == signature).expect("the table is there");
        let len = u32::from_le_bytes(area[at + 4..at + 8].try_into().unwrap());
        &area[at..at + len as usize]
    }

    #[test]
    fn every_table_has_a_right_checksum() {
        let area = tables(4);
        for signature in [b"DSDT", b"FACP", b"APIC", b"XSDT"] {
            let sum = table(&area, signature).iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
            assert_eq!(sum, 0, "{}", String::from_utf8_lossy(signature));
        }
        assert_eq!(&area[..8], b"RSD PTR ");
    }

    #[test]
    fn each_cpu_has_its_entry_even_the_254th() {
        let entries = |cpus| (table(&tables(cpus), b"APIC").len() - 44 - 12) / 8;
        assert_eq!(entries(1), 1);
        assert_eq!(entries(254), 254);
    }
}
