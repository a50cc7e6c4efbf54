//! Traits for everything that differs between processor architectures.
//!
//! [`crate::arch`] chooses the architecture that this program is compiled for. Neither this file nor the modules that
//! it imports depend on the choice.

use std::fmt::{self, Debug, Display};
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::sync::Arc;

use devices::virtio::{MmioBus, Transport};
use devices::{End, Interrupt, Serial};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use vpmu::event::Selection;
use vpmu::policy::Policy;
use vpmu::{BeforeEntry, Cause, VirtualPmu};
use vpmu_perf::PerfEvents;

use crate::error::MachineError;
use crate::exit::{self, Bytes, Exit};
use crate::kvm_error::{Capability, KvmError};
use crate::loader::error::{LoadError, Problem};
use crate::loader::kernel::{Boot, Kernel};
use crate::memory::GuestRam;

/// A processor architecture: the types that implement the traits below.
pub trait Architecture {
    /// Name of the instruction pointer.
    const INSTRUCTION_POINTER: &'static str;
    /// What machines of this architecture need from KVM.
    const KVM: KvmRequirements;
    /// The PMUs that Tally can emulate.
    type Model: PmuModel;
    /// The kernels that can be booted.
    type Format: Format<Model = Self::Model>;
    /// The devices around the processors.
    type Board: Board<Format = Self::Format>;
    /// A vCPU's file descriptor, on the vCPU's thread.
    type Run: Run<
            Board = Self::Board,
            Emulated: EmulatedPmu<Model = Self::Model, Link = <Self::Board as Board>::PmuLink>,
        >;

    /// Reads the processor's clock (x86: the time-stamp counter, RISC-V: `time`).
    fn ticks() -> u64;
}

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

/// The guest's view of an emulated PMU: its vendor and its counters.
pub trait PmuModel: Copy + Debug + Display + Eq {
    /// A value of `--pmu`.
    type Choice: Copy;
    /// The host PMU that backs the counters.
    type BackingPmu: Copy + Debug + Eq;
    /// The properties of the host's processor that matter to PMUs.
    type Processor: Copy + Display;
    /// Why this host cannot offer a PMU.
    type Unavailable;

    /// Returns the host's processor.
    fn processor() -> Self::Processor;
    /// Returns the number of general-purpose counters of the CPU on which this thread runs, or `None` if it cannot be
    /// found out.
    fn host_counters() -> Option<usize>;
    /// Determines the PMU that this host can offer the guest for a choice, a number of counters and a policy.
    fn offer(
        choice: Self::Choice,
        counters: Option<u32>,
        processor: Self::Processor,
        policy: &Policy,
    ) -> Result<Offer<Pmu<Self>>, Self::Unavailable>;
    /// Determines whether this host can offer the PMU of a guest that was saved. With fewer free counters than the
    /// guest has, the policy decides.
    fn offer_saved(
        self,
        processor: Self::Processor,
        policy: &Policy,
    ) -> Result<Offer<Pmu<Self>>, Self::Unavailable>;
    /// Returns the KVM capabilities that a machine with this PMU needs beyond [`KvmRequirements::required`].
    fn required_capabilities(choice: Self::Choice) -> &'static [Capability];
    /// Returns a sentence for the user about the state of KVM's own PMU.
    fn kvm_pmu_state(kvm: &Kvm) -> &'static str;
    /// Configures KVM for this PMU. Must be called before the first vCPU is created.
    fn configure(pmu: Pmu<Self>, vm: &VmFd) -> Result<(), KvmError>;
    /// Returns true if the kernel's accesses to this PMU reach Tally only after [`Format::retarget`].
    fn needs_retargeting(pmu: Pmu<Self>) -> bool;
    /// Returns kernel parameters that a guest with this PMU needs on this processor, if there are any.
    fn kernel_parameters(pmu: Pmu<Self>, processor: Self::Processor) -> Option<&'static str>;
    /// Describes a selected event in the guest's terms.
    fn describe(self, host: Self::BackingPmu, selection: Selection) -> String;
}

