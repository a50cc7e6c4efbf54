//! Saves machines, so that others can continue from there.
//!
//! All vCPUs are paused while a machine is saved: first all of them stop, so that none sends another one an interrupt
//! any more, and then each is saved by its own thread, which alone can read its counters. A state has what KVM holds,
//! the PMUs, the console and the virtio devices, which are paused as well. The guest's memory ([`GuestRam::save`]) and
//! what the device of the caller's knows beyond its registers are saved by the caller.

use std::sync::Arc;
use std::time::Duration;

use devices::virtio::{Device, DeviceState, Transport, TransportState};
use devices::{Mismatch, Serial, SerialState};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};
use vpmu::state::PmuState;

use crate::arch::{Board, Fingerprint, KvmState, Plan};
use crate::architecture::KernelFacts;
use crate::error::MachineError;
use crate::kvm_error::KvmError;
use crate::memory::GuestRam;
use crate::pmu::Pmu;
use crate::vcpu::mailbox::{PausedVcpus, VcpuHandles};
use crate::vcpu::saved::{SaveError, VcpuState};

/// Time in which a device has to complete the request that it processes.
const LIMIT: Duration = Duration::from_secs(5);

/// The state of a machine without its memory.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineState {
    pub(crate) kernel: KernelFacts,
    pub(crate) kvm: KvmState,
    pub(crate) vcpus: Vec<VcpuState>,
    pub(crate) console: SerialState,
    /// The device that the caller serves, if there is one.
    pub(crate) external_device: Option<TransportState>,
    /// The other devices, in the order of their addresses.
    pub(crate) devices: Vec<SavedDevice>,
}

/// A virtio device that a thread of its own serves.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedDevice {
    pub(crate) transport: TransportState,
    pub(crate) own: Option<DeviceState>,
}

/// Saves a machine that runs.
pub struct Saver {
    pub(crate) vm: Arc<VmFd>,
    pub(crate) board: Board,
    pub(crate) kernel: KernelFacts,
    pub(crate) vcpus: Arc<VcpuHandles>,
    pub(crate) console: Serial,
    pub(crate) external_device: Option<Arc<Transport>>,
    pub(crate) devices: Vec<Arc<Transport>>,
    /// The guest's memory.
    pub ram: GuestRam,
}

/// A machine that is paused until this is dropped.
pub struct PausedMachine<'a> {
    saver: &'a Saver,
    vcpus: PausedVcpus,
    _devices: PausedDevices<'a>,
}

/// Devices that take no request until this is dropped.
struct PausedDevices<'a>(&'a [Arc<Transport>]);

impl Saver {
    /// Stops all vCPUs, and then the devices that have threads of their own. The caller does not serve its own device
    /// meanwhile.
    pub fn pause(&self) -> Result<PausedMachine<'_>, SaveError> {
        let vcpus = self.vcpus.pause().ok_or(SaveError::NoAnswer)?;
        self.devices.iter().for_each(|device| device.pause());
        Ok(PausedMachine { saver: self, vcpus, _devices: PausedDevices(&self.devices) })
    }
}

impl PausedMachine<'_> {
    /// Saves the machine without its memory.
    pub fn save(&self) -> Result<MachineState, SaveError> {
        let Saver { vm, board, kernel, console, external_device, devices, .. } = self.saver;
        let device = |device: &Arc<Transport>| {
            let own = device.wait_until_paused(LIMIT).ok_or(SaveError::BusyDevice)??;
            Ok(SavedDevice { transport: device.save().ok_or(SaveError::BusyDevice)?, own })
        };
        let external_device = external_device.as_ref();
        Ok(MachineState {
            kernel: *kernel,
            vcpus: self.vcpus.save()?,
            kvm: board.save(vm)?,
            console: console.save(),
            external_device: external_device
                .map(|device| device.save().ok_or(SaveError::BusyDevice))
                .transpose()?,
            devices: devices.iter().map(device).collect::<Result<_, SaveError>>()?,
        })
    }
}

impl Drop for PausedDevices<'_> {
    fn drop(&mut self) {
        self.0.iter().for_each(|device| device.resume());
    }
}

impl MachineState {
    /// Restores what devices know beyond their registers.
    pub(crate) fn restore_devices(&self, devices: &mut [Box<dyn Device>]) -> Result<(), MachineError> {
        if self.devices.len() != devices.len() {
            return Err(MachineError::Restore(Mismatch("number of devices")));
        }
        let mut pairs = devices.iter_mut().zip(&self.devices);
        Ok(pairs.try_for_each(|(device, saved)| device.restore(saved.own.as_ref()))?)
    }

    /// Restores all but the vCPUs' PMUs, which only their threads can restore. Returns the states of these.
    pub(crate) fn restore(
        self,
        kvm: &Kvm,
        vm: &VmFd,
        board: &Board,
        plan: &Plan,
        vcpus: &mut [VcpuFd],
        transports: &[Arc<Transport>],
    ) -> Result<Vec<Option<PmuState>>, MachineError> {
        let devices: Vec<&TransportState> =
            self.external_device.iter().chain(self.devices.iter().map(|device| &device.transport)).collect();
        if self.vcpus.len() != vcpus.len() || devices.len() != transports.len() {
            return Err(MachineError::Restore(Mismatch("number of vCPUs or devices")));
        }
        let states = self.vcpus.iter().map(|vcpu| &vcpu.kvm);
        board.restore(kvm, vm, plan, vcpus, &self.kvm, states)?;
        for (device, state) in transports.iter().zip(devices) {
            device.restore(state).map_err(MachineError::Restore)?;
        }
        Ok(self.vcpus.into_iter().map(|vcpu| vcpu.pmu).collect())
    }

    /// Returns what the saved guest sees of the processor.
    pub fn processor(&self, kvm: &Kvm, pmu: Pmu) -> Result<Fingerprint, KvmError> {
        let cpus = u8::try_from(self.vcpus.len()).expect("vCPUs have 8-bit numbers");
        Board::saved_fingerprint(kvm, cpus, pmu, &self.vcpus[0].kvm)
    }

    /// Accepts other disks in the place of those that were saved: the user knows that they are as these were.
    pub fn accept_copies_of_disks(&mut self) {
        for SavedDevice { own, .. } in &mut self.devices {
            if let Some(DeviceState::Disk(disk)) = own {
                disk.accept_copy();
            }
        }
    }
}
