//! How a vCPU's thread leaves the guest when one of its counters has overflowed: the perf event sends a signal to this very
//! thread, which lets signals of that kind arrive in the guest only. So there is no handler: `KVM_RUN` returns, or does not
//! begin, and the signal is taken from the queue. No other thread and no lock is involved, and no alarm can come between the
//! last look and the entry into the guest.

use std::io;

use kvm_bindings::{KVMIO, kvm_signal_mask};
use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;
use vpmu::Cause;

use crate::kvm_error::{Doing, KvmError};
use crate::signals;

ioctl_iow_nr!(KVM_SET_SIGNAL_MASK, KVMIO, 0x8b, kvm_signal_mask);

/// What perf events send if nobody says otherwise. However many overflow, there is one.
const ALARM: libc::c_int = libc::SIGIO;

/// The signal with which timers and other threads call a vCPU's thread out of the guest.
pub fn call() -> libc::c_int {
    libc::SIGRTMIN()
}

/// Has the signals wait in this thread and those that it starts from now on: they are for vCPUs' threads in their guests.
pub fn hold_back() -> io::Result<()> {
    signals::block(&set()).map(drop)
}

fn set() -> libc::sigset_t {
    signals::set_of(&[ALARM, call()])
}

/// The signals that have this thread's vCPU leave the guest.
pub struct Calls(libc::sigset_t);

impl Calls {
    /// From now on they arrive while this thread runs the vCPU, and wait until it does.
    pub fn of(fd: &VcpuFd) -> Result<Self, KvmError> {
        const WHAT: &str = "say which signals end a run";
        /// As KVM wants it: how many bytes the set has, and the set.
        #[repr(C)]
        struct Mask {
            len: u32,
            set: [u8; 8],
        }
        let calls = set();
        let others = signals::block(&calls).map_err(kvm_ioctls::Error::from).doing(WHAT)?;
        let mask = Mask { len: 8, set: others.to_ne_bytes() };
        // SAFETY: it is as long as it says, and KVM only reads it.
        match unsafe { ioctl_with_ref(fd, KVM_SET_SIGNAL_MASK(), &mask) } {
            0 => Ok(Self(calls)),
            _ => Err(kvm_ioctls::Error::last()).doing(WHAT),
        }
    }

    /// Returns why `KVM_RUN` returned without an exit of the guest's, and takes that signal from the queue. If there are more
    /// signals, the next `KVM_RUN` returns at once.
    pub fn take(&mut self, fd: &mut VcpuFd) -> Cause {
        let mut called = std::mem::take(&mut fd.get_kvm_run().immediate_exit) != 0;
        // Calls queue up while a vCPU stands still. An alarm comes before them.
        loop {
            match signals::take(&self.0) {
                Some(ALARM) if called => return Cause::AlarmAndCall,
                Some(ALARM) => return Cause::Alarm,
                Some(_) => called = true,
                None => return Cause::Call,
            }
        }
    }
}
