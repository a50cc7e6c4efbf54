//! What a guest starts from: a kernel that boots, a template, or a snapshot of the user's.

use anyhow::{Result, bail};
use devices::virtio::{Console, Device};
use kvm_ioctls::Kvm;
use log::info;
use tally_machine::pmu::{Pmu, Processor};
use tally_machine::{Config, EmptyMachine, GuestRam, Machine, MachineError, Saver, Start};
use vpmu::policy::Policy;

use super::boot::{self, Files};
use super::kept::For;
use super::kernels::Kernels;
use super::template::{Saves, Template, TemplateFor};
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
pub enum At {
    /// It boots.
    Boot,
    /// Its agent waits for a command.
    Command,
    /// It goes on with its command.
    Work(Box<AgentState>),
}

/// The machine to build, beside what its guest starts from.
pub struct Blueprint<'a> {
    pub options: &'a Run,
    pub kvm: &'a Kvm,
    pub cpus: u8,
    pub processor: Processor,
    pub pmu: Pmu,
    pub policy: &'a Policy,
}

/// What a machine is built from, whatever its guest starts from.
pub struct Parts<'a> {
    pub machine: EmptyMachine,
    pub devices: Vec<Box<dyn Device>>,
    /// Where the console's output goes.
    pub output: &'a Output,
}

/// A machine, and the agent's device if its guest has an agent.
pub struct Built {
    pub machine: Machine,
    pub saver: Saver,
    pub agent: Option<Console>,
    pub at: At,
}

impl<'a> Blueprint<'a> {
    /// Finds what the guest starts from, and checks that it can run here.
    pub fn source(&self, saved: Option<Opened>) -> Result<Source> {
        if let Some(saved) = saved {
            let here = Machine::identity(self.kvm, self.cpus, self.pmu)?;
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
    pub fn saves(&self) -> Option<Saves> {
        self.template().saves()
    }

    fn template(&self) -> TemplateFor<'a> {
        TemplateFor { options: self.options, machine: self.kept_for(), policy: self.policy }
    }

    fn kept_for(&self) -> For<'a> {
        let Self { kvm, pmu, cpus, .. } = *self;
        For { kvm, pmu, cpus }
    }

    /// Returns the files to boot.
    fn files(&self) -> Result<Files> {
        boot::files(self.options, Kernels(self.kept_for()))
    }

    /// Builds the machine. If a template cannot be used, the guest boots.
    pub fn build(&self, parts: Parts, source: Source, ram: GuestRam) -> Result<Built> {
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
                let parts = Parts { machine: Machine::empty(self.kvm)?, devices, output };
                self.boot(parts, self.files()?, ram)
            }
        }
    }

    fn boot(&self, parts: Parts, files: Files, ram: GuestRam) -> Result<Built> {
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
        Ok(Built { machine, saver, agent, at: At::Boot })
    }

    fn continued(&self, parts: Parts, Opened { state, memory }: Opened) -> Result<Built> {
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
        let at = state.map_or(At::Boot, |state| At::Work(Box::new(state)));
        Ok(Built { machine, saver, agent, at })
    }

    fn restore(&self, parts: Parts, template: Template) -> Result<Built> {
        let Template { machine, console, memory, .. } = template;
        let ram = Machine::saved_memory(&self.options.memory, &memory)?;
        lost_memory::watch(&ram, &memory)?;
        let mut agent = agent::console();
        agent.restore(&console)?;
        let start = Start::Restore(Box::new(machine));
        let (machine, saver) = self.machine(parts, start, ram, Some(&agent))?;
        Ok(Built { machine, saver, agent: Some(agent), at: At::Command })
    }

    fn machine(
        &self,
        parts: Parts,
        start: Start,
        ram: GuestRam,
        agent: Option<&Console>,
    ) -> Result<(Machine, Saver), MachineError> {
        let Parts { machine, devices, output } = parts;
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
        Machine::new(self.kvm, machine, config)
    }
}
