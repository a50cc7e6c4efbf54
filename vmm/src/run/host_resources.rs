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
use crate::run::root::OpenedRoot;
use crate::run::{network, root};
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
/// Directories that a guest with a root has for itself. A share at one of them would hide what is in it.
const ROOTS_OWN: [&str; 4] = ["/", "/run", "/tmp", SHARED_MEMORY];
/// Maximum number of disks, shares, roots and networks together. One virtio device is reserved for the agent.
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
    /// Tag of the share that becomes the root, if one does.
    pub root: Option<OsString>,
    /// Shares that it mounts.
    pub shares: Vec<protocol::Share>,
    /// The network that it sets up.
    pub network: Option<protocol::Network>,
    /// Working directory of the command, if this process's working directory is in a share, or there is a root.
    pub working_dir: Option<OsString>,
    /// Whom the command runs as, if that is not root.
    pub user: Option<OsString>,
    /// Variables for the command.
    pub environment: Vec<protocol::Variable>,
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
    let share_count = options.share.len() + usize::from(options.root.is_some());
    if options.disk.len() + share_count + usize::from(options.net.is_some()) > MAX_DEVICES {
        bail!("--disk, --share, --root, --net: a guest can have {MAX_DEVICES} of them together");
    }
    let environment = root::environment(options)?;
    let mut opened_root = root::open(options, share_count)?;
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
        let folder = Share::open(&share.path, share.access, share_count)?;
        let path = guest_path(&share.path, options.root.is_some())?;
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
    let working_dir = working_dir(options, &shares, opened_root.as_mut())?;
    let user = options.user.clone();
    let number = u8::try_from(options.share.len()).expect("there are few shares");
    let root = opened_root.map(|root| add_root(root, number, &mut devices, &mut threads)).transpose()?;
    Ok(HostResources {
        devices,
        threads,
        setup: GuestSetup { root, shares, network, working_dir, user, environment },
    })
}

/// Returns the working directory of the command, if it is not the guest's own choice.
fn working_dir(
    options: &Run,
    shares: &[protocol::Share],
    root: Option<&mut OpenedRoot>,
) -> Result<Option<OsString>> {
    let here = env::current_dir().ok();
    if let Some(here) = &here
        && shares.iter().any(|share| here.starts_with(&share.path))
    {
        return Ok(Some(here.clone().into_os_string()));
    }
    // A guest that is saved or restored starts no command.
    let root = root.filter(|_| options.restore.is_none() && options.save_template.is_none());
    root.map(|root| root.working_dir(here.as_deref(), options.image.as_ref())).transpose()
}

/// Adds the device of a root behind those of the other shares. Returns its tag.
fn add_root(
    root: OpenedRoot,
    number: u8,
    devices: &mut Vec<Box<dyn Device>>,
    threads: &mut Vec<DeviceThread>,
) -> Result<OsString> {
    let OpenedRoot { path, share, .. } = root;
    let reach =
        Reach::to(&path, sandbox::Access::Read).with_context(|| format!("--root {}", path.display()))?;
    threads.push(DeviceThread { name: "root".into(), kind: Thread::Share, reach: vec![reach] });
    devices.push(Box::new(SharedFolder::new(share, number)));
    Ok(SharedFolder::tag(number).into())
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
fn guest_path(folder: &Path, has_root: bool) -> Result<PathBuf> {
    let path = fs::canonicalize(folder).with_context(|| format!("--share {}", folder.display()))?;
    if let Some(advice) = conflict(&path, has_root) {
        bail!("--share {}: the guest has a {} of its own; {advice}", folder.display(), path.display());
    }
    Ok(path)
}

/// Returns advice for the user if a share at this path would hide something that the guest needs.
fn conflict(path: &Path, has_root: bool) -> Option<&'static str> {
    let own = if has_root { &ROOTS_OWN[..] } else { &GUESTS_OWN };
    if KERNEL_FILE_SYSTEMS.iter().any(|own| path.starts_with(own)) && !path.starts_with(SHARED_MEMORY) {
        Some("share a folder elsewhere")
    } else if own.iter().any(|own| Path::new(own).starts_with(path)) {
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
        let conflict = |path: &&str| conflict(Path::new(path), false);
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
    fn below_a_root_a_share_hides_only_what_the_guest_has_for_itself() {
        let conflict = |path: &&str| conflict(Path::new(path), true);
        let hiding = ["/", "/run", "/tmp", "/dev/shm"];
        assert_eq!(hiding.iter().find(|path| conflict(path) != Some("share a folder in it")), None);
        assert_eq!(conflict(&"/proc/sys"), Some("share a folder elsewhere"));
        let free = ["/usr", "/etc", "/root", "/tmp/work", "/dev/shm/work", "/run/user/1000"];
        assert_eq!(free.iter().find(|path| conflict(path).is_some()), None);
    }

    #[test]
    fn a_refused_share_names_the_path_and_an_alternative() {
        let said = |path: &str| guest_path(Path::new(path), false).unwrap_err().to_string();
        assert_eq!(said("/etc"), "--share /etc: the guest has a /etc of its own; share a folder in it");
        assert_eq!(said("/dev"), "--share /dev: the guest has a /dev of its own; share a folder elsewhere");
    }
}
