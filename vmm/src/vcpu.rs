//! One vCPU: the loop around `KVM_RUN`. Nothing outside this file sees what KVM's exits look like.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use devices::virtio::MmioBus;
use devices::{End, PortBus};
use kvm_bindings::{KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN, kvm_run};
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use log::warn;
use vpmu::Outcome;
use vpmu::notice::Notice;
use vpmu::policy::Policy;

use crate::coalescing::Coalescing;
use crate::event_log::{EventLog, VcpuLog};
use crate::exits::{Exits, Stopwatch};
use crate::kvm::KvmError;
use crate::mailbox::{Ask, Mailbox, VcpuReport, Vcpus};
use crate::memory::GuestRam;
use crate::pmu::thread::{Settled, ThreadPmu};
use crate::pmu::{Pmu, SharedSlate};

/// Where a vCPU finds devices.
#[derive(Clone)]
pub struct Buses {
    /// Those with I/O ports.
    pub ports: Arc<PortBus>,
    /// Those with registers in memory.
    pub memory: Arc<MmioBus>,
}

/// A vCPU, ready to run on a thread of its own.
pub struct Vcpu {
    /// Its number, which is its APIC id.
    pub id: u8,
    /// KVM's side of it.
    pub fd: VcpuFd,
    /// The machine's devices.
    pub buses: Buses,
    /// The console bytes that KVM holds back.
    pub coalescing: Arc<Coalescing>,
    /// Which PMU it has.
    pub pmu: Pmu,
    /// What the operator lets it have of that.
    pub policy: Policy,
    /// Where it is asked how it does.
    pub mailbox: Mailbox,
    /// All of the machine's.
    pub vcpus: Arc<Vcpus>,
    /// What it came out of the guest for.
    pub exits: Exits,
    /// How long that took.
    pub stopwatch: Stopwatch,
    /// The machine.
    pub vm: Arc<VmFd>,
    /// Its share in the guest's memory, which is mapped as long as a vCPU may run in it.
    pub ram: GuestRam,
    /// Whether its kernel can access registers without leaving the guest.
    pub has_slate: bool,
}

/// Why a vCPU cannot go on.
#[derive(Debug)]
pub enum Reason {
    /// A fault while handling a fault while handling a fault.
    TripleFault,
    /// KVM met something that it cannot emulate.
    InternalError(u32),
    /// The processor refused to enter the guest.
    EntryFailed(u64),
    /// `KVM_RUN` itself failed.
    RunFailed(kvm_ioctls::Error),
    /// Something that must be done before it goes on cannot be done.
    Refused(KvmError),
    /// An exit that no machine of ours causes.
    Unexpected(String),
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TripleFault => write!(f, "triple fault"),
            Self::InternalError(kind) => {
                let what = match *kind {
                    kvm_bindings::KVM_INTERNAL_ERROR_EMULATION => "it cannot emulate an instruction",
                    kvm_bindings::KVM_INTERNAL_ERROR_SIMUL_EX => "two exceptions at once",
                    kvm_bindings::KVM_INTERNAL_ERROR_DELIVERY_EV => "it cannot deliver an event",
                    kvm_bindings::KVM_INTERNAL_ERROR_UNEXPECTED_EXIT_REASON => {
                        "an exit that it does not know"
                    }
                    _ => "unknown",
                };
                write!(f, "KVM internal error {kind}: {what}")
            }
            Self::EntryFailed(reason) => {
                write!(f, "KVM error: the processor refused to enter the guest ({reason:#x})")
            }
            Self::RunFailed(error) => write!(f, "KVM error: {error}"),
            Self::Refused(error) => write!(f, "{error}"),
            Self::Unexpected(exit) => write!(f, "KVM error: unexpected exit {exit}"),
        }
    }
}

/// A vCPU that cannot go on: which one, where, why.
#[derive(Debug, thiserror::Error)]
#[error("vCPU {vcpu} at RIP {rip:#x}: {reason}")]
pub struct Failure {
    /// Its number.
    pub vcpu: u8,
    /// Its instruction pointer. AMD's processors lose it in a triple fault: KVM then shows that of a reset.
    pub rip: u64,
    /// Why.
    pub reason: Reason,
}

/// What `KVM_RUN` came back for, free of the borrow of the vCPU's file.
enum Exit {
    /// An `in`, to be answered into this memory.
    In(u16, *mut [u8]),
    /// An `out` of what is in this memory.
    Out(u16, *const [u8]),
    /// Nothing more, or nothing that concerns us.
    Nothing,
    /// A signal, or what was asked for.
    CalledOut,
    /// The guest asked KVM itself for its end.
    End(End),
    /// It cannot go on.
    Dead(Reason),
}