/// Format of a kernel file.
pub trait Format: Sized {
    /// The PMUs that Tally can emulate.
    type Model: PmuModel;
    /// Initial state of the guest's first vCPU.
    type Entry: Copy;
    /// What is kept of a kernel beside its image, when that was patched.
    type Saved: Debug + Serialize + DeserializeOwned;

    /// Kernels of this architecture are worth keeping as they are when they were patched.
    const IS_KEPT: bool;

    /// Detects the format of a kernel file of this length. Also returns the unpacked image, which may contain more than
    /// is loaded.
    fn read(file: &mut (impl Read + Seek), len: u64) -> Result<(Self, Vec<u8>), Problem>;
    /// Returns whether a kernel is Linux.
    fn is_linux(&self) -> bool;
    /// Returns what the board has to know of the kernel. Must be called after [`Self::retarget`].
    fn facts(kernel: &Kernel<Self>) -> KernelFacts;
    /// Patches the kernel's PMU accesses so that they exit to Tally, and notes or logs the changes.
    fn retarget(
        kernel: &mut Kernel<Self>,
        kvm: &Kvm,
        pmu: Pmu<Self::Model>,
        cpus: u8,
    ) -> Result<(), LoadError>;
    /// Patches a kernel as [`Self::retarget`] does for the PMU with the most changes, on a host on which all of them
    /// are possible. Needs no KVM: [`crate::untrusted`] calls this.
    fn retarget_without_kvm(kernel: &mut Kernel<Self>) -> Result<(), LoadError>;
    /// Returns what to keep of a kernel that was patched, or `None` if such kernels are not kept.
    fn saved(kernel: &Kernel<Self>) -> Option<Self::Saved>;
    /// Returns the format of a kernel that was kept, or `None` if it cannot be one.
    fn restored(saved: Self::Saved) -> Option<Self>;
    /// Returns whether programs in the guest can read the counters of an emulated PMU by an instruction. True only
    /// after [`Self::retarget`].
    fn lets_programs_read_counters(&self) -> bool;
    /// Loads a kernel and its initrd into the guest's memory, on x86 also the command line.
    fn load(&self, path: &Path, image: &[u8], boot: &Boot) -> Result<Self::Entry, LoadError>;
}

/// Everything around the processors: memory map, interrupt controllers, device buses, firmware.
pub trait Board: Clone {
    /// Parameters that every Linux kernel gets on its command line.
    const KERNEL_PARAMETERS: &'static str;
    /// Interrupt line of the serial port.
    const CONSOLE_GSI: u32;
    /// Address and interrupt line of the first virtio device.
    const VIRTIO: FirstVirtio;
    /// Format of a kernel file.
    type Format: Format;
    /// The interrupt controllers that are created after the vCPUs.
    type Controllers;
    /// What an emulated PMU needs from the board.
    type PmuLink;
    /// What KVM holds of a machine, in a snapshot.
    type State: Serialize + DeserializeOwned;
    /// What KVM holds of a vCPU, in a snapshot.
    type VcpuState: Serialize + DeserializeOwned + Send;
    /// What a machine shows its guest of the processor, in a snapshot.
    type Fingerprint: Debug + Serialize + DeserializeOwned;

