//! A tap device of Linux (`Documentation/networking/tuntap.rst`), which belongs to the user who runs the VM. Its frames
//! have the header of virtio, so that the host's kernel does what the guest's leaves to do.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use virtio_bindings::virtio_net::{
    VIRTIO_NET_F_CSUM, VIRTIO_NET_F_GUEST_CSUM, VIRTIO_NET_F_GUEST_ECN, VIRTIO_NET_F_GUEST_TSO4,
    VIRTIO_NET_F_GUEST_TSO6, VIRTIO_NET_F_HOST_ECN, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6,
};

use super::{Backend, Frame, Offer};

/// Flags of a tap device that the kernel's `tun_flags` and `TUNSETIFF` share (`linux/if_tun.h`).
const TAP: libc::c_int = libc::IFF_TAP;
const MULTI_QUEUE: libc::c_int = libc::IFF_MULTI_QUEUE;

/// Frames that a driver accepts, as features of virtio and as flags of `TUNSETOFFLOAD`.
const OFFLOADS: [(u32, libc::c_uint); 4] = [
    (VIRTIO_NET_F_GUEST_CSUM, libc::TUN_F_CSUM),
    (VIRTIO_NET_F_GUEST_TSO4, libc::TUN_F_TSO4),
    (VIRTIO_NET_F_GUEST_TSO6, libc::TUN_F_TSO6),
    (VIRTIO_NET_F_GUEST_ECN, libc::TUN_F_TSO_ECN),
];

/// The reason why a tap device cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// There is no such device.
    #[error("there is no such tap device (`sudo ip tuntap add {0} mode tap user $USER` makes one)")]
    Absent(String),
    /// It is another kind of device.
    #[error("it is no tap device")]
    Kind,
    /// It belongs to somebody else.
    #[error("it belongs to another user")]
    Owner,
    /// Another process has it open.
    #[error("in use by another program")]
    InUse,
    /// It cannot be opened.
    #[error(transparent)]
    Open(#[from] io::Error),
}

/// A queue of a tap device.
#[derive(Debug)]
pub struct Tap {
    file: File,
}

impl Tap {
    /// Opens as many queues of an existing tap device as there are pairs in the offer.
    pub fn open(name: &str, offer: Offer) -> Result<Vec<Self>, TapError> {
        let multi_queue = flags(name)? & MULTI_QUEUE;
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
        let open = |_| {
            let file = options.open("/dev/net/tun")?;
            attach(&file, name, multi_queue).map_err(|error| match error.raw_os_error() {
                Some(libc::EBUSY) => TapError::InUse,
                Some(libc::EPERM) => TapError::Owner,
                _ => TapError::Open(error),
            })?;
            Ok(Self { file })
        };
        (0..offer.pairs).map(open).collect()
    }

    /// Returns what a device with this tap device offers: several pairs of queues, at most `pairs`, if it was made for
    /// that. Checks that there is one: `TUNSETIFF` would make it, if it may.
    pub fn offer_of(name: &str, pairs: u16) -> Result<Offer, TapError> {
        let mtu = (!name.contains('/')).then(|| about(name, "mtu").ok()).flatten();
        let mtu = mtu.ok_or_else(|| TapError::Absent(name.to_owned()))?;
        let pairs = if flags(name)? & MULTI_QUEUE == 0 { 1 } else { pairs };
        let sent = [VIRTIO_NET_F_CSUM, VIRTIO_NET_F_HOST_TSO4, VIRTIO_NET_F_HOST_TSO6, VIRTIO_NET_F_HOST_ECN];
        let received = OFFLOADS.map(|(feature, _)| feature);
        let features = sent.into_iter().chain(received).fold(0, |features, feature| features | 1 << feature);
        Ok(Offer { features, mtu: mtu.trim().parse().unwrap_or(u16::MAX), pairs })
    }
}

/// Returns the flags of a tap device.
fn flags(name: &str) -> Result<libc::c_int, TapError> {
    let flags = about(name, "tun_flags").map_err(|_| TapError::Kind)?;
    let flags = libc::c_int::from_str_radix(flags.trim().trim_start_matches("0x"), 16).unwrap_or(0);
    if flags & TAP == 0 { Err(TapError::Kind) } else { Ok(flags) }
}

/// Returns what the kernel knows about a network device.
fn about(name: &str, what: &str) -> io::Result<String> {
    fs::read_to_string(format!("/sys/class/net/{name}/{what}"))
}

/// Makes an open `/dev/net/tun` a queue of a tap device.
fn attach(file: &File, name: &str, more_flags: libc::c_int) -> io::Result<()> {
    // SAFETY: all of its fields may be 0.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes().take(libc::IFNAMSIZ - 1)) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let flags = TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | more_flags;
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).expect("the flags have 15 bits");
    // SAFETY: the request reads and writes an `ifreq`.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    let size = libc::c_int::try_from(Frame::HEADER).expect("it is small");
    // SAFETY: the request reads an `int`.
    check(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &raw const size) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl Backend for Tap {
    fn accept(&mut self, features: u64) -> io::Result<()> {
        let accepted = OFFLOADS.into_iter().filter(|(feature, _)| features & 1 << feature != 0);
        let flags = accepted.fold(0, |flags, (_, flag)| flags | flag);
        // SAFETY: the request takes flags.
        check(unsafe { libc::ioctl(self.file.as_raw_fd(), libc::TUNSETOFFLOAD, libc::c_ulong::from(flags)) })
    }

    fn receive(&mut self, frame: &mut Frame) -> io::Result<bool> {
        match frame.fill(|bytes| self.file.read(bytes)) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            // The device is down, and can be up again.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn has_room(&mut self) -> io::Result<bool> {
        Ok(true)
    }

    fn is_full(&self) -> bool {
        false
    }

    fn send(&mut self, frame: &mut Frame) -> io::Result<()> {
        // The kernel refuses what it does not like, and all while the device is down.
        let _ = self.file.write(frame.bytes());
        Ok(())
    }

    fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_not_there_is_not_made() {
        for name in ["tally-none", "../lo", ""] {
            let said = Tap::offer_of(name, 1).unwrap_err().to_string();
            assert!(said.starts_with("there is no such tap device"), "{name}: {said}");
        }
        assert_eq!(Tap::offer_of("lo", 1).unwrap_err().to_string(), "it is no tap device");
    }
}
