//! The signals that make a vCPU's thread leave the guest. When a counter overflows, its perf event sends a signal to
//! the vCPU's own thread. The thread blocks the signal except in `KVM_RUN` (`KVM_SET_SIGNAL_MASK`). So no signal
//! handler is needed: `KVM_RUN` returns, or does not enter the guest at all, and the thread takes the signal from its
//! queue. No other thread and no lock is involved, and a signal that arrives just before the entry is not lost. The
//! host's own samples of the vCPU have a signal of their own, so that no counter of the guest's is looked at for them.

use std::io;

use kvm_bindings::{KVMIO, kvm_signal_mask};
use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;
use vpmu::Cause;
use vpmu_perf::SAMPLE_SIGNAL;

use crate::kvm_error::{KvmError, KvmResultExt};
use crate::signals;

ioctl_iow_nr!(KVM_SET_SIGNAL_MASK, KVMIO, 0x8b, kvm_signal_mask);

/// The signal that perf events send by default (`O_ASYNC`). It is not queued: there is one, however many events
/// overflow.
const ALARM: libc::c_int = libc::SIGIO;

/// Returns the signal by which timers and other threads make a vCPU's thread leave the guest.
pub fn kick_signal() -> libc::c_int {
    libc::SIGRTMIN()
}

/// Blocks these signals in this thread, and in all threads that it starts from now on. vCPUs' threads unblock them in
/// `KVM_RUN` only.
pub fn block_exit_signals() -> io::Result<()> {
    signals::block(&set()).map(drop)
}

fn set() -> libc::sigset_t {
    signals::set_of(&[ALARM, SAMPLE_SIGNAL, kick_signal()])
}

/// The signals that make this thread's vCPU leave the guest.
pub struct ExitSignals {
    set: libc::sigset_t,
    /// A sample is due, since [`Self::take_sample`] was last called.
    is_sample_due: bool,
    /// Nothing but a sample's signal was taken last time.
    was_sample: bool,
}

impl ExitSignals {
    /// Blocks the signals in this thread except while it runs the vCPU.
    pub fn unblock_in_run(fd: &VcpuFd) -> Result<Self, KvmError> {
        const WHAT: &str = "set a vCPU's signal mask";
        /// `struct kvm_signal_mask`, with a set of 64 signals behind it.
        #[repr(C)]
        struct Mask {
            len: u32,
            set: [u8; 8],
        }
        let signals = set();
        let others = signals::block(&signals).map_err(kvm_ioctls::Error::from).operation(WHAT)?;
        let mask = Mask { len: 8, set: others.to_ne_bytes() };
        // SAFETY: `mask` has the length that it states, and KVM only reads from it.
        match unsafe { ioctl_with_ref(fd, KVM_SET_SIGNAL_MASK(), &mask) } {
            0 => Ok(Self { set: signals, is_sample_due: false, was_sample: false }),
            _ => Err(kvm_ioctls::Error::last()).operation(WHAT),
        }
    }

    /// Returns why `KVM_RUN` returned although the guest has caused no exit, and takes the signals from the queue up
    /// to the first alarm or the first sample. If signals remain in the queue, the next `KVM_RUN` returns at once.
    /// Returns [`Cause::Kick`] also if no signal is pending (`KVM_RUN` returned EAGAIN). A spurious kick is harmless.
    pub fn take(&mut self, fd: &mut VcpuFd) -> Cause {
        let mut kicked = std::mem::take(&mut fd.get_kvm_run().immediate_exit) != 0;
        let was_sample = std::mem::take(&mut self.was_sample);
        // Kicks are real-time signals, so they queue up while a vCPU is paused.
        loop {
            match signals::take(&self.set) {
                Some(ALARM) if kicked => return Cause::AlarmAndKick,
                Some(ALARM) => return Cause::Alarm,
                // It comes before all others, and hardly ever with one. But a clock may send it whenever the others are
                // left for the next time.
                Some(SAMPLE_SIGNAL) => {
                    self.is_sample_due = true;
                    if !kicked && !was_sample {
                        self.was_sample = true;
                        return Cause::Guest;
                    }
                }
                Some(_) => kicked = true,
                None if self.is_sample_due && !kicked => return Cause::Guest,
                None => return Cause::Kick,
            }
        }
    }

    /// Returns whether a sample of the vCPU is due, which is then taken.
    pub fn take_sample(&mut self) -> bool {
        std::mem::take(&mut self.is_sample_due)
    }
}
