//! Traits for everything that differs between processor architectures.
//!
//! [`crate::arch`] chooses the architecture that this program is compiled for. Neither this file nor the modules that
//! it imports depend on the choice.

use std::fmt::{self, Display};
use std::io::{Read, Seek, Write};
use std::sync::Arc;

use devices::virtio::{MmioBus, Transport};
use devices::{End, Interrupt, Serial};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vpmu::event::Selection;
use vpmu::policy::Policy;
use vpmu::{Cause, Next, VirtualPmu};
use vpmu_perf::PerfEvents;

use crate::error::MachineError;
use crate::exit::{self, Bytes, Exit};
use crate::kvm_error::{KvmError, Need};
use crate::loader::error::{LoadError, Problem};
use crate::loader::kernel::{Boot, Kernel};
use crate::memory::GuestRam;

/// A processor architecture, and the machine around it.
pub trait Architecture: Sized {
    /// Name of the instruction pointer.
    const POINTER: &'static str;

    // The host.

    /// The properties of the host's processor that matter to PMUs.
    type Processor: Copy + Display;
    /// KVM capabilities that every machine needs.
    const NEEDS: &'static [Need];
    /// KVM capabilities that are used if KVM has them.
    const WANTED: &'static [Need];
    /// KVM's kernel modules, each with a phrase for the user that says on what its KVM runs.
    const MODULES: &'static [(&'static str, &'static str)];
    /// Commands that load a KVM module.
    const LOADING: &'static [&'static str];

    /// Returns the host's processor.
    fn processor(kvm: &Kvm) -> Result<Self::Processor, KvmError>;
    /// Returns kernel parameters that a guest with this PMU needs on this processor, if there are any.
    fn kernel_words(processor: Self::Processor, pmu: PmuOf<Self>) -> Option<&'static str>;
    /// Returns the KVM capabilities that a machine with this PMU needs beyond [`Self::NEEDS`].
    fn needs(choice: Self::Choice) -> &'static [Need];
    /// Returns a sentence for the user about the state of KVM's own PMU.
    fn of_kvms_pmu(kvm: &Kvm) -> &'static str;
    /// Reads the processor's clock (x86: the time-stamp counter, RISC-V: `time`).
    fn ticks() -> u64;

    // Kernels.

    /// Format of a kernel file.
    type Format;
    /// Initial state of the guest's first vCPU.
    type Entry: Copy;
    /// Parameters that every Linux kernel gets on its command line.
    const KERNEL_WORDS: &'static str;

    /// Detects the format of a kernel file of this length. Also returns the unpacked image, which may contain more than
    /// is loaded.
    fn read_kernel(file: &mut (impl Read + Seek), len: u64) -> Result<(Self::Format, Vec<u8>), Problem>;
    /// Returns whether a kernel is Linux.
    fn is_linux(format: &Self::Format) -> bool;
    /// Patches the kernel's PMU accesses so that they exit to Tally, and logs the changes.
    fn retarget(kernel: &mut Kernel<Self::Format>, pmu: PmuOf<Self>, cpus: u8) -> Result<(), LoadError>;
    /// Loads a kernel and its initrd into the guest's memory, on x86 also the command line.
    fn load(kernel: &Kernel<Self::Format>, boot: &Boot) -> Result<Self::Entry, LoadError>;

    // The machine's parts.

    /// The device buses, and other state that all vCPUs share.
    type Buses: Clone;
    /// The interrupt controllers.
    type Controllers;
    /// The host's data from which vCPUs are set up.
    type Processors;
    /// Interrupt line of the serial port.
    const CONSOLE_GSI: u32;
    /// Address and interrupt line of the first virtio device.
    const VIRTIO: FirstVirtio;

    /// Returns the guest-physical ranges of RAM of this size: first addresses and lengths.
    fn ram(size: u64) -> Vec<(u64, u64)>;
    /// Creates the object through which a device raises this interrupt line.
    fn line(vm: &Arc<VmFd>, gsi: u32) -> Result<impl Interrupt + 'static, MachineError>;
    /// Creates the parts of the VM that KVM requires before the first vCPU is created.
    fn before_vcpus(vm: &VmFd) -> Result<(), KvmError>;
    /// Creates the parts of the VM that KVM creates only when all vCPUs exist.
    fn after_vcpus(vm: &VmFd, vcpus: &[VcpuFd]) -> Result<Self::Controllers, KvmError>;
    /// Writes the description of the hardware for the guest's kernel (x86: ACPI tables, RISC-V: device tree).
    /// `virtio` is the number of virtio devices.
    fn describe(
        plan: &Plan<Self::Format, PmuOf<Self>>,
        vcpus: &[VcpuFd],
        virtio: usize,
        entry: Self::Entry,
    ) -> Result<(), MachineError>;
    /// Creates the buses with all devices on them.
    fn buses(
        kvm: &Kvm,
        vm: &Arc<VmFd>,
        plan: &Plan<Self::Format, PmuOf<Self>>,
        console: &Serial,
        virtio: MmioBus,
        controllers: Self::Controllers,
    ) -> Result<Self::Buses, MachineError>;
    /// Handles a guest's read from a device's register in memory (MMIO).
    fn read(buses: &Self::Buses, address: u64, data: &mut [u8]);
    /// Handles a guest's write to a device's register in memory (MMIO). Returns how the machine ends if the write
    /// ends it.
    fn write(buses: &Self::Buses, address: u64, data: &[u8]) -> Option<End>;

    // vCPUs.

    /// Exits that only this architecture has.
    type OwnExit;
    /// A vCPU's file descriptor, on the vCPU's thread.
    type Run: Run<OwnExit = Self::OwnExit, Buses = Self::Buses>;

    /// Reads from KVM the data from which vCPUs are set up.
    fn processors(kvm: &Kvm) -> Result<Self::Processors, KvmError>;
    /// Sets up the initial state of vCPU `id`. All vCPUs but the first wait until the guest's kernel starts them.
    fn prepare(
        processors: &Self::Processors,
        fd: &mut VcpuFd,
        id: u8,
        entry: Self::Entry,
        plan: &Plan<Self::Format, PmuOf<Self>>,
        buses: &Self::Buses,
    ) -> Result<(), KvmError>;
    /// Returns the kind under which an exit is counted.
    fn kind(exit: &Self::OwnExit) -> exit::Kind;
    /// Handles an exit that only this architecture has. Returns how the machine ends if the exit ends it.
    fn serve(
        exit: Self::OwnExit,
        run: &mut Self::Run,
        pmu: &mut KindOf<Self>,
        buses: &Self::Buses,
        ram: &GuestRam,
    ) -> Option<End>;
    /// Returns a vCPU's instruction pointer.
    fn place(fd: &VcpuFd) -> u64;
    /// Enables [`Self::kept_place`]. On x86 KVM then copies the registers into the shared pages at each exit, which
    /// is cheaper than a system call after each exit.
    fn keep_place(fd: &mut VcpuFd);
    /// Returns the instruction pointer at the last exit. Requires an earlier call of [`Self::keep_place`].
    fn kept_place(fd: &VcpuFd) -> u64;
    /// Tells the guest's kernel that this vCPU was paused, so that the kernel's watchdog does not report a lockup. Does
    /// nothing if the guest has no interface for this.
    fn tell_of_pause(fd: &VcpuFd);

    // The PMU.

    /// A value of `--pmu`.
    type Choice: Copy;
    /// The guest's view of an emulated PMU: its vendor and its counters.
    type Shown: Copy;
    /// The host's side of an emulated PMU: the host PMU that backs its counters.
    type Host: Copy;
    /// Why this host cannot offer a PMU.
    type Unavailable;
    /// A vCPU's emulated PMU, on the vCPU's thread.
    type Front: Front;

    /// Determines the PMU that this host can offer the guest for a choice, a number of counters and a policy.
    fn offer(
        choice: Self::Choice,
        counters: Option<u32>,
        processor: Self::Processor,
        policy: &Policy,
    ) -> Result<Offer<PmuOf<Self>>, Self::Unavailable>;
    /// Returns the number of general-purpose counters of the CPU on which this thread runs, or `None` if it cannot be
    /// found out.
    fn counters() -> Option<usize>;
    /// Describes a selected event in the guest's terms.
    fn words(shown: Self::Shown, host: Self::Host, selection: Selection) -> String;
    /// Configures KVM for this PMU. Must be called before the first vCPU is created.
    fn configure(pmu: PmuOf<Self>, vm: &VmFd) -> Result<(), KvmError>;
    /// Returns true if the kernel's accesses to this PMU reach Tally only after [`Self::retarget`].
    fn needs_retargeting(pmu: PmuOf<Self>) -> bool;
    /// Creates the emulated PMU of this vCPU. Must be called on the vCPU's thread.
    fn front(
        shown: Self::Shown,
        host: Self::Host,
        vcpu: u8,
        buses: &Self::Buses,
        ram: &GuestRam,
    ) -> Self::Front;
}

