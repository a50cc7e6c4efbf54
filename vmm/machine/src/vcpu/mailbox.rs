//! Requests of other threads to vCPUs. Only a vCPU's own thread can read the vCPU's counters. So a request is put
//! into the vCPU's mailbox, and a signal makes the thread leave the guest to answer. A vCPU without requests has no
//! overhead.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use vpmu::Switch;
use vpmu::policy::Policy;

use super::report::VcpuReport;
use super::saved::{SaveError, VcpuState};
use super::starvation_pause::StarvationPause;
use crate::arch::AddressSpace;
use crate::pmu::exit_signals;
use crate::recording::linux::GuestLinux;
use crate::recording::sample::{Sample, SampleBuffer};
use crate::recording::{Plan, RecordError, RecordOrder};

/// Timeout for the answers to a request.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Request to a vCPU, with the channel for the answer. The requester may have stopped waiting.
#[derive(Debug)]
pub enum VcpuRequest {
    /// Report the vCPU's counters and exits.
    Report(Sender<VcpuReport>),
    /// Set the policy.
    SetPolicy(Policy, Sender<()>),
    /// Pause outside of the guest, and save the state.
    Pause(PauseRequest),
    /// Disable or enable a counter. The answer is false if there is no counter of this number.
    Switch(usize, Switch, Sender<bool>),
    /// Return the page tables that the vCPU uses, if the host's profiler can read them.
    AddressSpace(Sender<Option<AddressSpace>>),
    /// Begin to sample the vCPU.
    Record(RecordOrder, Sender<Result<(), RecordError>>),
    /// End that, if the samples went into this buffer. The answer is which part of the time there was a counter, in
    /// thousandths.
    StopRecording(Arc<SampleBuffer>, Sender<u64>),
}

/// Request to pause outside of the guest, until the sender of the orders is dropped.
#[derive(Debug)]
pub struct PauseRequest {
    /// Is told when the vCPU is paused.
    pub stopped: Sender<()>,
    /// Requests for the state.
    pub orders: Receiver<Sender<Result<VcpuState, SaveError>>>,
}

/// vCPUs that are paused until this is dropped.
#[derive(Debug)]
pub struct PausedVcpus {
    orders: Vec<Sender<Sender<Result<VcpuState, SaveError>>>>,
}

impl PausedVcpus {
    /// Returns the states of all vCPUs.
    pub fn save(&self) -> Result<Vec<VcpuState>, SaveError> {
        let order = |vcpu: &Sender<Sender<_>>| {
            let (sender, answer) = channel();
            vcpu.send(sender).map_err(|_| SaveError::NoAnswer)?;
            answer.recv_timeout(TIMEOUT).map_err(|_| SaveError::NoAnswer)?
        };
        self.orders.iter().map(order).collect()
    }
}

/// Handles on all vCPUs of a machine, for other threads' requests.
#[derive(Debug)]
pub struct VcpuHandles {
    handles: Vec<VcpuHandle>,
    /// The pause of the whole machine for starved counters.
    pub starvation_pause: StarvationPause,
}

/// Sender's end of a vCPU's mailbox.
#[derive(Debug)]
struct VcpuHandle {
    requests: Sender<VcpuRequest>,
    thread: Arc<OnceLock<libc::pid_t>>,
}

/// Receiver's end of a vCPU's mailbox, which its own thread holds.
#[derive(Debug)]
pub struct Mailbox {
    requests: Receiver<VcpuRequest>,
    thread: Arc<OnceLock<libc::pid_t>>,
}

impl VcpuHandles {
    /// Creates handles for this number of vCPUs, and the mailbox of each.
    pub fn new(vcpus: u8) -> (Arc<Self>, Vec<Mailbox>) {
        let pair = |_| {
            let (sender, requests) = channel();
            let thread = Arc::<OnceLock<_>>::default();
            (VcpuHandle { requests: sender, thread: Arc::clone(&thread) }, Mailbox { requests, thread })
        };
        let (handles, mailboxes) = (0..vcpus).map(pair).unzip();
        (Arc::new(Self { handles, starvation_pause: StarvationPause::default() }), mailboxes)
    }

