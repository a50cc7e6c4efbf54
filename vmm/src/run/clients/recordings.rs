//! Samples a VM for a client, and reads the symbols of its kernel.

use std::sync::Arc;

use log::info;
use tally_machine::{
    GuestLinux, GuestRam, KernelFunctions, Module, RecordError, Recording, SamplingPlan, Symbols,
    VcpuHandles, build_id, modules, symbols,
};
use vpmu::event::{Event, GenericEvent};
use vpmu_perf::{HostPmu, Sampling};

use crate::protocol::message::Answer;
use crate::protocol::recording::{
    Begun, Functions, MAX_ADDRESSES, MAX_PART, MAX_WORDS, Processes, RecordOptions, SampleRate, SampledEvent,
    Samples, SymbolsPart, WhyClock,
};

/// State that is kept for a client that records.
#[derive(Default)]
pub struct RecordingSession {
    /// The symbols, from when they were found until a recording begins.
    symbols: Option<Symbols>,
    /// Text that is being fetched.
    text: String,
    recording: Option<Recording>,
    /// Names the kernel's functions, if they have names.
    functions: Option<KernelFunctions>,
}

impl RecordingSession {
    /// Returns a part of the text of the kernel's symbols. The first part is of the kernel of now, with its modules.
    pub fn symbols(&mut self, memory: &GuestRam, vcpus: &VcpuHandles, from: usize) -> Answer {
        let mut listed = Vec::new();
        if from == 0 {
            let found = symbols(&memory.mapped);
            self.text = found.as_ref().map(Symbols::text).unwrap_or_default();
            let kernel = found.as_ref().zip(vcpus.address_space());
            let of_modules = kernel.and_then(|(symbols, space)| modules(symbols, space, &memory.mapped));
            if let Some((modules, text)) = of_modules {
                listed = modules;
                self.text += &text;
            }
            self.symbols = found;
        }
        self.part(from, listed)
    }

    /// Returns a part of the text of the modules' symbols. The first part is of the modules of now.
    pub fn modules(&mut self, memory: &GuestRam, from: usize) -> Answer {
        if self.recording.is_none() {
            return none();
        }
        let mut listed = Vec::new();
        if let Some(functions) = self.functions.as_ref().filter(|_| from == 0) {
            (listed, self.text) = functions.modules(&memory.mapped);
        }
        self.part(from, listed)
    }

    /// Returns a part of the text, which is dropped with the last one: it is large, and there may be many VMs.
    fn part(&mut self, from: usize, modules: Vec<Module>) -> Answer {
        let rest = self.text.get(from..).unwrap_or_default();
        // Whole lines.
        let end = rest.get(..MAX_PART).and_then(|part| part.rfind('\n')).map_or(rest.len(), |last| last + 1);
        let part = SymbolsPart { text: rest[..end].to_owned(), modules, more: end < rest.len() };
        if !part.more {
            self.text = String::new();
        }
        Answer::Symbols(part)
    }

    /// Begins to sample the VM.
    pub fn begin(
        &mut self,
        options: &RecordOptions,
        vcpus: &Arc<VcpuHandles>,
        cpus: u8,
        host: Option<HostPmu>,
        memory: &GuestRam,
    ) -> Answer {
        self.try_begin(options, vcpus, cpus, host, memory).unwrap_or_else(Answer::Error)
    }

    fn try_begin(
        &mut self,
        options: &RecordOptions,
        vcpus: &Arc<VcpuHandles>,
        cpus: u8,
        host: Option<HostPmu>,
        memory: &GuestRam,
    ) -> Result<Answer, String> {
        let SampledEvent { event, filter, .. } =
            options.event.parse().map_err(|error: crate::protocol::recording::NoEvent| error.to_string())?;
        let encoded = host.map(|pmu| Sampling::encoding(pmu, event)).transpose();
        let encoded = encoded.map_err(|error| error.to_string())?;
        if self.recording.is_some() {
            return Err("this client records it already".to_owned());
        }
        // They are large as well.
        let symbols = self.symbols.take().or_else(|| symbols(&memory.mapped));
        let symbols = symbols.as_ref();
        let kernel = symbols.zip(vcpus.address_space());
        let linux = kernel.and_then(|(symbols, space)| {
            GuestLinux::find(symbols, space, &memory.mapped, cpus, options.chains)
        });
        let linux = linux.map(Arc::new);
        self.functions = symbols.map(|symbols| KernelFunctions::new(symbols.tables().clone(), linux.clone()));
        let begin = |event| {
            let rate = options.rate.of_perf();
            let plan = SamplingPlan { event, filter, rate, has_chains: options.chains };
            vcpus.record(plan, linux.as_ref())
        };
        // So many samples in a second of cycles are as many of time.
        let is_of_time =
            event == Event::Generic(GenericEvent::Cycles) && matches!(options.rate, SampleRate::Frequency(_));
        let (recording, (kind, config), clock) = match encoded {
            Some(encoded) => match begin(encoded) {
                Err(RecordError::NoCounter) if is_of_time => {
                    (begin(Sampling::CLOCK), Sampling::CLOCK, Some(WhyClock::NoCounter))
                }
                started => (started, encoded, None),
            },
            None if is_of_time => (begin(Sampling::CLOCK), Sampling::CLOCK, Some(WhyClock::NoPmu)),
            None => return Err("this host has no PMU".to_owned()),
        };
        let recording = recording.map_err(|error| error.to_string())?;
        self.recording = Some(recording);
        info!("the machine is sampled from outside: {}", options.event);
        Ok(Answer::Recording(Begun {
            kind,
            config,
            has_functions: symbols.is_some(),
            processes: match &linux {
                None => Processes::Unknown,
                Some(linux) if linux.has_mappings() => Processes::Mapped,
                Some(_) => Processes::Named,
            },
            clock,
            has_kernel_chains: linux.is_some_and(|linux| linux.has_callers()),
            build_id: kernel.and_then(|(symbols, space)| build_id(symbols, space, &memory.mapped)),
        }))
    }

    /// Returns the samples since the last ones.
    pub fn samples(&self) -> Answer {
        let Some(recording) = &self.recording else { return none() };
        let (samples, lost, more) = recording.take(MAX_WORDS);
        Answer::Samples(Samples { taken: samples, lost, more })
    }

    /// Returns the functions of the kernel at these addresses.
    pub fn functions(&self, memory: &GuestRam, addresses: &[u64]) -> Answer {
        if self.recording.is_none() {
            return none();
        }
        let addresses = &addresses[..addresses.len().min(MAX_ADDRESSES)];
        let found = self.functions.as_ref().map(|functions| functions.at(&memory.mapped, addresses));
        Answer::Functions(Functions { found: found.unwrap_or_default() })
    }

    /// Ends the recording.
    pub fn stop(&self) -> Answer {
        self.recording.as_ref().map_or_else(none, |recording| Answer::Recorded(recording.stop()))
    }
}

fn none() -> Answer {
    Answer::Error("this client does not record it".to_owned())
}