/// A vCPU's file descriptor, on the thread that runs the vCPU. Only this trait's methods see what `KVM_RUN` returns.
pub trait Run {
    /// Exits that only this architecture has.
    type OwnExit;
    /// The device buses.
    type Buses;

    /// Wraps the file descriptor. Must be called on the thread that runs the vCPU.
    fn new(fd: VcpuFd) -> Self;
    /// Runs the guest until its next exit.
    fn run(&mut self) -> Exit<Self::OwnExit>;
    /// Returns the vCPU's file descriptor, for all operations except `KVM_RUN`.
    fn fd(&mut self) -> &mut VcpuFd;
    /// Passes the writes that KVM has coalesced to their devices. Must be called after every exit, before the exit is
    /// handled, so that the devices see all accesses in order.
    fn drain(&mut self, buses: &Self::Buses);

    /// Completes an [`Exit::MemoryRead`] with this data.
    fn answer_memory(&mut self, data: Bytes) {
        exit::answer_memory(self.fd(), data);
    }
}

/// A vCPU's emulated PMU, on the vCPU's thread.
pub trait Front {
    /// Returns the virtual PMU.
    fn pmu(&mut self) -> &mut VirtualPmu<PerfEvents>;
    /// Handles overflows and timers after an exit. See [`VirtualPmu::after_exit`].
    fn after_exit(&mut self, cause: Cause, vm: &VmFd, fd: &mut VcpuFd) -> Result<Next, KvmError>;
}

