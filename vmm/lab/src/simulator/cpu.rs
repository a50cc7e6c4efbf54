//! Builds the lab CPUs: simulators from the distribution's source packages, with the PMUs in this package's directory
//! `cpu` added.
//!
//! The source trees and their objects stay in the cache. So a change to a PMU compiles only the affected files, and an
//! interrupted build continues where it stopped.

mod bochs;
mod qemu;

use std::collections::VecDeque;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use guest_images::cache::{Cache, Key, remove_folder};
use guest_images::packages::Repository;
use guest_images::{Progress, Suite, child, run_tool};

use crate::error::{Error, Result};
use crate::simulator::board::Processor;
use crate::simulator::tools;

/// The PMUs' sources, in a directory for each simulator and architecture, and the patches with the simulators' calls of
/// them.
const FILES: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/cpu_files.rs"));
const RECIPE: &str = "1";
/// Number of the last lines of a failed compilation that an error message has.
const TAIL_LINES: usize = 20;
/// Name in the tree of the patch that is applied to its source.
const APPLIED: &str = "hooks.patch";

/// A simulator's source, and how it is compiled.
struct Simulator {
    package: &'static str,
    /// The release for whose source the patch is made.
    suite: Suite,
    /// Downloads and unpacks the source.
    unpack: fn(&Repository, &Path, &mut Progress) -> guest_images::Result<()>,
    /// Directory in the cache for source and objects.
    tree: &'static str,
    /// The patch among [`FILES`].
    hooks: &'static str,
    /// Destinations in the source of files in [`FILES`]: how the name starts there, and what replaces it.
    places: &'static [(&'static str, &'static str)],
    /// Arguments of the source's script `configure`.
    configure: &'static [&'static str],
    /// Files on which more depends than the compiling program finds out: if they change, everything is compiled.
    headers: &'static [&'static str],
    /// Packages with the compilers.
    tools: &'static [&'static str],
    /// Returns the command that compiles a program, and prints its progress and errors on standard output.
    compiling: fn(&str) -> Command,
}

/// Parameters of a lab CPU.
struct Kind {
    /// Name of its entries in the cache.
    name: &'static str,
    simulator: &'static Simulator,
    /// The simulator's name of the program.
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

/// The program that simulates a processor.
#[derive(Debug, Clone)]
pub struct LabCpu {
    pub program: PathBuf,
    pub firmware: PathBuf,
}

/// Returns a lab CPU, and builds it if needed. The variable `TALLY_LAB_CPU` can name another program, for work on the
/// lab CPU itself.
pub fn build(cache: &Cache, processor: Processor, progress: &mut Progress) -> Result<LabCpu> {
    let kind = match processor {
        Processor::Amd => &qemu::X86_64,
        Processor::Intel => &bochs::INTEL,
        Processor::Riscv64 => &qemu::RISCV64,
    };
    let firmware = build_firmware(cache, &kind.firmware, progress)?;
    if let Some(program) = env::var_os("TALLY_LAB_CPU").filter(|value| !value.is_empty()) {
        return Ok(LabCpu { program: program.into(), firmware });
    }
    let simulator = kind.simulator;
    let mut key = Key::new(kind.name).with(RECIPE).with(simulator.suite.name());
    key = simulator.configure.iter().fold(key, Key::with);
    key = simulator.files().fold(key, |key, (name, content)| key.with(name).with(content));
    let entry = cache.entry(&key, progress, |progress, entry| {
        tools::ensure(simulator.tools, progress)?;
        simulator.compile(cache, kind.program, entry, progress)
    })?;
    Ok(LabCpu { program: entry.join(kind.program), firmware })
}

/// Returns true if this machine has compiled a lab CPU before.
pub fn was_built(cache: &Cache) -> bool {
    [&qemu::QEMU, &bochs::BOCHS].iter().any(|simulator| cache.root().join(simulator.tree).exists())
}

fn build_firmware(cache: &Cache, firmware: &Firmware, progress: &mut Progress) -> Result<PathBuf> {
    let key = firmware.files.iter().fold(Key::new(firmware.name).with(RECIPE), Key::with);
    cache.entry(&key, progress, |progress, entry| {
        let repository = Repository::open(cache, firmware.suite, progress)?;
        let mut packages = repository.resolve(firmware.packages)?;
        packages.retain(|package| firmware.packages.contains(&package.name.as_str()));
        let unpacked = entry.join("unpacked");
        repository.unpack(&packages, &unpacked, progress)?;
        for file in firmware.files {
            let from = unpacked.join("usr").join(file);
            let to = entry.join(from.file_name().unwrap_or_default());
            fs::copy(&from, &to).map_err(Error::file("copy", from))?;
        }
        fs::remove_dir_all(&unpacked).map_err(Error::file("remove", unpacked))
    })
}

impl Simulator {
    /// Returns the files that this simulator is compiled with, and its patch.
    fn files(&self) -> impl Iterator<Item = &'static (&'static str, &'static [u8])> {
        FILES.iter().filter(|(name, _)| *name == self.hooks || self.place(name).is_some())
    }

    /// Returns the path of a file in the simulator's source.
    fn place(&self, name: &str) -> Option<PathBuf> {
        self.places.iter().find_map(|(prefix, to)| Some(format!("{to}{}", name.strip_prefix(prefix)?).into()))
    }

