//! The x86-64 architecture: PCs with an AMD or Intel processor.

mod acpi;
mod board;
mod clock;
mod coalescing;
mod cpuid;
mod exit;
mod firmware;
mod host;
mod kvm;
mod loader;
mod machine;
mod memory;
mod msr;
mod pmu;
mod registers;

use std::io::{Read, Seek};
use std::sync::Arc;

use devices::virtio::MmioBus;
use devices::{End, Interrupt, Serial};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vpmu::event::Selection;
use vpmu::policy::Policy;

use crate::architecture::FirstVirtio;
use crate::architecture::{Architecture, Plan};
use crate::error::MachineError;
use crate::exit::Kind;
use crate::kvm_error::{KvmError, Need};
use crate::loader::error::{LoadError, Problem};
use crate::loader::kernel::Boot;
use crate::memory::GuestRam;

use self::board::Buses;
use self::exit::{KvmRun, OwnExit};
use self::host::Processor;
use self::loader::{Entry, Format, Kernel};
use self::pmu::guest_page::GuestPage;
use self::pmu::{Choice, Front, Host, Offer, Pmu, Shown, Unavailable};

/// A PC with AMD or Intel processors.
pub struct X86_64;

impl Architecture for X86_64 {
    const POINTER: &'static str = "RIP";

    type Processor = Processor;
    const NEEDS: &'static [Need] = &kvm::NEEDS;
    const WANTED: &'static [Need] = &kvm::WANTED;
    const MODULES: &'static [(&'static str, &'static str)] = &kvm::MODULES;
    const LOADING: &'static [&'static str] = &kvm::LOADING;

    fn processor(kvm: &Kvm) -> Result<Processor, KvmError> {
        Processor::of(kvm)
    }

    fn kernel_words(processor: Processor, pmu: Pmu) -> Option<&'static str> {
        processor.kernel_words(pmu)
    }

    fn needs(choice: Choice) -> &'static [Need] {
        kvm::needs(choice)
    }

    fn of_kvms_pmu(kvm: &Kvm) -> &'static str {
        kvm::of_its_own_pmu(kvm)
    }

    fn ticks() -> u64 {
        clock::ticks()
    }

    type Format = Format;
    type Entry = Entry;
    const KERNEL_WORDS: &'static str = board::KERNEL_WORDS;

    fn read_kernel(file: &mut (impl Read + Seek), len: u64) -> Result<(Format, Vec<u8>), Problem> {
        Format::read(file, len)
    }

    fn is_linux(format: &Format) -> bool {
        format.is_linux()
    }

    fn retarget(kernel: &mut Kernel, pmu: Pmu, cpus: u8) -> Result<(), LoadError> {
        loader::retarget::retarget(kernel, pmu, cpus)
    }

    fn load(kernel: &Kernel, boot: &Boot) -> Result<Entry, LoadError> {
        kernel.format.load(&kernel.path, &kernel.image, boot)
    }

    type Buses = Buses;
    type Controllers = board::Controllers;
    type Processors = board::Processors;
    const CONSOLE_GSI: u32 = machine::COM.gsi;
    const VIRTIO: FirstVirtio = machine::VIRTIO;

    fn ram(size: u64) -> Vec<(u64, u64)> {
        memory::ranges(size)
    }

    fn line(vm: &Arc<VmFd>, gsi: u32) -> Result<impl Interrupt + 'static, MachineError> {
        board::line(vm, gsi)
    }

    fn before_vcpus(vm: &VmFd) -> Result<(), KvmError> {
        board::before_vcpus(vm)
    }

    fn after_vcpus(vm: &VmFd, vcpus: &[VcpuFd]) -> Result<Self::Controllers, KvmError> {
        board::after_vcpus(vm, vcpus)
    }

    fn describe(
        plan: &Plan<Format, Pmu>,
        vcpus: &[VcpuFd],
        virtio: usize,
        entry: Entry,
    ) -> Result<(), MachineError> {
        board::describe(plan, vcpus, virtio, entry)
    }

    fn buses(
        kvm: &Kvm,
        vm: &Arc<VmFd>,
        plan: &Plan<Format, Pmu>,
        console: &Serial,
        virtio: MmioBus,
        controllers: Self::Controllers,
    ) -> Result<Buses, MachineError> {
        Buses::new(kvm, vm, plan, console, virtio, controllers)
    }

    fn read(buses: &Buses, address: u64, data: &mut [u8]) {
        buses.read(address, data);
    }

    fn write(buses: &Buses, address: u64, data: &[u8]) -> Option<End> {
        buses.write(address, data)
    }

    type OwnExit = OwnExit;
    type Run = KvmRun;

    fn processors(kvm: &Kvm) -> Result<Self::Processors, KvmError> {
        board::Processors::new(kvm)
    }

    fn prepare(
        processors: &Self::Processors,
        fd: &mut VcpuFd,
        id: u8,
        entry: Entry,
        plan: &Plan<Format, Pmu>,
        buses: &Buses,
    ) -> Result<(), KvmError> {
        processors.prepare(fd, id, entry, plan, buses)
    }

    fn kind(exit: &OwnExit) -> Kind {
        exit.kind()
    }

    fn serve(
        exit: OwnExit,
        run: &mut KvmRun,
        pmu: &mut pmu::Kind,
        buses: &Buses,
        ram: &GuestRam,
    ) -> Option<End> {
        exit::serve(exit, run, pmu, buses, ram)
    }

    fn place(fd: &VcpuFd) -> u64 {
        exit::place(fd)
    }

    fn keep_place(fd: &mut VcpuFd) {
        exit::keep_place(fd);
    }

    fn kept_place(fd: &VcpuFd) -> u64 {
        exit::kept_place(fd)
    }

    fn tell_of_pause(fd: &VcpuFd) {
        exit::tell_of_pause(fd);
    }

    type Choice = Choice;
    type Shown = Shown;
    type Host = Host;
    type Unavailable = Unavailable;
    type Front = Front;

    fn offer(
        choice: Choice,
        counters: Option<u32>,
        processor: Processor,
        policy: &Policy,
    ) -> Result<Offer, Unavailable> {
        pmu::offer(choice, counters, processor.0, policy)
    }

    fn counters() -> Option<usize> {
        pmu::counters()
    }

    fn words(shown: Shown, host: Host, selection: Selection) -> String {
        shown.words(host, selection)
    }

    fn configure(pmu: Pmu, vm: &VmFd) -> Result<(), KvmError> {
        match pmu {
            Pmu::Kvm => Ok(()),
            Pmu::None => pmu::filter::take_registers(vm, None),
            Pmu::Emulated(shown, _) => pmu::filter::take_registers(vm, Some(shown.vendor())),
        }
    }

    fn needs_retargeting(pmu: Pmu) -> bool {
        matches!(pmu, Pmu::Emulated(..))
    }

    fn front(shown: Shown, host: Host, vcpu: u8, buses: &Buses, ram: &GuestRam) -> Front {
        let page = buses.has_shared_pages.then(|| GuestPage::new(vcpu, &ram.mapped));
        Front::new(shown, host, vcpu, page.flatten())
    }
}
