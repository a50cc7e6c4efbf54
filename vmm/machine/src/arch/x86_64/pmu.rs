//! The guest's PMU on x86: its MSRs, and its interrupt through the local APIC.
//!
//! An MSR filter makes KVM exit on accesses to the PMU's registers ([`filter`]). Each vCPU's [`Emulated`] emulates the
//! registers and interrupts the guest at an overflow ([`interrupt`]). While its counters are frozen or stand still, a
//! Linux guest can access the registers without an exit ([`guest_page`]).

mod branch;
mod counters;
mod entry_ticks;
pub mod filter;
pub mod guest_page;
mod interrupt;
mod offer;
mod rdpmc_in_programs;

use std::fmt;
use std::rc::Rc;

use kvm_bindings::KVM_CAP_PMU_CAPABILITY;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use log::{trace, warn};
use serde::{Deserialize, Serialize};
use vm_memory::GuestMemoryMmap;
use vpmu::ebb::Thread;
use vpmu::event::Selection;
use vpmu::model::{amd, intel, none};
use vpmu::policy::Policy;
use vpmu::shared_page::{LvtNote, Registers};
use vpmu::translation::Translation;
use vpmu::x86::{
    DEBUGCTL, DEBUGCTL_IGNORED, DEBUGCTL_OF_KVM, FREEZE_PERFMON_ON_PMI, Leaf, NOT_PERMITTED, Vendor, is_rdpmc,
};
use vpmu::{Access, BeforeEntry, Cause, Injected, Outcome, Platform, VirtualPmu};
use vpmu_perf::{Entries, EntryTicks, PerfEvents};

use super::host::Processor;
use super::kvm;
use super::msr::{self, Written};
use crate::architecture;
use crate::kvm_error::{Capability, KvmError};
use crate::memory::GuestRam;
use crate::perf_events::perf_events;
use crate::target::{ACCESSES, COUNTERS};
use branch::{Branching, Watched};
use guest_page::{PageCheck, guest_page};
use interrupt::{Delivery, LvtEntry, PendingExceptions};

pub use self::offer::{Choice, Unavailable};

/// In CPUID leaf 7, subleaf 1, EAX: the processor delivers exceptions without a descriptor table if the kernel wants.
const FRED: u32 = 1 << 17;
/// In CPUID leaf 7, subleaf 0, ECX: the processor can report bus locks.
const BUS_LOCK_DETECT: u32 = 1 << 24;

/// The emulated PMU's model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Model {
    /// An AMD PMU of this version.
    Amd(amd::Version),
    /// Intel's architectural PMU with this version and these counters.
    Intel(intel::Shape),
}

/// The PMU that the guest sees.
pub type Pmu = architecture::Pmu<Model, BackingPmu>;
/// The PMU for a choice, with remarks for the user.
pub type Offer = architecture::Offer<Pmu>;
/// The PMU of a vCPU.
pub type VcpuPmu = architecture::VcpuPmu<PmuWiring>;

/// The host's PMU, which counts for the emulated one.
pub type BackingPmu = architecture::BackingPmu<Vendor>;

/// What a vCPU's emulated PMU needs from the board.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    /// The guest's kernel can access registers on a shared page.
    pub has_shared_pages: bool,
    /// The guest's kernel is Linux, which has the upper half of the addresses.
    pub is_linux: bool,
}

impl Model {
    /// Returns the vendor of the model.
    pub fn vendor(self) -> Vendor {
        match self {
            Self::Amd(_) => Vendor::Amd,
            Self::Intel(_) => Vendor::Intel,
        }
    }

    /// Returns what an interrupt does to the LVT entry.
    fn on_delivery(self) -> interrupt::OnDelivery {
        match self {
            Self::Amd(_) => interrupt::OnDelivery::Unchanged,
            Self::Intel(_) => interrupt::OnDelivery::SetsMask,
        }
    }

    /// Creates the virtual PMU of a vCPU, on the vCPU's own thread.
    fn virtual_pmu(self, host: BackingPmu, source: PerfEvents) -> VirtualPmu<PerfEvents> {
        match self {
            Self::Amd(version) => VirtualPmu::amd(version, host.vendor, source),
            Self::Intel(shape) => VirtualPmu::intel(shape, host.vendor, source),
        }
    }
}

