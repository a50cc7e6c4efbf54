//! Virtio devices in a machine: their place, their interrupts, and a thread for each to serve it.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread;

use devices::virtio::{Device, MmioBus, Transport};
use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use log::info;
use vm_memory::GuestMemoryMmap;

use crate::arch::Arch;
use crate::architecture::Architecture;
use crate::error::MachineError;
use crate::kvm_error::Doing;

/// The most devices that there can be.
pub const MOST: usize = 8;

/// The devices so far.
#[derive(Default)]
pub struct Virtio(Vec<Arc<Transport>>);

impl Virtio {
    /// Gives a device its registers and its interrupt; whoever has it serves it.
    pub fn attach(
        &mut self,
        vm: &Arc<VmFd>,
        memory: &GuestMemoryMmap,
        device: &dyn Device,
    ) -> Result<Arc<Transport>, MachineError> {
        let index = self.0.len();
        let line = Arch::line(vm, Arch::VIRTIO.line(index))?;
        let transport = Transport::new(device, memory.clone(), line).map_err(MachineError::Event)?;
        // So that a request does not make its vCPU leave KVM.
        let notify = IoEventAddress::Mmio(Arch::VIRTIO.address(index) + Transport::NOTIFY);
        vm.register_ioevent(transport.kick(), &notify, NoDatamatch)
            .doing("take a virtio device's requests")?;
        self.0.push(Arc::clone(&transport));
        Ok(transport)
    }

    /// All their registers.
    pub fn bus(self) -> MmioBus {
        MmioBus::new(Arch::VIRTIO.base, self.0)
    }
}

/// Serves a device on a thread of its own until the process ends.
pub fn serve(name: &str, transport: Arc<Transport>, mut device: Box<dyn Device>) -> io::Result<()> {
    let work = move || {
        let mut is_driven = false;
        while wait(&transport).is_ok() {
            if !is_driven && transport.has_driver() {
                info!("the guest's driver is ready");
                is_driven = true;
            }
            transport.serve(&mut *device, Device::serve);
        }
    };
    thread::Builder::new().name(name.to_owned()).spawn(work).map(drop)
}

/// Waits until there may be something to serve.
fn wait(transport: &Transport) -> io::Result<()> {
    let mut kick = libc::pollfd { fd: transport.kick().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the one entry is valid.
    while unsafe { libc::poll(&raw mut kick, 1, -1) } < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // Non-blocking: an error says that it was read already.
    let _ = transport.kick().read();
    Ok(())
}
