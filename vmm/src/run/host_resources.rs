//! What a guest is given of the host's: folders and disks.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, Result, bail};
use devices::Access;
use devices::fs::Share;
use devices::virtio::{Device, Disk, SharedFolder};
use guest_agent::protocol;
use tally_machine::MOST_VIRTIO_DEVICES;

use crate::cli::Run;

/// What the default guest has its own of. A share there, or above it, would hide it: the guest's programs, the libraries and
/// the data that they use, and where they write.
#[rustfmt::skip]
const GUESTS_OWN: [&str; 17] = [
    "/bin", "/etc", "/lib/modules", "/lib/tally", "/lib/terminfo", "/lib/x86_64-linux-gnu", "/lib64", "/root", "/run",
    "/sbin", "/tmp", "/usr/bin", "/usr/lib", "/usr/lib64", "/usr/sbin", "/usr/share/doc/linux-perf", SHARED_MEMORY,
];
/// What is its kernel's, with all that is in it, but for one folder.
const KERNELS: [&str; 3] = ["/dev", "/proc", "/sys"];
const SHARED_MEMORY: &str = "/dev/shm";
/// The agent has a virtio device, too.
const MOST: usize = MOST_VIRTIO_DEVICES - 1;

/// The devices, and what the agent makes of them.
pub struct HostResources {
    /// Each with a name for its thread.
    pub devices: Vec<(String, Box<dyn Device>)>,
    /// What is to be mounted.
    pub shares: Vec<protocol::Share>,
    /// Where a command starts, if the guest has the folder that this process is in.
    pub folder: Option<OsString>,
}

/// Opens what the options name. The disks come first, so that their names in the guest are in the order given.
pub fn devices(options: &Run) -> Result<HostResources> {
    let mut devices: Vec<(String, Box<dyn Device>)> = Vec::new();
    if options.disk.len() + options.share.len() > MOST {
        bail!("--disk, --share: a guest can have {MOST} of them together");
    }
    for disk in &options.disk {
        let device =
            Disk::open(&disk.path, disk.access).with_context(|| format!("--disk {}", disk.path.display()))?;
        devices.push((format!("disk{}", devices.len()), Box::new(device)));
    }
    let mut shares: Vec<protocol::Share> = Vec::new();
    for (number, share) in (0..).zip(&options.share) {
        let folder = Share::open(&share.path, share.access, options.share.len())?;
        let path = place(&share.path)?;
        let tag = SharedFolder::tag(number);
        devices.push((format!("share{number}"), Box::new(SharedFolder::new(folder, number))));
        shares.push(protocol::Share { tag: tag.into(), path: path.into(), access: told(share.access) });
    }
    // A folder before those in it, in whichever order they were given: what is mounted later hides what is below it.
    shares.sort_by(|one, other| one.path.cmp(&other.path));
    if let Some(pair) = shares.windows(2).find(|pair| pair[0].path == pair[1].path) {
        bail!("--share {}: given twice", Path::new(&pair[0].path).display());
    }
    let folder =
        env::current_dir().ok().filter(|here| shares.iter().any(|share| here.starts_with(&share.path)));
    Ok(HostResources { devices, shares, folder: folder.map(PathBuf::into_os_string) })
}

/// Where a shared folder is in the guest: where it is on the host.
fn place(folder: &Path) -> Result<PathBuf> {
    let path = fs::canonicalize(folder).with_context(|| format!("--share {}", folder.display()))?;
    if let Some(advice) = obstacle(&path) {
        bail!("--share {}: the guest has a {} of its own; {advice}", folder.display(), path.display());
    }
    Ok(path)
}

/// What to do instead, where the default guest has its own of a folder.
fn obstacle(path: &Path) -> Option<&'static str> {
    if KERNELS.iter().any(|own| path.starts_with(own)) && !path.starts_with(SHARED_MEMORY) {
        Some("share a folder elsewhere")
    } else if GUESTS_OWN.iter().any(|own| Path::new(own).starts_with(path)) {
        Some("share a folder in it")
    } else {
        None
    }
}

fn told(access: Access) -> protocol::Access {
    match access {
        Access::ReadOnly => protocol::Access::ReadOnly,
        Access::ReadWrite => protocol::Access::ReadWrite,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_hides_nothing_of_the_guests() {
        let obstacle = |path: &&str| obstacle(Path::new(path));
        let hiding =
            ["/", "/etc", "/lib", "/root", "/run", "/tmp", "/dev/shm", "/usr", "/usr/lib", "/usr/share"];
        assert_eq!(hiding.iter().find(|path| obstacle(path) != Some("share a folder in it")), None);
        let kernels = ["/dev", "/dev/pts", "/proc", "/proc/sys", "/sys", "/sys/kernel/debug"];
        assert_eq!(kernels.iter().find(|path| obstacle(path) != Some("share a folder elsewhere")), None);
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
        assert_eq!(free.iter().find(|path| obstacle(path).is_some()), None);
        let within = ["/root/work", "/tmp/work", "/dev/shm/work", "/run/user/1000", "/tmpfs", "/device"];
        assert_eq!(within.iter().find(|path| obstacle(path).is_some()), None);
    }

    #[test]
    fn a_share_that_would_hide_something_is_refused_in_one_line() {
        let said = |path: &str| place(Path::new(path)).unwrap_err().to_string();
        assert_eq!(said("/etc"), "--share /etc: the guest has a /etc of its own; share a folder in it");
        assert_eq!(said("/dev"), "--share /dev: the guest has a /dev of its own; share a folder elsewhere");
    }
}
