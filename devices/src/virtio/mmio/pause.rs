//! Pauses a device while the machine is saved.
//!
//! The device's thread saves the device between two requests, and takes none from then on. What the driver has made
//! available meanwhile stays in the queues, which are in the guest's memory.

use std::sync::PoisonError;
use std::time::Duration;

use super::super::DeviceState;
use super::Transport;
use crate::state::DeviceError;

/// Whether a device runs or is paused.
#[derive(Debug, PartialEq, Eq)]
pub enum PauseState {
    /// It processes requests.
    Running,
    /// It pauses as soon as it has processed the current request.
    Requested,
    /// It is paused, with what it knows beyond its registers.
    Paused(Result<Option<DeviceState>, DeviceError>),
}

impl Transport {
    /// Requests that the device pauses until [`Self::resume`]. Returns at once.
    pub fn pause(&self) {
        self.state().pause = PauseState::Requested;
        let _ = self.kick.write(1);
    }

    /// Waits until the device is paused, and returns what it knows beyond its registers and queues. Returns `None`
    /// if the current request takes longer than `limit`.
    pub fn wait_until_paused(&self, limit: Duration) -> Option<Result<Option<DeviceState>, DeviceError>> {
        let is_running = |state: &mut super::State| !matches!(state.pause, PauseState::Paused(_));
        let state = self.stopped.wait_timeout_while(self.state(), limit, is_running);
        let (state, _) = state.unwrap_or_else(PoisonError::into_inner);
        match &state.pause {
            PauseState::Paused(saved) => Some(saved.clone()),
            PauseState::Running | PauseState::Requested => None,
        }
    }

    /// Lets the device go on.
    pub fn resume(&self) {
        self.state().pause = PauseState::Running;
        let _ = self.kick.write(1);
    }

    /// Records that the device is paused. Called by its own thread.
    pub(super) fn set_paused(&self, saved: Result<Option<DeviceState>, DeviceError>) {
        let mut state = self.state();
        // The pause may have been given up meanwhile.
        if state.pause == PauseState::Requested {
            state.pause = PauseState::Paused(saved);
            self.stopped.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::super::super::testing::Driver;
    use super::*;
    use crate::virtio::{Console, Queues};

    /// The queue that carries control messages of the driver.
    const CONTROL: usize = 3;
    const LIMIT: Duration = Duration::from_mins(1);

    #[test]
    fn a_paused_device_takes_no_request_until_it_is_resumed() {
        let mut console = Console::new(1);
        let mut driver = Driver::ready(&console);
        driver.transport.pause();
        assert_eq!(driver.transport.wait_until_paused(Duration::ZERO), None, "nobody has served it");
        driver.serve(&mut console);
        assert_eq!(driver.transport.wait_until_paused(LIMIT), Some(Ok(None)));
        driver.submit(CONTROL, &[0; 8], 0);
        driver.serve(&mut console);
        assert_eq!(driver.next_completion(CONTROL), None);
        let saved = driver.transport.save();
        driver.transport.resume();
        assert!(driver.transport.kick().read().is_ok(), "the thread is woken");
        driver.serve(&mut console);
        assert_eq!(driver.next_completion(CONTROL), Some(0));
        assert!(saved.is_some());
    }

    #[test]
    fn a_request_that_is_processed_is_completed_first() {
        let mut console = Console::new(1);
        let mut driver = Driver::ready(&console);
        driver.submit(CONTROL, &[0; 8], 0);
        driver.submit(CONTROL, &[0; 8], 0);
        let transport = std::sync::Arc::clone(&driver.transport);
        driver.transport.serve(&mut console, |_, queues: &mut Queues| {
            let request = queues.pop(CONTROL).unwrap();
            thread::scope(|scope| scope.spawn(|| transport.pause()).join().unwrap());
            assert!(queues.pop(CONTROL).is_none(), "no other one is begun");
            assert_eq!(transport.save(), None);
            queues.complete(request.head, 0);
        });
        driver.serve(&mut console);
        assert_eq!(driver.transport.wait_until_paused(LIMIT), Some(Ok(None)));
        assert_eq!(driver.next_completion(CONTROL), Some(0));
        assert_eq!(driver.next_completion(CONTROL), None);
    }
}
