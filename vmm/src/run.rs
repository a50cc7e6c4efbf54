//! `tally run`: from options to a machine, and from how it ended to a status.

mod boot;
mod given;
mod streams;
mod talk;

use std::io;
use std::process::ExitCode;
use std::thread;

use anyhow::{Context, Result, bail};
use devices::End;
use log::{info, warn};

use crate::agent;
use crate::cli::Run;
use crate::console::{FlushTimer, Output, standard_stream};
use crate::events::{Ending, EventLoop, Reporter};
use crate::flamegraph::FlameGraph;
use crate::logging::COUNTERS;
use crate::memory::GuestRam;
use crate::pmu::{Offer, alarm, offer};
use crate::signals::Signals;
use crate::terminal::Raw;
use crate::vcpu::Vcpu;
use crate::vm::{Config, Vm};
use crate::{FAILURE, cpuid, kvm, logging, signals};
use vpmu::x86::Vendor;

use boot::Files;
use given::Given;
use talk::Talk;

/// Boots what the options say and waits for its end.
pub fn run(options: &Run) -> Result<ExitCode> {
    signals::outlive_too_large_files();
    let kvm = kvm::open(options.pmu)?;
    kvm::raise_file_limit();
    let cpus = kvm::check_cpus(&kvm, options.cpus)?;
    let ram = GuestRam::new(&options.memory)?;
    info!("guest: {ram}; vCPUs: {cpus}");
    let Given { devices, shares, folder } = given::devices(options)?;
    let mut graph = options.flamegraph.as_deref().map(FlameGraph::new).transpose()?;
    let Files { mut kernel, initrd, front } = boot::files(options)?;
    let has_command = !options.command.is_empty();
    let path = |path: &std::path::Path| path.display().to_string();
    if has_command && !kernel.is_linux() {
        let name = options.kernel.as_deref().map_or_else(String::new, path);
        bail!("a COMMAND needs the default guest, and {name} is no Linux kernel");
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
        boot::retarget(&mut kernel)?;
    }

    // From here on signals are events, in every thread that follows.
    let signals = Signals::take().context("cannot take signals")?;
    alarm::install().context("cannot handle the signals of perf events")?;
    let mut events = EventLoop::new()?;
    let (output, timer) = console(options).context("cannot prepare the console")?;
    events.add_output(timer, output.clone());

    let talks = boot::has_agent(options, &kernel);
    let agent = talks.then(agent::console);
    let command_line = boot::command_line(options, &kernel, cpuid::kernel_words(host, pmu.identity()));
    info!("kernel command line: {command_line}");
    let vm = Vm::new(
        &kvm,
        Config {
            kernel: &kernel,
            initrd: initrd.as_deref(),
            front: &front,
            command_line: &command_line,
            cpus,
            ram,
            pmu,
            output: output.clone(),
            agent: agent.as_ref(),
            devices,
        },
    )?;
    // The unpacked image is large, and in the guest's memory now.
    drop(kernel);

    let (mut handle, mut thread, mut raw) = (None, None, None);
    if let Some((console, transport)) = agent.zip(vm.agent) {
        let talk = Talk { command: &options.command, shares, folder, graph: graph.as_mut() };
        let begun = talk.begin(console, transport, events.reporter()?)?;
        (handle, thread, raw) = (Some(begun.handle), Some(begun.thread), begun.raw);
    }
    events.add_signals(signals, handle);
    if !has_command {
        events.add_input(vm.console, vm.console_room);
        raw = Raw::enter().context("cannot make the terminal raw")?;
    }

    for remark in remarks {
        warn!(target: COUNTERS, "{remark}");
    }
    for vcpu in vm.vcpus {
        start(vcpu, events.reporter()?)?;
    }
    let ending = events.run()?;
    // With it goes the handle on the agent, whose thread then comes to its end.
    drop(events);
    drop(raw);
    let is_broken_off = matches!(ending, Ending::Quit | Ending::Signal(_));
    if is_broken_off {
        output.try_flush();
    }
    // What follows may take as long as somebody does not read: signals do again what they do.
    signals::give_back().context("cannot give signals back")?;
    if !is_broken_off {
        // What the guest has said is passed on to its end.
        output.flush_all();
        if let Some(thread) = thread {
            // A thread that panics has ended the process.
            let _ = thread.join();
        }
    }
    if let (Some(graph), Ending::Command(status)) = (graph, &ending)
        && let Err(error) = graph.finish(&options.command)
    {
        if *status == 0 {
            return Err(error);
        }
        // That of a command that failed says more than that there is no picture.
        logging::say(&format_args!("{error:#}"));
    }
    Ok(conclude(&ending, has_command, &output))
}

fn maker(vendor: Option<Vendor>) -> &'static str {
    match vendor {
        Some(Vendor::Amd) => "AMD's processor",
        Some(Vendor::Intel) => "Intel's processor",
        None => "another vendor's processor",
    }
}

/// Where the console's output goes. While a command runs it is shown only if asked for, and kept for a guest's last words.
fn console(options: &Run) -> io::Result<(Output, std::sync::Arc<FlushTimer>)> {
    let timer = std::sync::Arc::new(FlushTimer::new()?);
    let file = match (options.command.is_empty(), options.verbose > 0) {
        (true, _) => Some(standard_stream(&io::stdout())?),
        (false, true) => Some(standard_stream(&io::stderr())?),
        (false, false) => None,
    };
    let output = Output::new(file, std::sync::Arc::clone(&timer));
    if !options.command.is_empty() && options.verbose == 0 {
        output.keep_tail();
    }
    Ok((output, timer))
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
        logging::say(&how);
        if has_command {
            let tail = console.tail();
            if !tail.is_empty() {
                logging::say(&format_args!("the guest's console ended with:\n{tail}"));
            }
        }
        ExitCode::from(FAILURE)
    };
    match ending {
        Ending::Command(status) => ExitCode::from(*status),
        Ending::Agent(_) | Ending::Output(_) => {
            logging::say(ending);
            ExitCode::from(FAILURE)
        }
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
        // As Ctrl-C has it, whatever the command would have said.
        Ending::Quit if has_command => ExitCode::from(INTERRUPTED | 2),
        Ending::Guest(End::PowerOff | End::Reboot) | Ending::Quit | Ending::Signal(_) => ExitCode::SUCCESS,
    }
}