    /// Returns the reports of all vCPUs that still run.
    pub fn report(&self) -> Vec<VcpuReport> {
        self.request(VcpuRequest::Report)
    }

    /// Sets the policy of all vCPUs. Returns how many have set it.
    pub fn set_policy(&self, policy: &Policy) -> usize {
        self.request(|answer| VcpuRequest::SetPolicy(policy.clone(), answer)).len()
    }

    /// Disables or enables a vCPU's counter. Returns false if there is no such counter, or the vCPU does not answer.
    pub fn set_counter_switch(&self, vcpu: u8, counter: usize, to: Switch) -> bool {
        let Some(handle) = self.handles.get(usize::from(vcpu)) else { return false };
        let (sender, answer) = channel();
        handle.post(VcpuRequest::Switch(counter, to, sender));
        answer.recv_timeout(TIMEOUT).unwrap_or(false)
    }

    /// Returns the page tables that the first vCPU uses, if the host's profiler can read them.
    pub fn address_space(&self) -> Option<AddressSpace> {
        let (sender, answer) = channel();
        self.handles.first()?.post(VcpuRequest::AddressSpace(sender));
        answer.recv_timeout(TIMEOUT).ok().flatten()
    }

    /// Begins to sample all vCPUs, each into a buffer of its own. If one of them is not sampled, none is.
    pub fn record(
        self: &Arc<Self>,
        plan: Plan,
        linux: Option<&Arc<GuestLinux>>,
    ) -> Result<Recording, RecordError> {
        let mut recording =
            Recording { vcpus: Arc::clone(self), buffers: Vec::new(), first: AtomicUsize::new(0) };
        let begin = |handle: &VcpuHandle| {
            let (buffer, (sender, answer)) = (Arc::<SampleBuffer>::default(), channel());
            let order = RecordOrder { plan, linux: linux.cloned(), buffer: Arc::clone(&buffer) };
            handle.post(VcpuRequest::Record(order, sender));
            recording.buffers.push(buffer);
            answer
        };
        let answers: Vec<_> = self.handles.iter().map(begin).collect();
        for (vcpu, answer) in answers.into_iter().enumerate() {
            answer.recv_timeout(TIMEOUT).map_err(|_| RecordError::NoAnswer(vcpu))??;
        }
        Ok(recording)
    }

    /// Pauses all vCPUs outside of the guest. Returns `None` if one does not answer.
    pub fn pause(&self) -> Option<PausedVcpus> {
        let pause = |handle: &VcpuHandle| {
            let ((stopped, has_stopped), (sender, orders)) = (channel(), channel());
            handle.post(VcpuRequest::Pause(PauseRequest { stopped, orders }));
            (sender, has_stopped)
        };
        let (orders, stopped): (Vec<_>, Vec<_>) = self.handles.iter().map(pause).unzip();
        let all = stopped.len();
        (answers_until(stopped, Instant::now() + TIMEOUT).len() == all).then_some(PausedVcpus { orders })
    }

    /// Makes all vCPUs leave the guest.
    pub fn kick(&self) {
        for handle in &self.handles {
            handle.kick();
        }
    }

    fn request<T>(&self, request: impl Fn(Sender<T>) -> VcpuRequest) -> Vec<T> {
        let post = |handle: &VcpuHandle| {
            let (sender, answer) = channel();
            handle.post(request(sender));
            answer
        };
        let answers: Vec<Receiver<T>> = self.handles.iter().map(post).collect();
        answers_until(answers, Instant::now() + TIMEOUT)
    }
}

/// vCPUs that are sampled until this is dropped.
#[derive(Debug)]
pub struct Recording {
    vcpus: Arc<VcpuHandles>,
    /// Samples of each vCPU.
    buffers: Vec<Arc<SampleBuffer>>,
    /// The vCPU whose samples are taken first the next time.
    first: AtomicUsize,
}

