//! Types that all processor architectures have in common, and that know none of them.

use std::fmt::{self, Display};
use std::io::{self, Write};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

use devices::Interrupt;
use devices::virtio::Transport;
use kvm_ioctls::VmFd;
use serde::{Deserialize, Serialize};
use vpmu::VirtualPmu;
use vpmu_perf::{Entries, EntryTicks, HostPmu, PerfEvents};

use crate::kvm_error::Capability;
use crate::memory::GuestRam;

/// What machines of an architecture need from KVM.
pub struct KvmRequirements {
    /// KVM capabilities that every machine needs.
    pub required: &'static [Capability],
    /// KVM capabilities that are used if KVM has them.
    pub optional: &'static [Capability],
    /// KVM's kernel modules, each with the kind of virtualisation that it uses, for messages.
    pub modules: &'static [(&'static str, &'static str)],
    /// Commands that load a KVM module.
    pub modprobe: &'static [&'static str],
}

/// What the board has to know of the guest's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelFacts {
    /// It is Linux.
    pub is_linux: bool,
    /// Address of the first vCPU's shared page, if the kernel uses such pages.
    pub pages: Option<u64>,
}

/// A device's interrupt line.
///
/// It uses `KVM_IRQ_LINE` instead of an irqfd. For an irqfd of a line that is not an MSI, KVM on x86-64 leaves the
/// interrupt to a worker of the kernel, which costs two task switches; KVM on RISC-V raises the line and never lowers
/// it, so the APLIC would see only the first rising edge.
pub struct Line {
    vm: Arc<VmFd>,
    gsi: u32,
    /// Held while the line is high: what another thread raises then would not be an edge.
    raising: Mutex<()>,
}

impl Line {
    /// Creates the line of an interrupt number.
    pub fn new(vm: &Arc<VmFd>, gsi: u32) -> Self {
        Self { vm: Arc::clone(vm), gsi, raising: Mutex::new(()) }
    }
}

impl Interrupt for Line {
    fn raise(&self) -> io::Result<()> {
        let _raising = self.raising.lock().unwrap_or_else(PoisonError::into_inner);
        self.vm.set_irq_line(self.gsi, true)?;
        Ok(self.vm.set_irq_line(self.gsi, false)?)
    }
}

/// The part of a machine's configuration that its architecture needs.
pub struct Plan<'a, P> {
    /// What the board has to know of the kernel.
    pub kernel: KernelFacts,
    /// The guest was saved before, and goes on.
    #[allow(dead_code, reason = "RISC-V's board need not know")]
    pub is_restored: bool,
    /// Number of vCPUs.
    pub cpus: u8,
    /// The guest's memory.
    pub ram: &'a GuestRam,
    /// The PMU that the guest sees.
    pub pmu: P,
    /// Opens the destination of the console's output.
    #[allow(dead_code, reason = "x86's board prints nothing itself")]
    pub console: &'a dyn Fn() -> Box<dyn Write + Send>,
}

/// The PMU that the guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pmu<M, B> {
    /// No PMU. None is announced to the guest, and accesses to PMU registers fault.
    None,
    /// KVM's own in-kernel vPMU.
    Kvm,
    /// A PMU that Tally emulates, and the host PMU that backs it.
    Emulated(M, B),
}

/// The host's PMU, which counts for the emulated one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BackingPmu<V> {
    /// Vendor of the processor, on an architecture with several.
    pub vendor: V,
    /// The processor's PMU.
    pub pmu: HostPmu,
    /// What each entry into the guest adds to counts, as far as that was found out: it is left out of all counts.
    pub entry_ticks: EntryTicks,
}

impl<V> BackingPmu<V> {
    /// Creates the description of a host's PMU whose counts have nothing that is left out.
    pub(crate) fn new(vendor: V, pmu: HostPmu) -> Self {
        Self { vendor, pmu, entry_ticks: EntryTicks::default() }
    }
}

/// The PMU that a host can offer for a choice.
#[derive(Debug, PartialEq, Eq)]
pub struct Offer<P> {
    /// The PMU that the guest sees.
    pub pmu: P,
    /// Remarks for the user about the offer.
    pub remarks: Vec<String>,
}

/// A vCPU's PMU on the vCPU's thread.
pub enum VcpuPmu<W> {
    /// No PMU.
    None,
    /// KVM's own in-kernel vPMU.
    Kvm,
    /// A PMU that Tally emulates.
    Emulated(Box<Emulated<W>>),
}

/// A vCPU's emulated PMU, on the vCPU's thread.
pub struct Emulated<W> {
    /// The virtual PMU.
    pub pmu: VirtualPmu<PerfEvents>,
    /// The entries into the guest, on a host whose events count those.
    pub entries: Option<Rc<Entries>>,
    /// What connects it to its vCPU.
    pub wiring: W,
}

impl<W> VcpuPmu<W> {
    /// Returns the virtual PMU, or `None` if the PMU is not emulated.
    pub fn emulated(&mut self) -> Option<&mut VirtualPmu<PerfEvents>> {
        match self {
            Self::Emulated(emulated) => Some(&mut emulated.pmu),
            Self::None | Self::Kvm => None,
        }
    }

    /// Says that the guest has run since the last call. Must be called after each `KVM_RUN`, before anything is read.
    pub fn guest_ran(&self) {
        if let Self::Emulated(emulated) = self
            && let Some(entries) = &emulated.entries
        {
            entries.guest_ran();
        }
    }

    /// Records that the vCPU is paused from now on, so that its counters miss no events until it runs again.
    pub fn paused(&mut self) {
        if let Some(pmu) = self.emulated() {
            pmu.paused();
        }
    }

    /// Counts an instruction that accesses a device: it exits and is completed by Tally, so that no hardware counts it.
    /// `is_user` is called only if the answer matters.
    pub fn completes_instruction(&mut self, is_user: impl FnOnce() -> bool) {
        if let Some(pmu) = self.emulated() {
            pmu.completes_instruction(is_user);
        }
    }
}

impl<M: Display, B> Display for Pmu<M, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => write!(f, "none"),
            Self::Kvm => write!(f, "KVM's own"),
            Self::Emulated(model, _) => write!(f, "{model}"),
        }
    }
}

/// Location of the first virtio device. The others follow it, in the address space and in the interrupt lines.
#[derive(Debug, Clone, Copy)]
pub struct FirstVirtio {
    /// Address of the registers.
    pub base: u64,
    /// Interrupt line.
    pub gsi: u32,
}

impl FirstVirtio {
    /// Returns the address of the registers of device `index`.
    pub fn address(self, index: usize) -> u64 {
        self.base + index as u64 * Transport::SIZE
    }

    /// Returns the interrupt line of device `index`.
    pub fn gsi(self, index: usize) -> u32 {
        self.gsi + u32::try_from(index).expect("there are few devices")
    }
}
