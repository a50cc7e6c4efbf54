//! Events that a program opens by itself, without the library.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use tally_ebb::Attr;

use crate::promise::Failure;

pub const ENABLE: u64 = 0x2400;
pub const DISABLE: u64 = 0x2401;
/// Enables a sampling event, which is disabled after as many samples as the argument says.
pub const REFRESH: u64 = 0x2402;

/// Opens an event. `task` and `cpu` are those of `perf_event_open`.
pub fn open(attr: &Attr, task: i32, cpu: i32) -> Result<OwnedFd, Failure> {
    // SAFETY: `attr` is a valid description of its own size.
    let fd = unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const *attr, task, cpu, -1, 0) };
    let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the kernel has just returned this file.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes a request to an event, with an argument.
pub fn request(event: &OwnedFd, request: u64, argument: i32) -> Result<(), Failure> {
    // SAFETY: the requests of this module take a number or nothing.
    match unsafe { libc::ioctl(event.as_raw_fd(), request, argument) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error().into()),
    }
}

pub fn count(event: &OwnedFd) -> Result<u64, Failure> {
    let mut count = 0_u64;
    // SAFETY: `count` has room for what is read.
    match unsafe { libc::read(event.as_raw_fd(), (&raw mut count).cast(), size_of::<u64>()) } {
        8 => Ok(count),
        _ => Err(Failure("the event has no counter".into())),
    }
}
