//! Coalesced writes to the console (`KVM_CAP_COALESCED_PIO`): KVM collects them in a ring, so they cost no exit of
//! their own.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use devices::PortBus;
use kvm_bindings::kvm_coalesced_mmio;
use kvm_ioctls::{IoEventAddress, VcpuFd, VmFd};

use crate::arch::x86_64::layout::COM;
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
    state: Turns<State>,
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
        let state = Turns::new(if wanted { State::On } else { State::Off });
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
    ///
    /// All vCPUs map the same ring, so one at a time removes from it, whoever has written. It may have to wait for the
    /// console's reader; others wait for it only if their exit `is_ordered` after the writes.
    pub fn drain(
        &self,
        mut next: impl FnMut() -> Option<kvm_coalesced_mmio>,
        bus: &PortBus,
        is_ordered: bool,
    ) {
        if !self.used.load(Ordering::Relaxed) {
            return;
        }
        self.state.work(is_ordered, |state| {
            while let Some(write) = next() {
                let len = write.data.len().min(write.len as usize);
                if let Ok(port) = u16::try_from(write.phys_addr) {
                    bus.write(port, &write.data[..len]);
                }
            }
            if *state == State::Off {
                self.used.store(false, Ordering::Relaxed);
            }
        });
    }

    /// Updates the state for a write that is about to be carried out.
    pub fn watch(&self, port: u16, data: &[u8]) {
        if !matches!(port, Self::DATA | Self::INTERRUPT_ENABLE) || !self.used.load(Ordering::Relaxed) {
            return;
        }
        let wants_interrupt = data.first().is_some_and(|byte| byte & Self::TRANSMIT_INTERRUPT != 0);
        let mut state = self.state.wait();
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
}

/// Work that one thread does at a time, for all that ask for it.
struct Turns<T> {
    turn: Mutex<T>,
    /// Somebody has asked since the last work began.
    asked: AtomicBool,
}

impl<T> Turns<T> {
    fn new(value: T) -> Self {
        Self { turn: Mutex::new(value), asked: AtomicBool::new(false) }
    }

    /// Does the work, unless another thread is at it, which then does it once more. If this thread `waits`, the work
    /// has been done when this returns.
    fn work(&self, waits: bool, mut work: impl FnMut(&mut T)) {
        self.asked.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let mut turn = if waits { Some(self.wait()) } else { self.try_take() };
        while let Some(mut value) = turn {
            self.asked.swap(false, Ordering::SeqCst);
            work(&mut value);
            drop(value);
            // A thread that has found the turn taken has asked before this.
            fence(Ordering::SeqCst);
            turn = if self.asked.load(Ordering::SeqCst) { self.try_take() } else { None };
        }
    }

    fn wait(&self) -> MutexGuard<'_, T> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_take(&self) -> Option<MutexGuard<'_, T>> {
        match self.turn.try_lock() {
            Ok(turn) => Some(turn),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_vcpu_does_not_wait_for_another_that_prints_and_nothing_is_left_in_the_ring() {
        let ring = &Turns::new(Vec::new());
        thread::scope(|scope| {
            let (begins, has_begun) = channel();
            let (reads, is_read) = channel();
            scope.spawn(move || {
                ring.work(true, |written| {
                    written.push("by the one that prints");
                    begins.send(()).unwrap();
                    is_read.recv().unwrap();
                });
            });
            has_begun.recv().unwrap();
            ring.work(false, |_| panic!("the other one is at it"));
            reads.send(()).unwrap();
            has_begun.recv_timeout(Duration::from_mins(1)).expect("it does the work once more");
            reads.send(()).unwrap();
        });
        assert_eq!(*ring.wait(), ["by the one that prints"; 2]);
        ring.work(false, Vec::clear);
        assert!(ring.wait().is_empty());
    }

    #[test]
    fn an_access_of_the_port_comes_after_the_coalesced_writes() {
        let ring = Turns::new(());
        let is_printed = AtomicBool::new(false);
        let (begins, has_begun) = channel();
        let (reads, is_read) = channel::<()>();
        thread::scope(|scope| {
            let (ring, is_printed) = (&ring, &is_printed);
            scope.spawn(move || {
                ring.work(false, |()| {
                    let _ = begins.send(());
                    // Only the first time is there somebody who reads.
                    let _ = is_read.recv();
                    is_printed.store(true, Ordering::Relaxed);
                });
            });
            has_begun.recv().unwrap();
            let accesses = scope.spawn(move || {
                ring.work(true, |()| {});
                is_printed.load(Ordering::Relaxed)
            });
            reads.send(()).unwrap();
            drop(reads);
            assert!(accesses.join().unwrap());
        });
    }
}