    fn compile(&self, cache: &Cache, program: &str, entry: &Path, progress: &mut Progress) -> Result<()> {
        let _guard = cache.lock(self.tree, progress)?;
        let tree = cache.folder(self.tree)?;
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
            let unpacked = arriving.join(self.package);
            (self.unpack)(&Repository::open(cache, self.suite, progress)?, &unpacked, progress)?;
            let _ = fs::remove_file(tree.join(APPLIED));
            fs::rename(&unpacked, &source).map_err(Error::file("create", &source))?;
            remove_folder(&arriving)?;
        }
        fs::write(&half_patched, "").map_err(Error::file("write", &half_patched))?;
        self.add_pmus(&tree, &source)?;
        fs::remove_file(&half_patched).map_err(Error::file("remove", &half_patched))?;

        let objects = tree.join("objects");
        self.configure(&source, &objects, progress)?;
        self.run_compiler(&objects, program, progress)?;
        let built = objects.join(program);
        fs::copy(&built, entry.join(program)).map(drop).map_err(Error::file("copy", built))
    }

    /// Adds the PMUs' files to the tree and applies the patch, after an older version of the patch was reverted. Files
    /// that are up to date are not written, so they are not compiled again.
    fn add_pmus(&self, tree: &Path, source: &Path) -> Result<()> {
        for (path, content) in
            self.files().filter_map(|(name, content)| Some((source.join(self.place(name)?), content)))
        {
            if fs::read(&path).ok().as_deref() != Some(*content) {
                let folder = path.parent().unwrap_or(source);
                fs::create_dir_all(folder).map_err(Error::file("create", folder))?;
                fs::write(&path, content).map_err(Error::file("write", path))?;
            }
        }
        let hooks = content(self.hooks);
        let applied = tree.join(APPLIED);
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

    fn configure(&self, source: &Path, objects: &Path, progress: &mut Progress) -> Result<()> {
        let mut wanted = self.configure.join(" ").into_bytes();
        wanted.extend(self.headers.iter().flat_map(|name| content(name)));
        let configured = objects.join("configured");
        if fs::read(&configured).ok() == Some(wanted.clone()) {
            return Ok(());
        }
        progress.step("configuring the lab CPU");
        remove_folder(objects)?;
        fs::create_dir_all(objects).map_err(Error::file("create", objects))?;
        // The distribution's meson needs the distribution's Python, and another Python may come first in PATH.
        let mut command = Command::new(source.join("configure"));
        command.args(self.configure).env("PYTHON", "/usr/bin/python3");
        run_tool(command.current_dir(objects), "bash")?;
        fs::write(&configured, wanted).map_err(Error::file("write", configured))
    }

    fn run_compiler(&self, objects: &Path, program: &str, progress: &mut Progress) -> Result<()> {
        progress.long_step("compiling the lab CPU");
        let mut command = (self.compiling)(program);
        command.current_dir(objects).stdin(Stdio::null()).stdout(Stdio::piped());
        // This process's lock on the tree ends with the process, and then nothing may write to the tree any more.
        child::die_with_this_process(&mut command, child::Death::Terminate);
        let mut child = command.spawn().map_err(Error::system("run the compiler"))?;
        let mut tail = VecDeque::new();
        let output = child.stdout.take().map(BufReader::new);
        for line in output.into_iter().flat_map(BufRead::lines).map_while(std::result::Result::ok) {
            if let Some((done, total)) = parts(&line) {
                progress.parts(done, total);
            }
            tail.push_back(line);
            if tail.len() > TAIL_LINES {
                tail.pop_front();
            }
        }
        let status = child.wait().map_err(Error::system("wait for the compiler"))?;
        if status.success() { Ok(()) } else { Err(Error::Compile(Vec::from(tail).join("\n"))) }
    }
}

/// Returns how many files have been compiled, of how many, if ninja's line says so: `[327/1221] Compiling ...`.
fn parts(line: &str) -> Option<(u64, u64)> {
    let (done, total) = line.strip_prefix('[')?.split_once(']')?.0.split_once('/')?;
    Some((done.parse().ok()?, total.parse().ok()?))
}

/// Returns a file of [`FILES`].
fn content(name: &str) -> &'static [u8] {
    FILES.iter().find(|(other, _)| *other == name).map_or(&[], |(_, content)| content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_have_their_places_in_the_source() {
        let of = |simulator: &Simulator, name| simulator.place(name);
        assert_eq!(of(&qemu::QEMU, "riscv64/pmu.c"), Some("target/riscv/pmu.c".into()));
        assert_eq!(of(&bochs::BOCHS, "bochs/pmu.cc"), Some("instrument/lab/pmu.cc".into()));
        assert_eq!(of(&bochs::BOCHS, "bochs/console.cc"), Some("iodev/lab_console.cc".into()));
        assert_eq!(of(&bochs::BOCHS, "x86_64/pmu-model.h"), Some("instrument/lab/pmu-model.h".into()));
        assert_eq!(of(&bochs::BOCHS, "x86_64/pmu.h"), None);
    }

    #[test]
    fn every_embedded_file_belongs_to_a_simulator() {
        let simulators = [&qemu::QEMU, &bochs::BOCHS];
        for (name, _) in FILES {
            assert!(
                simulators.iter().any(|simulator| simulator.files().any(|(other, _)| name == other)),
                "{name}"
            );
        }
        for simulator in simulators {
            for name in simulator.headers.iter().chain([&simulator.hooks]) {
                assert!(!content(name).is_empty(), "{name}");
            }
        }
    }
}
