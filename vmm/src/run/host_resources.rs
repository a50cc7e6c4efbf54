//! Host resources for the guest: shared folders, disks and a network.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, Result, bail};
use devices::Access;
use devices::fs::Share;
use devices::virtio::{Device, Disk, Net, SharedFolder};
use guest_agent::protocol;
use tally_machine::MAX_VIRTIO_DEVICES;

use crate::cli::Run;
use crate::cli::network::Network;
use crate::run::network;
use crate::sandbox::{self, Reach, Thread};

/// Directories of the default guest that it needs: programs, libraries, their data, and directories that programs
/// write to. A share at or above one of them would hide it.
#[rustfmt::skip]
const GUESTS_OWN: [&str; 17] = [
    "/bin", "/etc", "/lib/modules", "/lib/tally", "/lib/terminfo", "/lib/x86_64-linux-gnu", "/lib64", "/root", "/run",
    "/sbin", "/tmp", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/sbin", "/usr/share/doc/linux-perf", SHARED_MEMORY,
];
/// Mount points of the kernel's file systems. A share cannot be below them, except below [`SHARED_MEMORY`].
const KERNEL_FILE_SYSTEMS: [&str; 3] = ["/dev", "/proc", "/sys"];
const SHARED_MEMORY: &str = "/dev/shm";
/// Maximum number of disks, shares and networks together. One virtio device is reserved for the agent.
const MAX_DEVICES: usize = MAX_VIRTIO_DEVICES - 1;

/// Devices for disks, shares and a network, and the agent's part in mounting them.
pub struct HostResources {
    pub devices: Vec<Box<dyn Device>>,
    pub threads: Vec<DeviceThread>,
    /// The agent's part.
    pub setup: GuestSetup,
}

/// What the agent sets up before it runs the command.
pub struct GuestSetup {
    /// Shares that it mounts.
    pub shares: Vec<protocol::Share>,
    /// The network that it sets up.
    pub network: Option<protocol::Network>,
    /// Working directory of the command, if this process's working directory is in a share.
    pub working_dir: Option<OsString>,
}

/// The thread that serves a device.
pub struct DeviceThread {
    pub name: String,
    pub kind: Thread,
    /// What it may open.
    pub reach: Vec<Reach>,
}

/// Opens the disks and shares that the options name. The disks come first, so that their names in the guest follow the
/// order of the options.
pub fn devices(options: &Run) -> Result<HostResources> {
    let (mut devices, mut threads) = (Vec::<Box<dyn Device>>::new(), Vec::new());
    if options.disk.len() + options.share.len() + usize::from(options.net.is_some()) > MAX_DEVICES {
        bail!("--disk, --share, --net: a guest can have {MAX_DEVICES} of them together");
    }
    for disk in &options.disk {
        let device =
            Disk::open(&disk.path, disk.access).with_context(|| format!("--disk {}", disk.path.display()))?;
        threads.push(DeviceThread {
            name: format!("disk{}", devices.len()),
            kind: Thread::Disk,
            reach: Vec::new(),
        });
        devices.push(Box::new(device));
    }
    let mut shares: Vec<protocol::Share> = Vec::new();
    for (number, share) in (0..).zip(&options.share) {
        let folder = Share::open(&share.path, share.access, options.share.len())?;
        let path = guest_path(&share.path)?;
        let tag = SharedFolder::tag(number);
        threads.push(DeviceThread {
            name: format!("share{number}"),
            kind: Thread::Share,
            reach: vec![reach(&share.path, share.access)?],
        });
        devices.push(Box::new(SharedFolder::new(folder, number)));
        shares.push(protocol::Share { tag: tag.into(), path: path.into(), access: mode_of(share.access) });
    }
    // Sorting by path puts a directory before its subdirectories. If it were mounted after them, it would hide them.
    shares.sort_by(|one, other| one.path.cmp(&other.path));
    if let Some(pair) = shares.windows(2).find(|pair| pair[0].path == pair[1].path) {
        bail!("--share {}: given twice", Path::new(&pair[0].path).display());
    }
    let network = options.net.as_ref().map(|net| network(options, net)).transpose()?;
    let network = network.map(|(device, about)| {
        threads.push(DeviceThread { name: "net".into(), kind: Thread::Network, reach: Vec::new() });
        devices.push(Box::new(device));
        about
    });
    let working_dir =
        env::current_dir().ok().filter(|here| shares.iter().any(|share| here.starts_with(&share.path)));
    let working_dir = working_dir.map(PathBuf::into_os_string);
    Ok(HostResources { devices, threads, setup: GuestSetup { shares, network, working_dir } })
}

