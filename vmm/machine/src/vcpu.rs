//! A vCPU's loop: it enters the guest, and handles each exit ([`crate::exit`]). The architecture's [`Run`] converts
//! what `KVM_RUN` returns.

pub mod exits;
pub mod mailbox;
pub mod pause;
pub mod report;

use std::sync::Arc;
use std::time::Instant;

use devices::End;
use kvm_ioctls::{VcpuFd, VmFd};
use log::warn;
use vpmu::notice::Notice;
use vpmu::policy::Policy;

use crate::arch::Arch;
use crate::architecture::{Architecture, Run};
use crate::exit::{Bytes, Exit, Kind, Reason};
use crate::kvm::KvmStats;
use crate::kvm_error::KvmError;
use crate::memory::GuestRam;
use crate::pmu::Pmu;
use crate::pmu::journal::Journal;
use crate::pmu::thread::{Settled, ThreadPmu, Wiring};
use exits::{Exits, Stopwatch};
use mailbox::{Ask, Mailbox, Vcpus};
use report::VcpuReport;

type Buses = <Arch as Architecture>::Buses;
type KvmRun = <Arch as Architecture>::Run;
type OwnExit = <Arch as Architecture>::OwnExit;

/// A vCPU, ready to run on a thread of its own.
pub struct Vcpu {
    /// Number of the vCPU, which is also its APIC id or its hart id.
    pub id: u8,
    /// KVM's file descriptor of the vCPU.
    pub(crate) fd: VcpuFd,
    /// The machine's devices.
    pub(crate) buses: Buses,
    /// The PMU that the guest sees.
    pub(crate) pmu: Pmu,
    /// The operator's policy for that PMU.
    pub(crate) policy: Policy,
    /// Receives other threads' requests.
    pub(crate) mailbox: Mailbox,
    /// Handle on all vCPUs of the machine.
    pub(crate) vcpus: Arc<Vcpus>,
    /// KVM's file descriptor of the machine.
    pub(crate) vm: Arc<VmFd>,
    /// The guest's memory. This reference keeps it mapped while the vCPU may run.
    pub(crate) ram: GuestRam,
}

/// Why a vCPU cannot run any further.
#[derive(Debug, thiserror::Error)]
#[error("vCPU {vcpu} at {} {place:#x}: {reason}", Arch::POINTER)]
pub struct Failure {
    /// Number of the vCPU.
    pub vcpu: u8,
    /// Instruction pointer of the guest.
    pub place: u64,
    /// The reason.
    pub reason: Reason,
}

impl Vcpu {
    /// Opens KVM's own statistics of this vCPU. Returns `None` if this KVM has none.
    pub fn kvm_stats(&self) -> Option<KvmStats> {
        KvmStats::of(&self.fd)
    }

    /// Runs the vCPU on this thread. Returns how the machine ends, or why this vCPU cannot run any further. Events of
    /// the guest's counters are passed to the journal, if there is one.
    pub fn run(self, journal: Option<Box<dyn Journal>>) -> Result<End, Failure> {
        let Self { id, fd, buses, pmu, policy, mailbox, vcpus, vm, ram } = self;
        let pmu = ThreadPmu::new(&Wiring { id, fd: &fd, pmu, policy: &policy, buses: &buses, ram: &ram });
        let run = KvmRun::new(fd);
        let (exits, stopwatch) = (Exits::default(), Stopwatch::default());
        let mut thread = VcpuThread { id, run, buses, mailbox, vcpus, exits, stopwatch, vm, ram };
        let result = pmu
            .map_err(|error| thread.failure(Reason::Refused(error)))
            .and_then(|mut pmu| thread.run(&mut pmu, journal));
        // Other vCPUs may still run on this machine, so this vCPU's file descriptors stay open until the process ends.
        std::mem::forget(thread);
        result
    }
}

/// A vCPU on its own thread.
struct VcpuThread {
    id: u8,
    run: KvmRun,
    buses: Buses,
    mailbox: Mailbox,
    vcpus: Arc<Vcpus>,
    /// Exits so far, by kind.
    exits: Exits,
    /// Measures the time that exits for the PMU take.
    stopwatch: Stopwatch,
    vm: Arc<VmFd>,
    ram: GuestRam,
}

impl VcpuThread {
    fn run(&mut self, pmu: &mut ThreadPmu, journal: Option<Box<dyn Journal>>) -> Result<End, Failure> {
        if let Some(journal) = journal {
            pmu.log_into(journal, self.run.fd());
        }
        self.mailbox.begin();
        self.answer(pmu);
        loop {
            self.stopwatch.enters();
            let exit = self.run.run();
            self.run.drain(&self.buses);
            let was_called = matches!(exit, Exit::CalledOut);
            let ending = self.serve(exit, pmu);
            self.settle(pmu, was_called)?;
            match ending {
                None => {}
                Some(Ok(end)) => return Ok(end),
                Some(Err(reason)) => return Err(self.failure(reason)),
            }
        }
    }

