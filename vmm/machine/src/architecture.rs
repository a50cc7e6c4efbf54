//! What an architecture supplies: everything in which a machine with one kind of processor differs from one with another.
//!
//! [`crate::arch`] chooses the one that this program is compiled for. Nothing in this file, or below it, knows which that is.

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

/// A kind of processor, and the machine around it.
pub trait Architecture: Sized {
    /// What its instruction pointer is called.
    const POINTER: &'static str;

    // The host.

    /// The host's processor, as far as PMUs go.
    type Processor: Copy + Display;
    /// What every machine needs of KVM.
    const NEEDS: &'static [Need];
    /// What KVM had better have.
    const WANTED: &'static [Need];
    /// The modules that make KVM of a kernel, and what they stand on.
    const MODULES: &'static [(&'static str, &'static str)];
    /// The commands that load such a module.
    const LOADING: &'static [&'static str];

    /// Returns the host's processor.
    fn processor(kvm: &Kvm) -> Result<Self::Processor, KvmError>;
    /// Returns what a kernel has to be told of its processor, for this PMU.
    fn kernel_words(processor: Self::Processor, pmu: PmuOf<Self>) -> Option<&'static str>;
    /// Returns what a machine with such a PMU needs of KVM beyond [`Self::NEEDS`].
    fn needs(choice: Self::Choice) -> &'static [Need];
    /// Says what there is to say of KVM's own PMU.
    fn of_kvms_pmu(kvm: &Kvm) -> &'static str;
    /// Returns the time by the processor's clock.
    fn ticks() -> u64;

    // Kernels.

    /// What a kernel's file was found to be.
    type Format;
    /// How the guest's first vCPU starts.
    type Entry: Copy;
    /// What every Linux kernel is told.
    const KERNEL_WORDS: &'static str;

    /// Finds out what a file of this length is. It comes with what is loaded of it, unpacked, and perhaps more.
    fn read_kernel(file: &mut (impl Read + Seek), len: u64) -> Result<(Self::Format, Vec<u8>), Problem>;
    /// Returns whether a kernel is Linux.
    fn is_linux(format: &Self::Format) -> bool;
    /// Has a kernel access its PMU in a way that can be handed over, and logs what was changed for that.
    fn retarget(kernel: &mut Kernel<Self::Format>, pmu: PmuOf<Self>, cpus: u8) -> Result<(), LoadError>;
    /// Puts a kernel and what it is booted with into the guest's memory.
    fn load(kernel: &Kernel<Self::Format>, boot: &Boot) -> Result<Self::Entry, LoadError>;

    // What the machine is made of.

    /// Where a vCPU finds devices, and what else it shares with the others.
    type Buses: Clone;
    /// The interrupt controllers.
    type Controllers;
    /// What vCPUs are prepared from.
    type Processors;
    /// The interrupt line of the serial port.
    const CONSOLE_GSI: u32;
    /// Where the first virtio device is.
    const VIRTIO: FirstVirtio;

    /// Returns where RAM of that size is: first addresses and lengths.
    fn ram(size: u64) -> Vec<(u64, u64)>;
    /// Connects a device's interrupt line.
    fn line(vm: &Arc<VmFd>, gsi: u32) -> Result<impl Interrupt + 'static, MachineError>;
    /// Makes what has to be there before the first vCPU.
    fn before_vcpus(vm: &VmFd) -> Result<(), KvmError>;
    /// Makes what comes after the last one.
    fn after_vcpus(vm: &VmFd, vcpus: &[VcpuFd]) -> Result<Self::Controllers, KvmError>;
    /// Tells the kernel what there is, so many virtio devices among it.
    fn describe(
        plan: &Plan<Self::Format, PmuOf<Self>>,
        vcpus: &[VcpuFd],
        virtio: usize,
        entry: Self::Entry,
    ) -> Result<(), MachineError>;
    /// Puts the devices where vCPUs find them.
    fn buses(
        kvm: &Kvm,
        vm: &Arc<VmFd>,
        plan: &Plan<Self::Format, PmuOf<Self>>,
        console: &Serial,
        virtio: MmioBus,
        controllers: Self::Controllers,
    ) -> Result<Self::Buses, MachineError>;
    /// Reads a device's register in memory.
    fn read(buses: &Self::Buses, address: u64, data: &mut [u8]);
    /// Writes to one.
    fn write(buses: &Self::Buses, address: u64, data: &[u8]) -> Option<End>;

    // vCPUs.

    /// The exits that other architectures do not have.
    type OwnExit;
    /// A vCPU's file, on its thread.
    type Run: Run<OwnExit = Self::OwnExit, Buses = Self::Buses>;

    /// Asks KVM what vCPUs are prepared from.
    fn processors(kvm: &Kvm) -> Result<Self::Processors, KvmError>;
    /// Prepares the vCPU of this number. All but the first wait for the kernel to start them.
    fn prepare(
        processors: &Self::Processors,
        fd: &mut VcpuFd,
        id: u8,
        entry: Self::Entry,
        plan: &Plan<Self::Format, PmuOf<Self>>,
        buses: &Self::Buses,
    ) -> Result<(), KvmError>;
    /// Returns what an exit is counted as.
    fn kind(exit: &Self::OwnExit) -> exit::Kind;
    /// Deals with an exit. Returns how the machine ends, if it does.
    fn serve(
        exit: Self::OwnExit,
        run: &mut Self::Run,
        pmu: &mut KindOf<Self>,
        buses: &Self::Buses,
        ram: &GuestRam,
    ) -> Option<End>;
    /// Returns where a vCPU is.
    fn place(fd: &VcpuFd) -> u64;
    /// Prepares [`Self::kept_place`], which is asked for often.
    fn keep_place(fd: &mut VcpuFd);
    /// Returns where a vCPU was when it left the guest.
    fn kept_place(fd: &VcpuFd) -> u64;
    /// Tells the guest's kernel that a vCPU was away, if it can be told.
    fn tell_of_pause(fd: &VcpuFd);

    // The PMU.

    /// What can be asked for.
    type Choice: Copy;
    /// A PMU of Tally's, as the guest sees it.
    type Shown: Copy;
    /// Who counts for it.
    type Host: Copy;
    /// Why a PMU cannot be had.
    type Unavailable;
    /// An emulated PMU, on its vCPU's thread.
    type Front: Front;

    /// Finds out what the guest can be offered on a host with that processor.
    fn offer(
        choice: Self::Choice,
        counters: Option<u32>,
        processor: Self::Processor,
        policy: &Policy,
    ) -> Result<Offer<PmuOf<Self>>, Self::Unavailable>;
    /// Returns how many counters for any events the processor has on which this thread runs, if that can be known.
    fn counters() -> Option<usize>;
    /// Returns what is counted, in the guest's words.
    fn words(shown: Self::Shown, host: Self::Host, selection: Selection) -> String;
    /// Tells KVM which PMU the guest sees, before the first vCPU exists.
    fn configure(pmu: PmuOf<Self>, vm: &VmFd) -> Result<(), KvmError>;
    /// Returns whether the kernel has to access this PMU in a way that can be handed over.
    fn needs_retargeting(pmu: PmuOf<Self>) -> bool;
    /// Creates the PMU of the vCPU of this number, on that vCPU's thread.
    fn front(
        shown: Self::Shown,
        host: Self::Host,
        vcpu: u8,
        buses: &Self::Buses,
        ram: &GuestRam,
    ) -> Self::Front;
}

