//! Builds the lab CPUs, one for each architecture: the distribution's QEMU with the PMUs in this package's directory
//! `cpu` added.
//!
//! The source tree and its objects stay in the cache. So a change to a PMU compiles only the affected files, and an
//! interrupted build continues where it stopped.

use std::collections::VecDeque;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use guest_images::cache::{Cache, Key, remove_folder};
use guest_images::packages::Apt;
use guest_images::{Arch, Progress, Suite, child, run_tool};

use crate::error::{Error, Result};
use crate::tools;

/// The PMUs' sources, in a directory for each architecture, and the patch with QEMU's calls of them.
const FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/cpu_files.rs"));
const HOOKS: &str = "hooks.patch";
/// Destination in QEMU's source of the files in each of these directories.
const PLACES: [(&str, &str); 2] = [("x86_64/", "target/i386/tcg/sysemu"), ("riscv64/", "target/riscv")];
/// The release for whose QEMU the patch is made.
const SUITE: Suite = Suite::Bookworm;
const CONFIGURE: [&str; 7] = [
    "--target-list=x86_64-softmmu,riscv64-softmmu",
    "--without-default-features",
    "--enable-tcg",
    "--enable-fdt=system",
    "--disable-docs",
    "--disable-werror",
    "--disable-debug-info",
];
const RECIPE: &str = "1";
/// Directory in the cache for QEMU's source and objects.
const TREE: &str = "lab-cpu-tree";
/// Number of the last lines of a failed compilation that an error message has.
const TAIL_LINES: usize = 20;

/// Parameters of a lab CPU.
struct Kind {
    /// Name of its entries in the cache.
    name: &'static str,
    /// QEMU's name of the program.
    program: &'static str,
    /// The firmware, which is also from the distribution.
    firmware: Firmware,
}

struct Firmware {
    name: &'static str,
    suite: Suite,
    packages: &'static [&'static str],
    /// Paths in `/usr`.
    files: &'static [&'static str],
}

const X86_64: Kind = Kind {
    name: "lab-cpu",
    program: "qemu-system-x86_64",
    firmware: Firmware {
        name: "lab-firmware",
        suite: SUITE,
        packages: &["seabios", "qemu-system-data"],
        files: &[
            "share/seabios/bios-256k.bin",
            "share/qemu/qboot.rom",
            "share/qemu/kvmvapic.bin",
            "share/qemu/linuxboot_dma.bin",
        ],
    },
};

/// The firmware is sid's, as trixie's OpenSBI is much older than the host's kernel.
const RISCV64: Kind = Kind {
    name: "lab-cpu-riscv64",
    program: "qemu-system-riscv64",
    firmware: Firmware {
        name: "lab-firmware-riscv64",
        suite: Suite::Sid,
        packages: &["opensbi"],
        files: &["lib/riscv64-linux-gnu/opensbi/generic/fw_dynamic.bin"],
    },
};

/// The program that simulates a processor.
#[derive(Debug, Clone)]
pub struct LabCpu {
    /// The QEMU.
    pub program: PathBuf,
    /// The directory of its firmware.
    pub firmware: PathBuf,
}

/// Returns the lab CPU of an architecture, and builds it if needed. The variable `TALLY_LAB_CPU` can name another QEMU,
/// for work on the lab CPU itself.
pub fn build(cache: &Cache, arch: Arch, progress: &mut Progress) -> Result<LabCpu> {
    let kind = match arch {
        Arch::X86_64 => &X86_64,
        Arch::Riscv64 => &RISCV64,
    };
    let firmware = build_firmware(cache, &kind.firmware, progress)?;
    if let Some(program) = env::var_os("TALLY_LAB_CPU").filter(|value| !value.is_empty()) {
        return Ok(LabCpu { program: program.into(), firmware });
    }
    let mut key = Key::new(kind.name).with(RECIPE).with(SUITE.name());
    key = CONFIGURE.iter().fold(key, Key::with);
    key = FILES.iter().fold(key, |key, (name, content)| key.with(name).with(content));
    let entry = cache.entry(&key, progress, |progress, entry| {
        tools::ensure(&tools::COMPILING, progress)?;
        compile(cache, kind.program, entry, progress)
    })?;
    Ok(LabCpu { program: entry.join(kind.program), firmware })
}

/// Returns true if this machine has compiled a lab CPU before.
pub fn was_built(cache: &Cache) -> bool {
    cache.root().join(TREE).exists()
}

fn build_firmware(cache: &Cache, firmware: &Firmware, progress: &mut Progress) -> Result<PathBuf> {
    let key = firmware.files.iter().fold(Key::new(firmware.name).with(RECIPE), Key::with);
    cache.entry(&key, progress, |progress, entry| {
        let apt = Apt::open(cache, firmware.suite, progress)?;
        let mut packages = apt.resolve(firmware.packages)?;
        packages.retain(|package| firmware.packages.contains(&package.name.as_str()));
        let unpacked = entry.join("unpacked");
        apt.unpack(&packages, &unpacked, progress)?;
        for file in firmware.files {
            let from = unpacked.join("usr").join(file);
            let to = entry.join(from.file_name().unwrap_or_default());
            fs::copy(&from, &to).map_err(Error::file("copy", from))?;
        }
        fs::remove_dir_all(&unpacked).map_err(Error::file("remove", unpacked))
    })
}

