//! Saves machines, so that others can continue from there.
//!
//! All vCPUs stand still while a machine is saved: first all of them stop, so that none sends another one an interrupt any
//! more, and then each is saved by its own thread, which alone can read its counters. A state has what KVM
//! holds, the PMUs, the console and the registers of virtio devices. The guest's memory ([`GuestRam::save`]) and what a device knows
//! beyond its registers are saved by the caller; a shared folder that is mounted cannot be.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use devices::virtio::{Transport, TransportState};
use devices::{Mismatch, Serial, SerialState};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use serde::{Deserialize, Serialize};
use vpmu::state::PmuState;

use crate::arch;
use crate::architecture::{Board, KernelFacts, Plan};
use crate::error::MachineError;
use crate::kvm_error::KvmError;
use crate::memory::GuestRam;
use crate::vcpu::mailbox::{Held, VcpuHandles};

/// Number of times that a device is looked at while it processes requests, and the time between.
const ATTEMPTS: u32 = 100;
const INTERVAL: Duration = Duration::from_millis(10);

type KvmState = <arch::Board as Board>::State;
type KvmVcpuState = <arch::Board as Board>::VcpuState;

/// The state of a machine without its memory.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineState {
    pub(crate) kernel: KernelFacts,
    pub(crate) kvm: KvmState,
    pub(crate) vcpus: Vec<VcpuState>,
    pub(crate) console: SerialState,
    /// In the order of their addresses.
    pub(crate) devices: Vec<TransportState>,
}

/// The state of a vCPU.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuState {
    pub(crate) kvm: KvmVcpuState,
    /// The PMU, if Tally emulates one.
    pub(crate) pmu: Option<PmuState>,
}

/// Why a machine cannot be saved.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// A vCPU does not answer.
    #[error("a vCPU does not answer")]
    NoAnswer,
    /// A vCPU does not come to a stop.
    #[error("a vCPU does not come to an end with what it does")]
    Busy,
    /// The machine has ended.
    #[error("the machine has ended")]
    Ended,
    /// A device does not come to an end with its requests.
    #[error("a device does not come to an end with what it does")]
    BusyDevice,
    /// A KVM operation failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
}

/// Saves a machine that runs.
pub struct Saver {
    pub(crate) vm: Arc<VmFd>,
    pub(crate) board: arch::Board,
    pub(crate) kernel: KernelFacts,
    pub(crate) vcpus: Arc<VcpuHandles>,
    pub(crate) console: Serial,
    pub(crate) devices: Vec<Arc<Transport>>,
    /// The guest's memory.
    pub ram: GuestRam,
}

impl Saver {
    /// Stops all vCPUs and saves the machine. The vCPUs stand still until the second result is dropped.
    pub fn save(&self) -> Result<(MachineState, Held), SaveError> {
        let held = self.vcpus.hold().ok_or(SaveError::NoAnswer)?;
        let devices = self.devices.iter().map(|device| when_idle(device)).collect::<Result<_, _>>()?;
        let state = MachineState {
            kernel: self.kernel,
            vcpus: held.save()?,
            kvm: self.board.save(&self.vm)?,
            console: self.console.save(),
            devices,
        };
        Ok((state, held))
    }
}

impl MachineState {
    /// Restores all but the vCPUs' PMUs, which only their threads can restore. Returns the states of these.
    pub(crate) fn restore(
        self,
        kvm: &Kvm,
        vm: &VmFd,
        board: &arch::Board,
        plan: &Plan<arch::Model>,
        vcpus: &mut [VcpuFd],
        devices: &[Arc<Transport>],
    ) -> Result<Vec<Option<PmuState>>, MachineError> {
        if self.vcpus.len() != vcpus.len() || self.devices.len() != devices.len() {
            return Err(MachineError::Restore(Mismatch("number of vCPUs or devices")));
        }
        let states = self.vcpus.iter().map(|vcpu| &vcpu.kvm);
        board.restore(kvm, vm, plan, vcpus, &self.kvm, states)?;
        for (device, state) in devices.iter().zip(&self.devices) {
            device.restore(state).map_err(MachineError::Restore)?;
        }
        Ok(self.vcpus.into_iter().map(|vcpu| vcpu.pmu).collect())
    }
}

/// Returns the state of a device when it processes no request.
fn when_idle(device: &Transport) -> Result<TransportState, SaveError> {
    for _ in 0..ATTEMPTS {
        if let Some(state) = device.save() {
            return Ok(state);
        }
        thread::sleep(INTERVAL);
    }
    Err(SaveError::BusyDevice)
}
