//! What a vCPU's PMU is connected to.

use kvm_ioctls::VcpuFd;
use vpmu::policy::Policy;

use super::Pmu;
use crate::arch::board::Buses;
use crate::memory::GuestRam;

/// What a vCPU's PMU is made from, on the vCPU's own thread.
#[derive(Clone, Copy)]
pub struct Wiring<'a> {
    /// The vCPU's number.
    pub id: u8,
    /// KVM's side of the vCPU.
    pub fd: &'a VcpuFd,
    /// Which PMU it has.
    pub pmu: Pmu,
    /// What the operator lets it have of that.
    pub policy: &'a Policy,
    /// What it shares with the machine's other vCPUs.
    pub buses: &'a Buses,
    /// The guest's memory.
    pub ram: &'a GuestRam,
}