impl Recording {
    /// Takes samples of not much more than so many words, those of each vCPU in the order of their time. Also returns
    /// the number of those that were lost, and whether there are more.
    pub fn take(&self, words: usize) -> (Vec<Sample>, u64, bool) {
        let each = (words / self.buffers.len().max(1)).max(1);
        let first = self.first.fetch_add(1, Ordering::Relaxed) % self.buffers.len().max(1);
        let (before, after) = self.buffers.split_at(first);
        let (mut samples, mut left) = (Vec::new(), words);
        for buffer in after.iter().chain(before) {
            let taken = buffer.take(each.min(left));
            left = left.saturating_sub(taken.iter().map(Sample::words).sum());
            samples.extend(taken);
        }
        let lost = self.buffers.iter().map(|buffer| buffer.take_lost()).sum();
        (samples, lost, self.buffers.iter().any(|buffer| !buffer.is_empty()))
    }

    /// Ends it. What was sampled can still be taken. Returns for each vCPU which part of the time there was a counter,
    /// in thousandths.
    pub fn stop(&self) -> Vec<u64> {
        answers_until(self.post_stop(), Instant::now() + TIMEOUT)
    }

    fn post_stop(&self) -> Vec<Receiver<u64>> {
        let post = |(handle, buffer): (&VcpuHandle, &Arc<SampleBuffer>)| {
            let (sender, answer) = channel();
            handle.post(VcpuRequest::StopRecording(Arc::clone(buffer), sender));
            answer
        };
        self.vcpus.handles.iter().zip(&self.buffers).map(post).collect()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        drop(self.post_stop());
    }
}

/// Returns the answers that arrive before `end`. An answer that has arrived is returned even if the time ran out while
/// another vCPU was waited for.
fn answers_until<T>(answers: Vec<Receiver<T>>, end: Instant) -> Vec<T> {
    let left = || end.saturating_duration_since(Instant::now());
    answers.into_iter().filter_map(|answer| answer.recv_timeout(left()).ok()).collect()
}

impl VcpuHandle {
    fn post(&self, request: VcpuRequest) {
        // Sending fails if the mailbox was dropped. The requester then gets no answer.
        let _ = self.requests.send(request);
        self.kick();
    }

    /// Makes the vCPU leave the guest. A thread that has not called [`Mailbox::register_thread`] yet needs no signal:
    /// it checks its mailbox before it first enters the guest.
    fn kick(&self) {
        if let Some(thread) = self.thread.get() {
            let process = std::process::id();
            // SAFETY: the system call has no pointer arguments. It returns an error if the thread has ended.
            unsafe { libc::syscall(libc::SYS_tgkill, process, *thread, exit_signals::kick_signal()) };
        }
    }
}

impl Mailbox {
    /// Publishes this thread's id, so that requests may signal the thread from now on.
    pub fn register_thread(&self) {
        self.thread.get_or_init(|| rustix::thread::gettid().as_raw_pid());
    }

    /// Returns the id that [`Self::register_thread`] has published.
    pub fn thread_id(&self) -> libc::pid_t {
        *self.thread.get().expect("the thread is registered before it handles requests")
    }

    /// Returns the next request, if there is one.
    pub fn next(&self) -> Option<VcpuRequest> {
        self.requests.try_recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu::exits::{Exits, Share};

    #[test]
    fn every_vcpu_that_still_runs_answers() {
        let (vcpus, mut mailboxes) = VcpuHandles::new(3);
        drop(mailboxes.remove(1));
        let answering = std::thread::spawn(move || {
            for (vcpu, mailbox) in (0..).zip(mailboxes) {
                // This thread blocks no signals, and is not interrupted: it waits for the request.
                let VcpuRequest::Report(answer) = mailbox.requests.recv().unwrap() else {
                    panic!("not requested")
                };
                let report = VcpuReport {
                    vcpu,
                    thread: 1,
                    counters: Vec::new(),
                    statistics: None,
                    exits: Exits::default(),
                    share: Share::default(),
                    cpu: 0,
                };
                answer.send(report).unwrap();
            }
        });
        let numbers: Vec<u8> = vcpus.report().iter().map(|report| report.vcpu).collect();
        assert_eq!(numbers, [0, 1]);
        answering.join().unwrap();
    }

    #[test]
    fn an_answer_is_not_lost_while_another_vcpu_is_silent() {
        let (_silent, first) = channel();
        let (answers, second) = channel();
        answers.send(7).unwrap();
        assert_eq!(answers_until(vec![first, second], Instant::now()), [7]);
    }
}