impl Model {
    /// Returns the host's processor.
    pub(crate) fn processor() -> Processor {
        Processor::of_this_host()
    }

    /// Returns the number of general-purpose counters of the CPU on which this thread runs, or `None` if it cannot be
    /// found out.
    pub(crate) fn host_counters() -> Option<usize> {
        counters::host_counters()
    }

    /// Determines the PMU that this host can offer the guest for a choice, a number of counters and a policy.
    pub(crate) fn offer(
        choice: Choice,
        counters: Option<u32>,
        processor: Processor,
        policy: &Policy,
    ) -> Result<Offer, Unavailable> {
        offer::offer(choice, counters, processor.0, policy)
    }

    /// Finds out what entries into a guest add to the counts of this PMU.
    pub(crate) fn find_entry_ticks(host: BackingPmu) -> Result<EntryTicks, entry_ticks::Unknown> {
        entry_ticks::of_this_host(host.vendor, host.pmu)
    }

    /// Determines whether this host can offer the PMU of a guest that was saved. With fewer free counters than the
    /// guest has, the policy decides.
    pub(crate) fn offer_saved(self, processor: Processor, policy: &Policy) -> Result<Offer, Unavailable> {
        offer::saved(self, processor.0, policy)
    }

    /// Returns the KVM capabilities that a machine with this PMU needs beyond those of all machines.
    pub(crate) fn required_capabilities(choice: Choice) -> &'static [Capability] {
        match choice {
            Choice::Kvm => &[],
            _ => &kvm::PMU_REQUIRED,
        }
    }

    /// Returns a sentence for the user about the state of KVM's own PMU.
    pub(crate) fn kvm_pmu_state(kvm: &Kvm) -> &'static str {
        if kvm.check_extension_raw(KVM_CAP_PMU_CAPABILITY.into()) > 0 {
            "KVM_CAP_PMU_CAPABILITY is there: KVM's own PMU is switched off for each guest"
        } else {
            "KVM_CAP_PMU_CAPABILITY is not there: KVM's own PMU is off, or KVM is older than Linux 5.18"
        }
    }

    /// Configures KVM for this PMU. Must be called before the first vCPU is created.
    pub(crate) fn configure(pmu: Pmu, vm: &VmFd) -> Result<(), KvmError> {
        match pmu {
            Pmu::Kvm => Ok(()),
            Pmu::None => filter::take_registers(vm, None),
            Pmu::Emulated(model, _) => filter::take_registers(vm, Some(model.vendor())),
        }
    }

    /// Returns true if the kernel's accesses to this PMU reach Tally only after [`super::loader::Format::retarget`].
    pub(crate) fn needs_retargeting(pmu: Pmu) -> bool {
        matches!(pmu, Pmu::Emulated(..))
    }

    /// Returns kernel parameters that a guest with this PMU needs on this processor, if there are any.
    pub(crate) fn kernel_parameters(pmu: Pmu, processor: Processor) -> Option<&'static str> {
        pmu.shown_processor().kernel_parameters(processor.0)
    }

    /// Describes a selected event in the guest's terms.
    pub(crate) fn describe(self, host: BackingPmu, selection: Selection) -> String {
        Translation { guest: self.vendor(), host: host.vendor }.describe(selection)
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Amd(amd::Version::V2(counters)) => {
                write!(f, "AMD's PMU with PerfMonV2, {counters} counters")
            }
            Self::Amd(version) => write!(f, "AMD's PMU without PerfMonV2, {} counters", version.counters()),
            Self::Intel(shape) => {
                let version = match shape.version {
                    intel::Version::V2 => 2,
                    intel::Version::V5 => 5,
                };
                write!(
                    f,
                    "Intel's PMU, version {version}, {} general and {} fixed counters, absent events {:#x}",
                    shape.general, shape.fixed, shape.absent
                )
            }
        }
    }
}

/// Vendor and model of the processor that CPUID shows to the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShownProcessor {
    /// The host's processor.
    Host,
    /// A fixed model of this vendor, independent of the host's model (see `cpuid::shown_vendor`).
    Generic(Vendor),
}

