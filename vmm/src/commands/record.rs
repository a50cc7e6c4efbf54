//! `tally record`: samples a running VM, and writes what perf reads. `tally symbols`: writes the symbols of its kernel.

mod perf_data;

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::geteuid;
use tally_machine::{Module, Sample};

use crate::cli::{Record, Symbols};
use crate::commands::client::{self, ClientError, GuestSymbols, Vm};
use crate::commands::functions::{Functions, Symbols as KernelSymbols};
use crate::host::{printer, signals};
use crate::protocol::recording::{Begun, Processes, RecordOptions, SampleRate, Samples, WhyClock};
use crate::run::flamegraph::Picture;
use crate::run::flamegraph::stacks::Stacks;
use perf_data::{Description, Writer};

/// Samples in a second without `-F` and `-c`: no divisor of the periods that programs have.
pub const FREQUENCY: u64 = 999;
/// Time between two requests for samples.
const INTERVAL: Duration = Duration::from_millis(50);
/// Time in which a VM gives the samples that it still has at the end.
const LAST: Duration = Duration::from_secs(10);
/// The host's limit for samples in a second of an event.
const MAX_RATE: &str = "/proc/sys/kernel/perf_event_max_sample_rate";

/// `tally record`: what was taken is written, however it ends.
pub fn record(options: &Record) -> Result<ExitCode> {
    signals::ignore_sigxfsz();
    check_rate(options.frequency)?;
    let picture = options.flamegraph.as_deref().map(Picture::new).transpose()?;
    let mut vm = find(&options.vm, "recorded")?;
    let symbols = vm.symbols()?;
    let mut kernel = Kernel { range: kernel_range(&symbols.text), symbols, asked: BTreeSet::new() };
    let rate = options
        .count
        .map_or(SampleRate::Frequency(options.frequency.unwrap_or(FREQUENCY)), SampleRate::Period);
    // A flame graph is of callers.
    let chains = options.call_graph.as_ref().map_or(picture.is_some(), |how| how == "fp");
    let asked = RecordOptions { event: options.event.text.clone(), rate, chains };
    let begun = vm.record(asked)?;
    // They end the recording.
    signals::block_ends()?;
    let mut file = private_file(&options.output)?;
    let description = Description {
        kind: begun.kind,
        config: begun.config,
        rate,
        filter: options.event.filter,
        chains,
        build_id: begun.build_id,
        kernel: kernel.range,
        modules: kernel.symbols.modules.clone(),
    };
    let failed = || options.output.display().to_string();
    let mut writer = Writer::create(&mut file, &description).with_context(failed)?;
    for remark in remarks(!kernel.symbols.text.is_empty(), &begun, chains) {
        printer::say(&remark);
    }
    let mut taken = Taken::default();
    // Another user may have chosen the files.
    let drawn = |_: &_| {
        (
            Functions::new(KernelSymbols::of_kernel(&kernel.symbols), vm.other_owner().is_none()),
            Stacks::default(),
        )
    };
    let drawn = picture.as_ref().map(drawn);
    let mut output = Output { writer: &mut writer, kernel: &mut kernel, drawn };
    let ended = fetch(&mut vm, &mut output, options.duration, &mut taken);
    let stacks = output.drawn.map(|(_, stacks)| stacks);
    let samples = writer.samples();
    writer.finish().with_context(failed)?;
    let beside = write_symbols_beside(&options.output, &kernel.symbols.text);
    printer::say(&summary(options, samples, &taken, beside.as_ref().ok().and_then(Option::as_deref)));
    match ended {
        Ok(()) => {}
        Err(Stopped::Vm(ClientError::Ended(process))) => {
            printer::say(&format_args!("the VM {process} has ended"));
        }
        Err(Stopped::Vm(error)) => return Err(error.into()),
        Err(Stopped::Write(error)) => return Err(error).with_context(failed),
    }
    if let (Some(picture), Some(stacks)) = (picture, stacks) {
        if stacks.count() == 0 {
            bail!("--flamegraph: there was no sample");
        }
        if let Some(remark) = stacks.remark() {
            printer::say(&remark);
        }
        picture.draw(true, &options.vm, stacks)?;
    }
    beside.map(|_| ExitCode::SUCCESS)
}

