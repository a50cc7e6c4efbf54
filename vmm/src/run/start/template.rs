//! Templates: the default guest, saved where it waits for its command. A run that can use one starts there, and maps
//! the saved memory, which all such guests share until they write to it.
//!
//! A template is made by a process of its own (`tally run --save-template DIR`), because a run confines itself, and it
//! belongs to everything that it was made from: the files of the guest, this program, the host's processor and kernel,
//! and the machine. Nobody else can change it: it is in the cache, whose owner is checked.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use devices::virtio::ConsoleState;
use guest_images::cache::{Cache, Key};
use guest_images::child::{Death, die_with_this_process};
use guest_images::{Guest, Progress, default_guest};
use log::info;
use serde::{Deserialize, Serialize};
use tally_machine::pmu::Pmu;
use tally_machine::{MachineState, PageMap, Saver};
use vpmu::policy::Policy;

use super::kept::{self, TargetMachine};
use crate::cli::Run;
use crate::run::network;
use crate::run::streams::agent::TemplateSaver;

/// Version of what is in a template's folder.
const VERSION: &str = "1";
const STATE: &str = "state.json";
const MEMORY: &str = "memory";
/// Why there can be none: instead of the other files.
const FAILURE_FILE: &str = "failure";
/// Time after which the process that makes a template is ended.
const LIMIT: Duration = Duration::from_mins(5);
const INTERVAL: Duration = Duration::from_millis(5);
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
    /// Where it is kept.
    pub place: Place,
}

/// Where a template is kept, and since when.
#[derive(Debug, Clone)]
pub struct Place {
    folder: PathBuf,
    age: Age,
}

#[derive(Debug, Clone, Copy)]
enum Age {
    /// This run has made it.
    New,
    /// An earlier run has made it.
    Kept,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TemplateState {
    /// [`TemplateRequest::counters`] of the process that saved it.
    counters: String,
    machine: MachineState,
    console: ConsoleState,
}

/// The machine that a template is for, beside its options.
pub struct TemplateRequest<'a> {
    pub options: &'a Run,
    pub machine: TargetMachine<'a>,
    pub policy: &'a Policy,
}