impl ShownProcessor {
    /// Returns the parameter that a Linux guest with an Intel processor on an AMD host needs in addition: 32-bit
    /// programs then make system calls by INT 0x80.
    ///
    /// On Intel processors, 32-bit programs enter the kernel by SYSENTER, and it returns by SYSRET. On an AMD host, KVM
    /// has to emulate SYSENTER in long mode. AMD's SYSRET does not load the attributes of the stack segment, and
    /// kernels correct those only on processors that they know as AMD's.
    pub fn kernel_parameters(self, host: Option<Vendor>) -> Option<&'static str> {
        match (host, self) {
            (Some(Vendor::Amd), Self::Generic(Vendor::Intel)) => Some("vdso32=0"),
            _ => None,
        }
    }
}

impl Pmu {
    /// Changes a CPUID leaf so that it describes this PMU. `index` matters only for functions with several leaves.
    pub fn show(self, function: u32, index: u32, leaf: &mut Leaf) {
        if self != Self::Kvm {
            vpmu::x86::hide_pmu(function, index, leaf);
        }
        match (self, function, index) {
            // The guest's programs can read counters only if exceptions go through the descriptor table.
            (Self::Emulated(..), 7, 1) => leaf.eax &= !FRED,
            // Its bit in `IA32_DEBUGCTL` is not passed on to KVM.
            (Self::Emulated(Model::Intel(_), _), 7, 0) => leaf.ecx &= !BUS_LOCK_DETECT,
            _ => {}
        }
        match self {
            Self::Emulated(Model::Amd(version), _) => version.show(function, leaf),
            Self::Emulated(Model::Intel(shape), _) => shape.show(function, leaf),
            Self::None | Self::Kvm => {}
        }
    }

    /// Returns the last CPUID function that describes this PMU, if there is one.
    pub fn last_function(self) -> Option<u32> {
        match self {
            Self::Emulated(Model::Amd(amd::Version::V2(_)), _) => Some(amd::Version::LAST_FUNCTION),
            Self::Emulated(Model::Intel(_), _) => Some(intel::Shape::FUNCTION),
            _ => None,
        }
    }

    /// Returns the registers that the guest's kernel may access on the shared page while its counters are frozen.
    pub fn page_registers(self) -> Option<Registers> {
        match self {
            Self::Emulated(Model::Amd(version), _) => version.page_registers(),
            Self::Emulated(Model::Intel(shape), _) => shape.page_registers(),
            Self::None | Self::Kvm => None,
        }
    }

    /// Returns true if `IA32_MISC_ENABLE` has to show that performance monitoring is available.
    pub fn is_monitoring(self) -> bool {
        matches!(self, Self::Emulated(Model::Intel(_), _))
    }

    /// Returns the processor that CPUID has to show so that the guest's kernel finds this PMU. The model of a hybrid
    /// processor would make the kernel expect PMUs of two kinds.
    pub fn shown_processor(self) -> ShownProcessor {
        match self {
            Self::Emulated(model, host) if model.vendor() != host.vendor => {
                ShownProcessor::Generic(model.vendor())
            }
            Self::Emulated(Model::Intel(_), host) if host.pmu.is_hybrid() => {
                ShownProcessor::Generic(Vendor::Intel)
            }
            _ => ShownProcessor::Host,
        }
    }
}

/// A vCPU's emulated PMU.
pub type Emulated = architecture::Emulated<PmuWiring>;

/// What connects an emulated PMU to its vCPU: the LVT entry that its overflow interrupt goes through, and the guest's
/// memory.
pub struct PmuWiring {
    lvt: LvtEntry,
    page_check: PageCheck,
    memory: GuestMemoryMmap,
    watched: Watched,
}

