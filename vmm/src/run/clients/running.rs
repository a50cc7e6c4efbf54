//! Answers clients' requests to a running VM. The instructions and cycles of the vCPUs' threads are counted only
//! while a client is connected that requests them.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{self, BufRead, Write};
use std::path::Path;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use log::{debug, info};
use tally_machine::kvm::KvmStats;
use tally_machine::pmu::Pmu;
use tally_machine::target::COUNTERS;
use tally_machine::{GuestRam, VcpuHandles, VcpuReport};
use vpmu::policy::{Change, Policy};
use vpmu_perf::{Attribution, HostPmu};

use super::hardware::{self, CpuCounters};
use super::measurement::{VcpuMeasurement, VmMeasurement, ratio};
use super::recordings::RecordingSession;
use super::snapshots::SnapshotService;
use crate::cli::Run;
use crate::cli::policy;
use crate::protocol::message::{Answer, CounterSwitch, Request};
use crate::protocol::record::MAX_TEXT;
use crate::protocol::status::{Report, Summary, VmStatus};
use crate::run::clients::control::ServedVm;
use crate::run::event_log::EventLog;

/// Interval between two probes of a CPU's counters. A probe costs more than the rest of a measurement.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);

/// A running VM.
pub struct Running {
    /// Description of the VM. Its age is not kept up to date.
    pub about: Summary,
    /// Time of the start.
    pub begun: Instant,
    /// The vCPUs.
    pub vcpus: Arc<VcpuHandles>,
    /// KVM's statistics of each vCPU.
    pub kvm: Vec<Option<KvmStats>>,
    /// The PMU that the guest sees.
    pub pmu: Pmu,
    /// The PMU that counts the vCPUs' threads, if this host has one.
    pub host: Option<HostPmu>,
    /// Policy for that PMU.
    pub policy: Mutex<Policy>,
    /// The event log, if there is one.
    pub log: Option<Arc<EventLog>>,
    /// The guest's memory.
    pub memory: GuestRam,
    /// Saves the VM.
    pub snapshots: SnapshotService,
}

/// State that is kept for a client between its requests.
#[derive(Default)]
pub struct ClientSession {
    vcpus: BTreeMap<u8, VcpuSession>,
    /// Measurement for the client's last request.
    last: Option<VmMeasurement>,
    recording: RecordingSession,
}

/// State that is kept for a client and a vCPU.
struct VcpuSession {
    hardware: Option<CpuCounters>,
    probed: Instant,
    attribution: Option<Attribution>,
}

impl Summary {
    /// Describes the VM of this process. Without `--name`, the VM has the name of the command's or the kernel's file.
    pub fn of_this(options: &Run, pmu: Pmu, cpus: u8, memory: u64) -> Self {
        let (kernel, command) = (options.kernel.as_deref(), &options.command);
        let file = command.first().map(Path::new).or(kernel).and_then(Path::file_name);
        let words = |words: &[OsString]| {
            words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
        };
        let runs = match (&command[..], kernel) {
            ([], Some(kernel)) => kernel.display().to_string(),
            ([], None) => "the default guest".to_owned(),
            (command, _) => words(command),
        };
        Self {
            pid: process::id(),
            name: options
                .name
                .clone()
                .unwrap_or_else(|| file.map_or("guest".into(), |file| file.to_string_lossy().into())),
            runs,
            pmu: pmu.to_string(),
            leaves_out_entries: pmu.leaves_out_entries(),
            cpus,
            memory,
            started: SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs(),
            age: 0.0,
        }
    }
}

impl Running {
    fn summary(&self) -> Summary {
        let milliseconds = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        Summary { age: ratio(milliseconds, 1_000), ..self.about.clone() }
    }

    fn may_be_recorded(&self) -> bool {
        self.policy.lock().unwrap_or_else(PoisonError::into_inner).record
    }

    fn status(&self, session: &mut ClientSession) -> VmStatus {
        let reports = self.vcpus.report();
        let at = self.begun.elapsed();
        let vcpus = reports.into_iter().map(|report| self.measure(report, session)).collect();
        let now = VmMeasurement {
            about: self.summary(),
            at,
            paused_by: self.vcpus.starvation_pause.causes(),
            vcpus,
        };
        let status = now.since(session.last.as_ref().unwrap_or(&now));
        session.last = Some(now);
        status
    }

    fn switch(&self, wanted: &[CounterSwitch]) -> Answer {
        let reports = self.vcpus.report();
        let counters =
            |vcpu| reports.iter().find(|report| report.vcpu == vcpu).map(|report| report.counters.len());
        let is_there =
            |one: &&CounterSwitch| counters(one.vcpu).is_some_and(|counters| one.counter < counters);
        if let Some(CounterSwitch { vcpu, counter, .. }) = wanted.iter().find(|one| !is_there(one)) {
            return Answer::Error(format!("no vCPU {vcpu} has a counter {counter} that is Tally's"));
        }
        for CounterSwitch { vcpu, counter, to } in wanted {
            if !self.vcpus.set_counter_switch(*vcpu, *counter, *to) {
                return Answer::Error(format!("vCPU {vcpu} does not answer"));
            }
        }
        Answer::Done
    }

