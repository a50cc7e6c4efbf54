//! The Debian package in a clean Debian, and that the same commit gives the same archives. The programs are those of
//! the other tests; the Debian is the one that guests boot, unpacked: ten seconds of a core.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use guest_images::{Arch, Progress};
use guest_tests::{debian, program, stderr, stdout};
use tally_packaging::build::{Commit, project};
use tally_packaging::{archive, deb};
use tempfile::TempDir;

/// An ordinary user of the clean Debian.
const USER: &str = "nobody";

fn commit() -> Commit {
    Commit { hash: "1234567".to_owned(), time: 1_700_000_000 }
}

/// Returns the folder of the programs.
fn programs() -> PathBuf {
    program("tally").parent().unwrap().to_owned()
}

/// Unpacks the image of a Debian that has nothing of Tally's. Returns `None` if that cannot be done here.
fn clean_debian() -> Option<TempDir> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can change its root folder");
        return None;
    }
    let image = debian::image(&mut Progress::stderr("test")).unwrap_or_else(|error| panic!("{error}"));
    let root = tempfile::tempdir().unwrap();
    let dump = format!("rdump / {}", root.path().display());
    let dumped =
        Command::new("debugfs").args(["-R", &dump]).arg(image).output().expect("e2fsprogs is installed");
    assert!(root.path().join("usr/bin/dpkg").is_file(), "{}", stderr(&dumped));
    Some(root)
}

/// Runs a command in a Debian.
fn run_in(root: &Path, arguments: &[&str]) -> Output {
    const IN_ROOT: &str = "mount -t proc proc \"$0/proc\" && exec chroot \"$0\" \"$@\"";
    let mut chroot = Command::new("unshare");
    chroot.args(["--mount", "sh", "-c", IN_ROOT]).arg(root).args(arguments);
    chroot.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("HOME", "/tmp");
    chroot.output().expect("there is unshare")
}

#[test]
fn the_debian_package_is_installed_used_and_removed_in_a_clean_debian() {
    let Some(root) = clean_debian() else { return };
    let root = root.path();
    let package = deb::write(&programs(), &commit(), &root.join("tmp")).unwrap();
    let package = format!("/tmp/{}", package.file_name().unwrap().to_str().unwrap());
    let succeed = |arguments: &[&str]| {
        let output = run_in(root, arguments);
        assert!(output.status.success(), "{arguments:?}: {}{}", stdout(&output), stderr(&output));
        stdout(&output)
    };
    let as_user = |arguments: &[&str]| {
        let user = ["setpriv", "--reuid", USER, "--regid", "nogroup", "--clear-groups"];
        run_in(root, &[&user, arguments].concat())
    };
    succeed(&["dpkg", "--install", &package]);

    let version = as_user(&["tally", "--version"]);
    assert_eq!(stdout(&version), concat!("tally ", env!("CARGO_PKG_VERSION"), "\n"));
    let lab = as_user(&["tally", "lab", "--help"]);
    assert!(
        stdout(&lab).starts_with("A simulated host"),
        "it finds tally-lab: {}{}",
        stdout(&lab),
        stderr(&lab)
    );
    let doctor = stdout(&as_user(&["tally", "doctor"]));
    assert!(doctor.contains("/dev/kvm"), "{doctor}");
    succeed(&["bash", "-n", "/usr/share/bash-completion/completions/tally"]);
    for file in [
        "usr/share/man/man1/tally-run.1.gz",
        "usr/share/zsh/vendor-completions/_tally",
        "usr/share/fish/vendor_completions.d/tally.fish",
        "usr/share/doc/tally/copyright",
        "usr/share/doc/tally/LICENSES-OF-OTHERS",
        "usr/lib/systemd/system/tally@.service",
    ] {
        assert!(root.join(file).is_file(), "{file}");
    }
    // No capability is forced on an administrator.
    let capability =
        rustix::fs::getxattr(root.join("usr/lib/tally/tally"), "security.capability", &mut [0; 64][..]);
    assert_eq!(capability, Err(rustix::io::Errno::NODATA));

    succeed(&["dpkg", "--purge", "tally"]);
    let left: Vec<&str> = ["usr/bin/tally", "usr/lib/tally", "usr/share/doc/tally"]
        .into_iter()
        .filter(|path| root.join(path).symlink_metadata().is_ok())
        .collect();
    assert_eq!(left, [""; 0]);
}

