//! The guest's ends of the console ports.

use std::fs::File;
use std::io::{Error, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

use guest_agent::protocol;

/// Time limit for the ports to appear.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two checks.
pub const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The ports, all non-blocking.
pub struct Ports {
    pub control: Rc<File>,
    pub stdin: Rc<File>,
    pub stdout: Rc<File>,
    pub stderr: Rc<File>,
    pub terminal: Rc<File>,
}

impl Ports {
    /// Opens the ports of the first virtio console. They appear one by one after its driver has been loaded. The error
    /// is printed on the serial console.
    pub fn open() -> Result<Self, String> {
        let until = Instant::now() + TIMEOUT;
        Ok(Self {
            control: open(protocol::CONTROL, until)?,
            stdin: open(protocol::STDIN, until)?,
            stdout: open(protocol::STDOUT, until)?,
            stderr: open(protocol::STDERR, until)?,
            terminal: open(protocol::TERMINAL, until)?,
        })
    }
}

fn open(port: u32, until: Instant) -> Result<Rc<File>, String> {
    let path = PathBuf::from(format!("/dev/vport0p{port}"));
    loop {
        let opened = File::options().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path);
        match opened {
            // While the host's end is closed, writes block and reads return end-of-file.
            Ok(file) if is_connected(&file) => return Ok(Rc::new(file)),
            Ok(_) if Instant::now() > until => {
                return Err(format!("{}: the host has not opened this port", path.display()));
            }
            Err(error) if Instant::now() > until => return Err(reason(&path.display().to_string(), &error)),
            _ => thread::sleep(POLL_INTERVAL),
        }
    }
}

/// Returns true if the host has opened its end.
fn is_connected(port: &File) -> bool {
    let mut poll = libc::pollfd { fd: port.as_raw_fd(), events: 0, revents: 0 };
    // SAFETY: The pointer and the count describe one valid entry.
    unsafe { libc::poll(&raw mut poll, 1, 0) };
    poll.revents & libc::POLLHUP == 0
}

fn reason(path: &str, error: &Error) -> String {
    if error.kind() == ErrorKind::NotFound {
        format!("{path}: this kernel has no virtio console (CONFIG_VIRTIO_MMIO, CONFIG_VIRTIO_CONSOLE)")
    } else {
        format!("{path}: {error}")
    }
}