    /// Handles an exit. Returns how the machine ends, or why the vCPU cannot run any further.
    fn serve(&mut self, exit: Exit<OwnExit>, pmu: &mut ThreadPmu) -> Option<Result<End, Reason>> {
        match exit {
            Exit::Own(exit) => {
                self.count(Arch::kind(&exit));
                Arch::serve(exit, &mut self.run, &mut pmu.kind, &self.buses, &self.ram).map(Ok)
            }
            Exit::MemoryRead { address, width } => {
                self.count(Kind::MemoryRead);
                let mut data = Bytes::zeroes(width);
                Arch::read(&self.buses, address, &mut data);
                self.run.answer_memory(data);
                None
            }
            Exit::MemoryWrite { address, data } => {
                self.count(Kind::MemoryWrite);
                Arch::write(&self.buses, address, &data).map(Ok)
            }
            Exit::CalledOut => {
                self.count(Kind::Signal);
                None
            }
            Exit::End(end) => Some(Ok(end)),
            Exit::Dead(reason) => Some(Err(reason)),
        }
    }

    fn count(&mut self, kind: Kind) {
        self.exits.count(kind);
        if matches!(kind, Kind::PmuRead | Kind::PmuWrite | Kind::Signal) {
            self.stopwatch.exits_for_pmu();
        }
    }

    /// Prepares the next entry after an exit: lets the PMU handle overflows, answers requests, and pauses if required.
    fn settle(&mut self, pmu: &mut ThreadPmu, was_called: bool) -> Result<(), Failure> {
        let settled = pmu.settle(&self.vm, self.run.fd(), was_called);
        let Settled { called, notices, pauses } =
            settled.map_err(|error: KvmError| self.failure(Reason::Refused(error)))?;
        log_notices(&notices);
        if called {
            self.stopwatch.stop_if_unwatched();
            if self.answer(pmu) {
                // Answering a request may update counters and find overflows: exit again at once, so that the PMU
                // handles these before the guest executes anything.
                self.run.fd().set_kvm_immediate_exit(1);
            }
        }
        if called || pauses {
            self.pause_if_required(pmu, pauses);
        }
        Ok(())
    }

    /// Answers all pending requests. Returns true if there were any.
    fn answer(&mut self, pmu: &mut ThreadPmu) -> bool {
        let mut answered = false;
        while let Some(ask) = self.mailbox.next() {
            answered = true;
            match ask {
                Ask::Report(answer) => {
                    let thread = self.mailbox.begin();
                    let (exits, share) = (self.exits, self.stopwatch.share());
                    let report = pmu.report().map(|report| (report.counters, report.statistics));
                    let (counters, statistics) = report.unzip();
                    let counters = counters.unwrap_or_default();
                    let report = VcpuReport { vcpu: self.id, thread, counters, statistics, exits, share };
                    // The requester may have stopped waiting.
                    let _ = answer.send(report);
                }
                Ask::SetPolicy(policy, answer) => {
                    pmu.set_policy(&policy);
                    let _ = answer.send(());
                }
                Ask::Switch(counter, to, answer) => {
                    let _ = answer.send(pmu.switch(counter, to));
                }
            }
        }
        answered
    }

    /// Waits while the machine is paused, because counters of a vCPU have no hardware and the policy demands the pause.
    /// `is_cause` is true if this vCPU's counters are the cause.
    fn pause_if_required(&mut self, pmu: &mut ThreadPmu, is_cause: bool) {
        let vcpus = Arc::clone(&self.vcpus);
        if is_cause && vcpus.pause.begin(self.id) {
            log_notices(&pmu.tell(Notice::StandsStill));
            vcpus.call_out();
        }
        let mut since = None;
        while !vcpus.pause.wait() {
            if since.is_none() {
                since = Some(Instant::now());
                pmu.paused();
            }
            self.answer(pmu);
            if is_cause && pmu.may_resume() {
                vcpus.pause.end(self.id);
            }
        }
        if let Some(since) = since {
            if is_cause {
                log_notices(&pmu.tell(Notice::GoesOn { after: since.elapsed() }));
            }
            Arch::tell_of_pause(self.run.fd());
            // Exit again at once, so that the PMU updates its counters before the guest executes anything.
            self.run.fd().set_kvm_immediate_exit(1);
        }
    }

    fn failure(&mut self, reason: Reason) -> Failure {
        Failure { vcpu: self.id, place: Arch::place(self.run.fd()), reason }
    }
}

/// Logs notices for the operator.
fn log_notices(notices: &[Notice]) {
    for notice in notices {
        warn!("{notice}");
    }
}
