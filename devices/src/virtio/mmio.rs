//! The MMIO transport of virtio devices (section 4.2 of the specification).
//!
//! vCPU threads access the registers, and the device's thread serves the queues. Both lock [`State`] for short: the
//! device's thread takes, completes and copies requests with the lock, and processes them without it. A vCPU never
//! waits for a request, not even when it resets the device. A reset abandons the request instead (see [`Session`]).

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use virtio_queue::{Queue, QueueT};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use super::Device;
use crate::interrupt::Interrupt;

mod pause;
mod readable;
mod session;
mod state;

use pause::PauseState;
use readable::Readable;
pub use session::{InvalidRing, Session};
pub use state::TransportState;

const MAGIC: u32 = u32::from_le_bytes(*b"virt");
const VERSION: u32 = 2;
const VENDOR: u32 = u32::from_le_bytes(*b"TALY");
/// Features of all devices.
const COMMON_FEATURES: u64 = 1 << VIRTIO_F_VERSION_1 | 1 << VIRTIO_RING_F_EVENT_IDX;

mod register {
    pub const MAGIC: u64 = 0x00;
    pub const VERSION: u64 = 0x04;
    pub const DEVICE_ID: u64 = 0x08;
    pub const VENDOR_ID: u64 = 0x0c;
    pub const DEVICE_FEATURES: u64 = 0x10;
    pub const DEVICE_FEATURES_SELECT: u64 = 0x14;
    pub const DRIVER_FEATURES: u64 = 0x20;
    pub const DRIVER_FEATURES_SELECT: u64 = 0x24;
    pub const QUEUE_SELECT: u64 = 0x30;
    pub const QUEUE_SIZE_MAX: u64 = 0x34;
    pub const QUEUE_SIZE: u64 = 0x38;
    pub const QUEUE_READY: u64 = 0x44;
    pub const QUEUE_NOTIFY: u64 = 0x50;
    pub const INTERRUPT_STATUS: u64 = 0x60;
    pub const INTERRUPT_ACKNOWLEDGE: u64 = 0x64;
    pub const STATUS: u64 = 0x70;
    pub const DESCRIPTORS_LOW: u64 = 0x80;
    pub const DESCRIPTORS_HIGH: u64 = 0x84;
    pub const AVAILABLE_LOW: u64 = 0x90;
    pub const AVAILABLE_HIGH: u64 = 0x94;
    pub const USED_LOW: u64 = 0xa0;
    pub const USED_HIGH: u64 = 0xa4;
    /// `SHMLenLow` to `SHMBaseHigh`. They read as all ones, which means that there is no shared memory region.
    pub const SHARED_MEMORY: std::ops::RangeInclusive<u64> = 0xb0..=0xbc;
    pub const CONFIG_GENERATION: u64 = 0xfc;
    pub const CONFIG: u64 = 0x100;
}

mod status {
    pub const DRIVER_OK: u32 = 4;
    pub const FEATURES_OK: u32 = 8;
    pub const NEEDS_RESET: u32 = 0x40;
}

mod interrupt {
    pub const USED: u32 = 1;
    pub const CONFIG: u32 = 2;
}

/// The MMIO registers of one device, shared by the vCPU threads and the device's thread.
pub struct Transport {
    id: u32,
    features: u64,
    memory: GuestMemoryMmap,
    state: Mutex<State>,
    /// Signalled when the device is paused.
    stopped: Condvar,
    interrupt_status: AtomicU32,
    readable: Readable,
    interrupt: Box<dyn Interrupt>,
    kick: EventFd,
}

struct State {
    queues: Vec<Queue>,
    config: Vec<u8>,
    /// Number of changes of the configuration.
    generation: u32,
    status: u32,
    driver_features: u64,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: usize,
    /// Number of resets by the driver.
    session: u64,
    /// The driver has reset the device, and [`Device::reset`] has not been called yet.
    was_reset: bool,
    /// Whether the device is paused, while the machine is saved.
    pause: PauseState,
}

impl Transport {
    /// Size of the register region.
    pub const SIZE: u64 = 0x1000;
    /// Offset of `QueueNotify`. The VMM registers [`Transport::kick`] with KVM as its ioeventfd.
    pub const NOTIFY: u64 = register::QUEUE_NOTIFY;

