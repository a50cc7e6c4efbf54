//! Hosts that are saved as soon as they have booted. A run then starts from there, which takes a tenth of a boot's time.
//!
//! A saved host is the same for all runs: its files and its script come after that, in an archive ([`super::Start`]). It
//! stops itself at an instruction, so that it is always the same one, whatever this machine is doing meanwhile.

use std::io::Read;
use std::path::PathBuf;
use std::thread;

use guest_images::cache::{Cache, Key};
use guest_images::{Progress, Release, stamp};

use super::{Machine, Shape, Start, qemu};
use crate::board::Processor;
use crate::cpu::LabCpu;
use crate::error::{Error, Result};
use crate::host::{HostImage, default_host};
use crate::watch::BOOT_LIMIT;

const RECIPE: &str = "1";

/// A saved host.
#[derive(Debug)]
pub struct Saved {
    folder: PathBuf,
}

impl Saved {
    /// Size of the archive with a run's files.
    pub const FILES_SIZE: u64 = qemu::FILES_MIB << 20;

    /// Returns the saved host of this shape, and saves it if needed. Only one shape is saved, which nearly all hosts
    /// have: the memory of each takes half a gigabyte in the cache.
    pub fn of(
        cache: &Cache,
        cpu: &LabCpu,
        release: Release,
        image: &HostImage,
        shape: Shape,
        progress: &mut Progress,
    ) -> Result<Option<Self>> {
        let processor = Processor::of(release.arch, shape.pmu);
        if processor != Processor::Amd || release != default_host(release.arch) || shape != Shape::default() {
            return Ok(None);
        }
        let mut key = Key::new("lab-saved").with(RECIPE).with(processor.command_line());
        for part in [&cpu.program, &image.kernel, &image.initrd] {
            key = key.with(stamp(part)?);
        }
        let folder = cache.entry(&key, progress, |progress, entry| {
            progress.step("booting a simulated host once, to start from there");
            let host = Self { folder: entry.to_owned() };
            let memory = host.memory();
            let start = Start::ToSave { initrd: &image.initrd, memory: &memory };
            let (machine, output) = Machine::start(cpu, release.arch, &image.kernel, &start, shape, None)?;
            thread::scope(|scope| {
                let console = scope.spawn(|| {
                    let (mut console, mut text) = (output.console, Vec::new());
                    // What was read before an error is all there is.
                    let _ = console.read_to_end(&mut text);
                    String::from_utf8_lossy(&text).into_owned()
                });
                machine.save(&host.state(), BOOT_LIMIT).map_err(|error| {
                    let console = console.join().unwrap_or_default();
                    Error::HostDied { cause: error.to_string(), console }
                })
            })
        })?;
        Ok(Some(Self { folder }))
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
