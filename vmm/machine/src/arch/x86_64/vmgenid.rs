//! How ACPI describes the VM generation ID to the guest, and its interrupt: that of the Generic Event Device, whose
//! method notifies the device of the ID. Linux has a driver since 5.18.

use acpi_tables::aml::{
    Device, Interrupt, Method, Name, Notify, ONE, Package, Path, ResourceTemplate, Scope,
};
use acpi_tables::{Aml, aml::ZERO};

use super::memory::low;

/// Interrupt line of the Generic Event Device: one of a PC's that nothing else uses.
pub const GSI: u32 = 5;
/// "The device has changed", for a device that defines its own notifications.
const CHANGED: u8 = 0x80;

/// Adds both devices to the table of devices.
pub fn describe(body: &mut Vec<u8>) {
    let address = u32::try_from(low::VMGENID).expect("it is in the first MiB");
    let address = Package::new(vec![&address, &ZERO]);
    let name = |name, value| Name::new(Path::new(name), value);
    let (id, kind) = (name("_HID", &"TALY0001"), name("_CID", &"VM_Gen_Counter"));
    let (text, address) = (name("_DDN", &"VM_Gen_Counter"), name("ADDR", &address));
    add(body, "VGEN", vec![&id, &kind, &text, &address]);

    let interrupt = Interrupt::new(true, true, false, false, GSI);
    let resources = ResourceTemplate::new(vec![&interrupt]);
    let (id, number, resources) = (name("_HID", &"ACPI0013"), name("_UID", &ONE), name("_CRS", &resources));
    let device = Path::new("\\_SB_.VGEN");
    let notify = Notify::new(&device, &CHANGED);
    let event = Method::new(Path::new("_EVT"), 1, true, vec![&notify]);
    add(body, "GED_", vec![&id, &number, &resources, &event]);
}

fn add(body: &mut Vec<u8>, name: &str, objects: Vec<&dyn Aml>) {
    let device = Device::new(Path::new(name), objects);
    Scope::new(Path::new("_SB_"), vec![&device]).to_aml_bytes(body);
}
