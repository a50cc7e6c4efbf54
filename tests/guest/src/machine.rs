//! Machines of other users: the root folder of a Debian that has only what such a machine has, in which commands run as
//! those of a new user.
//!
//! debootstrap runs the packages' own scripts in the new folder, so only root can make one.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use guest_images::cache::{Cache, Key};
use guest_images::sources::Archive;
use guest_images::{Progress, Suite, run_tool};
use tempfile::TempDir;

use crate::debian;

/// What somebody who has Rust has: a C compiler, which links, and certificates.
const PACKAGES: &str = "ca-certificates,gcc,git,libc6-dev";
/// Version of the steps below. Increased when they change, so that the cached folders are made again.
const RECIPE: &str = "1";
/// The certificates that this machine trusts: its network may have some of its own.
const CERTIFICATES: &str = "etc/ssl/certs/ca-certificates.crt";
/// Variables of the environment that say how this machine reaches the network.
const NETWORK: [&str; 7] =
    ["http_proxy", "https_proxy", "no_proxy", "HTTPS_PROXY", "NO_PROXY", "CARGO_HTTP_PROXY", "ALL_PROXY"];
/// Folder of the Rust toolchain in the machine.
const RUST: &str = "opt/rust";

/// A copy of a root folder, which goes with this value.
pub struct Machine {
    root: TempDir,
    environment: Vec<(String, String)>,
}

impl Machine {
    /// Makes a machine with a release of Debian. Returns `None`, and says why, if that cannot be done here.
    pub fn debian(suite: Suite) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            println!("skipped: only root can make the root folder of another machine");
            return None;
        }
        let made = installed(suite).unwrap_or_else(|error| panic!("{error}"));
        let root =
            tempfile::tempdir_in(made.parent().expect("it is in the cache")).expect("the cache has room");
        let mut copy = Command::new("cp");
        copy.args(["-a", "--reflink=auto"]).arg(made.join("root/.")).arg(root.path());
        run_tool(&mut copy, "coreutils").unwrap_or_else(|error| panic!("{error}"));
        let machine = Self { root, environment: Vec::new() };
        for file in ["etc/hosts", "etc/resolv.conf", CERTIFICATES] {
            fs::copy(Path::new("/").join(file), machine.path(file)).ok();
        }
        fs::create_dir_all(machine.path(RUST)).expect("it is a folder of this test");
        Some(machine)
    }

    /// Takes away what makes it a Debian: apt and dpkg, their data and keys, and its name. It is a Fedora by its name.
    #[must_use]
    pub fn without_apt(mut self) -> Self {
        const GONE: &str = "rm -rf /usr/bin/apt* /usr/bin/dpkg* /usr/lib/apt /usr/lib/dpkg /usr/share/dpkg \
                            /var/lib/apt /var/lib/dpkg /etc/apt /etc/dpkg /usr/share/keyrings && \
                            printf 'ID=fedora\\nPRETTY_NAME=\"Fedora\"\\n' >/usr/lib/os-release && \
                            rm -f /etc/os-release && ln -s ../usr/lib/os-release /etc/os-release";
        let gone = self.run(&["sh", "-c", GONE]);
        assert!(gone.status.success(), "{gone:?}");
        // Debian's own servers may not be reached from here.
        self.environment.push(("TALLY_MIRROR".to_owned(), Archive::of_this_machine().uri));
        self
    }

    /// Returns where a file of the machine is here.
    pub fn path(&self, file: &str) -> PathBuf {
        self.root.path().join(file)
    }

    /// Runs a command as root of the machine, with this machine's devices, kernel, network and Rust.
    pub fn run(&self, arguments: &[&str]) -> Output {
        const IN_ROOT: &str = "mount -t proc proc \"$0/proc\" && mount --rbind /dev \"$0/dev\" && \
                               mount --rbind /sys \"$0/sys\" && mount --bind \"$1\" \"$0/opt/rust\" && shift && \
                               exec chroot \"$0\" \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", IN_ROOT]).arg(self.root.path()).arg(toolchain()).args(arguments);
        command.env_clear().env("HOME", "/root");
        command.env("PATH", "/opt/rust/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command.envs(NETWORK.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?))));
        command.envs(self.environment.iter().map(|(name, value)| (name, OsStr::new(value))));
        command.output().expect("there is unshare")
    }
}

/// Returns the cache's entry with the root folder of a release, which is made first if it is not there.
fn installed(suite: Suite) -> guest_images::Result<PathBuf> {
    let cache = Cache::open()?;
    let key = Key::new("machine").with(RECIPE).with(PACKAGES).with(suite.name());
    cache.entry(&key, &mut Progress::stderr("machine"), |progress, entry| {
        debian::install(&cache, suite, PACKAGES, &entry.join("root"), progress)
    })
}

/// Returns the folder of the Rust with which these tests were compiled.
fn toolchain() -> PathBuf {
    let rustc = Command::new("rustc").args(["--print", "sysroot"]).output().expect("there is rustc");
    PathBuf::from(String::from_utf8_lossy(&rustc.stdout).trim())
}
