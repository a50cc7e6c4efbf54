//! The whole machine stands still while a vCPU's counters have no hardware, if the operator wants it to: better late
//! than counted wrong.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How often a vCPU that stands still looks whether it may go on, and whether it is asked something.
const INTERVAL: Duration = Duration::from_millis(10);

/// Whether the machine stands still.
#[derive(Debug, Default)]
pub struct Pause {
    /// The vCPUs because of which it does.
    because_of: Mutex<Vec<u8>>,
    over: Condvar,
}

impl Pause {
    /// Has it stand still because of this vCPU; whether it did not before.
    pub fn begin(&self, vcpu: u8) -> bool {
        let mut vcpus = self.vcpus();
        let first = vcpus.is_empty();
        if !vcpus.contains(&vcpu) {
            vcpus.push(vcpu);
        }
        first
    }

    /// This vCPU is no reason any more.
    pub fn end(&self, vcpu: u8) {
        let mut vcpus = self.vcpus();
        vcpus.retain(|other| *other != vcpu);
        if vcpus.is_empty() {
            self.over.notify_all();
        }
    }

    /// Because of whom it stands still; of nobody if it runs.
    pub fn because_of(&self) -> Vec<u8> {
        self.vcpus().clone()
    }

    /// Waits until it is over, or for as long as a vCPU may be deaf; whether it goes on.
    pub fn wait(&self) -> bool {
        let vcpus = self.vcpus();
        let waited = self.over.wait_timeout_while(vcpus, INTERVAL, |vcpus| !vcpus.is_empty());
        waited.unwrap_or_else(PoisonError::into_inner).0.is_empty()
    }

    fn vcpus(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        self.because_of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_goes_on_when_nobody_is_a_reason_any_more() {
        let pause = Pause::default();
        assert!(pause.wait(), "it runs");
        assert!(pause.begin(1) && !pause.begin(0) && !pause.begin(1));
        assert!(!pause.wait());
        pause.end(1);
        assert_eq!(pause.because_of(), [0]);
        pause.end(0);
        assert!(pause.wait() && pause.because_of().is_empty());
    }
}