    /// Creates the transport of a device with its queues in `memory`. The transport raises `interrupt`.
    pub fn new(
        device: &dyn Device,
        memory: GuestMemoryMmap,
        interrupt: impl Interrupt + 'static,
    ) -> io::Result<Arc<Self>> {
        let queues = device
            .queue_sizes()
            .into_iter()
            .map(|size| Queue::new(size).expect("the size of a queue is a power of two"))
            .collect();
        Ok(Arc::new(Self {
            id: device.id(),
            features: device.features() | COMMON_FEATURES,
            memory,
            state: Mutex::new(State {
                queues,
                config: device.config(),
                generation: 0,
                status: 0,
                driver_features: 0,
                device_features_select: 0,
                driver_features_select: 0,
                queue_select: 0,
                session: 0,
                was_reset: false,
                pause: PauseState::Running,
            }),
            stopped: Condvar::new(),
            interrupt_status: AtomicU32::new(0),
            readable: Readable::default(),
            interrupt: Box::new(interrupt),
            kick: EventFd::new(0)?,
        }))
    }

    /// Returns the eventfd that is readable when the device should be served. Reading it waits until it is.
    pub fn kick(&self) -> &EventFd {
        &self.kick
    }

    /// Returns true if the guest's driver has set `DRIVER_OK`.
    pub fn has_driver(&self) -> bool {
        self.state().status & status::DRIVER_OK != 0
    }

    /// Calls `work` with the device and the driver's session, and returns the result. Returns `None` without a call if
    /// the driver is not ready, or if the device needs a reset.
    pub(super) fn in_session<'a, D: Device + ?Sized, T>(
        &'a self,
        device: &mut D,
        work: impl FnOnce(&mut D, Session<'a>) -> T,
    ) -> Option<T> {
        let mut state = self.state();
        let (session, is_running) = (Session::new(self, state.session), state.is_running());
        let was_reset = std::mem::take(&mut state.was_reset);
        let is_to_pause = state.pause == PauseState::Requested;
        drop(state);
        if was_reset {
            device.reset();
        }
        if is_to_pause {
            self.set_paused(device.save());
        }
        is_running.then(|| work(device, session))
    }

    /// Handles a read of the registers.
    pub fn read(&self, offset: u64, data: &mut [u8]) {
        if let Some(at) = offset.checked_sub(register::CONFIG) {
            let state = self.state();
            let config = usize::try_from(at).ok().and_then(|at| state.config.get(at..)).unwrap_or(&[]);
            data.fill(0);
            data.iter_mut().zip(config).for_each(|(byte, value)| *byte = *value);
        } else if let Ok(data) = <&mut [u8; 4]>::try_from(&mut *data) {
            *data = self.register(offset).to_le_bytes();
        } else {
            data.fill(0);
        }
    }

    fn register(&self, offset: u64) -> u32 {
        self.register_in(&self.state(), offset)
    }

    fn register_in(&self, state: &State, offset: u64) -> u32 {
        match offset {
            register::MAGIC => MAGIC,
            register::VERSION => VERSION,
            register::DEVICE_ID => self.id,
            register::VENDOR_ID => VENDOR,
            register::INTERRUPT_STATUS => self.interrupt_status(),
            register::DEVICE_FEATURES => features_word(self.features, state.device_features_select),
            register::QUEUE_SIZE_MAX => {
                state.queues.get(state.queue_select).map_or(0, |queue| queue.max_size().into())
            }
            register::QUEUE_READY => state.queues.get(state.queue_select).is_some_and(Queue::ready).into(),
            register::STATUS => state.status,
            register::CONFIG_GENERATION => state.generation,
            offset if register::SHARED_MEMORY.contains(&offset) => u32::MAX,
            _ => 0,
        }
    }

    fn interrupt_status(&self) -> u32 {
        let always = if self.readable.is_used() { interrupt::USED } else { 0 };
        self.interrupt_status.load(Ordering::Acquire) | always
    }

    /// Handles a write to the registers.
    pub fn write(&self, offset: u64, data: &[u8]) {
        let Ok(value) = data.try_into().map(u32::from_le_bytes) else { return };
        match offset {
            register::QUEUE_NOTIFY => drop(self.kick.write(1)),
            register::INTERRUPT_ACKNOWLEDGE => {
                self.interrupt_status.fetch_and(!value, Ordering::AcqRel);
            }
            register::STATUS if value == 0 => self.reset(),
            register::STATUS => self.set_status(value),
            _ => self.state().set(offset, value),
        }
        if offset != register::QUEUE_NOTIFY {
            self.publish(&self.state());
        }
    }

    fn set_status(&self, value: u32) {
        let mut state = self.state();
        let has_unknown = state.driver_features & !self.features != 0;
        let has_version_1 = state.driver_features & 1 << VIRTIO_F_VERSION_1 != 0;
        // The driver reads the status back. If `FEATURES_OK` is clear, the device has refused the features (section
        // 3.1.1).
        let refused = if has_unknown || !has_version_1 { status::FEATURES_OK | status::DRIVER_OK } else { 0 };
        state.status = value & !refused | state.status & status::NEEDS_RESET;
        if state.status & status::DRIVER_OK != 0 {
            let event_idx = state.driver_features & 1 << VIRTIO_RING_F_EVENT_IDX != 0;
            let memory = &self.memory;
            for queue in &mut state.queues {
                queue.set_event_idx(event_idx);
                if queue.ready() && !queue.is_valid(memory) {
                    queue.set_ready(false);
                }
            }
            drop(state);
            // The device may have something to send at once.
            let _ = self.kick.write(1);
        }
    }

