//! A script that runs on the simulated host, with files given to it and files taken from it.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use guest_images::cache::Cache;
use guest_images::cpio::Archive;
use guest_images::payloads::OwnPrograms;
use guest_images::{Arch, Progress, Release};

use crate::board::HostPmu;
use crate::cores::Core;
use crate::machine::{Machine, Output, Shape};
use crate::symbols::Symbols;
use crate::watch::{BOOT_LIMIT, End, Place, Waiting, watch};
use crate::{Error, Result, cpu, cross, host};

/// How much of the console an error repeats.
const CONSOLE_LINES: usize = 50;

/// How a script ended.
#[derive(Debug)]
pub struct Outcome {
    /// Its exit status; 128 and the signal's number if one killed it.
    pub status: u8,
    /// What it wrote to its standard output, unless that was passed on.
    pub stdout: Vec<u8>,
    /// What it wrote to its standard error, unless that was passed on.
    pub stderr: Vec<u8>,
}

impl Outcome {
    /// Standard output as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }
}

/// The default guest's kernel, and its initrd with more programs in the folder that its command starts in.
pub fn guest_with(
    release: impl Into<Release>,
    programs: &[(&str, &[u8])],
    progress: &mut Progress,
) -> Result<(PathBuf, Vec<u8>)> {
    let Release { suite, arch } = release.into();
    let own = match arch {
        Arch::X86_64 => OwnPrograms::default(),
        Arch::Riscv64 => {
            let agent = cross::agent(progress)?;
            OwnPrograms::riscv64(fs::read(&agent).map_err(Error::file("read", agent))?)
        }
    };
    let guest = guest_images::guest_of(&Cache::open()?, suite, &own, progress)?;
    let mut initrd = Vec::new();
    if !programs.is_empty() {
        let mut archive = Archive::new();
        for (name, content) in programs {
            archive.file(&format!("root/{name}"), 0o755, content);
        }
        // In front, because only a plain archive can be followed by another one.
        initrd = archive.finish();
    }
    initrd.extend(fs::read(&guest.initrd).map_err(Error::file("read", &guest.initrd))?);
    Ok((guest.kernel, initrd))
}

/// What a script's streams are connected to while it runs.
pub struct Streams<'a> {
    /// Its standard input, which it need not read. Without, that is empty.
    pub input: Option<File>,
    /// Gets its standard output.
    pub stdout: &'a mut (dyn Write + Send),
    /// Gets its standard error.
    pub stderr: &'a mut (dyn Write + Send),
    /// Gets what it leaves in `$OUT`, as a tar archive.
    pub left: Option<&'a mut Vec<u8>>,
}

/// A script and what it needs.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// What it is called among all that wait for a core; without, it is called as the thread that runs it.
    name: Option<&'static str>,
    script: Vec<u8>,
    arguments: Vec<OsString>,
    variables: Vec<(String, String)>,
    files: Vec<(String, Content)>,
    /// A tar archive for the root of the host's files.
    unpacked: Vec<u8>,
    keep: Option<PathBuf>,
    limit: Duration,
    shape: Shape,
    host: Release,
    show_console: bool,
    names_addresses: bool,
}

#[derive(Debug, Clone)]
enum Content {
    File(PathBuf),
    Program(Vec<u8>),
}

impl Scenario {
    /// A scenario of one processor and 2 GiB that runs a shell script.
    pub fn new(script: impl Into<Vec<u8>>) -> Self {
        Self {
            name: None,
            script: script.into(),
            arguments: Vec::new(),
            variables: Vec::new(),
            files: Vec::new(),
            unpacked: Vec::new(),
            keep: None,
            limit: Duration::from_mins(5),
            shape: Shape { processors: 1, memory_mib: 2048, pmu: HostPmu::default() },
            host: Release::default(),
            show_console: false,
            names_addresses: true,
        }
    }

    /// Names the scenario, for whoever wants to know how long it takes ([`crate::cores`]).
    #[must_use]
    pub fn named(mut self, name: &'static str) -> Self {
        self.name = Some(name);
        self
    }

