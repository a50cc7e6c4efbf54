//! passt on the simulated host, which carries the networks of guests.

use std::path::PathBuf;

use guest_images::cache::Cache;
use guest_images::{Arch, Progress, Release};

use crate::error::Result;
use crate::host::default_host;
use crate::packed;
use crate::scenario::Scenario;

/// Shell commands that install what [`add`] has put there. passt gives itself another root file system, and the host's
/// is the initial one, which cannot be replaced: passt is given a copy.
pub const INSTALL: &str = "\
for module in veth tun; do insmod $module.ko; done
mkdir -p passt /copy; tar -C passt -xf passt.tar
mv passt/usr/bin/passt /usr/bin/passt-itself
cat >/usr/bin/passt <<'PASST'
#!/bin/sh
exec unshare -m sh -c 'mount --rbind / /copy; cd /copy; mount --move . /; exec chroot . passt-itself \"$@\"' passt \"$@\"
PASST
chmod +x /usr/bin/passt
echo nobody:x:65534:65534:nobody:/:/bin/false >>/etc/passwd
";

/// Adds passt and the drivers of virtual network devices to a scenario on the default host.
pub fn add(scenario: Scenario, progress: &mut Progress) -> Result<Scenario> {
    let passt = packed::archive("passt", progress)?;
    let drivers = drivers(Arch::X86_64, progress)?;
    Ok(scenario
        .file(passt, "passt.tar")
        .file(drivers.join("veth.ko"), "veth.ko")
        .file(drivers.join("tun.ko"), "tun.ko"))
}

/// Returns the folder with the drivers of network devices for the default host of an architecture.
pub fn drivers(arch: Arch, progress: &mut Progress) -> Result<PathBuf> {
    let host: Release = default_host(arch);
    Ok(guest_images::kernel(&Cache::open()?, host, progress)?.modules.join("kernel/drivers/net"))
}
