//! What a guest starts from: a kernel that boots, a template, or a snapshot of the user's.

use anyhow::{Result, bail};
use devices::virtio::{Console, Device};
use kvm_ioctls::Kvm;
use log::info;
use tally_machine::pmu::{Pmu, Processor};
use tally_machine::{Config, EmptyMachine, GuestRam, Machine, MachineError, Saver, Start};
use vpmu::policy::Policy;

use super::boot::{self, Files};
use super::kept::TargetMachine;
use super::kernels::Kernels;
use super::template::{Template, TemplateDestination, TemplateRequest};
use crate::cli::Run;
use crate::run::host_resources;
use crate::run::lost_memory;
use crate::run::start::snapshot::{GuestState, Opened};
use crate::run::streams::agent::{self, AgentState};
use crate::run::streams::console::Output;

/// What a guest starts from.
pub enum Source {
    /// A kernel that boots.
    Kernel(Box<Files>),
    /// A template.
    Template(Box<Template>),
    /// A snapshot.
    Snapshot(Box<Opened>),
}

/// What a guest does when its machine has been built.
pub enum GuestPhase {
    /// It boots.
    Boots,
    /// Its agent waits for a command.
    AwaitsCommand,
    /// It goes on with its command.
    RunsCommand(Box<AgentState>),
}

/// The machine to build, beside what its guest starts from.
pub struct Blueprint<'a> {
    pub options: &'a Run,
    pub kvm: Kvm,
    pub cpus: u8,
    pub processor: Processor,
    pub pmu: Pmu,
    pub policy: Policy,
}

/// What a machine is built from, whatever its guest starts from.
pub struct MachineParts<'a> {
    pub machine: EmptyMachine,
    pub devices: Vec<Box<dyn Device>>,
    /// Where the console's output goes.
    pub output: &'a Output,
}

/// A machine, and the agent's device if its guest has an agent.
pub struct BuiltMachine {
    pub machine: Machine,
    pub saver: Saver,
    pub agent: Option<Console>,
    pub phase: GuestPhase,
}

impl Blueprint<'_> {
    /// Finds what the guest starts from, and checks that it can run here.
    pub fn source(&self, saved: Option<Opened>) -> Result<Source> {
        if let Some(saved) = saved {
            let here = Machine::fingerprint(&self.kvm, self.cpus, self.pmu)?;
            if let Some(difference) = Machine::difference(&saved.state.processor, &here) {
                bail!("this host's processor is not the one that the guest was saved on: {difference}");
            }
            return Ok(Source::Snapshot(Box::new(saved)));
        }
        match self.template().find() {
            Some(template) => Ok(Source::Template(Box::new(template))),
            None => Ok(Source::Kernel(Box::new(self.files()?))),
        }
    }

    /// Returns where the machine is saved, if it is.
    pub fn destination(&self) -> Option<TemplateDestination> {
        self.template().destination()
    }

    fn template(&self) -> TemplateRequest<'_> {
        TemplateRequest { options: self.options, machine: self.target_machine(), policy: &self.policy }
    }

    fn target_machine(&self) -> TargetMachine<'_> {
        TargetMachine { kvm: &self.kvm, pmu: self.pmu, cpus: self.cpus }
    }

    /// Returns the files to boot.
    fn files(&self) -> Result<Files> {
        boot::files(self.options, Kernels(self.target_machine()))
    }

    /// Builds the machine. If a template cannot be used, the guest boots.
    pub fn build(&self, parts: MachineParts, source: Source, ram: GuestRam) -> Result<BuiltMachine> {
        let template = match source {
            Source::Kernel(files) => return self.boot(parts, *files, ram),
            Source::Snapshot(saved) => return self.continued(parts, *saved),
            Source::Template(template) => template,
        };
        let (place, output) = (template.place.clone(), parts.output);
        match self.restore(parts, *template) {
            Ok(built) => Ok(built),
            Err(error) => {
                info!("the guest boots: the template cannot be used: {error:#}");
                place.give_up(&error);
                let devices = host_resources::devices(self.options)?.devices;
                let parts = MachineParts { machine: Machine::empty(&self.kvm)?, devices, output };
                self.boot(parts, self.files()?, ram)
            }
        }
    }

    fn boot(&self, parts: MachineParts, files: Files, ram: GuestRam) -> Result<BuiltMachine> {
        let Files { kernel, initrd, initrd_prefix } = files;
        let agent = boot::has_agent(self.options, &kernel).then(agent::console);
        let command_line = boot::command_line(self.options, &kernel, self.pmu, self.processor);
        info!("kernel command line: {command_line}");
        let start = Start::Boot {
            kernel: &kernel,
            initrd: initrd.as_deref(),
            initrd_prefix: &initrd_prefix,
            command_line: &command_line,
        };
        // The unpacked image is large, and is copied into the guest's memory: it is dropped here.
        let (machine, saver) = self.machine(parts, start, ram, agent.as_ref())?;
        Ok(BuiltMachine { machine, saver, agent, phase: GuestPhase::Boots })
    }

    fn continued(&self, parts: MachineParts, Opened { state, memory }: Opened) -> Result<BuiltMachine> {
        let GuestState { mut machine, agent: state, .. } = state;
        if self.options.has_other_disks {
            machine.accept_copies_of_disks();
        }
        let ram = Machine::saved_memory(&self.options.memory, &memory)?;
        lost_memory::watch(&ram, &memory)?;
        let console = |state: &AgentState| {
            let mut console = agent::console();
            console.restore(&state.console).map(|()| console)
        };
        let agent = state.as_ref().map(console).transpose()?;
        let start = Start::Restore(Box::new(machine));
        let (machine, saver) = self.machine(parts, start, ram, agent.as_ref())?;
        let phase = state.map_or(GuestPhase::Boots, |state| GuestPhase::RunsCommand(Box::new(state)));
        Ok(BuiltMachine { machine, saver, agent, phase })
    }

    fn restore(&self, parts: MachineParts, template: Template) -> Result<BuiltMachine> {
        let Template { machine, console, memory, .. } = template;
        let ram = Machine::saved_memory(&self.options.memory, &memory)?;
        lost_memory::watch(&ram, &memory)?;
        let mut agent = agent::console();
        agent.restore(&console)?;
        let start = Start::Restore(Box::new(machine));
        let (machine, saver) = self.machine(parts, start, ram, Some(&agent))?;
        Ok(BuiltMachine { machine, saver, agent: Some(agent), phase: GuestPhase::AwaitsCommand })
    }

    fn machine(
        &self,
        parts: MachineParts,
        start: Start,
        ram: GuestRam,
        agent: Option<&Console>,
    ) -> Result<(Machine, Saver), MachineError> {
        let MachineParts { machine, devices, output } = parts;
        let config = Config {
            start,
            cpus: self.cpus,
            ram,
            pmu: self.pmu,
            policy: self.policy.clone(),
            console: &|| Box::new(output.clone()),
            external_device: agent.map(|console| console as &dyn Device),
            devices,
        };
        Machine::new(&self.kvm, machine, config)
    }
}