/// The PMU that the guest sees, on architecture `A`.
pub type PmuOf<A> = Pmu<<A as Architecture>::Shown, <A as Architecture>::Host>;

/// A vCPU's PMU on the vCPU's thread, on architecture `A`.
pub type KindOf<A> = Kind<<A as Architecture>::Front>;

/// The part of a machine's configuration that its architecture needs.
pub struct Plan<'a, F, P> {
    /// The kernel.
    pub kernel: &'a Kernel<F>,
    /// The kernel's command line.
    pub command_line: &'a str,
    /// Number of vCPUs.
    pub cpus: u8,
    /// The guest's memory.
    pub ram: &'a GuestRam,
    /// The PMU that the guest sees.
    pub pmu: P,
    /// Opens the destination of the console's output.
    pub console: &'a dyn Fn() -> Box<dyn Write + Send>,
}

/// The PMU that the guest sees. `S` is the guest's view of an emulated PMU, and `H` the host's side of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pmu<S, H> {
    /// No PMU. None is announced to the guest, and accesses to PMU registers fault.
    None,
    /// KVM's own in-kernel vPMU.
    Kvm,
    /// A PMU that Tally emulates.
    Emulated(S, H),
}

/// The PMU that a host can offer for a choice.
#[derive(Debug, PartialEq, Eq)]
pub struct Offer<P> {
    /// The PMU that the guest sees.
    pub pmu: P,
    /// Remarks for the user about the offer.
    pub remarks: Vec<String>,
}

/// A vCPU's PMU on the vCPU's thread. `F` is an emulated PMU.
pub enum Kind<F> {
    /// No PMU.
    None,
    /// KVM's own in-kernel vPMU.
    Kvm,
    /// A PMU that Tally emulates.
    Emulated(Box<F>),
}

impl<S: Display, H> Display for Pmu<S, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => write!(f, "none"),
            Self::Kvm => write!(f, "KVM's own"),
            Self::Emulated(shown, _) => write!(f, "{shown}"),
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
    pub fn line(self, index: usize) -> u32 {
        self.gsi + u32::try_from(index).expect("there are few devices")
    }
}
