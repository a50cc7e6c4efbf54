//! Makes a device stand still while the machine is saved.
//!
//! The device's thread saves the device between two requests, and takes none from then on. What the driver has made
//! available meanwhile stays in the queues, which are in the guest's memory.

use std::sync::PoisonError;
use std::time::Duration;

use super::super::DeviceState;
use super::Transport;
use crate::state::DeviceError;

/// Whether a device stands still.
#[derive(Debug, PartialEq, Eq)]
pub enum Hold {
    /// It processes requests.
    No,
    /// It is to stand still as soon as it has processed the current request.
    Wanted,
    /// It stands still, with what it knows beyond its registers.
    Stands(Result<Option<DeviceState>, DeviceError>),
}

impl Transport {
    /// Makes the device stand still until [`Self::release`]. Returns at once.
    pub fn hold(&self) {
        self.state().hold = Hold::Wanted;
        // An error means that the eventfd is readable already.
        let _ = self.kick.write(1);
    }

    /// Waits until the device stands still, and returns what it knows beyond its registers and queues. Returns `None`
    /// if the current request takes longer than `limit`.
    pub fn wait_until_held(&self, limit: Duration) -> Option<Result<Option<DeviceState>, DeviceError>> {
        let is_moving = |state: &mut super::State| !matches!(state.hold, Hold::Stands(_));
        let state = self.stopped.wait_timeout_while(self.state(), limit, is_moving);
        let (state, _) = state.unwrap_or_else(PoisonError::into_inner);
        match &state.hold {
            Hold::Stands(saved) => Some(saved.clone()),
            Hold::No | Hold::Wanted => None,
        }
    }

    /// Lets the device go on.
    pub fn release(&self) {
        self.state().hold = Hold::No;
        let _ = self.kick.write(1);
    }

    /// Records that the device stands still. Called by its own thread.
    pub(super) fn stand_still(&self, saved: Result<Option<DeviceState>, DeviceError>) {
        let mut state = self.state();
        // The hold may have been given up meanwhile.
        if state.hold == Hold::Wanted {
            state.hold = Hold::Stands(saved);
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
    fn a_device_that_is_held_takes_no_request_until_it_is_released() {
        let mut console = Console::new(1);
        let mut driver = Driver::ready(&console);
        driver.transport.hold();
        assert_eq!(driver.transport.wait_until_held(Duration::ZERO), None, "nobody has served it");
        driver.serve(&mut console);
        assert_eq!(driver.transport.wait_until_held(LIMIT), Some(Ok(None)));
        driver.submit(CONTROL, &[0; 8], 0);
        driver.serve(&mut console);
        assert_eq!(driver.next_completion(CONTROL), None);
        let saved = driver.transport.save();
        driver.transport.release();
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
            thread::scope(|scope| scope.spawn(|| transport.hold()).join().unwrap());
            assert!(queues.pop(CONTROL).is_none(), "no other one is begun");
            assert_eq!(transport.save(), None);
            queues.complete(request.head, 0);
        });
        driver.serve(&mut console);
        assert_eq!(driver.transport.wait_until_held(LIMIT), Some(Ok(None)));
        assert_eq!(driver.next_completion(CONTROL), Some(0));
        assert_eq!(driver.next_completion(CONTROL), None);
    }
}