impl Emulated {
    /// Creates the emulated PMU of this vCPU. Must be called on the vCPU's thread.
    pub fn new(
        model: Model,
        host: BackingPmu,
        (vcpu, fd): (u8, &VcpuFd),
        link: Link,
        ram: &GuestRam,
    ) -> Self {
        let (source, entries) = without_entries(perf_events(host.pmu), host, fd, link);
        let mut pmu = model.virtual_pmu(host, source);
        let page = link.has_shared_pages.then(|| guest_page(vcpu, &ram.mapped));
        if let Some(page) = page.flatten() {
            pmu.share_page(Box::new(page));
        }
        let lvt = LvtEntry::new(model.on_delivery(), vcpu);
        let (page_check, memory) = (PageCheck::new(vcpu), ram.mapped.clone());
        let wiring = PmuWiring { lvt, page_check, memory, watched: Watched::default() };
        Self { pmu, entries, wiring }
    }

    /// Handles overflows and timers after an exit. See [`VirtualPmu::after_exit`].
    pub fn after_exit(&mut self, cause: Cause, vm: &VmFd, fd: &mut VcpuFd) -> Result<BeforeEntry, KvmError> {
        let Self { pmu, wiring: PmuWiring { lvt, page_check, memory, watched }, .. } = self;
        let mut exited = Exited { vm, fd, lvt, page_check, memory, watched, branching: None };
        let next = pmu.after_exit(cause, &mut exited)?;
        let exceptions =
            if next.interrupts_soon { PendingExceptions::Stored } else { PendingExceptions::NotStored };
        lvt.store_pending_exceptions(fd, exceptions);
        watched.expect_branch(fd, next.branches_soon);
        Ok(next)
    }
}

/// Leaves entries into the guest out of what a vCPU's events count, if the host counts them.
fn without_entries(
    source: PerfEvents,
    host: BackingPmu,
    fd: &VcpuFd,
    link: Link,
) -> (PerfEvents, Option<Rc<Entries>>) {
    if host.entry_ticks == EntryTicks::default() {
        return (source, None);
    }
    let Some(made) = entry_ticks::entries(fd) else {
        warn!(target: COUNTERS, "this KVM does not say how often it enters the guest: counts include these entries");
        return (source, None);
    };
    let (source, entries) = source.without_entries(host.entry_ticks, made, link.is_linux);
    (source, Some(entries))
}

/// A vCPU outside its guest, as the virtual PMU accesses it.
struct Exited<'a> {
    vm: &'a VmFd,
    fd: &'a mut VcpuFd,
    lvt: &'a mut LvtEntry,
    page_check: &'a mut PageCheck,
    memory: &'a GuestMemoryMmap,
    watched: &'a mut Watched,
    /// The thread that the virtual PMU has asked for.
    branching: Option<Branching<'a>>,
}

impl Platform for Exited<'_> {
    type Error = KvmError;

    fn inject(&mut self, lvt_note: Option<LvtNote<'_>>) -> Result<Injected, KvmError> {
        Ok(match self.lvt.deliver(self.vm, self.fd, lvt_note)? {
            Delivery::Nmi => Injected::AtNextEntry,
            Delivery::None | Delivery::Fixed { .. } => Injected::Pending,
        })
    }

    fn uses_shared_page(&mut self) -> bool {
        self.page_check.confirm(self.fd)
    }

    fn thread(&mut self) -> Option<Thread<'_>> {
        self.branching =
            Branching::find(self.fd, self.memory, self.watched, |fd| self.lvt.pending_exceptions(fd));
        self.branching.as_ref().map(Branching::thread)
    }

    fn go_on_at(&mut self, address: u64) -> Result<(), KvmError> {
        if let Some(branching) = &self.branching {
            branching.go_on_at(address, self.fd);
        }
        Ok(())
    }
}

/// Splits a value that a guest writes to `IA32_DEBUGCTL` into the PMU's bits and KVM's. Returns `None` if the write
/// faults. The write to KVM is the host's, which KVM does not check against what the guest's CPUID has: so only bits
/// that every guest may set are passed on.
fn debug_control(value: u64) -> Option<(u64, u64)> {
    let [ours, kvms] = [FREEZE_PERFMON_ON_PMI, DEBUGCTL_OF_KVM];
    (value & !(ours | kvms | DEBUGCTL_IGNORED) == 0).then_some((value & ours, value & kvms))
}

