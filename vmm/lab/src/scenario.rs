//! Scenarios: scripts that run on the simulated host, with the files that they need and the files that they leave.

pub mod cores;
pub mod cross;
mod end;
mod files;
pub mod packed;
pub mod passt;
pub mod peer;
pub mod programs;
pub mod symbols;
pub mod trace;

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use guest_images::cache::Cache;
use guest_images::cpio::Archive;
use guest_images::payloads::OwnPrograms;
use guest_images::{Arch, Guest, Progress, Release};

use crate::error::{Error, Result};
use crate::simulator::board::{HostPmu, Processor};
use crate::simulator::cpu::LabCpu;
use crate::simulator::image::{HostImage, default_host};
use crate::simulator::machine::{
    BOOT_LIMIT, HostParts, Machine, Output, SavedHost, Shape, Start, Tracer, pipe,
};
use crate::simulator::silicon::Silicon;
use crate::simulator::{cpu, image};
use cores::Core;
use end::{End, Place, WaitDisplay, watch};
use files::{Channels, Content, in_memory};
use symbols::Symbols;
use trace::Trace;

/// The default guest's files.
const KERNEL: &str = "guest/kernel";
const INITRD: &str = "guest/initrd";
/// The variable that makes Tally's guests boot.
const BOOT: &str = "TALLY_BOOT";
/// Number of the console's last lines that an error message has.
const CONSOLE_LINES: usize = 50;

/// Result of a script.
#[derive(Debug)]
pub struct Outcome {
    /// Exit status: 128 plus the signal's number if a signal killed the script.
    pub status: u8,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

impl Outcome {
    /// Returns the standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// Returns the default guest's kernel and initrd.
pub fn guest(release: impl Into<Release>, progress: &mut Progress) -> Result<Guest> {
    let Release { suite, arch } = release.into();
    let own = match arch {
        Arch::X86_64 => OwnPrograms::default(),
        Arch::Riscv64 => {
            let agent = cross::agent(progress)?;
            OwnPrograms::riscv64(fs::read(&agent).map_err(Error::file("read", agent))?)
        }
    };
    Ok(guest_images::guest_of(&Cache::open()?, suite, &own, progress)?)
}

/// Returns an initrd with `programs` added to the working directory of the guest's command.
pub fn with_programs(initrd: &Path, programs: &[(&str, &[u8])]) -> Result<Vec<u8>> {
    let mut archive = Archive::new();
    for (name, content) in programs {
        archive.file(&format!("root/{name}"), 0o755, content);
    }
    // The added archive comes first: the kernel takes uncompressed archives only before compressed ones.
    let mut whole = archive.finish();
    whole.extend(fs::read(initrd).map_err(Error::file("read", initrd))?);
    Ok(whole)
}

/// The streams that a script is connected to while it runs.
pub struct Streams<'a> {
    /// Source of standard input, which the script need not read. `None` is an empty input.
    pub input: Option<File>,
    /// Destination of standard output.
    pub stdout: &'a mut (dyn Write + Send),
    /// Destination of standard error.
    pub stderr: &'a mut (dyn Write + Send),
    /// Destination of what the script leaves in `$OUT`, as a tar archive.
    pub out: Option<&'a mut Vec<u8>>,
    /// What the host executes. Only QEMU can trace that.
    pub trace: Option<&'a mut Trace>,
}

/// A script and what it needs.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Name under which the scenario waits for a core. `None` is the name of the calling thread.
    name: Option<&'static str>,
    script: Vec<u8>,
    arguments: Vec<OsString>,
    variables: Vec<(String, String)>,
    files: Vec<(String, Content)>,
    /// A tar archive that is unpacked in the host's root directory.
    unpacked: Vec<u8>,
    /// Frees the counter that the NMI watchdog holds, before the script starts.
    frees_watchdog: bool,
    /// What is executed before the host is saved once more.
    preparation: Option<Box<Scenario>>,
    /// Directory of this machine for what the script leaves in `$OUT`.
    out_folder: Option<PathBuf>,
    limit: Duration,
    shape: Shape,
    host: Release,
    show_console: bool,
    /// Looks up the kernel function in which a host hangs.
    finds_symbols: bool,
}

