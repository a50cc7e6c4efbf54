//! A vCPU in a snapshot, and why a machine cannot be saved.

use devices::DeviceError;
use serde::{Deserialize, Serialize};
use vpmu::state::PmuState;

use crate::arch::KvmVcpuState;
use crate::kvm_error::KvmError;

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
    /// A device cannot be saved now.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A KVM operation failed.
    #[error(transparent)]
    Kvm(#[from] KvmError),
}
