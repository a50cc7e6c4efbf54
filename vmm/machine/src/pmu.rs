//! The PMU that the guest sees, and its part on each vCPU's thread.
//!
//! [`offer`] turns the user's [`Choice`] into a [`Pmu`] that the host can provide. Each vCPU's thread handles the
//! accesses of its vCPU to the PMU, with perf events of its own (`thread`). Two signals make the thread leave the
//! guest (`exit_signals`): one when a counter's alarm expires, the other when the virtual PMU's timer expires
//! (`timer`) or another thread has a request. The architecture defines how the guest accesses the PMU and how the PMU
//! interrupts the guest (`arch`).

pub(crate) mod exit_signals;
pub(crate) mod journal;
pub(crate) mod thread;
mod timer;

use log::debug;
use serde::{Deserialize, Serialize};
use vpmu::event::Selection;
use vpmu::policy::Policy;
use vpmu_perf::{EntryTicks, Reservation};

pub use crate::arch::{Choice, Model, Offer, Pmu, Processor, Unavailable};

/// Returns the host's processor.
pub fn processor() -> Processor {
    Model::processor()
}

/// Determines the PMU that this host can offer the guest for a choice, a number of counters and a policy.
pub fn offer(
    choice: Choice,
    counters: Option<u32>,
    processor: Processor,
    policy: &Policy,
) -> Result<Offer, Unavailable> {
    Model::offer(choice, counters, processor, policy)
}

/// The PMU that a guest sees, in a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SavedPmu {
    /// None.
    None,
    /// One that Tally emulates.
    Emulated(Model),
}

impl SavedPmu {
    /// Returns the PMU of a guest that is to be saved. `None` if it is KVM's: what that counts is not Tally's to keep.
    pub fn of(pmu: Pmu) -> Option<Self> {
        match pmu {
            Pmu::None => Some(Self::None),
            Pmu::Emulated(model, _) => Some(Self::Emulated(model)),
            Pmu::Kvm => None,
        }
    }

    /// Determines whether this host can offer it. With fewer free counters than the guest has, the policy decides.
    pub fn offer(self, processor: Processor, policy: &Policy) -> Result<Offer, Unavailable> {
        match self {
            Self::None => Ok(Offer { pmu: Pmu::None, remarks: Vec::new() }),
            Self::Emulated(model) => model.offer_saved(processor, policy),
        }
    }
}

/// Returns the number of general-purpose counters of the CPU on which this thread runs, or `None` if it cannot be found
/// out.
pub fn host_counters() -> Option<usize> {
    Model::host_counters()
}

impl Pmu {
    /// Describes a selected event in the guest's terms.
    pub fn describe(self, selection: Selection) -> String {
        match self {
            Self::Emulated(model, host) => model.describe(host, selection),
            Self::None | Self::Kvm => selection.to_string(),
        }
    }

    /// Keeps the host's PMU in use, if it backs this one. The events of the guest's counters come and go as the guest
    /// wants.
    pub(crate) fn reserve_host(self) -> Option<Reservation> {
        let Self::Emulated(_, host) = self else { return None };
        let warn = |error: &_| debug!("cannot keep the host's PMU in use: {error}");
        Reservation::new(host.pmu).inspect_err(warn).ok()
    }

    /// Finds out what each entry into the guest adds to counts of the host's PMU that backs this one. That takes some
    /// milliseconds, and is the same until the host is booted again. Must be called on a thread that may open perf
    /// events.
    ///
    /// Returns `None` if no PMU of the host's backs this one.
    pub fn find_entry_ticks(self) -> Option<Result<EntryTicks, String>> {
        let Self::Emulated(_, host) = self else { return None };
        Some(Model::find_entry_ticks(host).map_err(|unknown| unknown.to_string()))
    }

    /// Has what entries into the guest add left out of all counts.
    pub fn leave_out(&mut self, ticks: EntryTicks) {
        if let Self::Emulated(_, host) = self {
            host.entry_ticks = ticks;
        }
    }

    /// Returns whether the host counts entries into the guest, which are left out.
    pub fn leaves_out_entries(self) -> bool {
        matches!(self, Self::Emulated(_, host) if host.entry_ticks != EntryTicks::default())
    }

    /// Returns what each entry into the guest adds to the instructions that the host's perf counts for the guest, as
    /// far as that is known.
    pub fn instructions_of_an_entry(self) -> u32 {
        match self {
            Self::Emulated(_, host) => host.entry_ticks.to_all_instructions().unwrap_or(0),
            Self::None | Self::Kvm => 0,
        }
    }

    /// Returns true if the kernel's accesses to this PMU reach Tally only after [`crate::Kernel::retarget`].
    pub fn needs_retargeting(self) -> bool {
        Model::needs_retargeting(self)
    }

    /// Returns kernel parameters that a guest with this PMU needs on this processor, if there are any.
    pub fn kernel_parameters(self, processor: Processor) -> Option<&'static str> {
        Model::kernel_parameters(self, processor)
    }
}
