//! Attaches virtio-mmio devices to a machine, and serves them.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use devices::virtio::{Device, MmioBus, Transport};
use kvm_bindings::{KVM_MEM_READONLY, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, IoEventAddress, NoDatamatch, VmFd};
use log::info;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use crate::arch;
use crate::architecture::Line;
use crate::error::MachineError;
use crate::kvm_error::KvmResultExt;

/// Maximum number of virtio devices.
pub const MAX_VIRTIO_DEVICES: usize = 8;

/// KVM's number for the registers of the first device. Those before are for the guest's memory.
const FIRST_SLOT: u32 = 16;

/// The devices that are attached so far.
#[derive(Default)]
pub struct Virtio(Vec<Arc<Transport>>);

impl Virtio {
    /// Assigns registers and an interrupt line to a device. The caller has to serve the returned transport.
    pub fn attach(
        &mut self,
        vm: &Arc<VmFd>,
        memory: &GuestMemoryMmap,
        device: &dyn Device,
    ) -> Result<Arc<Transport>, MachineError> {
        let index = self.0.len();
        let line = Line::new(vm, arch::Board::VIRTIO.gsi(index));
        let transport = Transport::new(device, memory.clone(), line).map_err(MachineError::Event)?;
        // With an ioeventfd, a vCPU that notifies the device does not exit to Tally.
        let notify = IoEventAddress::Mmio(arch::Board::VIRTIO.address(index) + Transport::NOTIFY);
        vm.register_ioevent(transport.kick(), &notify, NoDatamatch)
            .operation("register a virtio ioeventfd")?;
        if arch::Board::HAS_READABLE_REGISTERS && vm.check_extension(Cap::ReadonlyMem) {
            map_registers(vm, &transport, index)?;
        }
        self.0.push(Arc::clone(&transport));
        Ok(transport)
    }

    /// Returns the transports of all devices.
    pub fn transports(&self) -> Vec<Arc<Transport>> {
        self.0.clone()
    }

    /// Returns the bus with the registers of all devices.
    pub fn bus(self) -> MmioBus {
        MmioBus::new(arch::Board::VIRTIO.base, self.0)
    }
}

/// Lets the guest read a device's registers without an exit. What it writes still exits, but for notifications and
/// acknowledgements only as far as KVM.
fn map_registers(vm: &VmFd, transport: &Transport, index: usize) -> Result<(), MachineError> {
    let address = arch::Board::VIRTIO.address(index);
    let page = transport.make_readable().map_err(MachineError::Event)?;
    let region = kvm_userspace_memory_region {
        slot: FIRST_SLOT + u32::try_from(index).expect("there are few devices"),
        flags: KVM_MEM_READONLY,
        guest_phys_addr: address,
        memory_size: Transport::SIZE,
        userspace_addr: page as u64,
    };
    // SAFETY: the page is mapped, and each vCPU keeps it mapped: it holds the bus, which holds the transport.
    unsafe { vm.set_user_memory_region(region) }.operation("map the registers of a virtio device")?;
    let (offset, value) = Transport::ACKNOWLEDGEMENT;
    // Nobody waits for it. KVM keeps what it needs of the event.
    let ignored = EventFd::new(libc::EFD_NONBLOCK).map_err(MachineError::Event)?;
    vm.register_ioevent(&ignored, &IoEventAddress::Mmio(address + offset), value)
        .operation("register a virtio ioeventfd")?;
    Ok(())
}

/// The server of a device.
pub struct DeviceServer {
    pub(crate) transport: Arc<Transport>,
    pub(crate) device: Box<dyn Device>,
}

impl DeviceServer {
    /// Serves the device on this thread, as long as the process runs.
    pub fn run(mut self) {
        let (mut is_driven, mut is_running) = (false, false);
        loop {
            // What else the device awaits would not be taken while no driver is there for it.
            let more = if is_running { self.device.awaits() } else { Vec::new() };
            if wait(&self.transport, more).is_err() {
                return;
            }
            if !is_driven && self.transport.has_driver() {
                info!("the guest's driver is ready");
                is_driven = true;
            }
            is_running = self.transport.serve(&mut *self.device, Device::serve).is_some();
        }
    }
}

/// Waits until the driver notifies the device, or for what else the device awaits.
fn wait(transport: &Transport, more: Vec<(BorrowedFd, PollFlags)>) -> io::Result<()> {
    // One system call is enough to wait for the driver alone.
    if more.is_empty() || is_notified(transport, more)? {
        match transport.kick().read() {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            Ok(_) | Err(_) => {}
        }
    }
    Ok(())
}

/// Waits for the driver and for what else the device awaits. Returns true if the driver has notified the device.
fn is_notified(transport: &Transport, more: Vec<(BorrowedFd, PollFlags)>) -> io::Result<bool> {
    // SAFETY: the transport, which is borrowed here, keeps it open.
    let kick = unsafe { BorrowedFd::borrow_raw(transport.kick().as_raw_fd()) };
    let all = std::iter::once((kick, PollFlags::IN)).chain(more);
    let mut all: Vec<_> = all.map(|(fd, events)| PollFd::from_borrowed_fd(fd, events)).collect();
    match poll(&mut all, None) {
        Ok(_) | Err(Errno::INTR) => {
            Ok(all.first().is_some_and(|kick| kick.revents().contains(PollFlags::IN)))
        }
        Err(error) => Err(error.into()),
    }
}