/// Writes archives of both architectures into a folder; one program is as good as another here.
fn archives(folder: &Path) -> Vec<PathBuf> {
    let programs = programs();
    archive::write(&[(Arch::X86_64, &programs), (Arch::Riscv64, &programs)], &commit(), folder).unwrap()
}

#[test]
fn the_same_programs_give_the_same_archives_with_their_checksums() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [one, other] = folders.each_ref().map(|folder| {
        let mut made = archives(folder.path());
        made.push(deb::write(&programs(), &commit(), folder.path()).unwrap());
        made
    });
    assert_eq!(one.len(), 5);
    for (one, other) in one.iter().zip(&other) {
        assert!(fs::read(one).unwrap() == fs::read(other).unwrap(), "{}", one.display());
    }
    let sums = Command::new("sha256sum")
        .args(["--check", "--quiet", "SHA256SUMS"])
        .current_dir(&folders[0])
        .output();
    let sums = sums.expect("there is sha256sum");
    assert!(sums.status.success(), "{}", stdout(&sums));
}

#[test]
fn the_bill_of_materials_names_every_crate_with_its_licence() {
    let folder = tempfile::tempdir().unwrap();
    let made = archives(folder.path());
    let bill = made.iter().find(|path| path.to_string_lossy().ends_with(".spdx.json")).unwrap();
    let bill: serde_json::Value = serde_json::from_slice(&fs::read(bill).unwrap()).unwrap();
    let packages = bill["packages"].as_array().unwrap();
    let names: Vec<&str> = packages.iter().map(|package| package["name"].as_str().unwrap()).collect();
    for name in ["tally", "vpmu", "kvm-ioctls", "vm-memory", "virtio-queue", "seccompiler", "landlock"] {
        assert!(names.contains(&name), "{name}: {names:?}");
    }
    for name in ["proptest", "syn", "tally-lab", "guest-tests"] {
        assert!(!names.contains(&name), "{name} is not in the program");
    }
    let unlicensed = packages.iter().filter(|package| package["licenseDeclared"] == "NOASSERTION").count();
    assert_eq!(unlicensed, 0);
    assert_eq!(bill["creationInfo"]["created"], "2023-11-14T22:13:20Z");
}

#[test]
fn an_archive_has_the_licences_of_the_crates_that_are_linked() {
    let folder = tempfile::tempdir().unwrap();
    let made = archives(folder.path());
    let archive = made.iter().find(|path| path.to_string_lossy().ends_with("x86_64-linux.tar.gz")).unwrap();
    let mut tar = Command::new("tar");
    tar.arg("-xOzf").arg(archive).args(["--wildcards", "*/LICENSES-OF-OTHERS"]);
    let text = stdout(&tar.output().expect("there is tar"));
    for part in [
        "\nvm-memory ",
        "\nlibc ",
        "Apache License",
        "Permission is hereby granted",
        "GNU C Library",
        "\nkvm-ioctls ",
        "Redistribution and use",
    ] {
        assert!(text.contains(part), "{part}");
    }
    let own = env!("CARGO_PKG_VERSION");
    assert!(!text.contains(&format!("\nvpmu {own}")), "this project's own licences are files of their own");
}

/// Compiles everything twice, in folders with different names.
#[test]
fn the_same_commit_compiled_elsewhere_gives_the_same_archives() {
    const WANTED: &str = "TALLY_TEST_REPRODUCIBLE";
    if std::env::var_os(WANTED).is_none() {
        println!("skipped: it takes ten minutes of a core; {WANTED}=1 runs it");
        return;
    }
    let built = ["one", "somewhere-else"].map(|name| {
        let folder = tempfile::tempdir().unwrap();
        let checkout = folder.path().join(name);
        let cloned = Command::new("git").args(["clone", "--quiet"]).arg(project()).arg(&checkout).status();
        assert!(cloned.expect("there is git").success());
        let out = folder.path().join("out");
        let made = Command::new("cargo").args(["dist", "archives"]).arg(&out).current_dir(&checkout).status();
        assert!(made.expect("there is cargo").success());
        (fs::read_to_string(out.join("SHA256SUMS")).unwrap(), folder)
    });
    let [(one, _), (other, _)] = built;
    assert_eq!(one, other);
    assert_eq!(one.lines().filter(|line| line.ends_with("-linux.tar.gz")).count(), 2, "{one}");
}
