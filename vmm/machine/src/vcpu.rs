//! A vCPU's loop: it enters the guest, and handles each exit ([`crate::exit`]). The architecture's [`KvmRun`] converts
//! what `KVM_RUN` returns.

pub mod exits;
pub mod mailbox;
pub mod report;
pub mod saved;
pub mod starvation_pause;

use std::sync::Arc;
use std::time::Instant;

use devices::End;
use kvm_ioctls::{VcpuFd, VmFd};
use log::{Level, debug, log_enabled, warn};
use rustix::thread::sched_getcpu;
use vpmu::VirtualPmu;
use vpmu::notice::Notice;
use vpmu::policy::Policy;
use vpmu::report::Statistics;
use vpmu::state::PmuState;
use vpmu_perf::Reservation;

use crate::arch::{self, ArchExit, Board, KvmRun, Look};
use crate::exit::{Bytes, Exit, ExitKind, Reason, complete_read};
use crate::kvm::KvmStats;
use crate::kvm_error::KvmError;
use crate::memory::GuestRam;
use crate::pmu::Pmu;
use crate::pmu::journal::Journal;
use crate::pmu::thread::{AfterExit, ThreadPmu, VcpuPmuContext};
use crate::recording::sample::SampleBuffer;
use crate::recording::{RecordError, RecordOrder, Recorder};
use crate::target::STATISTICS;
use exits::{Exits, Stopwatch};
use mailbox::{Mailbox, PauseRequest, VcpuHandles, VcpuRequest};
use report::VcpuReport;
use saved::{SaveError, VcpuState};

/// A vCPU, ready to run on a thread of its own.
pub struct Vcpu {
    /// Number of the vCPU, which is also its APIC id or its hart id.
    pub id: u8,
    /// KVM's file descriptor of the vCPU.
    pub(crate) fd: VcpuFd,
    /// The machine's devices.
    pub(crate) board: Board,
    /// The PMU that the guest sees.
    pub(crate) pmu: Pmu,
    /// Keeps the host's PMU in use, if it backs that PMU.
    pub(crate) reservation: Option<Arc<Reservation>>,
    /// The operator's policy for that PMU.
    pub(crate) policy: Policy,
    /// Receives other threads' requests.
    pub(crate) mailbox: Mailbox,
    /// Handles on all vCPUs of the machine.
    pub(crate) vcpus: Arc<VcpuHandles>,
    /// KVM's file descriptor of the machine.
    pub(crate) vm: Arc<VmFd>,
    /// The guest's memory. This reference keeps it mapped while the vCPU may run.
    pub(crate) ram: GuestRam,
    /// The state of the PMU, if the machine is restored.
    pub(crate) saved_pmu: Option<PmuState>,
}

/// Why a vCPU cannot run any further.
#[derive(Debug, thiserror::Error)]
#[error("vCPU {vcpu} at {} {instruction_pointer:#x}: {reason}", arch::INSTRUCTION_POINTER)]
pub struct VcpuError {
    /// Number of the vCPU.
    pub vcpu: u8,
    /// Instruction pointer of the guest.
    pub instruction_pointer: u64,
    /// The reason.
    pub reason: Reason,
}

impl Vcpu {
    /// Opens KVM's own statistics of this vCPU. Returns `None` if this KVM has none.
    pub fn kvm_stats(&self) -> Option<KvmStats> {
        KvmStats::of(&self.fd)
    }

    /// Returns the guest's memory.
    pub fn memory(&self) -> GuestRam {
        self.ram.clone()
    }