impl TemplateRequest<'_> {
    /// Returns a template for this machine. The first call for a machine makes it. Returns `None` if a run with these
    /// options boots, or if there can be no template here.
    pub fn find(&self) -> Option<Template> {
        if let Some(why) = self.boots_because() {
            info!("the guest boots: {why}");
            return None;
        }
        let found = self
            .place()
            .and_then(|place| Template::load(&place, &self.counters()).inspect_err(|_| place.remove()));
        found.inspect_err(|error| info!("the guest boots: {error:#}")).ok()
    }

    /// Returns why a run with these options does not start from a template, if so.
    fn boots_because(&self) -> Option<&'static str> {
        let options = self.options;
        [
            (options.boot, "--boot"),
            (env::var_os(BOOT).is_some_and(|set| !set.is_empty()), BOOT),
            (options.save_template.is_some(), "it becomes a template"),
            (options.command.is_empty(), "it runs no command"),
            (options.kernel.is_some() || options.initrd.is_some(), "it is not the default guest"),
            (!options.append.is_empty(), "--append"),
            (!options.disk.is_empty(), "--disk"),
            (options.pmu_log.is_some(), "--pmu-log has all of its counters' events"),
            (matches!(self.machine.pmu, Pmu::Kvm), "its PMU is KVM's"),
        ]
        .into_iter()
        .find_map(|(applies, why)| applies.then_some(why))
    }

    /// Returns where the template is. Makes it if it does not exist.
    fn place(&self) -> Result<Place> {
        let mut progress = Progress::stderr("tally").verbose(self.options.verbose > 0);
        let guest = default_guest(&mut progress)?;
        let cache = Cache::open()?;
        let key = self.key(&guest)?;
        let mut age = Age::Kept;
        let folder = cache.entry(&key, &mut progress, |progress, folder| {
            age = Age::New;
            progress.step("saving a guest from which the next ones start at once");
            // The next runs boot without another attempt.
            self.make(folder).or_else(|error| Ok::<_, anyhow::Error>(leave_reason(folder, &error)?))
        })?;
        Ok(Place { folder, age })
    }

    fn key(&self, guest: &Guest) -> Result<Key> {
        let Run { memory, share, root, net, cpus, .. } = self.options;
        let offer = net.as_ref().map(|net| network::offer(net, *cpus)).transpose()?;
        Ok(kept::key("template", VERSION, self.machine)?
            .with(kept::file_stamp(&guest.kernel)?)
            .with(kept::file_stamp(&guest.initrd)?)
            .with(self.counters())
            .with(format!(
                "{} bytes, {} shares, has a root: {}, network {offer:?}",
                memory.bytes,
                share.len(),
                root.is_some()
            )))
    }

    /// Returns where the machine is saved, if it is.
    pub fn destination(&self) -> Option<TemplateDestination> {
        let folder = self.options.save_template.clone()?;
        Some(TemplateDestination { folder, counters: self.counters() })
    }

    /// Describes the counters that the guest has. Another process may find others, if somebody takes some in between.
    fn counters(&self) -> String {
        format!("{:?} {:?}", self.machine.pmu, self.policy)
    }

    /// Lets another process make a template in an empty folder.
    fn make(&self, folder: &Path) -> Result<()> {
        let Run { memory, cpus, pmu, counters, pmu_policy, share, root, net, verbose, .. } = self.options;
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
        if let Some(net) = net {
            tally.args(["--net", &net.to_string()]);
        }
        if let Some(root) = root {
            tally.arg("--root").arg(root);
        }
        for share in share {
            // It is not mounted: the access does not matter, and the suffix ends the path.
            let mut option = OsString::from("--share=");
            option.push(&share.path);
            option.push(":ro");
            tally.arg(option);
        }
        let said = tempfile::tempfile()?;
        let stderr = if *verbose > 0 { Stdio::inherit() } else { said.try_clone()?.into() };
        tally.args(["--", "true"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        die_with_this_process(&mut tally, Death::Terminate);
        let child = tally.spawn().context("cannot start a process that saves a guest")?;
        let done = wait(child).context("the guest that was to be saved did not come up")?;
        if !done.success() {
            let mut text = String::new();
            (&said).seek(SeekFrom::Start(0))?;
            (&said).take(MAX_SAID).read_to_string(&mut text)?;
            bail!("cannot save a guest: {}", text.trim_end());
        }
        Ok(())
    }
}

/// Maximum length of an error of the process that makes a template.
const MAX_SAID: u64 = 4096;

/// Waits for a process, but not for ever.
fn wait(mut child: Child) -> Result<ExitStatus> {
    let end = Instant::now() + LIMIT;
    while Instant::now() < end {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        thread::sleep(INTERVAL);
    }
    child.kill()?;
    child.wait()?;
    bail!("{} seconds were not enough", LIMIT.as_secs())
}

/// Puts the reason why there is no template in its place.
fn leave_reason(folder: &Path, why: &anyhow::Error) -> io::Result<()> {
    // First, because the reason may be that the disk is full.
    for file in [STATE, MEMORY] {
        let _ = fs::remove_file(folder.join(file));
    }
    fs::write(folder.join(FAILURE_FILE), format!("{why:#}"))
}

impl Place {
    /// Gives up a template with which no machine can be built. If this run has made it, the next one would be no
    /// better: the reason takes its place, and the next runs boot without another attempt.
    pub fn give_up(&self, why: &anyhow::Error) {
        let left = match self.age {
            Age::New => leave_reason(&self.folder, why).is_ok(),
            Age::Kept => false,
        };
        if !left {
            self.remove();
        }
    }

    /// Removes a template that cannot be used, so that the next run makes another one. One that cannot be made stays.
    fn remove(&self) {
        if !self.folder.join(FAILURE_FILE).exists() {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

impl Template {
    /// Opens a template for a guest with these counters.
    fn load(place: &Place, counters: &str) -> Result<Self> {
        let folder = &place.folder;
        let load = || -> Result<Self> {
            if let Ok(why) = fs::read_to_string(folder.join(FAILURE_FILE)) {
                bail!("{why}; remove it to try again");
            }
            let state = fs::read(folder.join(STATE))?;
            let TemplateState { counters: saved, machine, console } = serde_json::from_slice(&state)?;
            if saved != counters {
                bail!("the host's counters or the policy were others when it was made");
            }
            let memory = File::open(folder.join(MEMORY))?;
            kept::used(folder);
            info!("the guest starts from the template {}", folder.display());
            Ok(Self { machine, console, memory, place: place.clone() })
        };
        load().with_context(|| folder.display().to_string())
    }
}

/// Where a machine is saved.
pub struct TemplateDestination {
    folder: PathBuf,
    counters: String,
}

/// Creates a file for this user alone: it has the kernel's secrets.
fn new_file(path: &Path) -> io::Result<File> {
    File::options().write(true).create_new(true).mode(0o600).open(path)
}

/// Prepares to save a machine into a folder, before this process confines itself.
pub fn save_into(
    TemplateDestination { folder, counters }: TemplateDestination,
    saver: Saver,
) -> Result<TemplateSaver> {
    let create = |name| new_file(&folder.join(name)).with_context(|| folder.display().to_string());
    let (state, memory, pages) = (create(STATE)?, create(MEMORY)?, PageMap::open()?);
    Ok(Box::new(move |console| {
        let save = || -> Result<()> {
            let paused = saver.pause()?;
            let machine = paused.save()?;
            let mut to = BufWriter::new(&state);
            serde_json::to_writer(&mut to, &TemplateState { counters, machine, console: console.clone() })?;
            to.flush()?;
            saver.ram.save(&pages, &memory)?;
            // A template that is complete only in the host's memory would be found after a crash.
            state.sync_data()?;
            memory.sync_data()?;
            Ok(())
        };
        save().map_err(|error| format!("{error:#}"))
    }))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    fn given_up(age: Age) -> (tempfile::TempDir, String) {
        let cache = tempfile::tempdir().unwrap();
        let place = Place { folder: cache.path().join("template"), age };
        fs::create_dir(&place.folder).unwrap();
        for file in [STATE, MEMORY] {
            fs::write(place.folder.join(file), "").unwrap();
        }
        place.give_up(&anyhow::anyhow!("it is no good"));
        let next = Place { age: Age::Kept, ..place };
        let said = Template::load(&next, "").err().map(|error| format!("{error:#}"));
        (cache, said.unwrap_or_default())
    }

    #[test]
    fn a_template_is_for_its_user_alone_also_in_a_cache_that_others_may_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(MEMORY);
        let mode = new_file(&path).unwrap().metadata().unwrap().mode();
        assert_eq!(mode & 0o077, 0, "{mode:o}");
        assert!(new_file(&path).is_err(), "what somebody has put there is not written to");
    }

    #[test]
    fn a_template_that_cannot_be_used_is_made_again() {
        let (cache, _) = given_up(Age::Kept);
        assert!(!cache.path().join("template").exists());
    }

    #[test]
    fn one_that_was_of_no_use_when_it_was_new_is_not_made_again() {
        let (cache, said) = given_up(Age::New);
        assert!(said.ends_with("it is no good; remove it to try again"), "{said}");
        assert_eq!(fs::read_dir(cache.path().join("template")).unwrap().count(), 1, "no memory is kept");
    }
}