impl Vcpu {
    /// Runs until the guest ends or cannot go on. What happens to its counters goes into the log, if there is one.
    pub fn run(&mut self, log: Option<&Arc<EventLog>>) -> Result<End, Failure> {
        let registers = self.pmu.slate().filter(|_| self.has_slate);
        let slate = registers.and_then(|registers| SharedSlate::new(self.id, registers, &self.ram.mapped));
        let pmu = ThreadPmu::new(self.pmu, &self.policy, self.id, &self.fd, slate);
        let mut pmu = pmu.map_err(|error| self.failure(Reason::Refused(error)))?;
        if let Some(log) = log.and_then(|log| VcpuLog::new(log, self.id, self.pmu)) {
            pmu.log_into(log, &mut self.fd);
        }
        self.mailbox.begin();
        self.answer(&mut pmu);
        loop {
            self.stopwatch.enters();
            let exit = self.enter(&mut pmu);
            self.coalescing.drain(&mut self.fd, &self.buses.ports);
            self.settle(&mut pmu, matches!(exit, Exit::CalledOut))?;
            match exit {
                Exit::Nothing | Exit::CalledOut => {}
                Exit::In(port, data) => self.input(port, data),
                Exit::Out(port, data) => {
                    if let Some(end) = self.output(port, data) {
                        return Ok(end);
                    }
                }
                Exit::End(end) => return Ok(end),
                Exit::Dead(reason) => return Err(self.failure(reason)),
            }
        }
    }

    /// Has the PMU do what is due before the guest goes on.
    fn settle(&mut self, pmu: &mut ThreadPmu, was_called: bool) -> Result<(), Failure> {
        let settled = pmu.settle(&self.vm, &mut self.fd, was_called);
        let Settled { called, notices, stops } =
            settled.map_err(|error| self.failure(Reason::Refused(error)))?;
        say(&notices);
        if called {
            self.stopwatch.rest();
            if self.answer(pmu) {
                // What was found out on the way is dealt with before the guest goes on.
                self.fd.set_kvm_immediate_exit(1);
            }
        }
        if called || stops {
            self.stand_still(pmu, stops);
        }
        Ok(())
    }

    /// Answers what it was asked; whether that was anything.
    fn answer(&mut self, pmu: &mut ThreadPmu) -> bool {
        let mut asked = false;
        while let Some(ask) = self.mailbox.next() {
            asked = true;
            match ask {
                Ask::Report(answer) => {
                    let report = VcpuReport {
                        vcpu: self.id,
                        thread: self.mailbox.begin(),
                        exits: self.exits,
                        share: self.stopwatch.share(),
                        pmu: pmu.report(),
                    };
                    // Whoever asked may not wait any more.
                    let _ = answer.send(report);
                }
                Ask::Obey(policy, answer) => {
                    pmu.obey(&policy);
                    let _ = answer.send(());
                }
                Ask::Switch(counter, to, answer) => {
                    let _ = answer.send(pmu.switch(counter, to));
                }
            }
        }
        asked
    }

    /// Waits for as long as a vCPU's counters have no hardware, if that is the policy.
    fn stand_still(&mut self, pmu: &mut ThreadPmu, because_of_this: bool) {
        let vcpus = Arc::clone(&self.vcpus);
        if because_of_this && vcpus.pause.begin(self.id) {
            say(&pmu.tell(Notice::StandsStill));
            vcpus.call_out();
        }
        let mut since = None;
        while !vcpus.pause.wait() {
            if since.is_none() {
                since = Some(Instant::now());
                pmu.stands_still();
            }
            self.answer(pmu);
            if because_of_this && pmu.may_go_on() {
                vcpus.pause.end(self.id);
            }
        }
        if let Some(since) = since {
            if because_of_this {
                say(&pmu.tell(Notice::GoesOn { after: since.elapsed() }));
            }
            // Its kernel is told that it was away, lest it takes itself for hung. One that has no such clock cannot be.
            let _ = self.fd.kvmclock_ctrl();
            // Its counters are looked at before it goes on.
            self.fd.set_kvm_immediate_exit(1);
        }
    }