    /// Runs the vCPU on this thread. Returns how the machine ends, or why this vCPU cannot run any further. Events of
    /// the guest's counters are passed to the journal, if there is one. `before_guest` is called when everything is
    /// prepared, before the guest is first entered.
    pub fn run(
        self,
        journal: Option<Box<dyn Journal>>,
        before_guest: impl FnOnce(),
    ) -> Result<End, VcpuError> {
        let Self { id, fd, board, pmu, reservation, policy, mailbox, vcpus, vm, ram, saved_pmu } = self;
        let _in_use = reservation;
        let pmu =
            ThreadPmu::new(&VcpuPmuContext { id, fd: &fd, pmu, policy: &policy, board: &board, ram: &ram });
        let run = KvmRun::new(fd);
        let (exits, stopwatch) = (Exits::default(), Stopwatch::default());
        let mut thread = VcpuThread { id, run, board, mailbox, vcpus, exits, stopwatch, vm, ram };
        let result = pmu.map_err(|error| thread.error(Reason::Kvm(error))).and_then(|mut pmu| {
            if let (Some(saved), Some(emulated)) = (&saved_pmu, pmu.pmu.emulated()) {
                emulated.restore(saved).map_err(|error| thread.error(Reason::Restore(error)))?;
            }
            before_guest();
            thread.run(&mut pmu, journal)
        });
        // Other vCPUs may still run on this machine, so this vCPU's file descriptors stay open until the process ends.
        std::mem::forget(thread);
        result
    }
}

/// A vCPU on its own thread.
struct VcpuThread {
    id: u8,
    run: KvmRun,
    board: Board,
    mailbox: Mailbox,
    vcpus: Arc<VcpuHandles>,
    /// Exits so far, by kind.
    exits: Exits,
    /// Measures the time that exits for the PMU take.
    stopwatch: Stopwatch,
    vm: Arc<VmFd>,
    ram: GuestRam,
}

impl VcpuThread {
    fn run(&mut self, pmu: &mut ThreadPmu, journal: Option<Box<dyn Journal>>) -> Result<End, VcpuError> {
        if let Some(journal) = journal {
            pmu.log_into(journal, self.run.fd());
        }
        self.mailbox.register_thread();
        self.handle_requests(pmu);
        loop {
            self.stopwatch.enters();
            let exit = self.enter(pmu);
            let was_interrupted = matches!(exit, Exit::Interrupted);
            let ending = self.handle(exit, pmu);
            self.after_exit(pmu, was_interrupted)?;
            match ending {
                None => {}
                Some(Ok(end)) => {
                    self.say_statistics(pmu);
                    return Ok(end);
                }
                Some(Err(reason)) => return Err(self.error(reason)),
            }
        }
    }

    /// Says what the PMU did, once for a vCPU: this one has ended the machine.
    fn say_statistics(&self, pmu: &mut ThreadPmu) {
        let is_asked_for = log_enabled!(target: STATISTICS, Level::Debug);
        if let Some(emulated) = pmu.pmu.emulated().filter(|_| is_asked_for) {
            let Statistics { alarms, ignored_alarms, overflows, interrupts, .. } =
                emulated.report().statistics;
            debug!(
                target: STATISTICS,
                "vCPU {}: {alarms} alarms, {ignored_alarms} with nothing to do, {overflows} overflows, \
                 {interrupts} interrupts",
                self.id
            );
        }
    }

    /// Enters the guest, until it exits.
    fn enter(&mut self, pmu: &ThreadPmu) -> Exit<ArchExit> {
        let exit = self.run.run(&self.board);
        pmu.pmu.guest_ran();
        exit
    }

    /// Handles an exit. Returns how the machine ends, or why the vCPU cannot run any further.
    fn handle(&mut self, exit: Exit<ArchExit>, pmu: &mut ThreadPmu) -> Option<Result<End, Reason>> {
        match exit {
            Exit::Arch(exit) => {
                self.count(KvmRun::kind(&exit));
                self.run.handle(exit, &mut pmu.pmu, &self.board, &self.ram).map(Ok)
            }
            Exit::MemoryRead { address, width } => {
                self.count(ExitKind::MemoryRead);
                self.completes_instruction(pmu);
                let mut data = Bytes::zeroes(width);
                self.board.read(address, &mut data);
                complete_read(self.run.fd(), data);
                None
            }
            Exit::MemoryWrite { address, data } => {
                self.count(ExitKind::MemoryWrite);
                self.completes_instruction(pmu);
                self.board.write(address, &data).map(Ok)
            }
            Exit::Interrupted => {
                self.count(ExitKind::Signal);
                None
            }
            Exit::End(end) => Some(Ok(end)),
            Exit::Fatal(reason) => Some(Err(reason)),
        }
    }

