//! Perf events: their description (`perf_event_attr`), and the counters that are opened for them.

use std::fs;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use perf_event_open_sys as sys;
use sys::bindings::{self, perf_event_attr};

use crate::code::{self, Call, Loop};
use crate::failure::{Failure, checked};

/// Fields that every sample of this program has.
pub const SAMPLE_FIELDS: u64 = (bindings::PERF_SAMPLE_IP
    | bindings::PERF_SAMPLE_TID
    | bindings::PERF_SAMPLE_TIME
    | bindings::PERF_SAMPLE_PERIOD) as u64;

/// The description of an event. By default it counts user mode only, and is disabled when it is opened.
#[derive(Clone, Copy)]
pub struct Event(perf_event_attr);

/// The task or CPU whose events are counted.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    /// The calling thread.
    Caller,
    /// The thread with this ID.
    Task(i32),
    /// All tasks that run on this CPU.
    Cpu(i32),
}

impl Event {
    fn new(kind: u32, config: u64) -> Self {
        let times = bindings::PERF_FORMAT_TOTAL_TIME_ENABLED | bindings::PERF_FORMAT_TOTAL_TIME_RUNNING;
        let mut attr = perf_event_attr {
            type_: kind,
            size: u32::try_from(size_of::<perf_event_attr>()).expect("the size is about a hundred bytes"),
            config,
            read_format: times.into(),
            ..Default::default()
        };
        attr.set_disabled(1);
        attr.set_exclude_kernel(1);
        Self(attr)
    }

    /// Returns one of the generic hardware events.
    pub fn hardware(name: u32) -> Self {
        Self::new(bindings::PERF_TYPE_HARDWARE, name.into())
    }

    pub fn instructions() -> Self {
        Self::hardware(bindings::PERF_COUNT_HW_INSTRUCTIONS)
    }

    pub fn branches() -> Self {
        Self::hardware(bindings::PERF_COUNT_HW_BRANCH_INSTRUCTIONS)
    }

    /// Returns the event with this code of the processor.
    pub fn raw(number: u64) -> Self {
        Self::new(bindings::PERF_TYPE_RAW, number)
    }

    pub fn software(name: u32) -> Self {
        Self::new(bindings::PERF_TYPE_SOFTWARE, name.into())
    }

    /// Returns the tracepoint `GROUP/NAME`.
    pub fn tracepoint(name: &str) -> Result<Self, Failure> {
        let path = format!("/sys/kernel/tracing/events/{name}/id");
        let system = |source| Failure::System { action: format!("read {path}"), source };
        let text = fs::read_to_string(&path).map_err(system)?;
        let number = text.trim().parse().map_err(|error| system(io::Error::other(error)))?;
        // Tracepoints are hit in kernel mode.
        Ok(Self::new(bindings::PERF_TYPE_TRACEPOINT, number).with(|attr| attr.set_exclude_kernel(0)))
    }

    /// Returns the event with `change` made to its description.
    pub fn with(mut self, change: impl FnOnce(&mut perf_event_attr)) -> Self {
        change(&mut self.0);
        self
    }

    pub fn pinned(self) -> Self {
        self.with(|attr| attr.set_pinned(1))
    }

    pub fn exclusive(self) -> Self {
        self.with(|attr| attr.set_exclusive(1))
    }

    pub fn inherited(self) -> Self {
        self.with(|attr| attr.set_inherit(1))
    }

    /// Returns the event with this sampling period, and with samples of the fields that `ring::Sample` has.
    pub fn every(self, period: u64) -> Self {
        self.with(|attr| {
            attr.sample_period = period;
            attr.sample_type = SAMPLE_FIELDS;
        })
    }

    /// Opens a counter for the calling thread, in no group.
    pub fn open(&self) -> Result<Counter, Failure> {
        self.open_for(Target::Caller)
    }

    /// Opens a counter for `target`, in no group.
    pub fn open_for(&self, target: Target) -> Result<Counter, Failure> {
        open(self.0, target, -1).map_err(|source| Failure::System { action: "open a counter".into(), source })
    }

    /// Opens a counter in the group of `leader`. The counter is enabled by itself, so it counts while its leader does.
    pub fn open_with(&self, leader: &Counter) -> io::Result<Counter> {
        let mut attr = self.0;
        attr.set_disabled(0);
        open(attr, Target::Caller, leader.fd())
    }

    /// Returns this event and the same event of cycles in turn. Both have the same count where an instruction takes one
    /// cycle. Intel's PMUs have a fixed counter for instructions and one for cycles, so both events are needed to fill
    /// the PMU.
    fn alternating_with_cycles(self) -> impl Iterator<Item = Self> {
        let cycles = self.with(|attr| attr.config = bindings::PERF_COUNT_HW_CPU_CYCLES.into());
        [self, cycles].into_iter().cycle()
    }