impl VcpuPmu {
    /// Handles an RDMSR exit of the code that handles a program's faults: if the program may execute the RDPMC at which
    /// it has faulted, returns the counter's value.
    pub fn read_in_program(&mut self, fd: &VcpuFd, ram: &GuestRam, counter: u32) -> Outcome {
        let Self::Emulated(emulated) = self else { return Outcome::NotHandled };
        let outcome = if is_rdpmc(counter) && rdpmc_in_programs::is_permitted(fd, &ram.mapped) {
            emulated.pmu.access(Access::ReadInProgram(counter))
        } else {
            Outcome::NotHandled
        };
        trace!(target: ACCESSES, "a program reads counter {counter:#x}: {outcome}");
        // A fault here would be the kernel's.
        Outcome::Value(match outcome {
            Outcome::Value(value) => value & !NOT_PERMITTED,
            Outcome::Handled | Outcome::Fault | Outcome::NotHandled => NOT_PERMITTED,
        })
    }

    /// Handles an RDMSR exit.
    pub fn read(&mut self, fd: &VcpuFd, msr: u32) -> Outcome {
        let outcome = match self {
            Self::None => none::access(msr),
            Self::Kvm => Outcome::NotHandled,
            Self::Emulated(emulated) => match (emulated.pmu.access(Access::Read(msr)), msr) {
                // KVM emulates the other bits of the register.
                (Outcome::Value(ours), DEBUGCTL) => {
                    let kvms = msr::read(fd, msr).ok().flatten();
                    Outcome::Value(ours | kvms.unwrap_or_default())
                }
                (outcome, _) => outcome,
            },
        };
        trace!(target: ACCESSES, "reads {msr:#x}: {outcome}");
        outcome
    }

    /// Handles a WRMSR exit.
    pub fn write(&mut self, fd: &VcpuFd, msr: u32, value: u64) -> Outcome {
        let outcome = match self {
            Self::None => none::access(msr),
            Self::Kvm => Outcome::NotHandled,
            Self::Emulated(emulated) if msr == DEBUGCTL => match debug_control(value) {
                Some((ours, kvms)) => match msr::write(fd, msr, kvms) {
                    Ok(Written::Yes) => emulated.pmu.access(Access::Write(msr, ours)),
                    Ok(Written::No) | Err(_) => Outcome::Fault,
                },
                None => Outcome::Fault,
            },
            Self::Emulated(emulated) => emulated.pmu.access(Access::Write(msr, value)),
        };
        trace!(target: ACCESSES, "writes {value:#x} to {msr:#x}: {outcome}");
        outcome
    }
}

#[cfg(test)]
mod tests {
    use vpmu_perf::HostPmu;

    use super::*;

    #[test]
    fn what_tally_cannot_serve_is_not_in_cpuid() {
        let shape = intel::Shape { version: intel::Version::V5, general: 4, fixed: 3, absent: 0 };
        let (host_pmu, _) = HostPmu::bind_thread().expect("the thread may run");
        let host = |vendor| BackingPmu::new(vendor, host_pmu);
        let amd = Pmu::Emulated(Model::Amd(amd::Version::V2(6)), host(Vendor::Amd));
        let intel = Pmu::Emulated(Model::Intel(shape), host(Vendor::Intel));
        let hidden = |pmu: Pmu, index| {
            let all = Leaf { eax: !0, ebx: !0, ecx: !0, edx: !0 };
            let mut leaf = all;
            pmu.show(7, index, &mut leaf);
            (all.eax & !leaf.eax, all.ecx & !leaf.ecx)
        };
        assert_eq!([hidden(amd, 1), hidden(intel, 1), hidden(Pmu::None, 1)], [(FRED, 0), (FRED, 0), (0, 0)]);
        assert_eq!([hidden(amd, 0), hidden(intel, 0)], [(0, 0), (0, BUS_LOCK_DETECT)]);
    }

    #[test]
    fn of_a_guest_s_debug_control_only_known_bits_reach_kvm() {
        assert_eq!(debug_control(0), Some((0, 0)));
        assert_eq!(debug_control(1 << 12 | 1 << 1), Some((1 << 12, 1 << 1)));
        assert_eq!(debug_control(1), Some((0, 0)), "branch records");
        for bit in (2..64).filter(|bit| *bit != 12) {
            assert_eq!(debug_control(1 << bit), None, "bit {bit}");
        }
    }
}
