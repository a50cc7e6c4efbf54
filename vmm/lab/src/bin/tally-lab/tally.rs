//! `tally run` on the simulated host as if it ran on this machine. Files that its options name are copied to the host.
//! Files that it creates and changes are copied back.

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

/// Returns the path of the program `tally` for a host of this architecture, and compiles it if needed.
pub fn program_for(arch: Arch, progress: &mut Progress) -> Result<PathBuf> {
    match arch {
        Arch::X86_64 => beside::program("tally", progress),
        Arch::Riscv64 => cross::program("tally", progress),
    }
}

/// A `tally run` on the simulated host.
pub struct Run {
    scenario: Scenario,
    localised: Localised,
    /// Options of a run that makes a template for this one, if it can start from one.
    template: Option<Vec<OsString>>,
    /// Tar archive of the shared directories, as they are copied to the host.
    folders: Vec<u8>,
}

impl Run {
    /// Prepares a run with these arguments and the default guest, on a host with this much memory.
    pub fn new(
        arguments: Vec<OsString>,
        guest: Release,
        memory_mib: u32,
        progress: &mut Progress,
    ) -> Result<Self> {
        let template = arguments::template(&arguments);
        let mut localised = Localised::new(arguments)?;
        let folders = pack(&localised, memory_mib)?;
        let mut scenario =
            Scenario::with_all_counters(script(&localised, copies_back(&localised))).memory_mib(memory_mib);
        for file in localised.files.iter().chain(&localised.disks) {
            scenario = scenario.file(&file.here, &file.there);
        }
        let scenario = scenario
            .arguments(std::mem::take(&mut localised.arguments))
            .unpacked(folders.clone())
            .file(program_for(guest.arch, progress)?, "tally")
            .guest(guest, progress)?;
        Ok(Self { scenario, localised, template, folders })
    }

    /// Changes the scenario, for example its host.
    #[must_use]
    pub fn on(mut self, change: impl FnOnce(Scenario) -> Scenario) -> Self {
        self.scenario = change(self.scenario);
        self
    }

    /// Runs `tally run` on this process's own streams. Returns the status of the guest's command.
    pub fn run(mut self, progress: &mut Progress) -> Result<u8> {
        // Elsewhere the template would be lost with the host.
        if self.scenario.starts_saved()
            && let Some(options) = self.template.take()
        {
            self.scenario = self.scenario.template(options);
        }
        let mut out = Vec::new();
        let streams = Streams {
            input: input().map_err(|source| Error::System { action: "use standard input", source })?,
            stdout: &mut stdout(),
            stderr: &mut stderr(),
            out: copies_back(&self.localised).then_some(&mut out),
            trace: None,
        };
        let status = self.scenario.run_on(streams, progress)?;
        if copies_back(&self.localised) {
            self.copy_back(&Tree::read(&out)?)?;
        }
        Ok(status)
    }

    /// Copies files that the run has changed or created from the archive of `$OUT` to this machine.
    fn copy_back(&self, out: &Tree) -> Result<()> {
        for (number, share) in writable(&self.localised.shares) {
            let before = Tree::read(&self.folders)?;
            let after = out.folder(Path::new(&format!("shares/{number}")))?;
            after.apply_changes(&before.folder(&share.path)?, &share.path)?;
        }
        for disk in &self.localised.disks {
            tree::apply_image(out.file(&disk.there).ok_or(Error::Lost)?, &disk.here)?;
        }
        for created in &self.localised.created {
            // If `tally` could not create the file, its own message says why.
            if let Some(content) = out.file(&created.there) {
                fs::write(&created.here, content).map_err(|source| Error::File {
                    action: "write",
                    path: created.here.clone(),
                    source,
                })?;
            }
        }
        Ok(())
    }
}

/// Returns standard input, unless it is a terminal, which is not passed on, or `/dev/null`.
fn input() -> io::Result<Option<File>> {
    let stdin = io::stdin();
    let file = File::from(stdin.as_fd().try_clone_to_owned()?);
    let metadata = file.metadata()?;
    let is_null =
        metadata.file_type().is_char_device() && metadata.rdev() == fs::metadata("/dev/null")?.rdev();
    Ok(if is_null || stdin.is_terminal() { None } else { Some(file) })
}

/// Packs the shared directories into a tar archive. A directory that is inside another shared one is packed only once.
fn pack(localised: &Localised, memory_mib: u32) -> Result<Vec<u8>> {
    /// Share of the host's memory for the files. The host's memory has one copy of the files, at times two, and the
    /// guest's memory.
    const MEMORY_DIVISOR: u32 = 8;
    let limit_mib = memory_mib / MEMORY_DIVISOR;
    let mut packer = Packer::new(u64::from(limit_mib) << 20);
    let too_large = |option, path: &Path| Error::Refused {
        option,
        path: path.to_owned(),
        why: format!(
            "the files for the simulated host are larger than {limit_mib} MiB; use a larger --lab-memory"
        ),
    };
    for disk in &localised.disks {
        let size = fs::metadata(&disk.here).map_or(0, |metadata| metadata.len());
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

/// Returns true if the run can change or create files that have to be copied back.
fn copies_back(localised: &Localised) -> bool {
    let Localised { disks, shares, created, .. } = localised;
    !(disks.is_empty() && created.is_empty()) || writable(shares).next().is_some()
}

/// Returns the directories that the guest may write to, with their numbers.
fn writable(shares: &[Share]) -> impl Iterator<Item = (usize, &Share)> {
    shares.iter().enumerate().filter(|(_, share)| share.access == Access::ReadWrite)
}

/// Returns the script that runs on the host. Its working directory is that of this process, if that is shared. It
/// leaves in `$OUT` what has to be copied back.
fn script(localised: &Localised, copies_back: bool) -> Vec<u8> {
    let shares = &localised.shares;
    let mut script = Vec::new();
    if let Ok(here) = env::current_dir()
        && shares.iter().any(|share| here.starts_with(&share.path))
    {
        script.extend([b"cd ", &quoted(here.as_os_str())[..], b" || exit\n"].concat());
    }
    if !copies_back {
        script.extend_from_slice(b"exec /scenario/tally run \"$@\"\n");
        return script;
    }
    script.extend_from_slice(b"mkdir -p $OUT/given $OUT/made\n/scenario/tally run \"$@\"\nstatus=$?\ncd /\n");
    for disk in &localised.disks {
        let folder = disk.there.rsplit_once('/').map_or("", |(folder, _)| folder);
        script.extend_from_slice(format!("mv /scenario/{folder} $OUT/given/\n").as_bytes());
    }
    for (number, share) in writable(shares) {
        let place = format!("$OUT/shares/{number}");
        script.extend_from_slice(format!("mkdir -p {place} && mount --bind ").as_bytes());
        script.extend(quoted(share.path.as_os_str()));
        script.extend_from_slice(format!(" {place}\n").as_bytes());
    }
    script.extend_from_slice(b"exit $status\n");
    script
}
