//! Coalesced writes to the console (`KVM_CAP_COALESCED_PIO`): KVM collects them in a ring, so they cost no exit of
//! their own.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use devices::PortBus;
use kvm_bindings::kvm_coalesced_mmio;
use kvm_ioctls::{IoEventAddress, VcpuFd, VmFd};

use crate::arch::x86_64::machine::COM;
use crate::kvm_error::{KvmError, KvmResultExt};

/// Controls whether KVM coalesces writes to the console's transmit register.
///
/// A kernel that prints polls the serial port: it reads the line status register and then writes a byte, and each of
/// these accesses is an exit. With coalescing, KVM puts the writes into a ring and resumes the guest. The next exit,
/// usually the next read of the line status, finds the writes in the ring. This halves the cost of a boot's messages.
/// Coalescing must end when the guest transmits by interrupt, because each write then raises the next interrupt and has
/// to be seen at once.
pub struct Coalescing {
    vm: Arc<VmFd>,
    state: Mutex<State>,
    /// False once the ring cannot hold writes any more. Exits then need not take the lock.
    used: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// KVM coalesces writes.
    On,
    /// The guest has enabled the transmit interrupt, perhaps only to probe it. Coalescing resumes if the guest disables
    /// the interrupt before it writes a byte.
    Paused,
    /// KVM does not coalesce writes: the guest transmits by interrupt, or coalescing was not wanted.
    Off,
}

impl Coalescing {
    const DATA: u16 = COM.base;
    const INTERRUPT_ENABLE: u16 = COM.base + 1;
    const TRANSMIT_INTERRUPT: u8 = 1 << 1;

    /// Starts to coalesce writes if `wanted`.
    pub fn new(vm: Arc<VmFd>, wanted: bool) -> Result<Self, KvmError> {
        if wanted {
            vm.register_coalesced_mmio(IoEventAddress::Pio(Self::DATA.into()), 1)
                .operation("coalesce console writes")?;
        }
        let state = Mutex::new(if wanted { State::On } else { State::Off });
        Ok(Self { vm, state, used: AtomicBool::new(wanted) })
    }

    /// Maps the ring of coalesced writes for a vCPU, which [`Coalescing::drain`] needs.
    pub fn attach(&self, vcpu: &mut VcpuFd) -> Result<(), KvmError> {
        if self.used.load(Ordering::Relaxed) {
            vcpu.map_coalesced_mmio_ring().operation("map the coalesced-write ring")?;
        }
        Ok(())
    }

    /// Carries out the coalesced writes, which `next` removes from the ring. Must be called after every exit, before
    /// the exit is handled.
    pub fn drain(&self, mut next: impl FnMut() -> Option<kvm_coalesced_mmio>, bus: &PortBus) {
        if !self.used.load(Ordering::Relaxed) {
            return;
        }
        // All vCPUs map the same ring, so the lock admits one reader at a time.
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

    /// Updates the state for a write that is about to be carried out.
    pub fn watch(&self, port: u16, data: &[u8]) {
        if !matches!(port, Self::DATA | Self::INTERRUPT_ENABLE) || !self.used.load(Ordering::Relaxed) {
            return;
        }
        let wants_interrupt = data.first().is_some_and(|byte| byte & Self::TRANSMIT_INTERRUPT != 0);
        let mut state = self.lock();
        let zone = IoEventAddress::Pio(Self::DATA.into());
        *state = match (*state, port) {
            // Neither call is expected to fail: the zone to be removed exists, and there was room for the zone to be
            // added.
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
