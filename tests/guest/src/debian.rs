//! A whole Debian, as a disk for guests: its stable release with systemd, udev and perf, as debootstrap installs them.
//!
//! debootstrap has the packages' own scripts run in the new root, so only root can do it.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use guest_images::cache::{Cache, Key};
use guest_images::packages::Apt;
use guest_images::sources::Archive;
use guest_images::{Error, Progress, Result, Suite, run_tool};
use tally_lab::programs::LOOP;

/// What this machine itself needs for it.
pub const NEEDS: [&str; 3] = ["e2fsprogs", "util-linux", "wget"];
/// Beside those that every Debian has.
const PACKAGES: &str = "linux-perf,systemd-sysv,udev";
/// What the simulated host would hold in memory for nothing.
const LEFT_OUT: [&str; 5] =
    ["usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists"];
/// Counts up when the way of building changes.
const RECIPE: &str = "1";
/// Programs for administrators are not in every user's path.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// The image of a file system, built if it has not been. It has the program `loop`, and `root` needs no password.
pub fn image(progress: &mut Progress) -> Result<PathBuf> {
    let cache = Cache::open()?;
    let key = LEFT_OUT.iter().fold(Key::new("debian").with(RECIPE).with(PACKAGES).with(LOOP), Key::with);
    let entry = cache.entry(&key, progress, |progress, entry| {
        let root = entry.join("root");
        install(&cache, &root, progress)?;
        adapt(&root)?;
        progress.step("making an image of Debian");
        pack(&root, &entry.join("image"))?;
        fs::remove_dir_all(&root).map_err(Error::io("remove", root))
    })?;
    Ok(entry.join("image"))
}

/// Has debootstrap, which needs no more than to be unpacked, install Debian in a folder.
fn install(cache: &Cache, root: &Path, progress: &mut Progress) -> Result<()> {
    let suite = Suite::default();
    let tool = root.with_file_name("debootstrap");
    let apt = Apt::open(cache, suite, progress)?;
    let mut packages = apt.resolve(&["debootstrap"])?;
    packages.retain(|package| package.name == "debootstrap");
    apt.unpack(&packages, &tool, progress)?;
    progress.long_step("installing Debian in a folder");
    let archive = Archive::of_this_machine()?;
    // What it mounts goes with it, however it ends.
    let mut command = administer("unshare");
    command.args(["--mount", "sh"]).arg(tool.join("usr/sbin/debootstrap"));
    command.env("DEBOOTSTRAP_DIR", tool.join("usr/share/debootstrap"));
    command.args(["--variant=minbase", "--include", PACKAGES]);
    if let Some(keys) = archive.signed_by.filter(|keys| Path::new(keys).exists()) {
        command.args(["--keyring", &keys]);
    }
    run_tool(command.arg(suite.name()).arg(root).arg(&archive.uri), "util-linux")?;
    fs::remove_dir_all(&tool).map_err(Error::io("remove", tool))
}

/// Makes a system of it that one can log in to.
fn adapt(root: &Path) -> Result<()> {
    for folder in LEFT_OUT.map(|folder| root.join(folder)) {
        fs::remove_dir_all(&folder).map_err(Error::io("remove", folder))?;
    }
    let shadow = root.join("etc/shadow");
    let passwords = fs::read_to_string(&shadow).map_err(Error::io("read", &shadow))?;
    fs::write(&shadow, passwords.replacen("root:*:", "root::", 1)).map_err(Error::io("write", shadow))?;
    let name = root.join("etc/hostname");
    fs::write(&name, "debian\n").map_err(Error::io("write", name))?;
    let program = root.join("usr/local/bin/loop");
    fs::write(&program, LOOP).map_err(Error::io("write", &program))?;
    run_tool(administer("chmod").arg("755").arg(program), "coreutils").map(drop)
}

/// An image with some room in it.
fn pack(root: &Path, image: &Path) -> Result<()> {
    let used = run_tool(administer("du").arg("-sm").arg(root), "coreutils")?;
    let used: u64 = used.split_whitespace().next().and_then(|size| size.parse().ok()).unwrap_or(512);
    let mut mkfs = administer("mkfs.ext4");
    // Without a journal, for nothing else is as large.
    mkfs.args(["-q", "-O", "^has_journal", "-d"])
        .arg(root)
        .arg(image)
        .arg(format!("{}M", used * 11 / 10 + 24));
    run_tool(&mut mkfs, "e2fsprogs").map(drop)
}

fn administer(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env("PATH", PATH).env("LC_ALL", "C");
    command
}