impl Scenario {
    /// Creates a scenario that runs a shell script on a host with one CPU and 2 GiB of memory.
    pub fn new(script: impl Into<Vec<u8>>) -> Self {
        Self {
            name: None,
            script: script.into(),
            arguments: Vec::new(),
            variables: Vec::new(),
            files: Vec::new(),
            unpacked: Vec::new(),
            frees_watchdog: false,
            preparation: None,
            out_folder: None,
            limit: Duration::from_mins(5),
            shape: Shape::default(),
            host: default_host(Arch::X86_64),
            show_console: false,
            finds_symbols: true,
        }
    }

    /// Does the same as [`Self::new`], and before that what `tally doctor` advises on such a host, so that guests can
    /// have all of its counters: `sysctl kernel.nmi_watchdog=0`.
    pub fn with_all_counters(script: impl Into<Vec<u8>>) -> Self {
        Self { frees_watchdog: true, ..Self::new(script) }
    }

    /// Sets the name under which the scenario's duration is recorded ([`crate::scenario::cores`]).
    #[must_use]
    pub fn named(mut self, name: &'static str) -> Self {
        self.name = Some(name);
        self
    }

    /// Adds arguments of the script.
    #[must_use]
    pub fn arguments(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Adds a variable to the script's environment.
    #[must_use]
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Copies a file of this machine to `name` in the script's working directory.
    #[must_use]
    pub fn file(mut self, path: impl Into<PathBuf>, name: &str) -> Self {
        self.files.push((name.to_owned(), Content::File(path.into())));
        self
    }

    /// Creates a program `name` in the script's working directory.
    #[must_use]
    pub fn program(mut self, content: impl Into<Vec<u8>>, name: &str) -> Self {
        self.files.push((name.to_owned(), Content::Program(content.into())));
        self
    }

    /// Sets a tar archive that is unpacked in the host's root directory before the script starts.
    #[must_use]
    pub fn unpacked(mut self, archive: Vec<u8>) -> Self {
        self.unpacked = archive;
        self
    }

    /// Adds the default guest with the kernel of a release as `guest/kernel` and `guest/initrd`, where Tally finds it.
    /// A suite stands for its release for this machine's architecture.
    pub fn guest(self, release: impl Into<Release>, progress: &mut Progress) -> Result<Self> {
        self.guest_with(release, &[], progress)
    }

    /// Adds the default guest, with `programs` in the working directory of its command.
    pub fn guest_with(
        self,
        release: impl Into<Release>,
        programs: &[(&str, &[u8])],
        progress: &mut Progress,
    ) -> Result<Self> {
        let Guest { kernel, initrd, .. } = guest(release, progress)?;
        let scenario = if programs.is_empty() {
            self.file(initrd, INITRD)
        } else {
            self.program(with_programs(&initrd, programs)?, INITRD)
        };
        Ok(scenario
            .file(kernel, KERNEL)
            .variable("TALLY_GUEST", "/scenario/guest")
            // Most hosts run few guests, which would wait for a template that nobody uses again.
            .variable(BOOT, "1"))
    }

    /// Lets guests that are started by `tally` with these options start from a template. A host that can be saved is
    /// saved with it; on another, the first guest makes it. The scenario has Tally and the default guest.
    #[must_use]
    pub fn template(mut self, options: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        let is_needed = |(name, _): &(String, Content)| ["tally", KERNEL, INITRD].contains(&&name[..]);
        let (needed, others) = std::mem::take(&mut self.files).into_iter().partition(is_needed);
        self.files = others;
        let mut scenario = self.variable(BOOT, "");
        let mut preparation = Self::new("./tally run \"$@\" -- true").arguments(options);
        (preparation.files, preparation.variables) = (needed, scenario.variables.clone());
        preparation.frees_watchdog = scenario.frees_watchdog;
        scenario.preparation = Some(Box::new(preparation));
        scenario
    }

    /// Returns whether the host starts from where one was saved.
    pub fn starts_saved(&self) -> bool {
        // A saved host has already said what a host says while it boots.
        !self.show_console && SavedHost::exists_for(self.host, self.shape)
    }

    /// Sets the directory of this machine to which what the script leaves in `$OUT` is copied.
    #[must_use]
    pub fn keep_output_in(mut self, folder: impl Into<PathBuf>) -> Self {
        self.out_folder = Some(folder.into());
        self
    }

    /// Sets the script's timeout, in real time.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// Sets the number of the host's CPUs.
    #[must_use]
    pub fn processors(mut self, processors: u32) -> Self {
        self.shape.processors = processors;
        self
    }

    /// Sets the size of the host's memory.
    #[must_use]
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.shape.memory_mib = memory_mib;
        self
    }