    /// Counts the instruction that has accessed a device's register in memory.
    fn completes_instruction(&mut self, pmu: &mut ThreadPmu) {
        pmu.pmu.completes_instruction(|| KvmRun::is_in_user_mode(self.run.fd()));
    }

    fn count(&mut self, kind: ExitKind) {
        self.exits.count(kind);
        if matches!(kind, ExitKind::PmuRead | ExitKind::PmuWrite | ExitKind::Signal) {
            self.stopwatch.exits_for_pmu();
        }
    }

    /// Prepares the next entry after an exit: lets the PMU handle overflows, handles requests, and pauses if required.
    fn after_exit(&mut self, pmu: &mut ThreadPmu, was_interrupted: bool) -> Result<(), VcpuError> {
        let after = pmu.after_exit(&self.vm, self.run.fd(), was_interrupted);
        let AfterExit { kicked, notices, pauses } =
            after.map_err(|error: KvmError| self.error(Reason::Kvm(error)))?;
        log_notices(&notices);
        if kicked {
            self.stopwatch.stop_if_unwatched();
            if self.handle_requests(pmu) {
                // Handling a request may update counters and find overflows: exit again at once, so that the PMU
                // handles these before the guest executes anything.
                self.run.fd().set_kvm_immediate_exit(1);
            }
        }
        if kicked || pauses {
            self.pause_if_starved(pmu, pauses);
        }
        Ok(())
    }

    /// Handles all pending requests. Returns true if there were any.
    fn handle_requests(&mut self, pmu: &mut ThreadPmu) -> bool {
        let mut handled = false;
        while let Some(request) = self.mailbox.next() {
            handled = true;
            match request {
                VcpuRequest::Report(answer) => {
                    let thread = self.mailbox.thread_id();
                    let (exits, share) = (self.exits, self.stopwatch.share());
                    let report = pmu.pmu.emulated().map(VirtualPmu::report);
                    let report = report.map(|report| (report.counters, report.statistics));
                    let (counters, statistics) = report.unzip();
                    let counters = counters.unwrap_or_default();
                    let cpu = sched_getcpu();
                    let report =
                        VcpuReport { vcpu: self.id, thread, counters, statistics, exits, share, cpu };
                    // The requester may have stopped waiting.
                    let _ = answer.send(report);
                }
                VcpuRequest::SetPolicy(policy, answer) => {
                    if let Some(emulated) = pmu.pmu.emulated() {
                        emulated.set_policy(&policy);
                    }
                    let _ = answer.send(());
                }
                VcpuRequest::Pause(request) => self.pause_for_snapshot(pmu, &request),
                VcpuRequest::Switch(counter, to, answer) => {
                    let is_set =
                        pmu.pmu.emulated().is_some_and(|emulated| emulated.set_counter_switch(counter, to));
                    let _ = answer.send(is_set);
                }
                VcpuRequest::AddressSpace(answer) => {
                    let look = Look::of(self.run.fd(), &self.ram.mapped);
                    let _ = answer.send(look.and_then(|look| look.space));
                }
                VcpuRequest::Record(order, answer) => {
                    let _ = answer.send(self.record(pmu, order));
                }
                VcpuRequest::StopRecording(buffer, answer) => {
                    let _ = answer.send(stop_recording(pmu, &buffer));
                    // Who else wants them has them stored again.
                    KvmRun::forget_registers(self.run.fd());
                }
            }
        }
        handled
    }

    /// Begins to sample the vCPU, unless it is sampled already.
    fn record(&self, pmu: &mut ThreadPmu, order: RecordOrder) -> Result<(), RecordError> {
        if pmu.recorder.is_some() {
            return Err(RecordError::Busy);
        }
        pmu.recorder = Some(Box::new(Recorder::start(self.id, &self.ram, order)?));
        Ok(())
    }

