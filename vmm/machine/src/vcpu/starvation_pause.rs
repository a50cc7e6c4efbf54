//! Pauses the whole machine while a vCPU's counters have no hardware, if the policy's `on-starvation` is `stop`.

use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Interval at which a paused vCPU checks its mailbox, and whether the pause may end.
const INTERVAL: Duration = Duration::from_millis(10);

/// A pause of the whole machine. It lasts while any vCPU requires it.
#[derive(Debug, Default)]
pub struct StarvationPause {
    /// Numbers of the vCPUs that require the pause. The machine runs if there are none.
    causes: Mutex<Vec<u8>>,
    over: Condvar,
}

impl StarvationPause {
    /// Pauses the machine for this vCPU. Returns true if it was running.
    pub fn request(&self, vcpu: u8) -> bool {
        let mut vcpus = self.vcpus();
        let first = vcpus.is_empty();
        if !vcpus.contains(&vcpu) {
            vcpus.push(vcpu);
        }
        first
    }

    /// Releases this vCPU's pause. The machine resumes if no other vCPU requires a pause.
    pub fn release(&self, vcpu: u8) {
        let mut vcpus = self.vcpus();
        vcpus.retain(|other| *other != vcpu);
        if vcpus.is_empty() {
            self.over.notify_all();
        }
    }

    /// Returns the numbers of the vCPUs that require the pause. The list is empty if the machine runs.
    pub fn causes(&self) -> Vec<u8> {
        self.vcpus().clone()
    }

    /// Waits at most [`INTERVAL`]. Returns true if the machine runs.
    pub fn wait_for_resume(&self) -> bool {
        let vcpus = self.vcpus();
        let waited = self.over.wait_timeout_while(vcpus, INTERVAL, |vcpus| !vcpus.is_empty());
        waited.unwrap_or_else(PoisonError::into_inner).0.is_empty()
    }

    fn vcpus(&self) -> std::sync::MutexGuard<'_, Vec<u8>> {
        self.causes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_resumes_when_no_vcpu_pauses_it_any_more() {
        let pause = StarvationPause::default();
        assert!(pause.wait_for_resume(), "it runs");
        assert!(pause.request(1) && !pause.request(0) && !pause.request(1));
        assert!(!pause.wait_for_resume());
        pause.release(1);
        assert_eq!(pause.causes(), [0]);
        pause.release(0);
        assert!(pause.wait_for_resume() && pause.causes().is_empty());
    }
}
