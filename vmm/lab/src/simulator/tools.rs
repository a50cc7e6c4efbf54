//! Packages that must be installed on this machine itself, such as those that compile the lab CPU.

use std::process::Command;

use guest_images::cache::Cache;
use guest_images::distribution::Installer;
use guest_images::{Progress, run_tool};

use crate::error::{Error, Result};

/// Packages that compile the lab CPUs of AMD and RISC-V hosts.
pub const COMPILING_QEMU: [&str; 14] = [
    "bison",
    "dpkg-dev",
    "flex",
    "gcc",
    "libc6-dev",
    "libfdt-dev",
    "libglib2.0-dev",
    "libpixman-1-dev",
    "meson",
    "ninja-build",
    "patch",
    "pkg-config",
    "python3-venv",
    "xz-utils",
];

/// Packages that compile the lab CPU of Intel hosts.
pub const COMPILING_BOCHS: [&str; 6] = ["g++", "gcc", "libc6-dev", "make", "patch", "xz-utils"];

/// Options of apt: whatever the machine's configuration says, packages are those of signed indexes.
const SIGNED: [&str; 6] = [
    "-o",
    "Acquire::AllowInsecureRepositories=false",
    "-o",
    "Acquire::AllowDowngradeToInsecureRepositories=false",
    "-o",
    "APT::Get::AllowUnauthenticated=false",
];

/// Installs those of these packages that are missing, on a Debian and if the user is root. Otherwise, the error says
/// how to install them. On a distribution that is not known, the compilation itself says what is missing.
pub fn ensure(packages: &[&'static str], progress: &mut Progress) -> Result<()> {
    let installer = Installer::of_this_machine();
    let is_installed = |package: &str| installer.is_none_or(|installer| installer.has(package));
    let missing =
        || -> Vec<&str> { packages.iter().copied().filter(|package| !is_installed(package)).collect() };
    if missing().is_empty() {
        return Ok(());
    }
    // Another lab may install the same packages.
    let _guard = Cache::open()?.lock("packages-of-this-machine", progress)?;
    let missing = missing();
    if missing.is_empty() {
        return Ok(());
    }
    if installer != Some(Installer::Apt) || !rustix::process::geteuid().is_root() {
        return Err(Error::MissingPackages(missing));
    }
    progress.step(format!("installing {}", missing.join(" ")));
    let mut install = Command::new("apt-get");
    // apt waits for others who install packages, too.
    install.args(SIGNED).args(["-o", "DPkg::Lock::Timeout=600"]);
    install.args(["install", "--yes", "--no-install-recommends", "--quiet=2"]).args(&missing);
    install.env("DEBIAN_FRONTEND", "noninteractive");
    // A fresh machine has no package lists yet, and an interrupted installation has to be completed first.
    if run_tool(&mut install, "apt").is_err() {
        let _ = run_tool(Command::new("dpkg").args(["--configure", "--pending"]), "dpkg");
        run_tool(Command::new("apt-get").args(SIGNED).args(["update", "--quiet=2"]), "apt")?;
        run_tool(&mut install, "apt")?;
    }
    Ok(())
}
