//! What the device's thread may do between two resets by the driver.

use std::io;
use std::sync::MutexGuard;

use virtio_queue::Queue;
use vm_memory::GuestMemoryMmap;

use super::{PauseState, State, Transport, status};

/// A ring or a descriptor of the driver is invalid, and the device needs a reset.
#[derive(Debug)]
pub struct InvalidRing;

impl From<virtio_queue::Error> for InvalidRing {
    fn from(_: virtio_queue::Error) -> Self {
        Self
    }
}

impl From<vm_memory::GuestMemoryError> for InvalidRing {
    fn from(_: vm_memory::GuestMemoryError) -> Self {
        Self
    }
}

/// Access to the rings and buffers that the driver has set up since its last reset. A request may still be processed
/// when the driver resets the device. From then on, all accesses of that session fail: the driver may have given the
/// memory another use.
#[derive(Clone, Copy)]
pub struct Session<'a> {
    transport: &'a Transport,
    number: u64,
}

impl<'a> Session<'a> {
    /// Creates the current session.
    pub fn new(transport: &'a Transport, number: u64) -> Self {
        Self { transport, number }
    }

    /// Returns the guest's memory.
    pub fn memory(self) -> &'a GuestMemoryMmap {
        &self.transport.memory
    }

    /// Returns the features that the driver has accepted.
    pub fn features(self) -> u64 {
        self.transport.state().driver_features
    }

    /// Calls `work` with the rings, while the registers are locked. Returns `None` if the session is over. After an
    /// error, the device needs a reset.
    pub fn with_rings<T>(self, work: impl FnOnce(&mut [Queue]) -> Result<T, InvalidRing>) -> Option<T> {
        self.work(self.transport.state(), work)
    }

    /// Does the same, but not while the device is to pause: for work that begins a request.
    pub fn begin_with_rings<T>(self, work: impl FnOnce(&mut [Queue]) -> Result<T, InvalidRing>) -> Option<T> {
        let state = self.transport.state();
        if state.pause == PauseState::Running { self.work(state, work) } else { None }
    }

    fn work<T>(
        self,
        mut state: MutexGuard<State>,
        work: impl FnOnce(&mut [Queue]) -> Result<T, InvalidRing>,
    ) -> Option<T> {
        if !self.is_current(&state) {
            return None;
        }
        let result = work(&mut state.queues);
        if result.is_err() {
            state.status |= status::NEEDS_RESET;
            self.transport.interrupt_for_config(&state);
        }
        result.ok()
    }

    /// Calls `copy`, which accesses the driver's buffers, while the registers are locked: no driver that has seen its
    /// reset finds its memory accessed afterwards. Fails if the session is over.
    pub fn access<T>(self, copy: impl FnOnce() -> T) -> io::Result<T> {
        let state = self.transport.state();
        if self.is_current(&state) { Ok(copy()) } else { Err(io::ErrorKind::ConnectionReset.into()) }
    }

    /// Changes the device's configuration, and notifies the driver of that, if there still is one.
    pub fn set_config(self, config: Vec<u8>) {
        let mut state = self.transport.state();
        state.config = config;
        state.generation = state.generation.wrapping_add(1);
        self.transport.publish_config(&state);
        if self.is_current(&state) {
            self.transport.interrupt_for_config(&state);
        }
    }

    /// Notifies the driver of used buffers. Called by [`Self::with_rings`]'s `work`.
    pub fn interrupt(self) {
        self.transport.interrupt_for_used();
    }

    fn is_current(self, state: &State) -> bool {
        state.session == self.number && state.is_running()
    }
}
