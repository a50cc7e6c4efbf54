//! The PMUs that there are here: registers that KVM hands over, and a local APIC that is interrupted.
//!
//! KVM is told which registers to hand over ([`filter`]). Each vCPU's [`Front`] answers for them, and interrupts the guest
//! ([`interrupt`]). While its counters are frozen or stand still, a Linux guest need not hand anything over ([`guest_page`]).

mod counters;
mod filter;
mod guest_page;
mod interrupt;
mod offer;

use std::fmt;

use kvm_ioctls::{VcpuFd, VmFd};
use log::trace;
use vpmu::Outcome;
use vpmu::event::Selection;
use vpmu::model::{Model, amd, intel, none};
use vpmu::shared_page::Registers;
use vpmu::translation::Translation;
use vpmu::x86::{DEBUGCTL, Leaf, Vendor};
use vpmu_perf::{HostPmu, PerfEvents};

use super::cpuid::Identity;
use super::msr::{self, Written};
use crate::kvm::KvmError;
use crate::logging::ACCESSES;
use crate::pmu::Pmu;
use crate::pmu::thread::{Kind, ThreadPmu};
use crate::vcpu::Vcpu;
use guest_page::GuestPage;
use interrupt::{Delivery, LvtEntry};

pub use self::counters::counters;
pub use self::offer::{Choice, offer};

/// The PMU of Tally's that is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// Of AMD's kind.
    Amd(amd::Version),
    /// Of Intel's kind.
    Intel(intel::Shape),
}

/// Who counts for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Host {
    /// Who made the processor.
    pub vendor: Vendor,
    /// Its PMU.
    pub pmu: HostPmu,
}

impl Shown {
    /// Whose PMUs are like this.
    pub fn vendor(self) -> Vendor {
        match self {
            Self::Amd(_) => Vendor::Amd,
            Self::Intel(_) => Vendor::Intel,
        }
    }

    /// What is counted, in the guest's words.
    pub fn words(self, host: Host, selection: Selection) -> String {
        Translation { guest: self.vendor(), host: host.vendor }.describe(selection)
    }

    /// What its interrupt does to the local APIC's entry.
    fn entry(self) -> interrupt::Entry {
        match self {
            Self::Amd(_) => interrupt::Entry::Stays,
            Self::Intel(_) => interrupt::Entry::MasksItself,
        }
    }

    /// A vCPU's, on its own thread.
    fn model(self, host: Host) -> Box<dyn Model<PerfEvents>> {
        let source = PerfEvents::new(host.pmu);
        match self {
            Self::Amd(version) => Box::new(amd::Amd::new(version, host.vendor, source)),
            Self::Intel(shape) => Box::new(intel::Intel::new(shape, host.vendor, source)),
        }
    }
}

impl fmt::Display for Shown {
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

impl Pmu {
    /// Tells KVM, before the first vCPU exists.
    pub fn configure(self, vm: &VmFd) -> Result<(), KvmError> {
        match self {
            Self::Kvm => Ok(()),
            Self::None => filter::take_registers(vm, None),
            Self::Emulated(shown, _) => filter::take_registers(vm, Some(shown.vendor())),
        }
    }

    /// Whether the kernel has to access it in a way that can be handed over.
    pub fn needs_retargeting(self) -> bool {
        matches!(self, Self::Emulated(..))
    }

    /// Changes what CPUID says at `function` and, where it matters, `index`.
    pub fn show(self, function: u32, index: u32, leaf: &mut Leaf) {
        if self != Self::Kvm {
            vpmu::x86::hide_pmu(function, index, leaf);
        }
        match self {
            Self::Emulated(Shown::Amd(version), _) => version.show(function, leaf),
            Self::Emulated(Shown::Intel(shape), _) => shape.show(function, leaf),
            Self::None | Self::Kvm => {}
        }
    }

    /// The last CPUID function in which it has something to show, if there is one.
    pub fn last_function(self) -> Option<u32> {
        match self {
            Self::Emulated(Shown::Amd(amd::Version::V2(_)), _) => Some(amd::Version::LAST_FUNCTION),
            Self::Emulated(Shown::Intel(_), _) => Some(intel::Shape::FUNCTION),
            _ => None,
        }
    }

    /// Returns the registers that the guest's kernel may access on the shared page while its counters are frozen.
    pub fn page_registers(self) -> Option<Registers> {
        match self {
            Self::Emulated(Shown::Amd(version), _) => version.page_registers(),
            Self::Emulated(Shown::Intel(shape), _) => shape.page_registers(),
            Self::None | Self::Kvm => None,
        }
    }

