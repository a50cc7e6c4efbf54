//! Templates: the default guest, saved where it waits for its command. A run that can use one starts there, and maps the saved
//! memory, which all such guests share until they write to it.
//!
//! A template is made by a process of its own (`tally run --save-template DIR`), because a run confines itself, and it belongs to
//! everything that it was made from: the files of the guest, this program, the host's processor and kernel, and the machine.
//! Nobody else can change it: it is in the cache, whose owner is checked.

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use devices::virtio::ConsoleState;
use guest_images::cache::{Cache, Key};
use guest_images::child::{Death, die_with_this_process};
use guest_images::{Guest, Progress, default_guest};
use log::info;
use serde::{Deserialize, Serialize};
use tally_machine::pmu::Pmu;
use tally_machine::{CAN_SAVE, MachineState, PageMap, SaveError, Saver};
use vpmu::policy::Policy;

use crate::agent::Save;
use crate::cli::Run;

/// Version of what is in a template's folder.
const VERSION: &str = "1";
const STATE: &str = "state.json";
const MEMORY: &str = "memory";
/// Variable that makes guests boot, as `--boot` does.
const BOOT: &str = "TALLY_BOOT";

/// A saved guest.
pub struct Template {
    /// The machine without its memory.
    pub machine: MachineState,
    /// The agent's device.
    pub console: ConsoleState,
    /// The memory.
    pub memory: File,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Saved {
    machine: MachineState,
    console: ConsoleState,
}

/// The machine that a template is for, beside its options.
pub struct For<'a> {
    pub options: &'a Run,
    pub pmu: Pmu,
    pub policy: &'a Policy,
    pub cpus: u8,
}

impl For<'_> {
    /// Returns a template for this machine. The first call for a machine makes it. Returns `None` if a run with these
    /// options boots, or if there can be no template here.
    pub fn find(&self) -> Option<Template> {
        if let Some(why) = self.boots_because() {
            info!("the guest boots: {why}");
            return None;
        }
        let found = self.folder().and_then(|folder| Template::load(&folder));
        found.inspect_err(|error| info!("the guest boots: {error:#}")).ok()
    }

    /// Returns why a run with these options does not start from a template, if so.
    fn boots_because(&self) -> Option<&'static str> {
        let options = self.options;
        [
            (!CAN_SAVE, "machines of this architecture cannot be saved"),
            (options.boot, "--boot"),
            (env::var_os(BOOT).is_some_and(|set| !set.is_empty()), BOOT),
            (options.save_template.is_some(), "it becomes a template"),
            (options.command.is_empty(), "it runs no command"),
            (options.kernel.is_some() || options.initrd.is_some(), "it is not the default guest"),
            (!options.append.is_empty(), "--append"),
            (!options.disk.is_empty(), "--disk"),
            (options.pmu_log.is_some(), "--pmu-log has all of its counters' events"),
            (matches!(self.pmu, Pmu::Kvm), "its PMU is KVM's"),
        ]
        .into_iter()
        .find_map(|(applies, why)| applies.then_some(why))
    }

    /// Returns the folder of the template. Makes it if it does not exist.
    fn folder(&self) -> Result<PathBuf> {
        let mut progress = Progress::stderr("tally");
        let guest = default_guest(&mut progress)?;
        let cache = Cache::open()?;
        let key = self.key(&guest)?;
        cache.entry(&key, &mut progress, |progress, folder| {
            progress.step("saving a guest from which the next ones start at once");
            self.make(folder)
        })
    }

    fn key(&self, guest: &Guest) -> Result<Key> {
        let host = rustix::system::uname();
        let identity = |path: &Path| -> Result<String> {
            let file = fs::metadata(path).with_context(|| path.display().to_string())?;
            Ok(format!("{} {}.{:09} {}", file.len(), file.mtime(), file.mtime_nsec(), path.display()))
        };
        let Run { memory, share, .. } = self.options;
        Ok(Key::new("template")
            .with(VERSION)
            .with(identity(Path::new("/proc/self/exe"))?)
            .with(identity(&guest.kernel)?)
            .with(identity(&guest.initrd)?)
            .with(host.release().to_bytes())
            .with(host.version().to_bytes())
            .with(tally_machine::processor_identity())
            .with(format!("{:?} {:?}", self.pmu, self.policy))
            .with(format!("{} vCPUs, {} bytes, {} shares", self.cpus, memory.bytes, share.len())))
    }

    /// Lets another process make a template in an empty folder.
    fn make(&self, folder: &Path) -> Result<()> {
        let Run { memory, cpus, pmu, counters, pmu_policy, share, .. } = self.options;
        let mut tally = Command::new("/proc/self/exe");
        tally.arg("run").arg("--save-template").arg(folder);
        tally.args(["--memory", &memory.bytes.to_string(), "--cpus", &cpus.to_string()]);
        tally.args(["--pmu", pmu.name(), "--sandbox", self.options.sandbox_name()]);
        if let Some(counters) = counters {
            tally.args(["--counters", &counters.to_string()]);
        }
        if let Some(policy) = pmu_policy {
            tally.arg("--pmu-policy").arg(policy);
        }
        if let Some(how) = self.options.on_starvation_name() {
            tally.args(["--on-starvation", how]);
        }
        for share in share {
            tally.arg("--share").arg(&share.path);
        }
        tally.args(["--", "true"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        die_with_this_process(&mut tally, Death::Terminate);
        let done = tally.output().context("cannot start a process that saves a guest")?;
        if !done.status.success() {
            let said = String::from_utf8_lossy(&done.stderr);
            bail!("cannot save a guest: {}", said.trim_end());
        }
        Ok(())
    }
}

impl Template {
    /// Opens a template.
    fn load(folder: &Path) -> Result<Self> {
        let load = || -> Result<Self> {
            let state = fs::read(folder.join(STATE))?;
            let Saved { machine, console } = serde_json::from_slice(&state)?;
            info!("the guest starts from the template {}", folder.display());
            Ok(Self { machine, console, memory: File::open(folder.join(MEMORY))? })
        };
        load().with_context(|| folder.display().to_string())
    }
}

/// Prepares to save a machine into a folder, before this process confines itself.
pub fn save_into(folder: &Path, saver: Saver) -> Result<Save> {
    let create = |name| File::create_new(folder.join(name)).with_context(|| folder.display().to_string());
    let (state, memory, pages) = (create(STATE)?, create(MEMORY)?, PageMap::open()?);
    Ok(Box::new(move |console| {
        let save = || -> Result<()> {
            let (machine, _held) = saver.save().map_err(|error: SaveError| anyhow::Error::new(error))?;
            serde_json::to_writer(&state, &Saved { machine, console: console.clone() })?;
            saver.ram.save(&pages, &memory)?;
            Ok(())
        };
        save().map_err(|error| format!("{error:#}"))
    }))
}
