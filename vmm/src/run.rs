//! `tally run`: from options to a machine, and from how it ended to a status.

mod boot;
mod hardware;
mod host_resources;
mod running;
mod streams;
mod talk;

use std::fmt::Display;
use std::io;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use devices::End;
use devices::virtio::Device;
use log::{info, warn};
use tally_machine::kvm::{check_cpus, raise_file_limit};
use tally_machine::pmu::{self, Offer, offer};
use tally_machine::target::COUNTERS;
use tally_machine::{Config, Journal, Machine, Vcpu, hold_back_signals};
use vpmu::policy::Policy;

use crate::cli::{FAILURE, Run};
use crate::console::{FlushTimer, Output, standard_stream};
use crate::control::Control;
use crate::control::message::Summary;
use crate::ending::{Ending, Reporter};
use crate::event_log::{EventLog, VcpuLog};
use crate::events::EventLoop;
use crate::flamegraph::FlameGraph;
use crate::metrics::{Metrics, Socket};
use crate::signals::Signals;
use crate::terminal::Raw;
use crate::{agent, kvm, policy, signals, stderr};

use boot::Files;
use host_resources::HostResources;
use running::Running;
use talk::Talk;

/// Boots what the options say and waits for its end.
pub fn run(options: &Run, log: Option<&Arc<EventLog>>) -> Result<ExitCode> {
    let result = boot_and_wait(options, log);
    if let Err(error) = &result {
        close(log, &format_args!("{error:#}"));
    }
    result
}

fn boot_and_wait(options: &Run, log: Option<&Arc<EventLog>>) -> Result<ExitCode> {
    let policy = policy(options)?;
    signals::outlive_too_large_files();
    let kvm = kvm::open(options.pmu)?;
    raise_file_limit();
    let cpus = check_cpus(&kvm, options.cpus)?;
    let ram = Machine::memory(&options.memory)?;
    let memory = ram.size();
    info!("guest: {ram}; vCPUs: {cpus}");
    let metrics = options.metrics.as_ref().map(Metrics::listen).transpose()?;
    let HostResources { devices, shares, folder } = host_resources::devices(options)?;
    let mut graph = options.flamegraph.as_deref().map(FlameGraph::new).transpose()?;
    let Files { mut kernel, initrd, front } = boot::files(options)?;
    let has_command = !options.command.is_empty();
    boot::check(options, &kernel)?;

    let processor = pmu::processor(&kvm)?;
    let Offer { pmu, remarks } = offer(options.pmu, options.counters, processor, &policy)?;
    info!(target: COUNTERS, "PMU: the guest sees {pmu} (--pmu {}, on a host with {processor})", options.pmu.name());

    if pmu.needs_retargeting() {
        kernel.retarget(pmu, cpus)?;
    }

    // From here on signals are events, in every thread that follows.
    hold_back_signals().context("cannot hold signals back")?;
    let signals = Signals::take().context("cannot take signals")?;
    let mut events = EventLoop::new()?;
    let (output, timer) = console(options).context("cannot prepare the console")?;
    events.add_output(timer, output.clone());

    let talks = boot::has_agent(options, &kernel);
    let agent = talks.then(agent::console);
    let command_line = boot::command_line(options, &kernel, pmu.kernel_words(processor));
    info!("kernel command line: {command_line}");
    let vm = Machine::new(
        &kvm,
        Config {
            kernel: &kernel,
            initrd: initrd.as_deref(),
            front: &front,
            command_line: &command_line,
            cpus,
            ram,
            pmu,
            policy: policy.clone(),
            console: &|| Box::new(output.clone()),
            served_outside: agent.as_ref().map(|console| console as &dyn Device),
            devices,
        },
    )?;
    // The unpacked image is large, and in the guest's memory now.
    drop(kernel);
    let machine = Running {
        about: Summary::of_this(options, pmu, cpus, memory),
        begun: Instant::now(),
        vcpus: Arc::clone(&vm.asked),
        kvm: vm.vcpus.iter().map(Vcpu::kvm_stats).collect(),
        pmu,
        policy: Mutex::new(policy),
        log: log.cloned(),
    };
    let seen = show(machine, metrics)?;

    let (mut handle, mut thread, mut raw) = (None, None, None);
    if let Some((console, transport)) = agent.zip(vm.served_outside) {
        let talk = Talk { command: &options.command, shares, folder, graph: graph.as_mut() };
        let begun = talk.begin(console, transport, events.reporter()?)?;
        (handle, thread, raw) = (Some(begun.handle), Some(begun.thread), begun.raw);
    }
    events.add_signals(signals, handle);
    if !has_command {
        events.add_input(vm.console, vm.console_room);
        raw = Raw::enter().context("cannot make the terminal raw")?;
    }

    say(&remarks);
    for vcpu in vm.vcpus {
        let vcpu_log = log.map(|log| VcpuLog::new(Arc::clone(log), vcpu.id, pmu));
        start(vcpu, vcpu_log, events.reporter()?)?;
    }
    let ending = events.run()?;
    drop(seen);
    // With it goes the handle on the agent, whose thread then comes to its end.
    drop(events);
    drop(raw);
    let is_broken_off = matches!(ending, Ending::Quit | Ending::Signal(_));
    if is_broken_off {
        output.try_flush();
    }
    // What follows may take as long as somebody does not read: signals do again what they do.
    signals::give_back().context("cannot give signals back")?;
    close(log, &ending);
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
        stderr::say(&format_args!("{error:#}"));
    }
    Ok(conclude(&ending, has_command, &output))
}