/// Opens the network, unless the guest is only to be saved: then nobody is there whom it could reach.
fn network(options: &Run, net: &Network) -> Result<(Net, protocol::Network)> {
    if !options.publish.is_empty() && !matches!(net, Network::User(_)) {
        bail!("--publish is for --net user, not for --net {net}");
    }
    match &options.save_template {
        Some(_) => network::unplugged(net, options.cpus),
        None => network::open(net, options.cpus, &options.publish),
    }
}

/// Returns what the thread of a share may open.
fn reach(folder: &Path, access: Access) -> Result<Reach> {
    let access = match access {
        Access::ReadOnly => sandbox::Access::Read,
        Access::ReadWrite => sandbox::Access::Write,
    };
    Reach::to(folder, access).with_context(|| format!("--share {}", folder.display()))
}

/// Returns the path of a shared folder in the guest, which is its canonical path on the host.
fn guest_path(folder: &Path) -> Result<PathBuf> {
    let path = fs::canonicalize(folder).with_context(|| format!("--share {}", folder.display()))?;
    if let Some(advice) = conflict(&path) {
        bail!("--share {}: the guest has a {} of its own; {advice}", folder.display(), path.display());
    }
    Ok(path)
}

/// Returns advice for the user if a share at this path would hide something that the default guest needs.
fn conflict(path: &Path) -> Option<&'static str> {
    if KERNEL_FILE_SYSTEMS.iter().any(|own| path.starts_with(own)) && !path.starts_with(SHARED_MEMORY) {
        Some("share a folder elsewhere")
    } else if GUESTS_OWN.iter().any(|own| Path::new(own).starts_with(path)) {
        Some("share a folder in it")
    } else {
        None
    }
}

fn mode_of(access: Access) -> protocol::Access {
    match access {
        Access::ReadOnly => protocol::Access::ReadOnly,
        Access::ReadWrite => protocol::Access::ReadWrite,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_cannot_hide_what_the_guest_needs() {
        let conflict = |path: &&str| conflict(Path::new(path));
        let hiding =
            ["/", "/etc", "/lib", "/root", "/run", "/tmp", "/dev/shm", "/usr", "/usr/lib", "/usr/share"];
        assert_eq!(hiding.iter().find(|path| conflict(path) != Some("share a folder in it")), None);
        let kernels = ["/dev", "/dev/pts", "/proc", "/proc/sys", "/sys", "/sys/kernel/debug"];
        assert_eq!(kernels.iter().find(|path| conflict(path) != Some("share a folder elsewhere")), None);
        let free = [
            "/usr/local",
            "/usr/src",
            "/usr/lib/jvm",
            "/usr/share/dict",
            "/opt",
            "/srv",
            "/home",
            "/mnt",
            "/var",
        ];
        assert_eq!(free.iter().find(|path| conflict(path).is_some()), None);
        let within = ["/root/work", "/tmp/work", "/dev/shm/work", "/run/user/1000", "/tmpfs", "/device"];
        assert_eq!(within.iter().find(|path| conflict(path).is_some()), None);
    }

    #[test]
    fn a_refused_share_names_the_path_and_an_alternative() {
        let said = |path: &str| guest_path(Path::new(path)).unwrap_err().to_string();
        assert_eq!(said("/etc"), "--share /etc: the guest has a /etc of its own; share a folder in it");
        assert_eq!(said("/dev"), "--share /dev: the guest has a /dev of its own; share a folder elsewhere");
    }
}
