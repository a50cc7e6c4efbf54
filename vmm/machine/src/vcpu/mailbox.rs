//! How other threads ask something of the vCPUs, whose counters only their own threads can look at: the question goes into the
//! vCPU's mailbox, and a signal calls its thread out of the guest to answer. While nobody asks, that costs nothing.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use vpmu::Switch;
use vpmu::policy::Policy;
use vpmu::report::Report;

use super::exits::{Exits, Share};
use super::pause::Pause;
use crate::pmu::alarm;

/// For so long an answer is waited for.
const PATIENCE: Duration = Duration::from_secs(5);

/// What can be asked of a vCPU. Whoever has asked and does not wait any more gets no answer.
#[derive(Debug)]
pub enum Ask {
    /// How it does.
    Report(Sender<VcpuReport>),
    /// To do as the operator wants it to from now on.
    Obey(Policy, Sender<()>),
    /// To withhold a counter, or to give it back; whether there is one of this number.
    Switch(usize, Switch, Sender<bool>),
}

/// How a vCPU does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuReport {
    /// Its number.
    pub vcpu: u8,
    /// Its thread's.
    pub thread: libc::pid_t,
    /// What it came out of the guest for.
    pub exits: Exits,
    /// How much of its time the PMU takes.
    pub share: Share,
    /// Its PMU, if that is Tally's.
    pub pmu: Option<Report>,
}

/// The vCPUs of a machine, for those who ask.
#[derive(Debug)]
pub struct Vcpus {
    addresses: Vec<Address>,
    /// Whether they all stand still.
    pub pause: Pause,
}

/// Where a vCPU is asked.
#[derive(Debug)]
struct Address {
    asks: Sender<Ask>,
    thread: Arc<OnceLock<libc::pid_t>>,
}

/// A vCPU's mailbox, on its own thread.
#[derive(Debug)]
pub struct Mailbox {
    asks: Receiver<Ask>,
    thread: Arc<OnceLock<libc::pid_t>>,
}

impl Vcpus {
    /// So many, with the mailbox of each.
    pub fn new(vcpus: u8) -> (Arc<Self>, Vec<Mailbox>) {
        let pair = |_| {
            let (sender, asks) = channel();
            let thread = Arc::<OnceLock<_>>::default();
            (Address { asks: sender, thread: Arc::clone(&thread) }, Mailbox { asks, thread })
        };
        let (addresses, mailboxes) = (0..vcpus).map(pair).unzip();
        (Arc::new(Self { addresses, pause: Pause::default() }), mailboxes)
    }

    /// How they do. One that has come to its end does not answer.
    pub fn report(&self) -> Vec<VcpuReport> {
        self.ask(Ask::Report)
    }

    /// Has all of them do as the operator wants it to; how many do.
    pub fn set_policy(&self, policy: &Policy) -> usize {
        self.ask(|answer| Ask::Obey(policy.clone(), answer)).len()
    }

    /// Has a vCPU withhold one of its counters, or give it back; whether there is such a counter.
    pub fn switch(&self, vcpu: u8, counter: usize, to: Switch) -> bool {
        let Some(address) = self.addresses.get(usize::from(vcpu)) else { return false };
        let (sender, answer) = channel();
        address.put(Ask::Switch(counter, to, sender));
        answer.recv_timeout(PATIENCE).unwrap_or(false)
    }

    /// Calls all of them out of the guest.
    pub fn call_out(&self) {
        for address in &self.addresses {
            address.call_out();
        }
    }

    fn ask<T>(&self, ask: impl Fn(Sender<T>) -> Ask) -> Vec<T> {
        let put = |address: &Address| {
            let (sender, answer) = channel();
            address.put(ask(sender));
            answer
        };
        let answers: Vec<Receiver<T>> = self.addresses.iter().map(put).collect();
        heard(answers, Instant::now() + PATIENCE)
    }
}

/// What was answered until then: nobody is waited for longer because of another.
fn heard<T>(answers: Vec<Receiver<T>>, end: Instant) -> Vec<T> {
    let left = || end.saturating_duration_since(Instant::now());
    answers.into_iter().filter_map(|answer| answer.recv_timeout(left()).ok()).collect()
}

impl Address {
    fn put(&self, ask: Ask) {
        // Of a vCPU that has ended nobody is left to answer.
        let _ = self.asks.send(ask);
        self.call_out();
    }

    /// One whose thread has not begun looks into its mailbox when it does.
    fn call_out(&self) {
        if let Some(thread) = self.thread.get() {
            let process = std::process::id();
            // SAFETY: takes numbers, and a thread that has ended is an error.
            unsafe { libc::syscall(libc::SYS_tgkill, process, *thread, alarm::call()) };
        }
    }
}

impl Mailbox {
    /// Has this thread be called from now on; its number.
    pub fn begin(&self) -> libc::pid_t {
        // SAFETY: takes nothing.
        *self.thread.get_or_init(|| unsafe { libc::gettid() })
    }

    /// The next question, if there is one.
    pub fn next(&self) -> Option<Ask> {
        self.asks.try_recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vcpu_that_still_runs_answers() {
        let (vcpus, mut mailboxes) = Vcpus::new(3);
        drop(mailboxes.remove(1));
        let answering = std::thread::spawn(move || {
            for (vcpu, mailbox) in (0..).zip(mailboxes) {
                // The test's own signals are not those of alarms: it looks by itself.
                let Ask::Report(answer) = mailbox.asks.recv().unwrap() else { panic!("nobody asks that") };
                let report = VcpuReport {
                    vcpu,
                    thread: 1,
                    exits: Exits::default(),
                    share: Share::default(),
                    pmu: None,
                };
                answer.send(report).unwrap();
            }
        });
        let numbers: Vec<u8> = vcpus.report().iter().map(|report| report.vcpu).collect();
        assert_eq!(numbers, [0, 1]);
        answering.join().unwrap();
    }

    #[test]
    fn a_vcpu_that_has_answered_is_heard_however_long_another_was_waited_for() {
        let (_silent, first) = channel();
        let (answers, second) = channel();
        answers.send(7).unwrap();
        assert_eq!(heard(vec![first, second], Instant::now()), [7]);
    }
}
