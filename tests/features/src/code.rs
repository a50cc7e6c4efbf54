//! Code of known length: what runs in user mode between two system calls, counted instruction by instruction.
//!
//! A counter that the first call switches on and the second one off has seen exactly what is written here. A system call's
//! own instruction is fetched in user mode and counts there, so the second one belongs to it and the first does not. (On the
//! simulated RISC-V host, too; the architecture leaves it to the processor.)

#[cfg(target_arch = "riscv64")]
mod riscv64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "riscv64")]
pub use riscv64::*;
#[cfg(target_arch = "x86_64")]
pub use x86_64::*;

/// A system call with up to three arguments.
#[derive(Clone, Copy)]
pub struct Call {
    number: i64,
    arguments: [u64; 3],
}

impl Call {
    /// An `ioctl` on a descriptor.
    pub fn ioctl(fd: i32, request: u32, argument: u64) -> Self {
        let fd = u64::try_from(fd).expect("descriptors are not negative");
        Self { number: libc::SYS_ioctl, arguments: [fd, request.into(), argument] }
    }

    /// Switches all counters on that this thread has made.
    pub fn enable_all() -> Self {
        Self::prctl(libc::PR_TASK_PERF_EVENTS_ENABLE)
    }

    /// Switches them all off.
    pub fn disable_all() -> Self {
        Self::prctl(libc::PR_TASK_PERF_EVENTS_DISABLE)
    }

    fn prctl(option: i32) -> Self {
        let option = u64::try_from(option).expect("options are not negative");
        Self { number: libc::SYS_prctl, arguments: [option, 0, 0] }
    }
}

/// Where the two instructions of the loop are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Loop {
    pub decrement: u64,
    pub jump: u64,
}
