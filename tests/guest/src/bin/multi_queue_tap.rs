//! Makes a tap device with several queues, which Busybox cannot: `multi_queue_tap NAME`.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::{env, io, mem};

fn main() -> io::Result<()> {
    let name = env::args().nth(1).expect("multi_queue_tap NAME");
    let file = File::options().read(true).write(true).open("/dev/net/tun")?;
    // SAFETY: all of its fields may be 0.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_MULTI_QUEUE;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).expect("the flags have 15 bits");
    // SAFETY: the request reads and writes an `ifreq`.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    // SAFETY: the request takes a number.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETPERSIST, 1) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