/// `tally symbols`: writes the symbols of the kernel and the list of its modules into a folder.
pub fn symbols(options: &Symbols) -> Result<ExitCode> {
    let symbols = find(&options.vm, "read")?.symbols()?;
    if symbols.text.is_empty() {
        bail!("no symbols of a Linux kernel were found in the guest's memory");
    }
    fs::create_dir_all(&options.folder).with_context(|| options.folder.display().to_string())?;
    for (name, content) in [("kallsyms", symbols.text), ("modules", modules(&symbols.modules))] {
        let path = options.folder.join(name);
        private_file(&path)?.write_all(content.as_bytes()).with_context(|| path.display().to_string())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the lines of `/proc/modules`, as far as perf reads them: nobody is said to use a module.
fn modules(modules: &[Module]) -> String {
    let mut lines = String::new();
    for Module { name, start, size, .. } in modules {
        let _ = writeln!(lines, "{name} {size} 0 - Live {start:#018x}");
    }
    lines
}

fn find(who: &str, what: &str) -> Result<Vm, ClientError> {
    let vm = client::find_one(who)?;
    say_whose(&vm, what);
    Ok(vm)
}

/// Says whose VM it is, if it is another user's.
pub fn say_whose(vm: &Vm, what: &str) {
    if let Some(owner) = vm.other_owner() {
        printer::say(&format_args!(
            "process {} is a VM of user {owner}, who decides what is {what}",
            vm.about.pid
        ));
    }
}

/// Refuses more samples than the host takes.
pub fn check_rate(frequency: Option<u64>) -> Result<()> {
    let most = fs::read_to_string(MAX_RATE).ok().and_then(|text| text.trim().parse::<u64>().ok());
    if let (Some(frequency), Some(most)) = (frequency, most)
        && frequency > most
    {
        bail!(
            "-F {frequency}: this host takes {most} samples in a second (`sysctl kernel.perf_event_max_sample_rate`)"
        );
    }
    Ok(())
}

/// Creates a file that only this user reads: addresses and names are the guest's.
fn private_file(path: &Path) -> Result<File> {
    create_private(path).with_context(|| path.display().to_string())
}

/// Creates such a file, or empties the one that is there, which must be this user's: a link leads to what somebody else
/// may have chosen.
fn create_private(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    // What exists is emptied once it is known whose it is.
    options.read(true).write(true).create(true).truncate(false).mode(0o600).custom_flags(libc::O_NOFOLLOW);
    let file = options.open(path)?;
    let found = file.metadata()?;
    if !found.is_file() || found.uid() != geteuid().as_raw() {
        return Err(io::Error::other("it exists, and is no file of yours"));
    }
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.set_len(0)?;
    Ok(file)
}

/// Returns the first and the last address of the kernel, by its symbols.
fn kernel_range(symbols: &str) -> Option<(u64, u64)> {
    let address = |name: &str| {
        let line = symbols.lines().find(|line| line.split(' ').nth(2) == Some(name))?;
        u64::from_str_radix(line.split(' ').next()?, 16).ok()
    };
    let start = address("_text").or_else(|| address("_stext"))?;
    Some((start, address("_end").filter(|end| *end > start).unwrap_or(u64::MAX)))
}

/// The guest's kernel, as far as it is known.
struct Kernel {
    /// Its first and last address, if they are known.
    range: Option<(u64, u64)>,
    /// Its symbols, and those of the modules that it has had.
    symbols: GuestSymbols,
    /// Pages of code that belonged to no module when the modules were listed last.
    asked: BTreeSet<u64>,
}

impl Kernel {
    /// Returns whether samples are in code of which it is not known whose it is, for the first time.
    fn has_new_code(&mut self, samples: &[Sample]) -> bool {
        /// Maximum number of pages that are remembered: a guest can be anywhere.
        const MAX_ASKED: usize = 1 << 12;
        const PAGE_BITS: u32 = 12;
        let Some((start, end)) = self.range else { return false };
        let Self { symbols, asked, .. } = self;
        let is_of_module = |address: u64| {
            let of = |module: &Module| address.checked_sub(module.start).is_some_and(|at| at < module.len);
            symbols.modules.iter().any(of)
        };
        let mut is_new = |address: u64| {
            !(start..=end).contains(&address)
                && !is_of_module(address)
                && asked.len() < MAX_ASKED
                && asked.insert(address >> PAGE_BITS)
        };
        let mut found = false;
        for sample in samples {
            let own = (!sample.is_user).then_some(sample.instruction);
            for address in own.into_iter().chain(sample.kernel.iter().copied()) {
                found |= is_new(address);
            }
        }
        found
    }

    /// Adds the modules that are not known yet. Returns them, with their symbols.
    fn add(&mut self, now: GuestSymbols) -> GuestSymbols {
        let is_known = |module: &Module| {
            self.symbols.modules.iter().any(|one| (&one.name, one.start) == (&module.name, module.start))
        };
        let modules: Vec<Module> = now.modules.into_iter().filter(|module| !is_known(module)).collect();
        let names: BTreeSet<String> = modules.iter().map(|module| format!("[{}]", module.name)).collect();
        let is_new = |line: &&str| line.split_once('\t').is_some_and(|(_, name)| names.contains(name));
        let text: String = now.text.split_inclusive('\n').filter(|line| is_new(&line.trim_end())).collect();
        self.symbols.modules.extend(modules.iter().cloned());
        self.symbols.text += &text;
        GuestSymbols { text, modules }
    }
}

/// Returns what the samples of a VM do not have.
pub fn remarks(has_symbols: bool, begun: &Begun, chains: bool) -> Vec<&'static str> {
    let mut remarks = Vec::new();
    if !has_symbols {
        remarks.push("no symbols of a Linux kernel were found in the guest's memory");
    }
    remarks.extend(begun.clock.map(|why| match why {
        WhyClock::NoPmu => "this host has no PMU: samples are taken by time, also while the host's kernel works for the VM",
        WhyClock::NoCounter => {
            "no counter of the host is free: samples are taken by time, also while the host's kernel works for the VM"
        }
    }));
    match begun.processes {
        Processes::Unknown => remarks.push("the guest's kernel does not say which process runs: each has the address of its page tables as its name"),
        Processes::Named => remarks.push("the guest's kernel does not say which files its programs have mapped: their functions have no names"),
        Processes::Mapped => {}
    }
    if chains && !begun.has_kernel_chains {
        remarks.push(
            "the guest's kernel does not say who called its functions: in it, chains begin where a program has entered it",
        );
    }
    remarks
}

/// What was taken, beside the samples.
#[derive(Debug, Default)]
struct Taken {
    lost: u64,
    /// Least part of the time in which a vCPU's event had a counter, in thousandths.
    scheduled: Option<u64>,
}

/// Where samples go.
struct Output<'a, 'b> {
    writer: &'a mut Writer<'b>,
    kernel: &'a mut Kernel,
    /// Names and stacks for a flame graph.
    drawn: Option<(Functions, Stacks)>,
}

/// Why no more samples come.
enum Stopped {
    Vm(ClientError),
    Write(io::Error),
}

impl From<ClientError> for Stopped {
    fn from(error: ClientError) -> Self {
        Self::Vm(error)
    }
}

/// Writes samples until the time is over or a signal comes, and then those that are left.
fn fetch(vm: &mut Vm, output: &mut Output, time: Option<Duration>, taken: &mut Taken) -> Result<(), Stopped> {
    let begun = Instant::now();
    let is_over = || signals::is_end_pending() || time.is_some_and(|time| begun.elapsed() >= time);
    while !is_over() {
        let left = time.map_or(INTERVAL, |time| time.saturating_sub(begun.elapsed()));
        if !fetch_some(vm, output, taken)? {
            thread::sleep(left.min(INTERVAL));
        }
    }
    taken.scheduled = vm.stop_recording()?.into_iter().min();
    let until = Instant::now() + LAST;
    while fetch_some(vm, output, taken)? && Instant::now() < until {}
    Ok(())
}

/// Writes the samples that wait. Returns whether there are more.
fn fetch_some(vm: &mut Vm, output: &mut Output, taken: &mut Taken) -> Result<bool, Stopped> {
    let Samples { taken: mut samples, lost, more } = vm.samples()?;
    samples.sort_by_key(|sample| sample.time);
    if output.kernel.has_new_code(&samples) {
        let loaded = output.kernel.add(vm.modules()?);
        if let Some((functions, _)) = &mut output.drawn {
            functions.add_modules(&loaded);
        }
        output.writer.add_modules(loaded.modules);
    }
    output.writer.add(&samples, lost, !more).map_err(Stopped::Write)?;
    if let Some((functions, stacks)) = &mut output.drawn {
        for sample in &samples {
            stacks.add(&functions.frames(sample));
        }
    }
    taken.lost = taken.lost.saturating_add(lost);
    Ok(more)
}

/// Writes the symbols beside the samples. Returns the path, if there are symbols.
fn write_symbols_beside(output: &Path, symbols: &str) -> Result<Option<PathBuf>> {
    if symbols.is_empty() {
        return Ok(None);
    }
    let mut name = output.as_os_str().to_owned();
    name.push(".kallsyms");
    let path = PathBuf::from(name);
    let written = private_file(&path)?.write_all(symbols.as_bytes());
    // A part of them would give addresses wrong names.
    let written = written.inspect_err(|_| drop(fs::remove_file(&path)));
    written.with_context(|| path.display().to_string())?;
    Ok(Some(path))
}

fn summary(options: &Record, samples: u64, taken: &Taken, symbols: Option<&Path>) -> String {
    let output = options.output.display();
    let lost = if taken.lost > 0 { format!(", {} lost", taken.lost) } else { String::new() };
    let unscheduled = taken.scheduled.filter(|share| *share < 1000).map_or_else(String::new, |share| {
        format!(", no counter was free for {} % of the time", (1000 - share).div_ceil(10))
    });
    let perf = symbols.map_or_else(String::new, |symbols| {
        format!("; `perf report -i {output} --kallsyms {}` shows them", symbols.display())
    });
    format!("{output}: {samples} samples{lost}{unscheduled}{perf}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_listed_again_when_a_sample_is_in_new_code() {
        let module = |name: &str, start| Module { name: name.into(), start, len: 0x1000, size: 0x1000 };
        let symbols = GuestSymbols { text: "1000 T _text\n".into(), modules: vec![module("fuse", 0xa000)] };
        let mut kernel = Kernel { range: Some((0x1000, 0x2000)), symbols, asked: BTreeSet::new() };
        let sample = |is_user, instruction, kernel: &[u64]| {
            let (time, vcpu, period, table, task, user, mappings) =
                (0, 0, 1, 0, None, Vec::new(), Vec::new());
            let kernel = kernel.to_vec();
            Sample { time, vcpu, is_user, instruction, period, table, task, kernel, user, mappings }
        };
        assert!(!kernel.has_new_code(&[sample(false, 0x1800, &[0xafff]), sample(true, 0xb000, &[])]));
        // A caller counts as well, and each page once.
        assert!(kernel.has_new_code(&[sample(false, 0x1800, &[0xb010])]));
        assert!(!kernel.has_new_code(&[sample(false, 0xb020, &[])]));
        let now = "a000 t read\t[fuse]\nb000 t late\t[late]\n".into();
        let modules = vec![module("fuse", 0xa000), module("late", 0xb000)];
        let loaded = kernel.add(GuestSymbols { text: now, modules });
        assert_eq!(
            (&*loaded.text, &*loaded.modules),
            ("b000 t late\t[late]\n", &[module("late", 0xb000)][..])
        );
        assert_eq!(kernel.symbols.text, "1000 T _text\nb000 t late\t[late]\n");
        // A guest that is everywhere is not asked again and again.
        let everywhere: Vec<u64> = (0x100..0x8000).map(|page| page << 12).collect();
        assert!(kernel.has_new_code(&[sample(false, 0x1800, &everywhere)]));
        assert!(!kernel.has_new_code(&[sample(false, 0x1800, &[0x9000_0000])]));
    }
}
