//! A disk image with a whole Debian for guests: its stable release with systemd, udev and perf, as debootstrap installs
//! them.
//!
//! debootstrap runs the packages' own scripts in the new root directory, so only root can build the image.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use guest_images::cache::{Cache, Key};
use guest_images::packages::Repository;
use guest_images::sources::Archive;
use guest_images::{Error, Progress, Result, Suite, run_tool};
use tally_lab::programs::LOOP;

/// Packages that this machine needs to build the image.
pub const NEEDS: [&str; 3] = ["e2fsprogs", "util-linux", "wget"];
/// Packages in the image beside those that every Debian has.
const PACKAGES: &str = "linux-perf,systemd-sysv,udev";
/// Directories that are removed from the image. The simulated host would keep them in memory, and no test needs them.
const LEFT_OUT: [&str; 5] =
    ["usr/share/doc", "usr/share/locale", "usr/share/man", "var/cache/apt", "var/lib/apt/lists"];
/// Version of the build steps. Increased when they change, so that the cached image is built again.
const RECIPE: &str = "1";
/// Search path for the tools. Not every user's path has the directories for administrators' programs.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Returns the path of the file system's image, and builds the image first if it is not in the cache. The image has the
/// program `loop`, and `root` needs no password.
pub fn image(progress: &mut Progress) -> Result<PathBuf> {
    let cache = Cache::open()?;
    let key = LEFT_OUT.iter().fold(Key::new("debian").with(RECIPE).with(PACKAGES).with(LOOP), Key::with);
    let entry = cache.entry(&key, progress, |progress, entry| {
        let root = entry.join("root");
        install(&cache, Suite::default(), PACKAGES, &root, progress)?;
        adapt(&root)?;
        progress.step("making an image of Debian");
        pack(&root, &entry.join("image"))?;
        fs::remove_dir_all(&root).map_err(Error::io("remove", root))
    })?;
    Ok(entry.join("image"))
}

/// Installs a release of Debian and `packages` in a directory, with a debootstrap that is only unpacked from its
/// package.
pub fn install(
    cache: &Cache,
    suite: Suite,
    packages: &str,
    root: &Path,
    progress: &mut Progress,
) -> Result<()> {
    let tool = root.with_file_name("debootstrap");
    let repository = Repository::open(cache, suite, progress)?;
    let mut debootstrap = repository.resolve(&["debootstrap"])?;
    debootstrap.retain(|package| package.name == "debootstrap");
    repository.unpack(&debootstrap, &tool, progress)?;
    progress.long_step("installing Debian in a folder");
    let archive = Archive::of_this_machine();
    // debootstrap mounts file systems. In a mount namespace of its own they are gone when it ends, however it ends.
    let mut command = administer("unshare");
    command.args(["--mount", "sh"]).arg(tool.join("usr/sbin/debootstrap"));
    command.env("DEBOOTSTRAP_DIR", tool.join("usr/share/debootstrap"));
    command.args(["--variant=minbase", "--force-check-gpg", "--include", packages]);
    if let Some(keys) = archive.signed_by.filter(|keys| Path::new(keys).exists()) {
        command.args(["--keyring", &keys]);
    }
    run_tool(command.arg(suite.name()).arg(root).arg(&archive.uri), "util-linux")?;
    fs::remove_dir_all(&tool).map_err(Error::io("remove", tool))
}

/// Sets up the installed system: removes [`LEFT_OUT`], allows `root` to log in, and adds the program `loop`.
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

/// Writes the directory into an image with some free space.
fn pack(root: &Path, image: &Path) -> Result<()> {
    let used = run_tool(administer("du").arg("-sm").arg(root), "coreutils")?;
    let used: u64 = used.split_whitespace().next().and_then(|size| size.parse().ok()).unwrap_or(512);
    let mut mkfs = administer("mkfs.ext4");
    // Without a journal, which would be the largest part of the image's overhead.
    mkfs.args(["-q", "-O", "^has_journal", "-d"])
        .arg(root)
        .arg(image)
        .arg(format!("{}M", used * 11 / 10 + 24));
    run_tool(&mut mkfs, "e2fsprogs").map(drop)
}

/// Returns a command for an administrator's program, with [`PATH`] and English messages.
fn administer(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.env("PATH", PATH).env("LC_ALL", "C");
    command
}
