//! Code of known length: the instructions that run in user mode between two system calls.
//!
//! A counter that the first call enables and the second call disables has counted exactly the instructions in between,
//! and the instruction of the second call: a system call's own instruction is counted in user mode. RISC-V leaves this
//! to the implementation; the simulated RISC-V host does it as x86 does.

#[cfg(target_arch = "riscv64")]
mod riscv64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "riscv64")]
pub use riscv64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

use crate::failure::Failure;

/// Raw event codes of a processor.
pub struct Codes {
    pub instructions: u64,
    pub branches: u64,
    /// `None` on Intel, where it is not an architectural event.
    pub conditional_branches: Option<u64>,
}

impl Codes {
    /// Returns the codes of the processor that this program runs on.
    pub fn of_this_processor() -> Result<Self, Failure> {
        codes().ok_or(Failure::Unknown("the raw event codes of this processor are not known"))
    }
}

/// A system call with up to three arguments.
#[derive(Clone, Copy)]
pub struct Call {
    number: i64,
    arguments: [u64; 3],
}

impl Call {
    /// Returns an `ioctl` on a file descriptor.
    pub fn ioctl(fd: i32, request: u32, argument: u64) -> Self {
        let fd = u64::try_from(fd).expect("file descriptors are not negative");
        Self { number: libc::SYS_ioctl, arguments: [fd, request.into(), argument] }
    }

    /// Returns the `prctl` that enables all counters that this thread has opened.
    pub fn enable_all() -> Self {
        Self::prctl(libc::PR_TASK_PERF_EVENTS_ENABLE)
    }

    /// Returns the `prctl` that disables all counters that this thread has opened.
    pub fn disable_all() -> Self {
        Self::prctl(libc::PR_TASK_PERF_EVENTS_DISABLE)
    }

    fn prctl(option: i32) -> Self {
        let option = u64::try_from(option).expect("options are not negative");
        Self { number: libc::SYS_prctl, arguments: [option, 0, 0] }
    }
}

/// Addresses of the loop's two instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loop {
    pub decrement: u64,
    pub jump: u64,
}