    /// Pauses outside of the guest, and saves the state when it is ordered to.
    fn pause_for_snapshot(&mut self, pmu: &mut ThreadPmu, request: &PauseRequest) {
        let mut settled = self.settle(pmu);
        // An error means that the requester has stopped waiting. An error of the other sends means the same.
        let _ = request.stopped.send(());
        pmu.pmu.paused();
        while let Ok(answer) = request.orders.recv() {
            let state = std::mem::replace(&mut settled, Ok(())).and_then(|()| {
                let kvm = self.board.save_vcpu(self.run.fd())?;
                Ok(VcpuState { kvm, pmu: pmu.pmu.emulated().map(VirtualPmu::save) })
            });
            let _ = answer.send(state);
        }
        // So that the guest's watchdogs do not take this time for the guest's own.
        KvmRun::tell_guest_of_pause(self.run.fd());
    }

    /// Lets KVM complete the last exit, and take over what was made pending since: it does both at the next entry,
    /// which ends before the guest executes anything.
    fn settle(&mut self, pmu: &mut ThreadPmu) -> Result<(), SaveError> {
        /// More than the parts of any instruction that exits several times.
        const MAX_EXITS: usize = 1000;
        let mut quiet = 0;
        for _ in 0..MAX_EXITS {
            self.run.fd().set_kvm_immediate_exit(1);
            let exit = self.enter(pmu);
            let was_interrupted = matches!(exit, Exit::Interrupted);
            if self.handle(exit, pmu).is_some() {
                return Err(SaveError::Ended);
            }
            let AfterExit { notices, .. } = pmu.after_exit(&self.vm, self.run.fd(), was_interrupted)?;
            log_notices(&notices);
            // What is to be taken over at the next entry is in `struct kvm_run` until then.
            let is_taken_over = self.run.fd().get_kvm_run().kvm_dirty_regs == 0;
            quiet = if was_interrupted && is_taken_over { quiet + 1 } else { 0 };
            if quiet == 2 {
                return Ok(());
            }
        }
        Err(SaveError::Busy)
    }

    /// Waits while the machine is paused, because counters of a vCPU have no hardware and the policy demands the pause.
    /// `is_cause` is true if this vCPU's counters are the cause.
    fn pause_if_starved(&mut self, pmu: &mut ThreadPmu, is_cause: bool) {
        let vcpus = Arc::clone(&self.vcpus);
        if is_cause && vcpus.starvation_pause.request(self.id) {
            add_notice(pmu, Notice::Paused);
            vcpus.kick();
        }
        let mut since = None;
        while !vcpus.starvation_pause.wait_for_resume() {
            if since.is_none() {
                since = Some(Instant::now());
                pmu.pmu.paused();
            }
            self.handle_requests(pmu);
            if is_cause && pmu.pmu.emulated().is_none_or(VirtualPmu::may_resume) {
                vcpus.starvation_pause.release(self.id);
            }
        }
        if let Some(since) = since {
            if is_cause {
                add_notice(pmu, Notice::Resumed { after: since.elapsed() });
            }
            KvmRun::tell_guest_of_pause(self.run.fd());
            // Exit again at once, so that the PMU updates its counters before the guest executes anything.
            self.run.fd().set_kvm_immediate_exit(1);
        }
    }

    fn error(&mut self, reason: Reason) -> VcpuError {
        let instruction_pointer = KvmRun::instruction_pointer(self.run.fd());
        VcpuError { vcpu: self.id, instruction_pointer, reason }
    }
}

/// Ends the samples that go into a buffer. Returns which part of the time there was a counter, in thousandths.
fn stop_recording(pmu: &mut ThreadPmu, buffer: &Arc<SampleBuffer>) -> u64 {
    let recorder = pmu.recorder.take_if(|recorder| recorder.adds_to(buffer));
    recorder.map_or(1000, |recorder| recorder.scheduled())
}

/// Adds a notice for the operator, and logs all that were not logged before.
fn add_notice(pmu: &mut ThreadPmu, notice: Notice) {
    if let Some(emulated) = pmu.pmu.emulated() {
        log_notices(&emulated.add_notice(notice));
    }
}

/// Logs notices for the operator.
fn log_notices(notices: &[Notice]) {
    for notice in notices {
        warn!("{notice}");
    }
}