    /// Sets the PMU of an x86-64 host, which also says whose processor it has.
    #[must_use]
    pub fn pmu(mut self, pmu: HostPmu) -> Self {
        self.shape.pmu = pmu;
        self
    }

    /// Has an AMD host's PMU misbehave as those of real processors do.
    #[must_use]
    pub fn silicon(mut self, silicon: Silicon) -> Self {
        self.shape.silicon = silicon;
        self
    }

    /// Sets the host's architecture, and the release whose kernel it runs.
    #[must_use]
    pub fn host(mut self, release: impl Into<Release>) -> Self {
        self.host = release.into();
        self
    }

    /// Shows the host's console on standard error.
    #[must_use]
    pub fn show_console(mut self, show: bool) -> Self {
        self.show_console = show;
        self
    }

    /// Turns off the lookup of kernel symbols if the host hangs. The scenario that reads the symbols needs that, as it
    /// would start itself again.
    #[must_use]
    fn without_symbols(mut self) -> Self {
        self.finds_symbols = false;
        self
    }

    /// Runs the script and returns its output.
    pub fn run(&self, progress: &mut Progress) -> Result<Outcome> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let status = self.run_with(progress, &mut stdout, &mut stderr)?;
        Ok(Outcome { status, stdout, stderr })
    }

    /// Runs the script and forwards its output while it runs. Returns the script's status.
    pub fn run_with(
        &self,
        progress: &mut Progress,
        stdout: &mut (dyn Write + Send),
        stderr: &mut (dyn Write + Send),
    ) -> Result<u8> {
        self.run_on(Streams { input: None, stdout, stderr, out: None, trace: None }, progress)
    }

    /// Builds the host, and saves it if such hosts are saved, without running the script.
    pub(crate) fn build_host(&self, progress: &mut Progress) -> Result<()> {
        let cache = Cache::open()?;
        let (cpu, image) = self.host_parts(&cache, progress)?;
        self.saved(&cache, self.parts(&cpu, &image), progress);
        Ok(())
    }

    fn host_parts(&self, cache: &Cache, progress: &mut Progress) -> Result<(LabCpu, HostImage)> {
        let processor = Processor::of(self.host.arch, self.shape.pmu);
        let cpu = cpu::build(cache, processor, progress)?;
        Ok((cpu, image::build(cache, self.host, processor, progress)?))
    }

    fn parts<'a>(&self, cpu: &'a LabCpu, image: &'a HostImage) -> HostParts<'a> {
        HostParts { cpu, release: self.host, image, shape: self.shape }
    }

    /// Runs the script on these streams. Returns the script's status.
    pub fn run_on(&self, streams: Streams, progress: &mut Progress) -> Result<u8> {
        let Streams { input, stdout, stderr, out, trace } = streams;
        let cache = Cache::open()?;
        let (cpu, image) = self.host_parts(&cache, progress)?;
        let saved = self.saved(&cache, self.parts(&cpu, &image), progress);
        let thread = thread::current();
        let core = Core::wait_for(self.name.or(thread.name()).unwrap_or("a scenario"), self.limit);
        let channels = Channels { input: input.is_some(), out: out.is_some() || self.out_folder.is_some() };
        let (archive, saved) = self.fitting(channels, saved)?;
        let files = match saved {
            Some(_) => in_memory(None, &archive, Some(SavedHost::FILES_SIZE))?,
            None => in_memory(Some(&image.initrd), &archive, None)?,
        };
        let start = match &saved {
            Some(host) => Start::Saved { host, files: &files },
            None => Start::Boot { initrd: &files },
        };
        let unpacker = self.out_folder.as_deref().map(unpacker).transpose()?;
        let (log, log_end) = trace.is_some().then(pipe).transpose()?.unzip();
        let (machine, output) =
            Machine::start(&cpu, self.host.arch, &image.kernel, &start, self.shape, input, log_end)?;
        let tracer = trace.is_some().then(|| machine.tracer()).transpose()?;
        let Output { stdout: from_stdout, stderr: from_stderr, console, files } = output;
        let waiting = WaitDisplay::new(progress);
        let ended = thread::scope(|scope| {
            scope.spawn(|| forward(from_stdout, &mut EndingWait(stdout, &waiting)));
            scope.spawn(|| forward(from_stderr, &mut EndingWait(stderr, &waiting)));
            let console = scope.spawn(|| self.watch_console(console, &waiting, tracer.as_ref()));
            let files = scope.spawn(|| match (out, unpacker) {
                (Some(out), _) => forward(files, out),
                (None, Some(mut unpacker)) => {
                    forward(files, &mut unpacker.stdin.take().expect("tar was started with a pipe"));
                    let _ = unpacker.wait();
                }
                (None, None) => forward(files, &mut io::sink()),
            });
            if let (Some(trace), Some(log), Some(tracer)) = (trace, log, &tracer) {
                scope.spawn(|| trace.read(log, tracer));
            }
            let ended = watch(machine, self.limit, &waiting);
            // The machine has ended, so the other ends of all pipes are closed.
            let _ = files.join();
            (ended, console.join().unwrap_or_default())
        });
        waiting.end();
        // The lookup of a symbol may boot another host, which waits for a core.
        drop(core);
        match ended {
            (End::Status(status), _) => Ok(status),
            (End::Died(cause), console) => Err(Error::HostDied { cause, console }),
            (End::Hung(place), console) => {
                let place = self.describe(place, &console, progress);
                Err(Error::Hung { limit: self.limit, place })
            }
            (End::NotBooted(place), console) => {
                let place = self.describe(place, &console, progress);
                Err(Error::NotBooted { limit: BOOT_LIMIT, place })
            }
        }
    }

    /// Returns the saved host to start from, and whether it was prepared. Returns `None` if the host has to boot.
    fn saved(&self, cache: &Cache, parts: HostParts, progress: &mut Progress) -> Option<(SavedHost, bool)> {
        if !self.starts_saved() {
            return None;
        }
        self.find_saved(cache, parts, progress)
            .inspect_err(|error| {
                progress.remark(&format!("the host boots, as it cannot start from a saved one: {error}"));
            })
            .ok()
    }

    fn find_saved(
        &self,
        cache: &Cache,
        parts: HostParts,
        progress: &mut Progress,
    ) -> Result<(SavedHost, bool)> {
        let host = SavedHost::of(cache, parts, progress)?;
        let Some(preparation) = &self.preparation else { return Ok((host, false)) };
        let archive = || in_memory(None, &preparation.preparing_archive()?, Some(SavedHost::FILES_SIZE));
        // If the preparation fails, so will the script, and says why.
        let prepared = host.prepared(cache, parts, (&preparation.inputs()?, self.limit), archive, progress);
        Ok(prepared.map_or((host, false), |prepared| (prepared, true)))
    }

    /// Returns the archive of this run's files, and the saved host if the archive fits into its memory for that.
    fn fitting(
        &self,
        channels: Channels,
        saved: Option<(SavedHost, bool)>,
    ) -> Result<(Vec<u8>, Option<SavedHost>)> {
        let is_prepared = saved.as_ref().is_some_and(|(_, is_prepared)| *is_prepared);
        let archive = self.archive(channels, is_prepared)?;
        match saved {
            Some((host, _)) if archive.len() as u64 <= SavedHost::FILES_SIZE => Ok((archive, Some(host))),
            Some(_) => Ok((self.archive(channels, false)?, None)),
            None => Ok((archive, None)),
        }
    }

    fn describe(&self, place: Place, console: &str, progress: &mut Progress) -> String {
        let address = match place {
            Place::Processes(text) => return text,
            Place::Unknown => "unknown".to_owned(),
            Place::Address(address) => {
                let read = |progress: &mut Progress| {
                    let scenario = Scenario::new("cat /proc/kallsyms").host(self.host).pmu(self.shape.pmu);
                    Ok(scenario.without_symbols().run(progress)?.stdout)
                };
                let processor = Processor::of(self.host.arch, self.shape.pmu);
                let symbols =
                    self.finds_symbols.then(|| Symbols::of_host(self.host, processor, progress, read));
                let name = symbols.and_then(Result::ok).and_then(|symbols| symbols.name(address));
                format!("{address:#x} {}", name.unwrap_or_default())
            }
        };
        format!(
            "the simulated host does not answer; the address that its first CPU executes: {address}\n{console}"
        )
    }

    /// Reads the console to its end, and shows it if the scenario wants that. Begins the trace at its mark. Returns the
    /// console's last lines.
    fn watch_console(
        &self,
        mut console: impl Read,
        waiting: &WaitDisplay,
        mut tracer: Option<&Tracer>,
    ) -> String {
        let mut tail = VecDeque::new();
        let mut chunk = [0; 4096];
        while let Ok(length @ 1..) = console.read(&mut chunk) {
            if self.show_console {
                waiting.end();
                let _ = io::stderr().write_all(&chunk[..length]);
            }
            tail.extend(&chunk[..length]);
            let excess = tail.len().saturating_sub(64 << 10);
            tail.drain(..excess);
            let is_mark = |text: &[u8]| text == trace::MARK.as_bytes();
            // If it fails, the trace stays empty, as after a script that does not begin it.
            if tracer.is_some() && tail.make_contiguous().windows(trace::MARK.len()).any(is_mark) {
                let _ = tracer.take().map_or(Ok(()), |tracer| tracer.set(true));
            }
        }
        let text = String::from_utf8_lossy(&Vec::from(tail)).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(CONSOLE_LINES)..].join("\n")
    }
}

/// Copies a stream to its end. After a write has failed, it goes on reading, as the machine would wait otherwise.
fn forward(mut from: impl Read, to: &mut dyn Write) {
    let mut chunk = [0; 4096];
    let mut can_write = true;
    while let Ok(length @ 1..) = from.read(&mut chunk) {
        can_write = can_write && to.write_all(&chunk[..length]).and_then(|()| to.flush()).is_ok();
    }
}

/// A stream whose first output removes the display of the wait.
struct EndingWait<'a>(&'a mut (dyn Write + Send), &'a WaitDisplay<'a>);

impl Write for EndingWait<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.end();
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Starts tar, which unpacks its standard input in `folder`.
fn unpacker(folder: &Path) -> Result<std::process::Child> {
    fs::create_dir_all(folder).map_err(Error::file("create", folder))?;
    Command::new("tar")
        .args(["--extract", "--no-same-owner", "--directory"])
        .arg(folder)
        .stdin(Stdio::piped())
        .spawn()
        .map_err(Error::system("run tar"))
}
