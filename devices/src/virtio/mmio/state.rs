//! The registers and queues of a device in a snapshot.
//!
//! A state may come from a file, so nothing in it is trusted. A restored device does no more than one whose driver has
//! written the same to its registers.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};
use virtio_queue::{Queue, QueueState, QueueT};
use vm_memory::GuestMemoryMmap;

use super::{PauseState, State, Transport, status};
use crate::state::{Mismatch, check};

/// What the driver has set up, and how far both sides are in the queues.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransportState {
    /// Type of the device.
    device: u32,
    status: u32,
    driver_features: u64,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: usize,
    interrupt_status: u32,
    generation: u32,
    queues: Vec<Ring>,
}

/// A queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Ring {
    size: u16,
    ready: bool,
    event_idx: bool,
    next_avail: u16,
    next_used: u16,
    descriptors: u64,
    available: u64,
    used: u64,
}

impl Ring {
    fn of(queue: &Queue) -> Self {
        let state = queue.state();
        Self {
            size: state.size,
            ready: state.ready,
            event_idx: state.event_idx_enabled,
            next_avail: state.next_avail,
            next_used: state.next_used,
            descriptors: state.desc_table,
            available: state.avail_ring,
            used: state.used_ring,
        }
    }

    /// Returns the queue, which is not ready if it is not within the guest's memory.
    fn queue(&self, max_size: u16, memory: &GuestMemoryMmap) -> Result<Queue, Mismatch> {
        let state = QueueState {
            max_size,
            next_avail: self.next_avail,
            next_used: self.next_used,
            event_idx_enabled: self.event_idx,
            size: self.size,
            ready: self.ready,
            desc_table: self.descriptors,
            avail_ring: self.available,
            used_ring: self.used,
        };
        let mut queue = Queue::try_from(state).map_err(|_| Mismatch("queue"))?;
        if queue.ready() && !queue.is_valid(memory) {
            queue.set_ready(false);
        }
        Ok(queue)
    }
}

impl Transport {
    /// Returns the state, or `None` if the device processes a request. No vCPU may run meanwhile, and the device takes
    /// no request: its thread calls this, or it is paused.
    pub fn save(&self) -> Option<TransportState> {
        let state = self.state();
        let processes = |queue: &Queue| queue.ready() && queue.next_avail() != queue.next_used();
        if state.was_reset || state.queues.iter().any(processes) {
            return None;
        }
        Some(TransportState {
            device: self.id,
            status: state.status,
            driver_features: state.driver_features,
            device_features_select: state.device_features_select,
            driver_features_select: state.driver_features_select,
            queue_select: state.queue_select,
            interrupt_status: self.interrupt_status.load(Ordering::Acquire),
            generation: state.generation,
            queues: state.queues.iter().map(Ring::of).collect(),
        })
    }