/// A vCPU's file, on the thread that runs the vCPU: what `KVM_RUN` comes back with is seen by its methods alone.
pub trait Run {
    /// The exits that other architectures do not have.
    type OwnExit;
    /// Where a vCPU finds devices.
    type Buses;

    /// Takes a vCPU to its thread.
    fn new(fd: VcpuFd) -> Self;
    /// Runs the guest until it leaves.
    fn run(&mut self) -> Exit<Self::OwnExit>;
    /// Returns the vCPU's file, for anything but to run it.
    fn fd(&mut self) -> &mut VcpuFd;
    /// Carries out what KVM has held back; after every exit, before that is dealt with.
    fn drain(&mut self, buses: &Self::Buses);

    /// Gives the guest what it reads from a device's register in memory.
    fn answer_memory(&mut self, data: Bytes) {
        exit::answer_memory(self.fd(), data);
    }
}

/// An emulated PMU as one vCPU sees it, on that vCPU's thread.
pub trait Front {
    /// Returns the virtual PMU.
    fn pmu(&mut self) -> &mut VirtualPmu<PerfEvents>;
    /// Handles overflows and timers after an exit. See [`VirtualPmu::after_exit`].
    fn after_exit(&mut self, cause: Cause, vm: &VmFd, fd: &mut VcpuFd) -> Result<Next, KvmError>;
}

/// What a guest sees as its PMU.
pub type PmuOf<A> = Pmu<<A as Architecture>::Shown, <A as Architecture>::Host>;

/// What a vCPU has as its PMU.
pub type KindOf<A> = Kind<<A as Architecture>::Front>;

/// What a machine is built for, as far as that matters to its architecture.
pub struct Plan<'a, F, P> {
    /// The kernel.
    pub kernel: &'a Kernel<F>,
    /// Its command line.
    pub command_line: &'a str,
    /// How many vCPUs there are.
    pub cpus: u8,
    /// The guest's memory.
    pub ram: &'a GuestRam,
    /// Which PMU the guest sees.
    pub pmu: P,
    /// Opens where the console's output goes.
    pub console: &'a dyn Fn() -> Box<dyn Write + Send>,
}

/// What the guest sees: `S` is a PMU of Tally's, and `H` who counts for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pmu<S, H> {
    /// No PMU: none is announced, and its registers fault.
    None,
    /// KVM's own in-kernel vPMU.
    Kvm,
    /// Tally's.
    Emulated(S, H),
}

/// What becomes of a choice.
#[derive(Debug, PartialEq, Eq)]
pub struct Offer<P> {
    /// What the guest sees.
    pub pmu: P,
    /// What the user should know about it.
    pub remarks: Vec<String>,
}

/// What a vCPU has, on its thread: `F` is an emulated one.
pub enum Kind<F> {
    /// None.
    None,
    /// KVM's own.
    Kvm,
    /// One of Tally's.
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

/// Where the first virtio device is. The others are behind it, each with an interrupt line of its own.
#[derive(Debug, Clone, Copy)]
pub struct FirstVirtio {
    /// Its registers.
    pub base: u64,
    /// The interrupt line that it drives.
    pub gsi: u32,
}

impl FirstVirtio {
    /// Returns where a device's registers are.
    pub fn address(self, index: usize) -> u64 {
        self.base + index as u64 * Transport::SIZE
    }

    /// Returns the interrupt line that it drives.
    pub fn line(self, index: usize) -> u32 {
        self.gsi + u32::try_from(index).expect("there are few devices")
    }
}
