//! What runs keep in the cache belongs to everything that it was made from.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context, Result};
use guest_images::cache::Key;
use kvm_ioctls::Kvm;
use tally_machine::Machine;
use tally_machine::pmu::Pmu;

/// The machine for which something is kept.
#[derive(Clone, Copy)]
pub struct TargetMachine<'a> {
    pub kvm: &'a Kvm,
    pub pmu: Pmu,
    pub cpus: u8,
}

/// Returns a key for something that this program makes on this host for a machine.
pub fn key(kind: &str, version: &str, TargetMachine { kvm, pmu, cpus }: TargetMachine) -> Result<Key> {
    let host = rustix::system::uname();
    Ok(Key::new(kind)
        .with(version)
        .with(file_stamp(Path::new("/proc/self/exe"))?)
        .with(host.release().to_bytes())
        .with(host.version().to_bytes())
        .with(format!("{:?}", Machine::fingerprint(kvm, cpus, pmu)?))
        .with(format!("{cpus} vCPUs, {pmu:?}")))
}

/// Returns what changes when a file does.
pub fn file_stamp(path: &Path) -> Result<String> {
    let file = fs::metadata(path).with_context(|| path.display().to_string())?;
    let (modified, changed) = ((file.mtime(), file.mtime_nsec()), (file.ctime(), file.ctime_nsec()));
    let inode = (file.dev(), file.ino());
    Ok(format!("{} {inode:?} {modified:?} {changed:?} {}", file.len(), path.display()))
}

/// Notes that an entry of the cache is used: the cache keeps the latest.
pub fn used(folder: &Path) {
    // An entry of another user's cache stays as it is.
    let _ = File::open(folder).and_then(|folder| folder.set_modified(SystemTime::now()));
}
