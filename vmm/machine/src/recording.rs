//! Samples a running machine from outside: each vCPU's thread has a host event that counts in the guest only, and looks
//! at its guest when that overflows. The guest sees nothing of it.
//!
//! A [`Recorder`] is on a vCPU's thread, and adds samples to a buffer, from which whoever wants them takes them.
//! Which thread the guest's kernel runs, and the kernel's symbols, are read in the guest's memory ([`linux`]).

pub mod btf;
pub mod kallsyms;
pub mod linux;
mod mappings;
pub mod modules;
pub mod sample;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use kvm_ioctls::VcpuFd;
use rustix::time::{ClockId, clock_gettime};
use vm_memory::GuestMemoryMmap;
use vpmu::event::Filter;
use vpmu_perf::{Encoded, Rate, Sampling};

use crate::arch::Look;
use crate::memory::GuestRam;
use linux::{GuestLinux, Running};
use mappings::Region;
use sample::{Mapping, Sample, SampleBuffer};

/// Maximum number of regions of processes that are remembered, and of those that are looked up for a sample: a guest
/// can make up any number.
const MAX_KNOWN: usize = 1 << 12;
const MAX_REGIONS: usize = 16;
/// Lowest address at which a program may have anything: what frame pointers lead to is often below.
const LOWEST: u64 = 4 << 10;

/// What is sampled, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plan {
    /// The event: the host's encoding, or [`Sampling::CLOCK`].
    pub event: Encoded,
    /// The guest's privilege levels.
    pub filter: Filter,
    /// When a sample is taken.
    pub rate: Rate,
    /// Each sample has its callers.
    pub has_chains: bool,
}

impl Plan {
    /// Returns whether there is no sample of this privilege level, though the event does not know that.
    fn leaves_out(&self, is_user: bool) -> bool {
        let unwanted = if is_user { Filter::Kernel } else { Filter::User };
        self.event == Sampling::CLOCK && self.filter == unwanted
    }
}

/// Order to a vCPU to begin to sample itself.
#[derive(Debug, Clone)]
pub struct RecordOrder {
    /// What is sampled.
    pub plan: Plan,
    /// The guest's kernel, if it says which threads it runs.
    pub linux: Option<Arc<GuestLinux>>,
    /// Where the samples go.
    pub buffer: Arc<SampleBuffer>,
}

/// Why a vCPU is not sampled.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error("it is being recorded already")]
    Busy,
    #[error("no counter of the host is free: the guest's counters and others hold them")]
    NoCounter,
    #[error("the host refuses the event: {0}")]
    Refused(String),
    #[error("vCPU {0} does not answer")]
    NoAnswer(usize),
}

/// A vCPU that is sampled, on the thread that runs it.
pub struct Recorder {
    event: Sampling,
    /// What the event had counted at the last sample.
    counted: u64,
    sampler: Sampler,
}

impl Recorder {
    /// Begins to sample the vCPU that this thread runs.
    pub fn start(vcpu: u8, ram: &GuestRam, order: RecordOrder) -> Result<Self, RecordError> {
        let Plan { event: encoded, filter, rate, .. } = order.plan;
        let event = Sampling::of_this_thread(encoded, filter, rate)
            .map_err(|error| RecordError::Refused(refusal(&error)))?;
        if encoded != Sampling::CLOCK && event.read().is_some_and(|reading| reading.running == 0) {
            return Err(RecordError::NoCounter);
        }
        Ok(Self { event, counted: 0, sampler: Sampler::new(vcpu, &ram.mapped, order) })
    }

    /// Takes a sample: the event has overflowed, and the vCPU has left its guest.
    pub fn sample(&mut self, fd: &mut VcpuFd) {
        let Some(look) = Look::at_exit(fd, &self.sampler.memory) else { return };
        if !self.sampler.order.plan.leaves_out(look.is_user) {
            let period = self.period();
            self.sampler.add(&look, period);
        }
    }

    /// Returns the number of counts since the last sample.
    fn period(&mut self) -> u64 {
        match self.sampler.order.plan.rate {
            Rate::Period(period) => period,
            Rate::Frequency(_) => {
                let counted = self.event.read().map_or(self.counted, |reading| reading.value);
                counted - std::mem::replace(&mut self.counted, counted).min(counted)
            }
        }
    }