    fn enter(&mut self, pmu: &mut ThreadPmu) -> Exit {
        match self.fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => {
                self.exits.port_reads += 1;
                Exit::In(port, data)
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                self.exits.port_writes += 1;
                Exit::Out(port, data)
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                self.exits.memory_reads += 1;
                self.buses.memory.read(address, data);
                Exit::Nothing
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                self.exits.memory_writes += 1;
                self.buses.memory.write(address, data);
                Exit::Nothing
            }
            Ok(VcpuExit::Intr) => self.called_out(),
            Ok(VcpuExit::X86Rdmsr(exit)) => {
                self.exits.pmu_reads += 1;
                self.stopwatch.exits_for_pmu();
                let (msr, data, error) = (exit.index, &raw mut *exit.data, &raw mut *exit.error);
                match pmu.read(&self.fd, msr) {
                    // SAFETY: as for `input`.
                    Outcome::Value(value) => unsafe { *data = value },
                    // SAFETY: as for `input`.
                    Outcome::Handled | Outcome::Fault | Outcome::NotMine => unsafe { *error = 1 },
                }
                Exit::Nothing
            }
            Ok(VcpuExit::X86Wrmsr(exit)) => {
                self.exits.pmu_writes += 1;
                self.stopwatch.exits_for_pmu();
                let (msr, data, error) = (exit.index, exit.data, &raw mut *exit.error);
                if pmu.write(&self.fd, msr, data) != Outcome::Handled {
                    // SAFETY: as for `input`.
                    unsafe { *error = 1 };
                }
                Exit::Nothing
            }
            Ok(VcpuExit::SystemEvent(event, _)) => match event {
                KVM_SYSTEM_EVENT_SHUTDOWN => Exit::End(End::PowerOff),
                KVM_SYSTEM_EVENT_RESET => Exit::End(End::Reboot),
                KVM_SYSTEM_EVENT_CRASH => Exit::Dead(Reason::Unexpected("guest crash".into())),
                other => Exit::Dead(Reason::Unexpected(format!("system event {other}"))),
            },
            Ok(VcpuExit::Shutdown) => Exit::Dead(Reason::TripleFault),
            Ok(VcpuExit::FailEntry(reason, _)) => Exit::Dead(Reason::EntryFailed(reason)),
            Ok(VcpuExit::InternalError) => {
                Exit::Dead(Reason::InternalError(internal_error(self.fd.get_kvm_run())))
            }
            Ok(other) => Exit::Dead(Reason::Unexpected(format!("{other:?}"))),
            Err(e) if matches!(e.errno(), libc::EINTR | libc::EAGAIN) => self.called_out(),
            Err(e) => Exit::Dead(Reason::RunFailed(e)),
        }
    }

    fn called_out(&mut self) -> Exit {
        self.exits.signals += 1;
        self.stopwatch.exits_for_pmu();
        Exit::CalledOut
    }

    fn input(&mut self, port: u16, data: *mut [u8]) {
        let width = access_width(self.fd.get_kvm_run());
        // SAFETY: KVM gave this slice of the vCPU's shared pages, which stay mapped as long as `self.fd` is open;
        // the borrow it came with is over, and nothing else touches it before the next `KVM_RUN`.
        let data = unsafe { &mut *data };
        for item in data.chunks_exact_mut(width) {
            self.buses.ports.read(port, item);
        }
    }

    fn output(&mut self, port: u16, data: *const [u8]) -> Option<End> {
        let width = access_width(self.fd.get_kvm_run());
        // SAFETY: as for input.
        let data = unsafe { &*data };
        data.chunks_exact(width).find_map(|item| {
            self.coalescing.watch(port, item);
            self.buses.ports.write(port, item)
        })
    }

    fn failure(&self, reason: Reason) -> Failure {
        Failure { vcpu: self.id, rip: self.fd.get_regs().map_or(0, |regs| regs.rip), reason }
    }
}

/// Has the operator know.
fn say(notices: &[Notice]) {
    for notice in notices {
        warn!("{notice}");
    }
}

/// How wide each access of the port exit is; a string instruction makes several of them at once.
fn access_width(run: &kvm_run) -> usize {
    // SAFETY: called for a port exit only, where the kernel has filled in this member of the union.
    let io = unsafe { run.__bindgen_anon_1.io };
    usize::from(io.size).max(1)
}

fn internal_error(run: &kvm_run) -> u32 {
    // SAFETY: called for an internal error only, where the kernel has filled in this member of the union.
    unsafe { run.__bindgen_anon_1.internal.suberror }
}