    /// Whether `IA32_MISC_ENABLE` is to say that counters are there.
    pub fn is_monitoring(self) -> bool {
        matches!(self, Self::Emulated(Shown::Intel(_), _))
    }

    /// What processor the guest has to see, for its kernel to find this PMU. That of a hybrid processor would promise PMUs of
    /// two kinds.
    pub fn identity(self) -> Identity {
        match self {
            Self::Emulated(shown, host) if shown.vendor() != host.vendor => Identity::Generic(shown.vendor()),
            Self::Emulated(Shown::Intel(_), host) if host.pmu.is_hybrid() => Identity::Generic(Vendor::Intel),
            _ => Identity::Host,
        }
    }
}

/// An emulated PMU as one vCPU sees it: its registers, the LVT entry that its overflows go through, and its shared page.
pub struct Front {
    model: Box<dyn Model<PerfEvents>>,
    lvt: LvtEntry,
    page: Option<GuestPage>,
}

impl Front {
    /// The PMU of a vCPU.
    pub fn new(shown: Shown, host: Host, vcpu: &Vcpu) -> Self {
        let registers = vcpu.pmu.page_registers().filter(|_| vcpu.buses.has_shared_pages);
        let page = registers.and_then(|registers| GuestPage::new(vcpu.id, registers, &vcpu.ram.mapped));
        Self { model: shown.model(host), lvt: LvtEntry::new(shown.entry(), vcpu.id), page }
    }

    /// The register model.
    pub fn model(&mut self) -> &mut dyn Model<PerfEvents> {
        &mut *self.model
    }

    /// Applies the register writes that the guest made on the shared page. Returns true if that also updated all counters.
    pub fn apply_page(&mut self) -> bool {
        self.page.as_mut().is_some_and(|page| page.apply(&mut *self.model))
    }

    /// Applies the writes on the shared page and withdraws the page until the next freeze, before an ordinary access.
    pub fn end(&mut self) {
        self.apply_page();
        if let Some(page) = &mut self.page {
            page.withdraw();
        }
    }

    /// Interrupts the guest. Returns true if the handler is the next thing that the guest executes.
    pub fn interrupt(&mut self, vm: &VmFd, fd: &mut VcpuFd) -> Result<bool, KvmError> {
        let noted = self.page.as_mut().and_then(GuestPage::lvt_entry);
        Ok(self.lvt.deliver(vm, fd, noted)? == Delivery::Nmi)
    }

    /// Prepares the shared page for the next entry, which may begin with the handler of an overflow.
    pub fn prepare_page(&mut self, fd: &VcpuFd, is_handling: bool) {
        if let Some(page) = &mut self.page {
            if is_handling {
                page.offer(&mut *self.model);
            }
            page.activate(&mut *self.model, fd);
        }
    }
}

impl ThreadPmu {
    /// Handles a guest's RDMSR that KVM has passed on.
    pub fn read(&mut self, fd: &VcpuFd, msr: u32) -> Outcome {
        self.end();
        let outcome = self.read_quietly(fd, msr);
        trace!(target: ACCESSES, "reads {msr:#x}: {outcome}");
        outcome
    }

    fn read_quietly(&mut self, fd: &VcpuFd, msr: u32) -> Outcome {
        match &mut self.kind {
            Kind::None => none::access(msr),
            Kind::Kvm => Outcome::NotMine,
            Kind::Emulated(front) if msr == DEBUGCTL => match (front.model.read(msr), msr::read(fd, msr)) {
                (Outcome::Value(ours), Ok(Some(kvms))) => Outcome::Value(ours | kvms),
                (outcome, _) => outcome,
            },
            Kind::Emulated(front) => front.model.read(msr),
        }
    }

    /// Handles a guest's WRMSR that KVM has passed on.
    pub fn write(&mut self, fd: &VcpuFd, msr: u32, value: u64) -> Outcome {
        self.end();
        let outcome = self.write_quietly(fd, msr, value);
        trace!(target: ACCESSES, "writes {value:#x} to {msr:#x}: {outcome}");
        outcome
    }

    fn write_quietly(&mut self, fd: &VcpuFd, msr: u32, value: u64) -> Outcome {
        match &mut self.kind {
            Kind::None => none::access(msr),
            Kind::Kvm => Outcome::NotMine,
            Kind::Emulated(front) if msr == DEBUGCTL => {
                // The rest of it is KVM's, and refused if KVM does.
                let ours = value & vpmu::x86::FREEZE_AT_INTERRUPTS;
                match msr::write(fd, msr, value & !ours) {
                    Ok(Written::Yes) => front.model.write(msr, ours),
                    Ok(Written::No) | Err(_) => Outcome::Fault,
                }
            }
            Kind::Emulated(front) => front.model.write(msr, value),
        }
    }
}
