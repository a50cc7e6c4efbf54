//! `tally run`: from options to a machine, and from how it ended to a status.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;

use anyhow::{Context, Result, bail};
use devices::End;
use guest_images::Progress;
use log::{info, warn};

use crate::cli::Run;
use crate::console::{Output, outputs, standard_stream};
use crate::events::{Ending, EventLoop, Reporter};
use crate::loader::{Kernel, Retargeted};
use crate::logging::COUNTERS;
use crate::machine::{COM, port};
use crate::memory::GuestRam;
use crate::pmu::{Offer, alarm, offer};
use crate::signals::Signals;
use crate::terminal::Raw;
use crate::vcpu::Vcpu;
use crate::vm::{Config, Vm};
use crate::{FAILURE, cpuid, kvm, signals};
use vpmu::x86::Vendor;

/// Boots what the options say and waits for its end.
pub fn run(options: &Run) -> Result<ExitCode> {
    let kvm = kvm::open(options.pmu)?;
    kvm::raise_file_limit();
    let cpus = kvm::check_cpus(&kvm, options.cpus)?;
    let ram = GuestRam::new(&options.memory)?;
    info!("guest: {ram}; vCPUs: {cpus}");
    let (mut kernel, initrd) = boot_files(options)?;
    let has_command = !options.command.is_empty();
    if has_command && !kernel.is_linux() {
        bail!("a COMMAND needs the default guest, and {} is no Linux kernel", path(options));
    }

    if kernel.is_linux()
        && let Some(obstacle) = guest_images::host::obstacle()
    {
        bail!("{obstacle}: `tally lab run` runs it on a simulated host");
    }

    let host = cpuid::host_vendor(&kvm)?;
    let Offer { pmu, remarks } = offer(options.pmu, options.counters, host)?;
    info!("PMU: {pmu} (--pmu {}, on a host with {})", options.pmu.name(), maker(host));

    if pmu.needs_rdpmc() {
        retarget(&mut kernel)?;
    }

    // From here on signals are events, in every thread that follows.
    let signals = Signals::take().context("cannot take signals")?;
    alarm::install().context("cannot handle the signals of perf events")?;
    let (outputs, timer) = outputs(output_files(options)?).context("cannot prepare the console")?;
    let mut events = EventLoop::new()?;
    if let [console, stdout, ..] = outputs.as_slice() {
        // A command ends with its reader, as in a pipeline; a console that nobody sees is kept for a guest's last words.
        stdout.end_when_closed(events.reporter()?);
        if options.verbose == 0 {
            console.keep_tail();
        }
    }
    events.add_signals(signals);
    events.add_outputs(timer, outputs.clone());

    let command_line = command_line(options, &kernel, cpuid::kernel_words(host, pmu.identity()));
    info!("kernel command line: {command_line}");
    let vm = Vm::new(
        &kvm,
        &Config {
            kernel: &kernel,
            initrd: initrd.as_deref(),
            command_line: &command_line,
            cpus,
            ram,
            pmu,
            outputs: outputs.clone(),
            command: has_command,
        },
    )?;
    // The unpacked image is large, and in the guest's memory now.
    drop(kernel);

    let raw = if has_command {
        None
    } else {
        events.add_input(vm.console, vm.console_room);
        Raw::enter().context("cannot make the terminal raw")?
    };
    for remark in remarks {
        warn!(target: COUNTERS, "{remark}");
    }
    for vcpu in vm.vcpus {
        start(vcpu, events.reporter()?)?;
    }
    let ending = events.run()?;
    drop(raw);
    match ending {
        Ending::Guest(_) | Ending::Failed(_) => {
            // What the guest has said is passed on to its end, however long that takes: signals do again what they do.
            signals::give_back().context("cannot give signals back")?;
            outputs.iter().for_each(Output::flush_all);
        }
        Ending::Quit | Ending::Signal(_) => {
            for output in &outputs {
                output.try_flush();
            }
        }
    }
    Ok(conclude(&ending, has_command, &outputs[0]))
}

fn path(options: &Run) -> String {
    options.kernel.as_ref().map_or_else(String::new, |path| path.display().to_string())
}

/// The kernel and the initrd: those named, and the default guest's where none is.
fn boot_files(options: &Run) -> Result<(Kernel, Option<PathBuf>)> {
    let named = options.kernel.as_deref().map(Kernel::read).transpose()?;
    let (kernel, initrd) = match named {
        Some(kernel) if options.initrd.is_some() || !kernel.is_linux() => (kernel, options.initrd.clone()),
        _ => {
            let guest = guest_images::default_guest(&mut Progress::stderr("tally"))?;
            let kernel = named.map_or_else(|| Kernel::read(&guest.kernel), Ok)?;
            (kernel, Some(options.initrd.clone().unwrap_or(guest.initrd)))
        }
    };
    info!("kernel: {kernel}{}", whose(options.kernel.as_ref()));
    if let Some(initrd) = &initrd {
        info!("initrd: {}{}", initrd.display(), whose(options.initrd.as_ref()));
    }
    Ok((kernel, initrd))
}

