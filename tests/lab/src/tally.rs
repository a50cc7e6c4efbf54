//! `tally run` on the simulated host, as if it ran on this machine: what its options name goes there, and what it makes and
//! changes comes back.

mod arguments;
mod tree;

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, IsTerminal, stderr, stdout};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use guest_images::{Arch, Progress, Release};
use tally_lab::{Error, Result, Scenario, Streams, cross, quoted};

use crate::beside;
use arguments::{Access, Localised, Share};
use tree::{Packer, TooLarge, Tree};

/// The program `tally` for a kind of host, compiled for it if need be.
pub fn program_for(arch: Arch, progress: &mut Progress) -> Result<PathBuf> {
    match arch {
        Arch::X86_64 => beside::program("tally", progress),
        Arch::Riscv64 => cross::program("tally", progress),
    }
}

/// A `tally run` that is to be.
pub struct Run {
    scenario: Scenario,
    localised: Localised,
    /// The folders as they go there.
    folders: Vec<u8>,
}

impl Run {
    /// With these arguments and the default guest, on a host with so much memory.
    pub fn new(
        arguments: Vec<OsString>,
        guest: Release,
        memory_mib: u32,
        progress: &mut Progress,
    ) -> Result<Self> {
        let mut localised = Localised::new(arguments)?;
        let folders = pack(&localised, memory_mib)?;
        let mut scenario = Scenario::new(script(&localised, brings_back(&localised))).memory_mib(memory_mib);
        for twin in localised.files.iter().chain(&localised.disks) {
            scenario = scenario.file(&twin.here, &twin.there);
        }
        let scenario = scenario
            .arguments(std::mem::take(&mut localised.arguments))
            .unpacked(folders.clone())
            .file(program_for(guest.arch, progress)?, "tally")
            .guest(guest, progress)?;
        Ok(Self { scenario, localised, folders })
    }

    /// Changes the host.
    #[must_use]
    pub fn on(mut self, change: impl FnOnce(Scenario) -> Scenario) -> Self {
        self.scenario = change(self.scenario);
        self
    }

    /// Runs it on this process's own streams. The status is the command's.
    pub fn run(self, progress: &mut Progress) -> Result<u8> {
        let mut left = Vec::new();
        let streams = Streams {
            input: input().map_err(|source| Error::System { action: "look at standard input", source })?,
            stdout: &mut stdout(),
            stderr: &mut stderr(),
            left: brings_back(&self.localised).then_some(&mut left),
        };
        let status = self.scenario.run_on(streams, progress)?;
        if brings_back(&self.localised) {
            self.bring_back(&Tree::read(&left)?)?;
        }
        Ok(status)
    }

    fn bring_back(&self, left: &Tree) -> Result<()> {
        for (number, share) in written(&self.localised.shares) {
            let before = Tree::read(&self.folders)?;
            let after = left.folder(Path::new(&format!("shares/{number}")))?;
            after.bring_back(&before.folder(&share.path)?, &share.path)?;
        }
        for disk in &self.localised.disks {
            tree::bring_back_image(left.file(&disk.there).ok_or(Error::Lost)?, &disk.here)?;
        }
        for made in &self.localised.made {
            // It says itself why it made none.
            if let Some(content) = left.file(&made.there) {
                fs::write(&made.here, content).map_err(|source| Error::File {
                    action: "write",
                    path: made.here.clone(),
                    source,
                })?;
            }
        }
        Ok(())
    }
}

/// Standard input if there is something to read, or may be: a terminal is not passed on.
fn input() -> io::Result<Option<File>> {
    let stdin = io::stdin();
    let file = File::from(stdin.as_fd().try_clone_to_owned()?);
    let found = file.metadata()?;
    let is_null = found.file_type().is_char_device() && found.rdev() == fs::metadata("/dev/null")?.rdev();
    Ok(if is_null || stdin.is_terminal() { None } else { Some(file) })
}

/// The folders that go there, each once: one may be in another.
fn pack(localised: &Localised, memory_mib: u32) -> Result<Vec<u8>> {
    /// The host has a copy of everything in its memory, at times two, and the guest's own memory.
    const PARTS: u32 = 8;
    let limit_mib = memory_mib / PARTS;
    let mut packer = Packer::new(u64::from(limit_mib) << 20);
    let too_large = |option, path: &Path| Error::Refused {
        option,
        path: path.to_owned(),
        why: format!(
            "what goes to the simulated host is larger than {limit_mib} MiB; --lab-memory gives it more room"
        ),
    };
    for disk in &localised.disks {
        let size = fs::metadata(&disk.here).map_or(0, |found| found.len());
        packer.reserve(size).map_err(|TooLarge| too_large("--disk", &disk.here))?;
    }
    let paths = || localised.shares.iter().map(|share| &share.path);
    for (number, path) in paths().enumerate() {
        let is_outer = |(other_number, other): (usize, &PathBuf)| {
            path.starts_with(other) && (path != other || other_number < number)
        };
        if !paths().enumerate().any(is_outer) {
            packer.folder(path)?.map_err(|TooLarge| too_large("--share", path))?;
        }
    }
    if localised.shares.is_empty() { Ok(Vec::new()) } else { packer.finish() }
}

fn brings_back(localised: &Localised) -> bool {
    let Localised { disks, shares, made, .. } = localised;
    !(disks.is_empty() && made.is_empty()) || written(shares).next().is_some()
}

/// The folders that guests may write to, with their numbers.
fn written(shares: &[Share]) -> impl Iterator<Item = (usize, &Share)> {
    shares.iter().enumerate().filter(|(_, share)| share.access == Access::ReadWrite)
}

/// What runs on the host. It starts in the folder that this process is in if that is there too, and leaves in `$OUT` what is
/// to come back.
fn script(localised: &Localised, brings_back: bool) -> Vec<u8> {
    let shares = &localised.shares;
    let mut script = Vec::new();
    if let Ok(here) = env::current_dir()
        && shares.iter().any(|share| here.starts_with(&share.path))
    {
        script.extend([b"cd ", &quoted(here.as_os_str())[..], b" || exit\n"].concat());
    }
    if !brings_back {
        script.extend_from_slice(b"exec /scenario/tally run \"$@\"\n");
        return script;
    }
    script.extend_from_slice(b"mkdir -p $OUT/given $OUT/made\n/scenario/tally run \"$@\"\nstatus=$?\ncd /\n");
    for disk in &localised.disks {
        let folder = disk.there.rsplit_once('/').map_or("", |(folder, _)| folder);
        script.extend_from_slice(format!("mv /scenario/{folder} $OUT/given/\n").as_bytes());
    }
    for (number, share) in written(shares) {
        let place = format!("$OUT/shares/{number}");
        script.extend_from_slice(format!("mkdir -p {place} && mount --bind ").as_bytes());
        script.extend(quoted(share.path.as_os_str()));
        script.extend_from_slice(format!(" {place}\n").as_bytes());
    }
    script.extend_from_slice(b"exit $status\n");
    script
}
