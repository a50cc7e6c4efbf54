//! Hosts that are saved as soon as they have booted. A run then starts from there, which takes a tenth of a boot's
//! time.
//!
//! A saved host is the same for all runs: its files and its script come after that, in an archive ([`super::Start`]).
//! It stops itself, so that it is always at the same instruction, whatever this machine is doing meanwhile. What many
//! runs begin with can be executed before that, and is saved with the host ([`SavedHost::prepared`]).

use std::fs::File;
use std::io::Read;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::Duration;

use guest_images::cache::{Cache, Key};
use guest_images::{Progress, Release, run_tool, stamp};

use super::{BOOT_LIMIT, Machine, Shape, Start, qemu};
use crate::error::{Error, Result};
use crate::simulator::board::Processor;
use crate::simulator::cpu::LabCpu;
use crate::simulator::image::{HostImage, default_host};
use crate::simulator::silicon::Silicon;

const RECIPE: &str = "1";
/// Number of saved hosts of a kind that are kept: each has a file of half a gigabyte.
const KEPT: usize = 3;

/// A saved host.
#[derive(Debug)]
pub struct SavedHost {
    folder: PathBuf,
}

/// What a host is started with.
#[derive(Clone, Copy)]
pub struct HostParts<'a> {
    pub cpu: &'a LabCpu,
    pub release: Release,
    pub image: &'a HostImage,
    pub shape: Shape,
}

impl SavedHost {
    /// Size of the archive with a run's files.
    pub const FILES_SIZE: u64 = qemu::FILES_MIB << 20;

    /// Returns whether hosts like this are saved. Only one shape is, which nearly all hosts have. What its PMU does
    /// wrong may begin when it goes on; what CPUID says may not.
    pub fn exists_for(release: Release, shape: Shape) -> bool {
        let processor = Processor::of(release.arch, shape.pmu);
        processor == Processor::Amd
            && release == default_host(release.arch)
            && without_mistakes(shape) == Shape::default()
            && !shape.silicon.is_in_cpuid()
    }

    /// Returns the saved host, and saves it if needed.
    pub fn of(cache: &Cache, parts: HostParts, progress: &mut Progress) -> Result<Self> {
        let folder = cache.entry(&parts.key("lab-saved")?, progress, |progress, entry| {
            progress.step("booting a simulated host once, to start from there");
            let host = Self { folder: entry.to_owned() };
            let start = Start::ToSave { initrd: &parts.image.initrd, memory: &host.memory() };
            host.save(&start, parts, BOOT_LIMIT)
        })?;
        Ok(Self { folder })
    }

    /// Returns this host as it is after the commands in an archive, and saves it if needed. The archive is made from
    /// the inputs. The commands may take as long as the limit, in real time.
    pub fn prepared(
        &self,
        cache: &Cache,
        parts: HostParts,
        (inputs, limit): (&[impl AsRef<[u8]>], Duration),
        archive: impl FnOnce() -> Result<File>,
        progress: &mut Progress,
    ) -> Result<Self> {
        let key = inputs.iter().fold(parts.key("lab-prepared")?, Key::with);
        let folder = cache.entry(&key, progress, |progress, entry| {
            progress.step("preparing a simulated host once, to start from there");
            let host = Self { folder: entry.to_owned() };
            let mut copy = Command::new("cp");
            copy.arg("--sparse=always").arg(self.memory()).arg(host.memory());
            run_tool(&mut copy, "coreutils")?;
            let files = archive()?;
            let start = Start::ToSaveAgain { host: self, files: &files, memory: &host.memory() };
            host.save(&start, parts, limit)
        })?;
        Ok(Self { folder })
    }

    /// Starts a host, and saves it when it has stopped itself.
    fn save(&self, start: &Start, parts: HostParts, limit: Duration) -> Result<()> {
        let HostParts { cpu, release, image, shape } = parts;
        let shape = without_mistakes(shape);
        let (machine, output) = Machine::start(cpu, release.arch, &image.kernel, start, shape, None, None)?;
        thread::scope(|scope| {
            let console = scope.spawn(|| {
                let (mut console, mut text) = (output.console, Vec::new());
                // What was read before an error is all there is.
                let _ = console.read_to_end(&mut text);
                String::from_utf8_lossy(&text).into_owned()
            });
            machine.save(&self.state(), limit).map_err(|error| {
                let console = console.join().unwrap_or_default();
                Error::HostDied { cause: error.to_string(), console }
            })
        })
    }

    /// The file with its memory.
    pub fn memory(&self) -> PathBuf {
        self.folder.join("memory")
    }

    /// The file with everything else.
    pub fn state(&self) -> PathBuf {
        self.folder.join("state")
    }
}

fn without_mistakes(shape: Shape) -> Shape {
    Shape { silicon: Silicon::default(), ..shape }
}

impl HostParts<'_> {
    /// Returns the key of a saved host that starts from these parts.
    fn key(&self, kind: &str) -> Result<Key> {
        let Self { cpu, image, .. } = self;
        let key = Key::new(kind).keep(KEPT).with(RECIPE).with(Processor::Amd.command_line());
        [&cpu.program, &image.kernel, &image.initrd]
            .into_iter()
            .try_fold(key, |key, part| Ok(key.with(stamp(part)?)))
    }
}