    fn change(&self, change: &Change) -> Answer {
        let Pmu::Emulated(..) = self.pmu else {
            return Answer::Error(format!(
                "a policy is for Tally's own PMUs, and the guest sees {}",
                self.pmu
            ));
        };
        let mut policy = self.policy.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = policy.changed_by(change);
        if changed != *policy {
            info!(target: COUNTERS, "policy: {}", policy::toml(&changed).trim_end().replace('\n', ", "));
            policy.clone_from(&changed);
            let changed_vcpus = self.vcpus.set_policy(&changed);
            if changed_vcpus < usize::from(self.about.cpus) {
                return Answer::Error(format!(
                    "{changed_vcpus} of its {} vCPUs have the new policy; the others get it when they can",
                    self.about.cpus
                ));
            }
        }
        Answer::Policy(policy.clone())
    }

    fn log(&self, text: Option<&str>) -> Answer {
        let Some(log) = &self.log else {
            return Answer::Error("it has no log: that is for `tally run --pmu-log FILE`".to_owned());
        };
        if text.is_some_and(|text| text.len() > MAX_TEXT) {
            return Answer::Error(format!("a note has at most {MAX_TEXT} bytes"));
        }
        let written = text.map_or_else(|| log.flush(), |text| log.note(text));
        written.map_or_else(|error| Answer::Error(error.to_string()), |()| Answer::Done)
    }

    fn measure(&self, report: VcpuReport, session: &mut ClientSession) -> VcpuMeasurement {
        let stats = self.kvm.get(usize::from(report.vcpu)).and_then(Option::as_ref);
        let kvm = stats.and_then(|stats| stats.read().ok());
        let (mut work, mut hardware) = (None, None);
        if let Some(host) = self.host {
            let vcpu = session.vcpus.entry(report.vcpu).or_insert_with(|| VcpuSession::new(&report, host));
            vcpu.probe_if_old(&report, host);
            work = vcpu.attribution.as_ref().map(Attribution::read);
            hardware.clone_from(&vcpu.hardware);
        }
        VcpuMeasurement {
            report,
            kvm,
            work,
            entry_adds: self.pmu.instructions_of_an_entry().into(),
            hardware,
        }
    }
}

impl ServedVm for Running {
    type Session = ClientSession;

    fn answer(&self, session: &mut ClientSession, request: Request) -> Answer {
        match request {
            Request::Hello => Answer::Hello(self.summary()),
            Request::Status => Answer::Status(Box::new(self.status(session))),
            Request::Report => Answer::Report(report(&self.vcpus)),
            Request::Switch(wanted) => self.switch(&wanted),
            Request::Policy(change) => self.change(&change),
            Request::Log(text) => self.log(text.as_deref()),
            Request::Record(_)
            | Request::Symbols(_)
            | Request::Functions(_)
            | Request::Modules(_)
            | Request::Samples
                if !self.may_be_recorded() =>
            {
                // The policy may have changed since it began.
                session.recording = RecordingSession::default();
                Answer::Error("its policy forbids that: `record = false`".to_owned())
            }
            Request::Record(options) => {
                session.recording.begin(&options, &self.vcpus, self.about.cpus, self.host, &self.memory)
            }
            Request::Symbols(from) => session.recording.symbols(&self.memory, &self.vcpus, from),
            Request::Functions(addresses) => session.recording.functions(&self.memory, &addresses),
            Request::Modules(from) => session.recording.modules(&self.memory, from),
            Request::Samples => session.recording.samples(),
            Request::StopRecording => session.recording.stop(),
            Request::Snapshot { .. } | Request::End => {
                Answer::Error("no snapshot was sent before".to_owned())
            }
        }
    }

    fn send_snapshot(
        &self,
        stop: bool,
        requests: &mut impl BufRead,
        answers: &mut impl Write,
    ) -> io::Result<()> {
        let policy = self.policy.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.snapshots.send(stop, policy, requests, answers)
    }
}

/// Returns the vCPUs' counters and exits.
pub fn report(vcpus: &VcpuHandles) -> Report {
    let stands_still = !vcpus.starvation_pause.causes().is_empty();
    Report { stands_still, vcpus: vcpus.report() }
}

/// Returns the PMU of the host that counts the vCPUs' threads. If the guest's PMU is emulated, this is the one that
/// backs it.
pub fn host_pmu(pmu: Pmu) -> Option<HostPmu> {
    match pmu {
        Pmu::Emulated(_, host) => Some(host.pmu),
        Pmu::None | Pmu::Kvm => HostPmu::of_thread().ok(),
    }
}

impl VcpuSession {
    fn new(report: &VcpuReport, host: HostPmu) -> Self {
        let hardware = hardware::probe_cpu(report.cpu, host);
        // Leave room for counters that have lost their hardware and need it again.
        let without_hardware =
            report.counters.iter().filter(|counter| counter.enabled.is_some() && counter.hardware.is_none());
        let held = report.held().len() + without_hardware.count();
        let room = hardware.as_ref().map_or(0, |hardware| hardware.available.saturating_sub(held));
        let attribution = Attribution::of(host, report.thread, room).inspect_err(|error| {
            debug!("cannot attribute vCPU {}'s cycles to guest and host: {error}", report.vcpu);
        });
        Self { hardware, probed: Instant::now(), attribution: attribution.ok() }
    }

    fn probe_if_old(&mut self, report: &VcpuReport, host: HostPmu) {
        if self.probed.elapsed() >= PROBE_INTERVAL {
            self.hardware = hardware::probe_cpu(report.cpu, host);
            self.probed = Instant::now();
        }
    }
}