    /// Arguments for the script.
    #[must_use]
    pub fn arguments(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// A variable in the script's environment.
    #[must_use]
    pub fn variable(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// A file of this machine, to be at `name` in the folder that the script starts in.
    #[must_use]
    pub fn file(mut self, path: impl Into<PathBuf>, name: &str) -> Self {
        self.files.push((name.to_owned(), Content::File(path.into())));
        self
    }

    /// A program to be at `name` in the folder that the script starts in.
    #[must_use]
    pub fn program(mut self, content: impl Into<Vec<u8>>, name: &str) -> Self {
        self.files.push((name.to_owned(), Content::Program(content.into())));
        self
    }

    /// Files that are to be where this tar archive has them, counted from the root of the host's.
    #[must_use]
    pub fn unpacked(mut self, archive: Vec<u8>) -> Self {
        self.unpacked = archive;
        self
    }

    /// The default guest with the kernel of a release, for this kind of machine if it is a suite: `guest/kernel` and
    /// `guest/initrd`, where Tally finds it.
    pub fn guest(self, release: impl Into<Release>, progress: &mut Progress) -> Result<Self> {
        self.guest_with(release, &[], progress)
    }

    /// The default guest with more programs in the folder that its command starts in.
    pub fn guest_with(
        self,
        release: impl Into<Release>,
        programs: &[(&str, &[u8])],
        progress: &mut Progress,
    ) -> Result<Self> {
        let (kernel, initrd) = guest_with(release, programs, progress)?;
        Ok(self
            .file(kernel, "guest/kernel")
            .program(initrd, "guest/initrd")
            .variable("TALLY_GUEST", "/scenario/guest"))
    }

    /// Where what the script leaves in `$OUT` is to go.
    #[must_use]
    pub fn keep_output_in(mut self, folder: impl Into<PathBuf>) -> Self {
        self.keep = Some(folder.into());
        self
    }

    /// How long the script may run, in real time.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// How many processors the host has.
    #[must_use]
    pub fn processors(mut self, processors: u32) -> Self {
        self.shape.processors = processors;
        self
    }

    /// How much memory the host has.
    #[must_use]
    pub fn memory_mib(mut self, memory_mib: u32) -> Self {
        self.shape.memory_mib = memory_mib;
        self
    }

    /// The interface of the host's PMU.
    #[must_use]
    pub fn pmu(mut self, pmu: HostPmu) -> Self {
        self.shape.pmu = pmu;
        self
    }

    /// The kind of processor that the host has, and the release whose kernel it runs.
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

    /// Does not look for the name of the place where the host hangs, for the scenario that finds names.
    #[must_use]
    pub(crate) fn without_names(mut self) -> Self {
        self.names_addresses = false;
        self
    }

    /// Runs the script and keeps what it writes.
    pub fn run(&self, progress: &mut Progress) -> Result<Outcome> {
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        let status = self.run_with(progress, &mut stdout, &mut stderr)?;
        Ok(Outcome { status, stdout, stderr })
    }

    /// Runs the script and passes on what it writes while it does.
    pub fn run_with(
        &self,
        progress: &mut Progress,
        stdout: &mut (dyn Write + Send),
        stderr: &mut (dyn Write + Send),
    ) -> Result<u8> {
        self.run_on(Streams { input: None, stdout, stderr, left: None }, progress)
    }

    /// Runs the script on these streams.
    pub fn run_on(&self, streams: Streams, progress: &mut Progress) -> Result<u8> {
        let Streams { input, stdout, stderr, left } = streams;
        let cache = Cache::open()?;
        let cpu = cpu::build(&cache, self.host.arch, progress)?;
        let image = host::build(&cache, self.host, progress)?;
        let thread = thread::current();
        let core = Core::wait_for(self.name.or(thread.name()).unwrap_or("a scenario"), self.limit);
        let channels = Channels { input: input.is_some(), left: left.is_some() || self.keep.is_some() };
        let initrd = self.initrd(&image.initrd, channels)?;
        let unpacker = self.keep.as_deref().map(unpacker).transpose()?;
        let (machine, output) =
            Machine::start(&cpu, self.host.arch, &image.kernel, &initrd, self.shape, input)?;
        let Output { stdout: from_stdout, stderr: from_stderr, console, files } = output;
        let waiting = Waiting::new(progress);
        let ended = thread::scope(|scope| {
            scope.spawn(|| pass_on(from_stdout, &mut AfterWaiting(stdout, &waiting)));
            scope.spawn(|| pass_on(from_stderr, &mut AfterWaiting(stderr, &waiting)));
            let console = scope.spawn(|| self.watch_console(console, &waiting));
            let files = scope.spawn(|| match (left, unpacker) {
                (Some(left), _) => pass_on(files, left),
                (None, Some(mut unpacker)) => {
                    pass_on(files, &mut unpacker.stdin.take().expect("it was made with a pipe"));
                    let _ = unpacker.wait();
                }
                (None, None) => pass_on(files, &mut io::sink()),
            });
            let ended = watch(machine, self.limit, &waiting);
            // The machine is gone, so the other ends of all pipes are closed.
            let _ = files.join();
            (ended, console.join().unwrap_or_default())
        });
        waiting.over();
        // To name the place where it hangs takes another host.
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

    fn describe(&self, place: Place, console: &str, progress: &mut Progress) -> String {
        let address = match place {
            Place::Told(text) => return text,
            Place::Silent => "unknown".to_owned(),
            Place::Address(address) => {
                let symbols = self.names_addresses.then(|| Symbols::of_host(self.host, progress));
                let name = symbols.and_then(Result::ok).and_then(|symbols| symbols.name(address));
                format!("{address:#x} {}", name.unwrap_or_default())
            }
        };
        format!("the simulated host does not answer; its first processor is at {address}\n{console}")
    }

    fn watch_console(&self, mut console: impl Read, waiting: &Waiting) -> String {
        let mut tail = VecDeque::new();
        let mut chunk = [0; 4096];
        while let Ok(length @ 1..) = console.read(&mut chunk) {
            if self.show_console {
                waiting.over();
                let _ = io::stderr().write_all(&chunk[..length]);
            }
            tail.extend(&chunk[..length]);
            let excess = tail.len().saturating_sub(64 << 10);
            tail.drain(..excess);
        }
        let text = String::from_utf8_lossy(&Vec::from(tail)).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(CONSOLE_LINES)..].join("\n")
    }

    /// The host's initrd followed by what belongs to this run, in a file without a name that goes when it is closed.
    fn initrd(&self, base: &Path, channels: Channels) -> Result<File> {
        let mut archive = Archive::new();
        archive.file("lab/script", 0o755, &self.script);
        archive.file("lab/run", 0o644, &self.run_command(channels));
        if channels.left {
            archive.file("lab/keep-out", 0o644, b"");
        }
        if !self.unpacked.is_empty() {
            archive.file("lab/unpacked.tar", 0o644, &self.unpacked);
        }
        for (name, content) in &self.files {
            let name = format!("scenario/{name}");
            match content {
                Content::File(path) => archive.copy(&name, path)?,
                Content::Program(bytes) => archive.file(&name, 0o755, bytes),
            }
        }
        let mut initrd = anonymous_file().map_err(Error::system("create a file in memory"))?;
        let mut base_file = File::open(base).map_err(Error::file("open", base))?;
        io::copy(&mut base_file, &mut initrd).map_err(Error::file("copy", base))?;
        initrd.write_all(&archive.finish()).map_err(Error::system("write to memory"))?;
        initrd.rewind().map_err(Error::system("rewind a file"))?;
        Ok(initrd)
    }

    /// What the host's init runs: the script with its files, environment, input and arguments.
    fn run_command(&self, channels: Channels) -> Vec<u8> {
        let mut text = Vec::new();
        if !self.unpacked.is_empty() {
            text.extend_from_slice(UNPACK.as_bytes());
        }
        if channels.input {
            text.extend_from_slice(TAKE_INPUT.as_bytes());
        }
        for (name, value) in &self.variables {
            text.extend_from_slice(format!("export {name}=").as_bytes());
            text.extend(quoted(value.as_ref()));
            text.push(b'\n');
        }
        let interpreter: &[u8] = if self.script.starts_with(b"#!") { b"" } else { b"sh " };
        text.extend_from_slice(b"exec ");
        text.extend_from_slice(interpreter);
        text.extend_from_slice(b"/lab/script");
        for argument in &self.arguments {
            text.push(b' ');
            text.extend(quoted(argument));
        }
        if channels.input {
            text.extend_from_slice(b" </lab/input");
        }
        text.push(b'\n');
        text
    }
}

/// Which channels a run has besides those for what its script writes.
#[derive(Debug, Clone, Copy)]
struct Channels {
    /// For its standard input.
    input: bool,
    /// For what it leaves.
    left: bool,
}

/// Puts the files of an archive where they belong. It cannot be done sooner: some of the host's folders are mounted by its
/// init.
const UNPACK: &str = "tar -x -p -f /lab/unpacked.tar -C / && rm /lab/unpacked.tar || exit 125\n";
/// Makes the port for the script's input a pipe, which is what it expects. A port without its other end looks like one
/// that is at its end, and that end is there a moment after the port.
const TAKE_INPUT: &str = "\
until grep -q 'host_connected: 1' /sys/kernel/debug/virtio-ports/vport0p5 2>/dev/null; do
    sleep 0.001
done
mkfifo /lab/input
dd if=/dev/vport0p5 of=/lab/input bs=64k 2>/dev/null &
";

/// Copies everything, also when whoever listens has gone: the machine must not wait for them.
fn pass_on(mut from: impl Read, to: &mut dyn Write) {
    let mut chunk = [0; 4096];
    let mut listening = true;
    while let Ok(length @ 1..) = from.read(&mut chunk) {
        listening = listening && to.write_all(&chunk[..length]).and_then(|()| to.flush()).is_ok();
    }
}

/// A stream whose output takes the place of what is shown while one waits for it.
struct AfterWaiting<'a>(&'a mut (dyn Write + Send), &'a Waiting<'a>);

impl Write for AfterWaiting<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.over();
        self.0.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn unpacker(folder: &Path) -> Result<std::process::Child> {
    fs::create_dir_all(folder).map_err(Error::file("create", folder))?;
    Command::new("tar")
        .args(["--extract", "--no-same-owner", "--directory"])
        .arg(folder)
        .stdin(Stdio::piped())
        .spawn()
        .map_err(Error::system("run tar"))
}

fn anonymous_file() -> io::Result<File> {
    // SAFETY: the name is a string that ends with a zero.
    let fd = unsafe { libc::memfd_create(c"initrd".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above has just made this descriptor, and nothing else owns it.
    Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// An argument as a shell reads it back.
pub fn quoted(argument: &OsStr) -> Vec<u8> {
    let mut text = vec![b'\''];
    for &byte in argument.as_bytes() {
        if byte == b'\'' { text.extend_from_slice(b"'\\''") } else { text.push(byte) }
    }
    text.push(b'\'');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT_ONLY: Channels = Channels { input: false, left: false };

    #[test]
    fn arguments_reach_the_script_as_they_are() {
        let scenario = Scenario::new("").arguments(["a b", "it's", ""]).variable("X", "$y");
        let command = String::from_utf8(scenario.run_command(OUTPUT_ONLY)).unwrap();
        assert_eq!(command, "export X='$y'\nexec sh /lab/script 'a b' 'it'\\''s' ''\n");
    }

    #[test]
    fn a_script_may_name_its_interpreter() {
        let command = Scenario::new("#!/bin/busybox awk -f\n").run_command(OUTPUT_ONLY);
        assert_eq!(command, b"exec /lab/script\n");
    }
}
