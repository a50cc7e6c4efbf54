//! One vCPU: the loop around `KVM_RUN`. What KVM's exits look like is seen here, as far as all processors have them,
//! and behind [`exit`], nowhere else.

pub mod exits;
pub mod mailbox;
pub mod pause;
pub mod report;

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use devices::End;
use kvm_bindings::{
    KVM_EXIT_INTERNAL_ERROR, KVM_SYSTEM_EVENT_CRASH, KVM_SYSTEM_EVENT_RESET, KVM_SYSTEM_EVENT_SHUTDOWN,
    kvm_run,
};
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use log::warn;
use vpmu::notice::Notice;
use vpmu::policy::Policy;

use crate::arch::board::Buses;
use crate::arch::exit;
use crate::kvm::KvmError;
use crate::memory::GuestRam;
use crate::pmu::Pmu;
use crate::pmu::journal::Journal;
use crate::pmu::thread::{Settled, ThreadPmu};
use crate::pmu::wiring::Wiring;
use exits::{Exits, Stopwatch};
use mailbox::{Ask, Mailbox, Vcpus};
use report::VcpuReport;

/// A vCPU, ready to run on a thread of its own.
pub struct Vcpu {
    /// Its number, which is its APIC id or its hart id.
    pub id: u8,
    /// KVM's side of it.
    pub fd: VcpuFd,
    /// The machine's devices.
    pub buses: Buses,
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
#[error("vCPU {vcpu} at {} {place:#x}: {reason}", exit::POINTER)]
pub struct Failure {
    /// Its number.
    pub vcpu: u8,
    /// Its instruction pointer.
    pub place: u64,
    /// Why.
    pub reason: Reason,
}

/// What `KVM_RUN` came back for, free of the borrow of the vCPU's file.
pub enum Exit {
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
    /// Runs until the guest ends or cannot go on. What happens to its counters goes into the journal, if there is one.
    pub fn run(&mut self, journal: Option<Box<dyn Journal>>) -> Result<End, Failure> {
        let Self { id, ref fd, pmu, ref policy, ref buses, ref ram, .. } = *self;
        let pmu = ThreadPmu::new(&Wiring { id, fd, pmu, policy, buses, ram });
        let mut pmu = pmu.map_err(|error| self.failure(Reason::Refused(error)))?;
        if let Some(journal) = journal {
            pmu.log_into(journal, &mut self.fd);
        }
        self.mailbox.begin();
        self.answer(&mut pmu);
        loop {
            self.stopwatch.enters();
            let exit = self.enter(&mut pmu);
            self.settle(&mut pmu, matches!(exit, Exit::CalledOut))?;
            match exit {
                Exit::Nothing | Exit::CalledOut => {}
                Exit::End(end) => return Ok(end),
                Exit::Dead(reason) => return Err(self.failure(reason)),
            }
        }
    }

    /// Has the PMU do what is due before the guest goes on.
    fn settle(&mut self, pmu: &mut ThreadPmu, was_called: bool) -> Result<(), Failure> {
        let settled = pmu.settle(&self.vm, &mut self.fd, was_called);
        let Settled { called, notices, pauses } =
            settled.map_err(|error| self.failure(Reason::Refused(error)))?;
        say(&notices);
        if called {
            self.stopwatch.stop_if_unwatched();
            if self.answer(pmu) {
                // What was found out on the way is dealt with before the guest goes on.
                self.fd.set_kvm_immediate_exit(1);
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
            exit::tell_of_pause(&self.fd);
            // Its counters are looked at before it goes on.
            self.fd.set_kvm_immediate_exit(1);
        }
    }

    /// `KVM_RUN` failed.
    pub fn failed_run(&mut self, error: kvm_ioctls::Error) -> Exit {
        match error.errno() {
            libc::EINTR | libc::EAGAIN => self.called_out(),
            _ => Exit::Dead(Reason::RunFailed(error)),
        }
    }

    /// An exit that says by itself too little.
    pub fn rare_exit(&mut self) -> Exit {
        match self.fd.get_kvm_run() {
            run if run.exit_reason == KVM_EXIT_INTERNAL_ERROR => {
                Exit::Dead(Reason::InternalError(internal_error(run)))
            }
            _ => self.called_out(),
        }
    }

    fn called_out(&mut self) -> Exit {
        self.exits.signals += 1;
        self.stopwatch.exits_for_pmu();
        Exit::CalledOut
    }

    fn failure(&self, reason: Reason) -> Failure {
        Failure { vcpu: self.id, place: exit::place(&self.fd), reason }
    }
}

/// Has the operator know.
fn say(notices: &[Notice]) {
    for notice in notices {
        warn!("{notice}");
    }
}

impl Exit {
    /// What is the same on all processors; none of what needs more than is in it.
    pub fn of(exit: &VcpuExit) -> Option<Self> {
        Some(match *exit {
            VcpuExit::Intr | VcpuExit::InternalError => return None,
            VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, _) => Self::End(End::PowerOff),
            VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_RESET, _) => Self::End(End::Reboot),
            VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_CRASH, _) => {
                Self::Dead(Reason::Unexpected("guest crash".into()))
            }
            VcpuExit::SystemEvent(other, _) => {
                Self::Dead(Reason::Unexpected(format!("system event {other}")))
            }
            VcpuExit::Shutdown => Self::Dead(Reason::TripleFault),
            VcpuExit::FailEntry(reason, _) => Self::Dead(Reason::EntryFailed(reason)),
            ref other => Self::Dead(Reason::Unexpected(format!("{other:?}"))),
        })
    }
}

fn internal_error(run: &kvm_run) -> u32 {
    // SAFETY: called for an internal error only, where the kernel has filled in this member of the union.
    unsafe { run.__bindgen_anon_1.internal.suberror }
}