fn say(remarks: &[String]) {
    for remark in remarks {
        warn!(target: COUNTERS, "{remark}");
    }
}

/// Lets others look at the machine, for as long as what comes back is there. Its vCPUs do not run yet.
fn show(machine: Running, metrics: Option<(Metrics, Socket)>) -> Result<(Control, Option<Socket>)> {
    let socket = match metrics {
        Some((metrics, socket)) => {
            let facts = facts(&machine.about);
            metrics.serve(facts, Arc::clone(&machine.vcpus)).context("cannot start the metrics' thread")?;
            Some(socket)
        }
        None => None,
    };
    Ok((Control::open(machine), socket))
}

/// What the metrics say of the machine that never changes.
fn facts(about: &Summary) -> Vec<(&'static str, String)> {
    vec![
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("name", about.name.clone()),
        ("pid", about.pid.to_string()),
        ("pmu", about.pmu.clone()),
    ]
}

/// What the guest may have of the counters. What the command line says of it wins over the file.
fn policy(options: &Run) -> Result<Policy> {
    let option = match (&options.pmu_policy, options.on_starvation) {
        (Some(_), _) => Some("--pmu-policy"),
        (None, Some(_)) => Some("--on-starvation"),
        (None, None) => None,
    };
    if let Some(option) = option.filter(|_| !options.pmu.is_ours()) {
        bail!("{option} is for Tally's own PMUs, not for --pmu {}", options.pmu.name());
    }
    let policy = options.pmu_policy.as_deref().map(policy::of_file).transpose()?.unwrap_or_default();
    Ok(match options.on_starvation {
        Some(on_starvation) => Policy { on_starvation, ..policy },
        None => policy,
    })
}

/// Where the console's output goes. While a command runs it is shown only if asked for, and kept for a guest's last words.
fn console(options: &Run) -> io::Result<(Output, Arc<FlushTimer>)> {
    let timer = Arc::new(FlushTimer::new()?);
    let file = match (options.command.is_empty(), options.verbose > 0) {
        (true, _) => Some(standard_stream(&io::stdout())?),
        (false, true) => Some(standard_stream(&io::stderr())?),
        (false, false) => None,
    };
    let output = Output::new(file, Arc::clone(&timer));
    if !options.command.is_empty() && options.verbose == 0 {
        output.keep_tail();
    }
    Ok((output, timer))
}

/// Ends the log, and says what is not in it.
fn close(log: Option<&Arc<EventLog>>, how: &dyn Display) {
    if let Some(log) = log
        && let Err(error) = log.end(how)
    {
        stderr::say(&error);
    }
}

fn start(vcpu: Vcpu, log: Option<VcpuLog>, reporter: Reporter) -> Result<()> {
    thread::Builder::new()
        .name(format!("vcpu{}", vcpu.id))
        .spawn(move || {
            let journal = log.map(|log| Box::new(log) as Box<dyn Journal>);
            let ending = vcpu.run(journal).map_or_else(Ending::Failed, Ending::Guest);
            reporter.report(ending);
        })
        .context("cannot start a vCPU's thread")?;
    Ok(())
}

/// Says what there is to say of an ending, and which status it has.
fn conclude(ending: &Ending, has_command: bool, console: &Output) -> ExitCode {
    const INTERRUPTED: u8 = 128;
    info!("{ending}");
    let died = |how: &str| {
        stderr::say(&how);
        if has_command {
            let tail = console.tail();
            if !tail.is_empty() {
                stderr::say(&format_args!("the guest's console ended with:\n{tail}"));
            }
        }
        ExitCode::from(FAILURE)
    };
    match ending {
        Ending::Command(status) => ExitCode::from(*status),
        Ending::Agent(_) | Ending::Output(_) => {
            stderr::say(ending);
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
