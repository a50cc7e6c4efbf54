//! `tally run`: builds a machine from the options, waits for its end, and turns that into an exit status.

mod boot;
pub mod hardware;
mod host_resources;
pub mod look;
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
use crate::ending::{Ending, Reporter};
use crate::event_log::{EventLog, VcpuLog};
use crate::events::EventLoop;
use crate::flamegraph::FlameGraph;
use crate::metrics::{Metrics, Socket};
use crate::signals::Signals;
use crate::status::Summary;
use crate::terminal::Raw;
use crate::{agent, kvm, policy, signals, stderr};

use boot::Files;
use host_resources::HostResources;
use running::Running;
use talk::Talk;

/// `tally run`: boots a guest and waits for its end.
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

    // From here on, signals are blocked in this thread and all new ones, and arrive as events.
    hold_back_signals().context("cannot hold signals back")?;
    let signals = Signals::take().context("cannot take signals")?;
    let mut events = EventLoop::new()?;
    let (output, timer) = console(options).context("cannot prepare the console")?;
    events.add_output(timer, output.clone());

    let has_agent = boot::has_agent(options, &kernel);
    let agent = has_agent.then(agent::console);
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
    // The unpacked image is large, and was copied into the guest's memory.
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
        let started = talk.start(console, transport, events.reporter()?)?;
        (handle, thread, raw) = (Some(started.handle), Some(started.thread), started.raw);
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
    // This drops the handle on the agent, whose thread ends then.
    drop(events);
    drop(raw);
    let is_interrupted = matches!(ending, Ending::Quit | Ending::Signal(_));
    if is_interrupted {
        output.try_flush();
    }
    // What follows may block on a reader of the output: signals end this process again.
    signals::give_back().context("cannot give signals back")?;
    close(log, &ending);
    if !is_interrupted {
        // All of the guest's output is passed on.
        output.flush_all();
        if let Some(thread) = thread {
            // A panic would have ended the process.
            let _ = thread.join();
        }
    }
    if let (Some(graph), Ending::Command(status)) = (graph, &ending)
        && let Err(error) = graph.finish(&options.command)
    {
        if *status == 0 {
            return Err(error);
        }
        // The status of a command that failed says more than the lack of a picture.
        stderr::say(&format_args!("{error:#}"));
    }
    Ok(conclude(&ending, has_command, &output))
}

/// Prints remarks about the guest's counters.
fn say(remarks: &[String]) {
    for remark in remarks {
        warn!(target: COUNTERS, "{remark}");
    }
}

/// Serves the control socket and the metrics until the result is dropped. The vCPUs do not run yet.
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

/// Returns the labels of the metric `tally_machine_info`.
fn facts(about: &Summary) -> Vec<(&'static str, String)> {
    vec![
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("name", about.name.clone()),
        ("pid", about.pid.to_string()),
        ("pmu", about.pmu.clone()),
    ]
}

/// Returns the policy for the guest's counters. `--on-starvation` wins over the file.
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

/// Returns the destination of the console's output, and its timer. While a command runs, the console is shown with `-v`
/// only; its last lines are kept in case the guest dies.
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

/// Closes the event log, and prints an error if records are missing.
fn close(log: Option<&Arc<EventLog>>, how: &dyn Display) {
    if let Some(log) = log
        && let Err(error) = log.end(how)
    {
        stderr::say(&error);
    }
}

/// Starts a vCPU's thread.
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

/// Prints why the machine ended, if that is a failure, and returns the exit status.
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
        // As with QEMU's isa-debug-exit, no value is taken for success.
        Ending::Guest(End::DebugExit(value)) => ExitCode::from(value << 1 | 1),
        Ending::Guest(End::PowerOff) if has_command => {
            died("the guest switched itself off before its command ended")
        }
        Ending::Guest(End::Reboot) if has_command => died("the guest reset before its command ended"),
        Ending::Failed(failure) => died(&failure.to_string()),
        Ending::Signal(signal) if has_command => {
            ExitCode::from(u8::try_from(*signal).map_or(FAILURE, |signal| INTERRUPTED | signal))
        }
        // As after Ctrl-C (SIGINT).
        Ending::Quit if has_command => ExitCode::from(INTERRUPTED | 2),
        Ending::Guest(End::PowerOff | End::Reboot) | Ending::Quit | Ending::Signal(_) => ExitCode::SUCCESS,
    }
}
