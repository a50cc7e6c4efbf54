//! The VM generation ID: 16 random bytes in the guest's memory that are others after the guest was restored, and an interrupt that
//! says so. Linux (5.18 and later, `CONFIG_VMGENID`) lets its random generator begin anew then.
//!
//! The interrupt is that of ACPI's Generic Event Device, whose method notifies the device of the ID.

use acpi_tables::aml::{
    Device, Interrupt, Method, Name, Notify, ONE, Package, Path, ResourceTemplate, Scope,
};
use acpi_tables::{Aml, aml::ZERO};
use kvm_ioctls::VmFd;
use rustix::rand::{GetRandomFlags, getrandom};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use super::memory::low;
use crate::kvm_error::{KvmError, KvmResultExt};

/// Interrupt line of the Generic Event Device: one of a PC's that nothing else uses.
const GSI: u32 = 5;
/// "The device has changed", for a device that defines its own notifications.
const CHANGED: u8 = 0x80;

/// Gives the guest an ID that no other one has.
pub fn write_new(memory: &GuestMemoryMmap) -> Result<(), GuestMemoryError> {
    let mut id = [0; 16];
    // It does not fail for so few bytes once the host's pool is initialised.
    let _ = getrandom(&mut id, GetRandomFlags::empty());
    memory.write_slice(&id, GuestAddress(low::GENERATION))
}

/// Tells the guest that it has another ID.
pub fn announce(vm: &VmFd) -> Result<(), KvmError> {
    // The interrupt is edge-triggered.
    [true, false]
        .into_iter()
        .try_for_each(|level| vm.set_irq_line(GSI, level))
        .operation("interrupt the guest")
}

/// Adds both devices to the table of devices.
pub fn describe(body: &mut Vec<u8>) {
    let address = u32::try_from(low::GENERATION).expect("it is in the first MiB");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_guests_have_the_same_id() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        let new = || {
            write_new(&memory).unwrap();
            memory.read_obj::<[u8; 16]>(GuestAddress(low::GENERATION)).unwrap()
        };
        assert_ne!(new(), new());
    }
}
