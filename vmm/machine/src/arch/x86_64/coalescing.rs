//! The console's writes that KVM holds back, so that they cost no exit.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devices::PortBus;
use kvm_bindings::kvm_coalesced_mmio;
use kvm_ioctls::{IoEventAddress, VcpuFd, VmFd};

use crate::arch::x86_64::machine::COM;
use crate::kvm_error::{Doing, KvmError};

/// Whether KVM holds back writes to the console's transmit register.
///
/// A kernel that prints polls: it reads the line status, then writes a byte, each of them an exit. KVM can keep
/// the writes in a ring and go on; the next exit, the next look at the line status, finds them there. That halves
/// the cost of a boot's messages. It must end when the guest sends by interrupt: then the write itself has to be
/// seen, for it is what raises the next interrupt.
pub struct Coalescing {
    vm: Arc<VmFd>,
    state: Mutex<State>,
    /// Whether the ring may hold anything, so that most machines' exits take no lock.
    used: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Writes are held back.
    On,
    /// The guest has switched the transmit interrupt on, maybe only to try it.
    Paused,
    /// The guest sends by interrupt.
    Off,
}

impl Coalescing {
    const DATA: u16 = COM.base;
    const INTERRUPT_ENABLE: u16 = COM.base + 1;
    const TRANSMIT_INTERRUPT: u8 = 1 << 1;

    /// Begins to hold back writes, if `wanted`.
    pub fn new(vm: Arc<VmFd>, wanted: bool) -> Result<Self, KvmError> {
        if wanted {
            vm.register_coalesced_mmio(IoEventAddress::Pio(Self::DATA.into()), 1)
                .doing("hold back console output")?;
        }
        let state = Mutex::new(if wanted { State::On } else { State::Off });
        Ok(Self { vm, state, used: AtomicBool::new(wanted) })
    }

    /// Prepares a vCPU for [`Coalescing::drain`].
    pub fn attach(&self, vcpu: &mut VcpuFd) -> Result<(), KvmError> {
        if self.used.load(Ordering::Relaxed) {
            vcpu.map_coalesced_mmio_ring().doing("map the ring of held-back writes")?;
        }
        Ok(())
    }

    /// Carries out the writes that KVM held back, which `next` takes from the ring; after every exit, before it is dealt with.
    pub fn drain(&self, mut next: impl FnMut() -> Option<kvm_coalesced_mmio>, bus: &PortBus) {
        if !self.used.load(Ordering::Relaxed) {
            return;
        }
        // The machine has one ring, and each vCPU a view of it: one reader at a time.
        let state = self.lock();
        while let Some(write) = next() {
            let len = write.data.len().min(write.len as usize);
            if let Ok(port) = u16::try_from(write.phys_addr) {
                bus.write(port, &write.data[..len]);
            }
        }
        if *state == State::Off {
            self.used.store(false, Ordering::Relaxed);
        }
    }

    /// Looks at a write that is about to be carried out.
    pub fn watch(&self, port: u16, data: &[u8]) {
        if !matches!(port, Self::DATA | Self::INTERRUPT_ENABLE) || !self.used.load(Ordering::Relaxed) {
            return;
        }
        let wants_interrupt = data.first().is_some_and(|byte| byte & Self::TRANSMIT_INTERRUPT != 0);
        let mut state = self.lock();
        let zone = IoEventAddress::Pio(Self::DATA.into());
        *state = match (*state, port) {
            // KVM cannot fail to find the zone that it has, nor lack room for the one that it had.
            (State::On, Self::INTERRUPT_ENABLE) if wants_interrupt => {
                self.vm.unregister_coalesced_mmio(zone, 1).map_or(State::On, |()| State::Paused)
            }
            (State::Paused, Self::INTERRUPT_ENABLE) if !wants_interrupt => {
                self.vm.register_coalesced_mmio(zone, 1).map_or(State::Off, |()| State::On)
            }
            (State::Paused, Self::DATA) => State::Off,
            (state, _) => state,
        };
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
