//! What a guest is given of the host's: folders and disks.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, Result, bail};
use devices::Access;
use devices::fs::Share;
use devices::virtio::{Device, Disk, SharedFolder};
use guest_agent::protocol;

use crate::cli::Run;
use crate::machine::virtio;

/// Folders that the default guest has its own of: what is in them would be hidden.
const GUESTS_OWN: [&str; 12] =
    ["/", "/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr", "/usr/bin"];
/// The agent has a virtio device, too.
const MOST: usize = virtio::MOST - 1;

/// The devices, and what the agent makes of them.
pub struct Given {
    /// Each with a name for its thread.
    pub devices: Vec<(String, Box<dyn Device>)>,
    /// What is to be mounted.
    pub shares: Vec<protocol::Share>,
    /// Where a command starts, if the guest has the folder that this process is in.
    pub folder: Option<OsString>,
}

/// Opens what the options name. The disks come first, so that their names in the guest are in the order given.
pub fn devices(options: &Run) -> Result<Given> {
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
        let folder = Share::open(&share.path, share.access)?;
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
    Ok(Given { devices, shares, folder: folder.map(PathBuf::into_os_string) })
}

/// Where a shared folder is in the guest: where it is on the host.
fn place(folder: &Path) -> Result<PathBuf> {
    let path = fs::canonicalize(folder).with_context(|| format!("--share {}", folder.display()))?;
    if GUESTS_OWN.iter().any(|own| path == Path::new(own)) {
        bail!(
            "--share {}: the guest has a {} of its own; share a folder in it",
            folder.display(),
            path.display()
        );
    }
    Ok(path)
}

fn told(access: Access) -> protocol::Access {
    match access {
        Access::ReadOnly => protocol::Access::ReadOnly,
        Access::ReadWrite => protocol::Access::ReadWrite,
    }
}