    /// Restores a state. The guest's memory has been restored before. Does nothing if it is another device's.
    pub fn restore(&self, saved: &TransportState) -> Result<(), Mismatch> {
        let mut state = self.state();
        check(saved.device == self.id && saved.queues.len() == state.queues.len(), "device")?;
        let is_accepted = saved.status & (status::FEATURES_OK | status::DRIVER_OK) != 0;
        check(!is_accepted || saved.driver_features & !self.features == 0, "feature")?;
        let queues = saved.queues.iter().zip(&state.queues);
        let queues = queues.map(|(ring, queue)| ring.queue(queue.max_size(), &self.memory));
        let queues = queues.collect::<Result<_, _>>()?;
        let (session, config) = (state.session, std::mem::take(&mut state.config));
        *state = State {
            queues,
            config,
            generation: saved.generation,
            status: saved.status,
            driver_features: saved.driver_features,
            device_features_select: saved.device_features_select,
            driver_features_select: saved.driver_features_select,
            queue_select: saved.queue_select,
            session,
            was_reset: false,
            pause: PauseState::Running,
        };
        self.interrupt_status.store(saved.interrupt_status, Ordering::Release);
        self.publish(&state);
        drop(state);
        // Interrupts and notifications that were on their way are lost, and none that comes once more does harm.
        if saved.interrupt_status != 0 {
            self.raise();
        }
        let _ = self.kick.write(1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;
    use crate::virtio::testing::Driver;
    use crate::virtio::{Console, Device};

    /// The queue that carries control messages of the driver.
    const CONTROL: usize = 3;
    const DEVICE_READY: [u8; 8] = [0, 0, 0, 0, 0, 0, 1, 0];

    /// Replaces the device of a driver by another one, which is restored.
    fn replace(driver: &mut Driver, device: &dyn Device, state: &TransportState) {
        driver.interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        let interrupt = driver.interrupt.try_clone().unwrap();
        driver.transport = Transport::new(device, driver.memory.clone(), interrupt).unwrap();
        driver.transport.restore(state).unwrap();
    }

    #[test]
    fn a_driver_goes_on_with_a_restored_device() {
        let mut console = Console::new(2);
        let mut driver = Driver::ready(&console);
        driver.submit(CONTROL, &DEVICE_READY, 0);
        driver.serve(&mut console);
        let mut restored = Console::new(2);
        restored.restore(&console.save()).unwrap();
        let state = driver.transport.save().unwrap();
        replace(&mut driver, &restored, &state);
        assert!(driver.transport.kick().read().is_ok(), "what was on its way is looked for");
        // Both ports are announced by the console that was not there when the driver became ready.
        let buffers: Vec<_> = (0..4).map(|_| driver.submit(2, &[], 16)).collect();
        driver.serve(&mut restored);
        for (port, buffer) in (0..).zip(&buffers[..2]) {
            assert_eq!(driver.next_completion(2), Some(8));
            assert_eq!(driver.bytes(*buffer, 8), [port, 0, 0, 0, 1, 0, 1, 0]);
        }
        assert_eq!(driver.next_completion(2), None);
    }

    #[test]
    fn a_device_that_processes_a_request_is_not_saved() {
        let console = Console::new(2);
        let mut driver = Driver::ready(&console);
        driver.submit(CONTROL, &DEVICE_READY, 0);
        assert!(driver.transport.save().is_some(), "the device has not taken it");
        let mut console = console;
        driver.transport.serve(&mut console, |_, queues| {
            let request = queues.pop(CONTROL).unwrap();
            assert_eq!(driver.transport.save(), None);
            queues.complete(request.head, 0);
        });
        assert!(driver.transport.save().is_some());
    }

    #[test]
    fn a_state_of_another_device_is_refused() {
        let console = Console::new(2);
        let state = Driver::ready(&console).transport.save().unwrap();
        let refuses = |device: &dyn Device, state: &TransportState| {
            Driver::new(device).transport.restore(state).is_err()
        };
        assert!(!refuses(&console, &state));
        assert!(refuses(&Console::new(3), &state));
        assert!(refuses(&console, &TransportState { device: 2, ..state.clone() }));
        assert!(refuses(&console, &TransportState { driver_features: 1 << 63, ..state.clone() }));
    }

    fn ring() -> impl Strategy<Value = Ring> {
        let size = prop_oneof![Just(16), any::<u16>()];
        let address = || prop_oneof![0..0x1_0000_u64, any::<u64>()];
        let rest = (any::<[u16; 2]>(), address(), address(), address());
        (size, any::<[bool; 2]>(), rest).prop_map(
            |(size, [ready, event_idx], ([next_avail, next_used], descriptors, available, used))| Ring {
                size,
                ready,
                event_idx,
                next_avail,
                next_used,
                descriptors,
                available,
                used,
            },
        )
    }

    proptest! {
        #[test]
        fn whatever_a_file_says_the_device_is_served_or_refused(
            rings in prop::collection::vec(ring(), 6),
            registers in any::<[u32; 4]>(),
            features in any::<u64>(),
        ) {
            let mut console = Console::new(2);
            let driver = Driver::new(&console);
            let [status, device_features_select, driver_features_select, interrupt_status] = registers;
            let state = TransportState {
                device: console.id(),
                status,
                driver_features: features,
                device_features_select,
                driver_features_select,
                queue_select: usize::MAX,
                interrupt_status,
                generation: status,
                queues: rings,
            };
            if driver.transport.restore(&state).is_ok() {
                driver.transport.serve(&mut console, Device::serve);
            }
        }
    }
}