fn compile(cache: &Cache, program: &str, entry: &Path, progress: &mut Progress) -> Result<()> {
    let _guard = cache.lock(TREE, progress)?;
    let tree = cache.folder(TREE)?;
    let source = tree.join("source");
    let half_patched = tree.join("half-patched");
    if half_patched.exists() && source.exists() {
        remove_folder(&source)?;
    }
    if !source.exists() {
        // The source is unpacked in a directory of its own, which is removed first in case an earlier unpacking was
        // interrupted.
        let arriving = tree.join("arriving");
        remove_folder(&arriving)?;
        fs::create_dir(&arriving).map_err(Error::file("create", &arriving))?;
        let unpacked = arriving.join("qemu");
        Apt::open(cache, SUITE, progress)?.unpack_source("qemu", &unpacked, progress)?;
        let _ = fs::remove_file(tree.join(HOOKS));
        fs::rename(&unpacked, &source).map_err(Error::file("create", &source))?;
        remove_folder(&arriving)?;
    }
    fs::write(&half_patched, "").map_err(Error::file("write", &half_patched))?;
    add_pmus(&tree, &source)?;
    fs::remove_file(&half_patched).map_err(Error::file("remove", &half_patched))?;

    let objects = tree.join("objects");
    configure(&source, &objects, progress)?;
    ninja(&objects, program, progress)?;
    let built = objects.join(program);
    fs::copy(&built, entry.join(program)).map(drop).map_err(Error::file("copy", built))
}

/// Adds the PMUs' files to the tree and applies the patch, after an older version of the patch was reverted. Files that
/// are up to date are not written, so they are not compiled again.
fn add_pmus(tree: &Path, source: &Path) -> Result<()> {
    let place = |name: &str| {
        PLACES.iter().find_map(|(folder, to)| Some(Path::new(to).join(name.strip_prefix(folder)?)))
    };
    for (path, content) in
        FILES.iter().filter_map(|(name, content)| Some((source.join(place(name)?), content)))
    {
        if fs::read(&path).ok().as_deref() != Some(*content) {
            fs::write(&path, content).map_err(Error::file("write", path))?;
        }
    }
    let hooks = FILES.iter().find(|(name, _)| *name == HOOKS).map_or(&[][..], |(_, content)| content);
    let applied = tree.join(HOOKS);
    let before = fs::read(&applied).unwrap_or_default();
    if before == hooks {
        return Ok(());
    }
    let patch = |arguments: &[&str]| {
        let mut command = Command::new("patch");
        command.args(["--strip=1", "--silent", "--no-backup-if-mismatch"]).args(arguments);
        run_tool(command.arg("--input").arg(&applied).current_dir(source), "patch")
    };
    if !before.is_empty() {
        patch(&["--reverse"])?;
    }
    fs::write(&applied, hooks).map_err(Error::file("write", &applied))?;
    if !hooks.is_empty() {
        patch(&["--forward"])?;
    }
    Ok(())
}

fn configure(source: &Path, objects: &Path, progress: &mut Progress) -> Result<()> {
    let flags = CONFIGURE.join(" ");
    let configured = objects.join("configured");
    if fs::read_to_string(&configured).ok().as_deref() == Some(&flags) {
        return Ok(());
    }
    progress.step("configuring the lab CPU");
    remove_folder(objects)?;
    fs::create_dir_all(objects).map_err(Error::file("create", objects))?;
    // The distribution's meson needs the distribution's Python, and another Python may come first in PATH.
    let mut command = Command::new(source.join("configure"));
    run_tool(command.args(CONFIGURE).env("PYTHON", "/usr/bin/python3").current_dir(objects), "bash")?;
    fs::write(&configured, flags).map_err(Error::file("write", configured))
}

fn ninja(objects: &Path, program: &str, progress: &mut Progress) -> Result<()> {
    progress.long_step("compiling the lab CPU");
    let mut command = Command::new("ninja");
    command.arg(program).current_dir(objects).stdin(Stdio::null()).stdout(Stdio::piped());
    // This process's lock on the tree ends with the process, and then nothing may write to the tree any more.
    child::die_with_this_process(&mut command, child::Death::Terminate);
    let mut child = command.spawn().map_err(Error::system("run ninja"))?;
    let mut tail = VecDeque::new();
    let output = child.stdout.take().map(BufReader::new);
    for line in output.into_iter().flat_map(BufRead::lines).map_while(std::result::Result::ok) {
        if let Some((done, _)) = line.strip_prefix('[').and_then(|line| line.split_once(']')) {
            progress.detail(done);
        }
        tail.push_back(line);
        if tail.len() > TAIL_LINES {
            tail.pop_front();
        }
    }
    let status = child.wait().map_err(Error::system("wait for ninja"))?;
    if status.success() { Ok(()) } else { Err(Error::Compile(Vec::from(tail).join("\n"))) }
}
