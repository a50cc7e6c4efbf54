//! passt on the simulated host, which carries the networks of guests.

use guest_images::cache::Cache;
use guest_images::{Arch, Error, Progress, modules};

use crate::error::Result;
use crate::scenario::Scenario;
use crate::scenario::packed;
use crate::simulator::image::default_host;

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
    let scenario = scenario.file(passt, "passt.tar");
    ["veth", "tun"].iter().try_fold(scenario, |scenario, name| {
        Ok(scenario.program(driver(Arch::X86_64, name, progress)?, &format!("{name}.ko")))
    })
}

/// Returns a module with the driver of a network device for the default host of an architecture.
pub fn driver(arch: Arch, name: &str, progress: &mut Progress) -> Result<Vec<u8>> {
    let host = default_host(arch);
    let drivers = modules::all(&guest_images::kernel(&Cache::open()?, host, progress)?.modules)?;
    let missing = || Error::NotInPackages { suite: host.suite.name(), what: format!("driver {name}") };
    Ok(modules::content(drivers.get(name).ok_or_else(missing)?)?)
}