    /// Opens a group of this many counters, of this event and of cycles in turn. The first one is the leader.
    pub fn open_group(&self, members: usize) -> Result<Vec<Counter>, Failure> {
        let mut group = vec![self.open()?];
        // A group is pinned or exclusive if its leader is.
        let member = self.with(|attr| {
            attr.set_pinned(0);
            attr.set_exclusive(0);
        });
        for (number, member) in member.alternating_with_cycles().enumerate().take(members).skip(1) {
            let action = format!("add counter {number} to a group");
            let counter = member.open_with(&group[0]).map_err(|source| Failure::System { action, source })?;
            group.push(counter);
        }
        Ok(group)
    }

    /// Opens this many counters in no group, of this event and of cycles in turn.
    pub fn open_each(&self, number: usize) -> Result<Vec<Counter>, Failure> {
        self.alternating_with_cycles().take(number).map(|event| event.open()).collect()
    }
}

fn open(mut attr: perf_event_attr, target: Target, leader: i32) -> io::Result<Counter> {
    let (task, cpu) = match target {
        Target::Caller => (0, -1),
        Target::Task(number) => (number, -1),
        Target::Cpu(number) => (-1, number),
    };
    let flags = bindings::PERF_FLAG_FD_CLOEXEC.into();
    // SAFETY: the attributes are valid for the whole call.
    let fd = unsafe { sys::perf_event_open(&raw mut attr, task, cpu, leader, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just returned this file descriptor, and nothing else owns it.
    Ok(Counter(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// An open perf event.
pub struct Counter(OwnedFd);

/// Result of reading a counter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// The count and its times.
    Counts(Counts),
    /// End of file: the event is in the error state, because it is pinned and could not be scheduled.
    EndOfFile,
}

/// A count and its times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Counts {
    pub value: u64,
    /// Time enabled, in nanoseconds.
    pub enabled: u64,
    /// Time running on the PMU, in nanoseconds.
    pub running: u64,
}

impl Counter {
    pub fn fd(&self) -> i32 {
        self.0.as_raw_fd()
    }

    pub fn read(&self) -> Result<Reading, Failure> {
        let mut counts = Counts { value: 0, enabled: 0, running: 0 };
        // SAFETY: the buffer has the length that is passed, and any bytes are valid for its fields.
        let length = unsafe { libc::read(self.fd(), (&raw mut counts).cast(), size_of::<Counts>()) };
        match checked("read a counter", i64::try_from(length).expect("the length fits into 64 bits"))? {
            0 => Ok(Reading::EndOfFile),
            _ => Ok(Reading::Counts(counts)),
        }
    }

    /// Returns the count and its times, or an error if the event is in the error state.
    pub fn counts(&self) -> Result<Counts, Failure> {
        match self.read()? {
            Reading::Counts(counts) => Ok(counts),
            Reading::EndOfFile => Err(Failure::Wrong {
                what: "a counter".into(),
                found: "in the error state".into(),
                expected: "counting".into(),
            }),
        }
    }

    pub fn value(&self) -> Result<u64, Failure> {
        Ok(self.counts()?.value)
    }

    pub fn request(&self, request: u32, argument: u64) -> Result<(), Failure> {
        // SAFETY: the requests that this program makes take numbers, or the address of a number that outlives the call.
        let result = unsafe { libc::ioctl(self.fd(), request.into(), argument) };
        checked("make an ioctl on a counter", result).map(drop)
    }

    pub fn enable(&self) -> Result<(), Failure> {
        self.request(bindings::ENABLE, 0)
    }

    pub fn disable(&self) -> Result<(), Failure> {
        self.request(bindings::DISABLE, 0)
    }

    /// Returns an `ioctl` on this counter, to be made by the counted code.
    pub fn call(&self, request: u32, argument: u64) -> Call {
        Call::ioctl(self.fd(), request, argument)
    }

    /// Runs the loop while this counter is enabled.
    pub fn count_loop(&self, rounds: u64) -> Result<Loop, Failure> {
        code::run(self.call(bindings::ENABLE, 0), rounds, self.call(bindings::DISABLE, 0))
    }
}

/// Runs the loop while all counters are enabled that this thread has opened.
pub fn count_loop_with_all(rounds: u64) -> Result<Loop, Failure> {
    code::run(Call::enable_all(), rounds, Call::disable_all())
}

pub fn values(counters: &[Counter]) -> Result<Vec<u64>, Failure> {
    counters.iter().map(Counter::value).collect()
}
