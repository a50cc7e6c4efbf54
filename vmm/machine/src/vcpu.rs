//! One vCPU: the loop that enters the guest and deals with what it has left for ([`crate::exit`]). What `KVM_RUN` comes back with is
//! seen by the architecture's [`Run`] alone.

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
    /// Its number, which is its APIC id or its hart id.
    pub id: u8,
    /// KVM's side of it.
    pub(crate) fd: VcpuFd,
    /// The machine's devices.
    pub(crate) buses: Buses,
    /// Which PMU it has.
    pub(crate) pmu: Pmu,
    /// What the operator lets it have of that.
    pub(crate) policy: Policy,
    /// Where it is asked how it does.
    pub(crate) mailbox: Mailbox,
    /// All of the machine's.
    pub(crate) vcpus: Arc<Vcpus>,
    /// The machine.
    pub(crate) vm: Arc<VmFd>,
    /// Its share in the guest's memory, which is mapped as long as a vCPU may run in it.
    pub(crate) ram: GuestRam,
}

/// A vCPU that cannot go on: which one, where, why.
#[derive(Debug, thiserror::Error)]
#[error("vCPU {vcpu} at {} {place:#x}: {reason}", Arch::POINTER)]
pub struct Failure {
    /// Its number.
    pub vcpu: u8,
    /// Its instruction pointer.
    pub place: u64,
    /// Why.
    pub reason: Reason,
}

impl Vcpu {
    /// Returns what KVM itself counts for it, where KVM does.
    pub fn kvm_stats(&self) -> Option<KvmStats> {
        KvmStats::of(&self.fd)
    }

    /// Runs on this thread until the guest ends or cannot go on. What happens to its counters goes into the journal, if there is
    /// one.
    pub fn run(self, journal: Option<Box<dyn Journal>>) -> Result<End, Failure> {
        let Self { id, fd, buses, pmu, policy, mailbox, vcpus, vm, ram } = self;
        let wired = ThreadPmu::new(&Wiring { id, fd: &fd, pmu, policy: &policy, buses: &buses, ram: &ram });
        let run = KvmRun::new(fd);
        let (exits, stopwatch) = (Exits::default(), Stopwatch::default());
        let mut thread = VcpuThread { id, run, buses, mailbox, vcpus, exits, stopwatch, vm, ram };
        let result = wired
            .map_err(|error| thread.failure(Reason::Refused(error)))
            .and_then(|mut pmu| thread.run(&mut pmu, journal));
        // The other vCPUs may still run on this one's machine: it stays open until the process ends.
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
    /// What it came out of the guest for.
    exits: Exits,
    /// How long that took.
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

    /// Deals with an exit. Returns how the machine ends, if it does.
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

    /// Has the PMU do what is due before the guest goes on.
    fn settle(&mut self, pmu: &mut ThreadPmu, was_called: bool) -> Result<(), Failure> {
        let settled = pmu.settle(&self.vm, self.run.fd(), was_called);
        let Settled { called, notices, pauses } =
            settled.map_err(|error: KvmError| self.failure(Reason::Refused(error)))?;
        say(&notices);
        if called {
            self.stopwatch.stop_if_unwatched();
            if self.answer(pmu) {
                // What was found out on the way is dealt with before the guest goes on.
                self.run.fd().set_kvm_immediate_exit(1);
            }
        }
        if called || pauses {
            self.stand_still(pmu, pauses);
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
                    let thread = self.mailbox.begin();
                    let (exits, share) = (self.exits, self.stopwatch.share());
                    let report = pmu.report().map(|report| (report.counters, report.statistics));
                    let (counters, statistics) = report.unzip();
                    let counters = counters.unwrap_or_default();
                    let report = VcpuReport { vcpu: self.id, thread, counters, statistics, exits, share };
                    // Whoever asked may not wait any more.
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
                pmu.paused();
            }
            self.answer(pmu);
            if because_of_this && pmu.may_resume() {
                vcpus.pause.end(self.id);
            }
        }
        if let Some(since) = since {
            if because_of_this {
                say(&pmu.tell(Notice::GoesOn { after: since.elapsed() }));
            }
            Arch::tell_of_pause(self.run.fd());
            // Its counters are looked at before it goes on.
            self.run.fd().set_kvm_immediate_exit(1);
        }
    }

    fn failure(&mut self, reason: Reason) -> Failure {
        Failure { vcpu: self.id, place: Arch::place(self.run.fd()), reason }
    }
}

/// Has the operator know.
fn say(notices: &[Notice]) {
    for notice in notices {
        warn!("{notice}");
    }
}
