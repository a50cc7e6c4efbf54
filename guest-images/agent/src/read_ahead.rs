//! How far the kernel reads ahead in what the host shares.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// As much as fits a request. By itself, the kernel reads an eighth of that ahead, each in a request of its own.
const KIB: &str = "1024";

/// Lets the kernel read far ahead in a share that is mounted there.
pub fn raise(share: &Path) {
    let Ok(device) = fs::metadata(share).map(|share| share.dev()) else { return };
    let (major, minor) = (libc::major(device), libc::minor(device));
    // Without the file (CONFIG_SYSFS), reading is only slower.
    let _ = fs::write(format!("/sys/class/bdi/{major}:{minor}/read_ahead_kb"), KIB);
}