    /// Returns the guest-physical ranges of RAM of this size: first addresses and lengths.
    fn ram(size: u64) -> Vec<(u64, u64)>;
    /// Creates the object through which a device raises this interrupt line.
    fn interrupt(vm: &Arc<VmFd>, gsi: u32) -> Result<impl Interrupt + 'static, MachineError>;
    /// Creates the parts of the VM that KVM requires before the first vCPU is created.
    fn before_vcpus(vm: &VmFd) -> Result<(), KvmError>;
    /// Creates the parts of the VM that KVM creates only when all vCPUs exist.
    fn after_vcpus(vm: &VmFd, vcpus: &[VcpuFd]) -> Result<Self::Controllers, KvmError>;
    /// Writes the description of the hardware for the guest's kernel (x86: ACPI tables, RISC-V: device tree).
    /// `virtio` is the number of virtio devices.
    fn write_tables(
        plan: &Plan<ModelOf<Self::Format>>,
        vcpus: &[VcpuFd],
        virtio: usize,
        command_line: &str,
        entry: EntryOf<Self::Format>,
    ) -> Result<(), MachineError>;
    /// Creates the buses with all devices on them.
    fn new(
        kvm: &Kvm,
        vm: &Arc<VmFd>,
        plan: &Plan<ModelOf<Self::Format>>,
        console: &Serial,
        virtio: MmioBus,
        controllers: Self::Controllers,
    ) -> Result<Self, MachineError>;
    /// Sets up the initial state of all vCPUs. All but the first wait until the guest's kernel starts them.
    fn set_up_vcpus(
        &self,
        kvm: &Kvm,
        plan: &Plan<ModelOf<Self::Format>>,
        vcpus: &mut [VcpuFd],
        kernel: &Kernel<Self::Format>,
        entry: EntryOf<Self::Format>,
    ) -> Result<(), KvmError>;
    /// Reads what KVM holds of the machine. No vCPU may run meanwhile.
    fn save(&self, vm: &VmFd) -> Result<Self::State, KvmError>;
    /// Reads what KVM holds of a vCPU, whose last exit has been completed.
    fn save_vcpu(&self, vcpu: &VcpuFd) -> Result<Self::VcpuState, KvmError>;
    /// Sets what KVM holds of a new machine and its vCPUs. The guest's memory has been restored before.
    fn restore<'a>(
        &self,
        kvm: &Kvm,
        vm: &VmFd,
        plan: &Plan<ModelOf<Self::Format>>,
        vcpus: &mut [VcpuFd],
        state: &Self::State,
        vcpu_states: impl Iterator<Item = &'a Self::VcpuState>,
    ) -> Result<(), KvmError>
    where
        Self::VcpuState: 'a;
    /// Returns what a machine on this host shows its guest of the processor: a guest that was saved on a host with the
    /// same finds everything as it was.
    fn fingerprint(
        kvm: &Kvm,
        cpus: u8,
        pmu: Pmu<ModelOf<Self::Format>>,
    ) -> Result<Self::Fingerprint, KvmError>;
    /// Returns [`Self::fingerprint`] while machines run, given the first vCPU of one that is saved.
    fn saved_fingerprint(
        kvm: &Kvm,
        cpus: u8,
        pmu: Pmu<ModelOf<Self::Format>>,
        first: &Self::VcpuState,
    ) -> Result<Self::Fingerprint, KvmError>;
    /// Returns in what this host differs from the one where a guest was saved, if its guest would see it.
    fn difference(saved: &Self::Fingerprint, here: &Self::Fingerprint) -> Option<String>;
    /// Returns what a vCPU's emulated PMU needs from the board.
    fn pmu_link(&self) -> Self::PmuLink;
    /// Handles a guest's read from a device's register in memory (MMIO).
    fn read(&self, address: u64, data: &mut [u8]);
    /// Handles a guest's write to a device's register in memory (MMIO). Returns how the machine ends if the write
    /// ends it.
    fn write(&self, address: u64, data: &[u8]) -> Option<End>;
}

/// A vCPU's file descriptor, on the thread that runs the vCPU. Only this trait's methods see what `KVM_RUN` returns.
pub trait Run: Sized {
    /// Exits that only this architecture has.
    type ArchExit;
    /// The devices around the processors.
    type Board;
    /// A vCPU's emulated PMU.
    type Emulated: EmulatedPmu;

    /// Wraps the file descriptor. Must be called on the thread that runs the vCPU.
    fn new(fd: VcpuFd) -> Self;
    /// Runs the guest until its next exit. The writes that KVM has coalesced are passed to their devices before the exit
    /// is handled, so that the devices see all accesses in order.
    fn run(&mut self, board: &Self::Board) -> Exit<Self::ArchExit>;
    /// Returns the vCPU's file descriptor, for all operations except `KVM_RUN`.
    fn fd(&mut self) -> &mut VcpuFd;
    /// Returns the kind under which an exit is counted.
    fn kind(exit: &Self::ArchExit) -> exit::ExitKind;
    /// Handles an exit that only this architecture has. Returns how the machine ends if the exit ends it.
    fn handle(
        &mut self,
        exit: Self::ArchExit,
        pmu: &mut VcpuPmu<Self::Emulated>,
        board: &Self::Board,
        ram: &GuestRam,
    ) -> Option<End>;