/// Of a file that was named or not: where it comes from.
fn whose(named: Option<&PathBuf>) -> &'static str {
    if named.is_some() { "" } else { ", the default guest's" }
}

fn maker(vendor: Option<Vendor>) -> &'static str {
    match vendor {
        Some(Vendor::Amd) => "AMD's processor",
        Some(Vendor::Intel) => "Intel's processor",
        None => "another vendor's processor",
    }
}

/// Has the kernel read its counters in a way that can be handed over, and logs what was changed for that.
fn retarget(kernel: &mut Kernel) -> Result<()> {
    let Retargeted { sites, left } = kernel.retarget_rdpmc()?;
    for site in sites {
        info!(target: COUNTERS, "RDPMC became RDMSR at {site}");
    }
    for address in left {
        info!(
            target: COUNTERS,
            "the bytes of an RDPMC at {address:#x} are left alone: nothing shows that they run"
        );
    }
    Ok(())
}

/// Where the serial ports' output goes. With a command there are three: console, output, errors.
fn output_files(options: &Run) -> io::Result<Vec<Option<std::fs::File>>> {
    let (stdout, stderr) = (standard_stream(&io::stdout())?, standard_stream(&io::stderr())?);
    if options.command.is_empty() {
        return Ok(vec![Some(stdout)]);
    }
    let console = if options.verbose > 0 { Some(stderr.try_clone()?) } else { None };
    Ok(vec![console, Some(stdout), Some(stderr)])
}

/// What the kernel is told: what Tally needs, what its processor's identity does, what the default guest's init needs, what
/// the user adds.
fn command_line(options: &Run, kernel: &Kernel, identity: Option<&str>) -> String {
    let mut words = Vec::new();
    if kernel.is_linux() {
        let ports = if options.command.is_empty() { 1 } else { COM.len() };
        // A panic ends in a reset, which ends the machine; there is no PCI bus to look for.
        words.push(format!("console=ttyS0 8250.nr_uarts={ports} panic=-1 pci=off"));
        words.extend(identity.map(str::to_owned));
        if options.initrd.is_none() {
            // A tmpfs takes half of the memory at most, too little for the default guest's files in the smallest guests.
            words.push("rootfstype=ramfs".to_owned());
        }
        if !options.command.is_empty() {
            words.push(format!("tally.out=ttyS1 tally.err=ttyS2 tally.status={:#x}", port::COMMAND_STATUS));
            words.push(format!("tally.run={}", guest_images::command::encode(&options.command)));
        }
    }
    if !options.append.is_empty() {
        words.push(options.append.clone());
    }
    words.join(" ")
}

fn start(mut vcpu: Vcpu, reporter: Reporter) -> Result<()> {
    thread::Builder::new()
        .name(format!("vcpu{}", vcpu.id))
        .spawn(move || {
            let ending = vcpu.run().map_or_else(Ending::Failed, Ending::Guest);
            reporter.report(ending);
            // The other vCPUs may still run on this one's machine: it stays open until the process ends.
            std::mem::forget(vcpu);
        })
        .context("cannot start a vCPU's thread")?;
    Ok(())
}

/// Says what there is to say of an ending, and which status it has.
fn conclude(ending: &Ending, has_command: bool, console: &Output) -> ExitCode {
    const INTERRUPTED: u8 = 128;
    info!("{ending}");
    let died = |how: &str| {
        eprintln!("tally: {how}");
        if has_command {
            let tail = console.tail();
            if !tail.is_empty() {
                eprintln!("tally: the guest's console ended with:\n{tail}");
            }
        }
        ExitCode::from(FAILURE)
    };
    match ending {
        Ending::Guest(End::Command(status)) => ExitCode::from(*status),
        // As QEMU's isa-debug-exit has it, so that no value is taken for success.
        Ending::Guest(End::DebugExit(value)) => ExitCode::from(value << 1 | 1),
        Ending::Guest(End::PowerOff) if has_command => {
            died("the guest switched itself off before its command ended")
        }
        Ending::Guest(End::Reboot) if has_command => died("the guest reset before its command ended"),
        Ending::Failed(failure) => died(&failure.to_string()),
        Ending::Signal(signal) if has_command => {
            ExitCode::from(u8::try_from(*signal).map_or(FAILURE, |signal| INTERRUPTED | signal))
        }
        Ending::Guest(End::PowerOff | End::Reboot) | Ending::Quit | Ending::Signal(_) => ExitCode::SUCCESS,
    }
}
