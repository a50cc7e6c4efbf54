//! The Debian package (`deb(5)`): an `ar` archive of a version, an archive about the package and one of its files.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::build::{Commit, Programs, project};
use crate::contents::{add_licences, add_manuals};
use crate::tree::{Entry, Tree};

/// The programs. They find each other in one folder.
const PROGRAMS: [&str; 6] =
    ["tally", "tally-lab", "bench-workload", "counter-thief", "net-workload", "pmu-workload"];
const FOLDER: &str = "usr/lib/tally";
/// Those that users call, where they find them.
const IN_PATH: [(&str, &str); 2] =
    [("usr/bin/tally", "../lib/tally/tally"), ("usr/bin/tally-lab", "../lib/tally/tally-lab")];

/// What an administrator has to know.
const README: &str = "\
Tally for Debian
================
A user who runs guests needs /dev/kvm, and the right to count a guest's kernel:

    sudo adduser USER kvm
    sudo sysctl kernel.perf_event_paranoid=1            # for everybody, or
    sudo setcap cap_perfmon+ep /usr/lib/tally/tally     # for this program alone, where the setting is 2

The package does neither: a capability of the program is for all users who can run it. `tally doctor` says what is
missing. Networks for guests (`--net user`) need the package passt.

`tally lab` is a simulated host for machines without a PMU. Its parts are built at the first use, in ~/.cache/tally.

tally@.service and tally-metrics.service are for VMs that run as services; they need a user `tally`:

    sudo useradd --system --groups kvm tally
";

/// Writes the package into a folder. Returns its path.
pub fn write(programs: &Programs, commit: &Commit, folder: &Path) -> Result<PathBuf> {
    // Before the release of this number, and by time.
    let version = format!("{}~git{}.{}", env!("CARGO_PKG_VERSION"), commit.day(), commit.hash);
    let files = files(programs)?;
    let mut about = Tree::default();
    about.file("control", control(&version, &files));
    about.file("sha256sums", sums(&files));
    let path = folder.join(format!("tally_{version}_amd64.deb"));
    let members = [
        ("debian-binary", b"2.0\n".to_vec()),
        ("control.tar.gz", about.archive("", commit.time)?),
        ("data.tar.gz", files.archive("", commit.time)?),
    ];
    fs::write(&path, ar(&members, commit.time)).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// Returns the files of the package.
fn files(programs: &Programs) -> Result<Tree> {
    let mut tree = Tree::default();
    for name in PROGRAMS {
        tree.program(format!("{FOLDER}/{name}"), &programs.join(name))?;
    }
    for (path, target) in IN_PATH {
        tree.link(path, target);
    }
    add_manuals(&mut tree, "usr/", &programs.join("tally"))?;
    let doc = "usr/share/doc/tally/";
    add_licences(&mut tree, doc, &["tally", "tally-lab"])?;
    tree.file(format!("{doc}copyright"), copyright());
    tree.file(format!("{doc}README.Debian"), README);
    tree.copy(format!("{doc}examples/grafana.json"), &project().join("packaging/grafana/tally.json"))?;
    tree.copy(format!("{doc}examples/kubernetes.yaml"), &project().join("packaging/kubernetes/tally.yaml"))?;
    for unit in ["tally@.service", "tally-metrics.service"] {
        tree.copy(format!("usr/lib/systemd/system/{unit}"), &project().join("packaging/systemd").join(unit))?;
    }
    Ok(tree)
}

/// Returns the paragraph about the package (Debian Policy, section 5.3).
fn control(version: &str, files: &Tree) -> String {
    format!(
        "Package: tally
Version: {version}
Architecture: amd64
Maintainer: The Tally developers <tally@localhost>
Installed-Size: {}
Section: admin
Priority: optional
Recommends: linux-perf, passt
Description: KVM virtual machine monitor whose guests have a working PMU
 Unmodified guest kernels and the unmodified perf count and sample in Tally's
 guests, backed by perf events of the host. The package also has tally-lab, a
 simulated host with an exact PMU for machines that have none.
",
        files.size().div_ceil(1024)
    )
}

/// Returns the licences, in Debian's format for machines.
fn copyright() -> String {
    "\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
Copyright: The Tally developers
License: MIT or Apache-2.0
 The full texts are in /usr/share/doc/tally, LICENSE-MIT and LICENSE-APACHE;
 those of the crates that the programs are linked with are beside them, in
 LICENSES-OF-OTHERS.
 What tally-lab adds to QEMU is GPL-2.0-or-later, and what it adds to Bochs is
 LGPL-2.1-or-later, as they are.
"
    .into()
}

/// Returns the files' checksums, as `sha256sum` prints them.
fn sums(files: &Tree) -> String {
    let sum = |(path, entry): (&String, &Entry)| match entry {
        Entry::File(content) | Entry::Program(content) => Some(crate::archive::sum_line(content, path)),
        Entry::Link(_) => None,
    };
    files.0.iter().filter_map(sum).collect()
}

/// Returns an archive in the format of `ar(5)`.
fn ar(members: &[(&str, Vec<u8>)], time: u64) -> Vec<u8> {
    let mut bytes = b"!<arch>\n".to_vec();
    for (name, content) in members {
        bytes.extend(
            format!("{name:<16}{time:<12}{:<6}{:<6}{:<8}{:<10}`\n", 0, 0, 100_644, content.len()).bytes(),
        );
        bytes.extend(content);
        if content.len() % 2 == 1 {
            bytes.push(b'\n');
        }
    }
    bytes
}