    /// Completes an [`Exit::MemoryRead`] with this data.
    fn complete_read(&mut self, data: Bytes) {
        exit::complete_read(self.fd(), data);
    }

    /// Returns whether a vCPU is in user mode.
    fn is_in_user_mode(fd: &VcpuFd) -> bool;
    /// Returns a vCPU's instruction pointer.
    fn instruction_pointer(fd: &VcpuFd) -> u64;
    /// Enables [`Self::synced_instruction_pointer`]. On x86 KVM then copies the registers into the shared pages at each
    /// exit, which is cheaper than a system call after each exit.
    fn sync_instruction_pointer(fd: &mut VcpuFd);
    /// Returns the instruction pointer at the last exit. Requires an earlier call of
    /// [`Self::sync_instruction_pointer`].
    fn synced_instruction_pointer(fd: &VcpuFd) -> u64;
    /// Tells the guest's kernel that this vCPU was paused, so that the kernel's watchdog does not report a lockup. Does
    /// nothing if the guest has no interface for this.
    fn notify_paused(fd: &VcpuFd);
}

/// A vCPU's emulated PMU, on the vCPU's thread.
pub trait EmulatedPmu: Sized {
    /// The guest's view of the PMU.
    type Model: PmuModel;
    /// What it needs from the board.
    type Link;

    /// Creates the emulated PMU of this vCPU. Must be called on the vCPU's thread.
    fn new(
        model: Self::Model,
        host: <Self::Model as PmuModel>::BackingPmu,
        vcpu: u8,
        link: Self::Link,
        ram: &GuestRam,
    ) -> Self;
    /// Returns the virtual PMU.
    fn pmu(&mut self) -> &mut VirtualPmu<PerfEvents>;
    /// Handles overflows and timers after an exit. See [`VirtualPmu::after_exit`].
    fn after_exit(&mut self, cause: Cause, vm: &VmFd, fd: &mut VcpuFd) -> Result<BeforeEntry, KvmError>;
}

/// The PMUs of machines that run kernels of format `F`.
pub type ModelOf<F> = <F as Format>::Model;
/// Initial state of the first vCPU, for a kernel of format `F`.
pub type EntryOf<F> = <F as Format>::Entry;

/// What the board has to know of the guest's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KernelFacts {
    /// It is Linux.
    pub is_linux: bool,
    /// Address of the first vCPU's shared page, if the kernel uses such pages.
    pub pages: Option<u64>,
}

/// The part of a machine's configuration that its architecture needs.
pub struct Plan<'a, M: PmuModel> {
    /// What the board has to know of the kernel.
    pub kernel: KernelFacts,
    /// The guest was saved before, and goes on.
    pub is_restored: bool,
    /// Number of vCPUs.
    pub cpus: u8,
    /// The guest's memory.
    pub ram: &'a GuestRam,
    /// The PMU that the guest sees.
    pub pmu: Pmu<M>,
    /// Opens the destination of the console's output.
    pub console: &'a dyn Fn() -> Box<dyn Write + Send>,
}

/// The PMU that the guest sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pmu<M: PmuModel> {
    /// No PMU. None is announced to the guest, and accesses to PMU registers fault.
    None,
    /// KVM's own in-kernel vPMU.
    Kvm,
    /// A PMU that Tally emulates, and the host PMU that backs it.
    Emulated(M, M::BackingPmu),
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
pub enum VcpuPmu<E> {
    /// No PMU.
    None,
    /// KVM's own in-kernel vPMU.
    Kvm,
    /// A PMU that Tally emulates.
    Emulated(Box<E>),
}

impl<E: EmulatedPmu> VcpuPmu<E> {
    /// Counts an instruction that accesses a device: it exits and is completed by Tally, so that no hardware counts it.
    /// `is_user` is called only if the answer matters.
    pub fn completes_instruction(&mut self, is_user: impl FnOnce() -> bool) {
        if let Self::Emulated(emulated) = self {
            emulated.pmu().completes_instruction(is_user);
        }
    }
}

impl<M: PmuModel> Display for Pmu<M> {
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