    /// Returns whether its samples go into this buffer.
    pub fn adds_to(&self, buffer: &Arc<SampleBuffer>) -> bool {
        Arc::ptr_eq(&self.sampler.order.buffer, buffer)
    }

    /// Returns which part of the time the event had a counter, in thousandths.
    pub fn scheduled(&self) -> u64 {
        let times = self.event.read().map(|reading| (reading.running, reading.enabled));
        let share = times.and_then(|(running, enabled)| running.saturating_mul(1000).checked_div(enabled));
        share.unwrap_or(1000).min(1000)
    }
}

/// Makes samples of a vCPU, of what its guest's memory says.
pub struct Sampler {
    vcpu: u8,
    memory: GuestMemoryMmap,
    order: RecordOrder,
    /// Regions of processes that are in earlier samples, by the process and their first address.
    known: BTreeMap<(u32, u64), Region>,
}

impl Sampler {
    pub fn new(vcpu: u8, memory: &GuestMemoryMmap, order: RecordOrder) -> Self {
        Self { vcpu, memory: memory.clone(), order, known: BTreeMap::new() }
    }

    /// Adds a sample of the vCPU where it is, which stands for `period` counts.
    pub fn add(&mut self, look: &Look, period: u64) {
        let memory = &self.memory;
        let linux = self.order.linux.as_deref();
        let running = linux.and_then(|linux| linux.running(memory, self.vcpu, look));
        let [kernel, user] = match linux.zip(running.as_ref()) {
            _ if !self.order.plan.has_chains => Default::default(),
            Some((GuestLinux { unwinder: Some(unwinder), .. }, running)) if !look.is_user => {
                look.kernel_callers(memory, unwinder, running.stack)
            }
            _ => [Vec::new(), look.callers(memory)],
        };
        let addresses = look.is_user.then_some(look.instruction).into_iter().chain(user.iter().copied());
        let (mappings, regions) = match linux.zip(running.as_ref()) {
            Some((linux, running)) => self.mappings(linux, running, addresses),
            None => Default::default(),
        };
        let sample = Sample {
            time: now(),
            vcpu: self.vcpu,
            is_user: look.is_user,
            instruction: look.instruction,
            period,
            table: look.table(),
            task: running.map(|running| running.task),
            kernel,
            user,
            mappings,
        };
        if self.order.buffer.add(sample) {
            for (process, region) in regions {
                self.remember(process, region);
            }
        }
    }

    /// Remembers a region in place of what was there.
    fn remember(&mut self, process: u32, region: Region) {
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
        }
        let before = self.known.range((process, 0)..(process, region.end)).rev();
        let replaced: Vec<_> =
            before.take_while(|(_, other)| other.end > region.start).map(|(key, _)| *key).collect();
        for key in replaced {
            self.known.remove(&key);
        }
        self.known.insert((process, region.start), region);
    }

    /// Returns what a process has mapped where these addresses are, as far as that is not known yet, and the regions
    /// of that.
    fn mappings(
        &self,
        linux: &GuestLinux,
        running: &Running,
        addresses: impl Iterator<Item = u64>,
    ) -> (Vec<Mapping>, Vec<(u32, Region)>) {
        let memory = &self.memory;
        let mut found: Vec<Region> = Vec::new();
        let mut looks = 0;
        for address in addresses.filter(|address| *address >= LOWEST) {
            if found.iter().any(|region| (region.start..region.end).contains(&address)) {
                continue;
            }
            looks += 1;
            if looks > MAX_REGIONS {
                break;
            }
            found.extend(linux.region(memory, running, address));
        }
        let process = running.task.process;
        let is_unknown = |region: &Region| self.known.get(&(process, region.start)) != Some(region);
        let described = |region: Region| Some((linux.mapping(memory, running, &region)?, (process, region)));
        found.into_iter().filter(is_unknown).filter_map(described).unzip()
    }
}

/// Says why an event was not opened. A vCPU's thread can open no file that would say more.
fn refusal(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EINVAL | libc::ENOENT | libc::ENODEV | libc::EOPNOTSUPP) => {
            "it has no such event".to_owned()
        }
        _ => error.to_string(),
    }
}

fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let [seconds, nanoseconds] = [time.tv_sec, time.tv_nsec].map(i64::cast_unsigned);
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}