    fn reset(&self) {
        let mut state = self.state();
        state.queues.iter_mut().for_each(Queue::reset);
        (state.status, state.driver_features, state.queue_select) = (0, 0, 0);
        (state.session, state.was_reset) = (state.session + 1, true);
        self.interrupt_status.store(0, Ordering::Release);
        drop(state);
        let _ = self.kick.write(1);
    }

    /// Notifies the driver of used buffers.
    fn interrupt_for_used(&self) {
        self.interrupt_status.fetch_or(interrupt::USED, Ordering::AcqRel);
        self.raise();
    }

    /// Notifies the driver of a change of the configuration, or that the device needs a reset.
    fn interrupt_for_config(&self, state: &State) {
        self.interrupt_status.fetch_or(interrupt::CONFIG, Ordering::AcqRel);
        self.publish(state);
        self.raise();
    }

    fn raise(&self) {
        // There is nobody to tell, and the driver waits for the next one.
        let _ = self.interrupt.raise();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Returns true if the driver is ready and the device needs no reset.
    fn is_running(&self) -> bool {
        self.status & (status::DRIVER_OK | status::NEEDS_RESET) == status::DRIVER_OK
    }

    fn set(&mut self, offset: u64, value: u32) {
        match offset {
            register::DEVICE_FEATURES_SELECT => self.device_features_select = value,
            register::DRIVER_FEATURES_SELECT => self.driver_features_select = value,
            register::DRIVER_FEATURES if self.status & status::FEATURES_OK == 0 => {
                let shift = match self.driver_features_select {
                    0 => 0,
                    1 => 32,
                    // All features are in the first 64 bits.
                    _ => return,
                };
                self.driver_features &= !(u64::from(u32::MAX) << shift);
                self.driver_features |= u64::from(value) << shift;
            }
            register::QUEUE_SELECT => self.queue_select = usize::try_from(value).unwrap_or(usize::MAX),
            _ => self.set_queue(offset, value),
        }
    }

    fn set_queue(&mut self, offset: u64, value: u32) {
        let is_running = self.status & status::DRIVER_OK != 0;
        let Some(queue) = self.queues.get_mut(self.queue_select) else { return };
        // A queue in use cannot be changed. The driver has to reset the device first.
        if queue.ready() || is_running {
            return;
        }
        match offset {
            register::QUEUE_SIZE => queue.set_size(u16::try_from(value).unwrap_or(0)),
            register::QUEUE_READY => queue.set_ready(value == 1),
            register::DESCRIPTORS_LOW => queue.set_desc_table_address(Some(value), None),
            register::DESCRIPTORS_HIGH => queue.set_desc_table_address(None, Some(value)),
            register::AVAILABLE_LOW => queue.set_avail_ring_address(Some(value), None),
            register::AVAILABLE_HIGH => queue.set_avail_ring_address(None, Some(value)),
            register::USED_LOW => queue.set_used_ring_address(Some(value), None),
            register::USED_HIGH => queue.set_used_ring_address(None, Some(value)),
            _ => {}
        }
    }
}

/// Returns 32 feature bits, as selected by the value of `DeviceFeaturesSel`.
fn features_word(features: u64, select: u32) -> u32 {
    let bytes = features.to_le_bytes();
    match select {
        0 => u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        1 => u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
        _ => 0,
    }
}

/// The MMIO regions of all virtio devices, in a row. Reads of other addresses return all ones.
pub struct MmioBus {
    base: u64,
    devices: Vec<Arc<Transport>>,
}

impl MmioBus {
    /// Creates a bus with the devices at `base`, [`Transport::SIZE`] apart.
    pub fn new(base: u64, devices: Vec<Arc<Transport>>) -> Self {
        Self { base, devices }
    }

    /// Handles an MMIO read.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        match self.find(address) {
            Some((device, offset)) => device.read(offset, data),
            None => data.fill(0xff),
        }
    }

    /// Handles an MMIO write.
    pub fn write(&self, address: u64, data: &[u8]) {
        if let Some((device, offset)) = self.find(address) {
            device.write(offset, data);
        }
    }

    fn find(&self, address: u64) -> Option<(&Transport, u64)> {
        let offset = address.checked_sub(self.base)?;
        let device = self.devices.get(usize::try_from(offset / Transport::SIZE).ok()?)?;
        Some((device, offset % Transport::SIZE))
    }
}

#[cfg(test)]
mod tests;
