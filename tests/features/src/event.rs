//! Events as Linux describes them, and counters made of them.

use std::fs;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use perf_event_open_sys as sys;
use sys::bindings::{self, perf_event_attr};

use crate::code::{self, Call, Loop};
use crate::failure::{Failure, checked};

/// What is to be counted, and how. Until something else is said: in user mode, and not before it is switched on.
#[derive(Clone, Copy)]
pub struct Event(perf_event_attr);

/// Whose events are counted.
#[derive(Debug, Clone, Copy)]
pub enum Target {
    /// This thread's.
    Caller,
    /// The thread's with this number.
    Task(i32),
    /// Those of everything that runs on this CPU.
    Cpu(i32),
}

/// What a processor calls its events.
pub struct Codes {
    pub instructions: u64,
    pub branches: u64,
    /// Not among those that all of Intel's processors have.
    pub conditional_branches: Option<u64>,
}

impl Codes {
    /// Those of the processor that this runs on.
    pub fn own() -> Result<Self, Failure> {
        code::codes().ok_or(Failure::Unknown("nobody knows what this processor calls its events"))
    }
}

impl Event {
    fn new(kind: u32, config: u64) -> Self {
        let times = bindings::PERF_FORMAT_TOTAL_TIME_ENABLED | bindings::PERF_FORMAT_TOTAL_TIME_RUNNING;
        let mut attr = perf_event_attr {
            type_: kind,
            size: u32::try_from(size_of::<perf_event_attr>()).expect("it is a hundred bytes or so"),
            config,
            read_format: times.into(),
            ..Default::default()
        };
        attr.set_disabled(1);
        attr.set_exclude_kernel(1);
        Self(attr)
    }

    /// An event that Linux has a name for.
    pub fn hardware(name: u32) -> Self {
        Self::new(bindings::PERF_TYPE_HARDWARE, name.into())
    }

    pub fn instructions() -> Self {
        Self::hardware(bindings::PERF_COUNT_HW_INSTRUCTIONS)
    }

    pub fn branches() -> Self {
        Self::hardware(bindings::PERF_COUNT_HW_BRANCH_INSTRUCTIONS)
    }

    /// An event that only the processor has a number for.
    pub fn raw(number: u64) -> Self {
        Self::new(bindings::PERF_TYPE_RAW, number)
    }

    /// An event of the kernel's own.
    pub fn software(name: u32) -> Self {
        Self::new(bindings::PERF_TYPE_SOFTWARE, name.into())
    }

    /// A place in the kernel that tells when it is passed, as `GROUP/NAME`.
    pub fn tracepoint(name: &str) -> Result<Self, Failure> {
        let path = format!("/sys/kernel/tracing/events/{name}/id");
        let system = |source| Failure::System { action: format!("read {path}"), source };
        let text = fs::read_to_string(&path).map_err(system)?;
        let number = text.trim().parse().map_err(|error| system(io::Error::other(error)))?;
        // It is the kernel that passes it.
        Ok(Self::new(bindings::PERF_TYPE_TRACEPOINT, number).with(|attr| attr.set_exclude_kernel(0)))
    }

    /// With something else in its description.
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

    /// Sampled every so many events, with what `ring::Sample` has.
    pub fn every(self, period: u64) -> Self {
        self.with(|attr| {
            attr.sample_period = period;
            attr.sample_type = crate::ring::SAMPLE_FIELDS;
        })
    }

    /// A counter of this event, alone, for the caller.
    pub fn open(&self) -> Result<Counter, Failure> {
        self.open_for(Target::Caller)
    }

    /// A counter of this event, alone.
    pub fn open_for(&self, target: Target) -> Result<Counter, Failure> {
        open(self.0, target, -1).map_err(|source| Failure::System { action: "make a counter".into(), source })
    }

    /// A counter in another's group, switched on and off with it.
    pub fn open_with(&self, leader: &Counter) -> io::Result<Counter> {
        let mut attr = self.0;
        attr.set_disabled(0);
        open(attr, Target::Caller, leader.fd())
    }

    /// This event, and in every second place the same of cycles: as many, where an instruction takes one. A processor of
    /// Intel's has a counter for instructions only and one for cycles only, and so all of its counters are in use.
    fn in_turn_with_cycles(self) -> impl Iterator<Item = Self> {
        let cycles = self.with(|attr| attr.config = bindings::PERF_COUNT_HW_CPU_CYCLES.into());
        [self, cycles].into_iter().cycle()
    }

    /// This many counters in a group, of this event and of cycles in turn; the first leads it.
    pub fn open_group(&self, members: usize) -> Result<Vec<Counter>, Failure> {
        let mut group = vec![self.open()?];
        // A group is pinned and exclusive as its leader is.
        let member = self.with(|attr| {
            attr.set_pinned(0);
            attr.set_exclusive(0);
        });
        for (number, member) in member.in_turn_with_cycles().enumerate().take(members).skip(1) {
            let action = format!("put counter {number} into a group");
            let counter = member.open_with(&group[0]).map_err(|source| Failure::System { action, source })?;
            group.push(counter);
        }
        Ok(group)
    }

    /// This many counters, each for itself, of this event and of cycles in turn.
    pub fn open_each(&self, number: usize) -> Result<Vec<Counter>, Failure> {
        self.in_turn_with_cycles().take(number).map(|event| event.open()).collect()
    }
}

fn open(mut attr: perf_event_attr, target: Target, leader: i32) -> io::Result<Counter> {
    let (task, cpu) = match target {
        Target::Caller => (0, -1),
        Target::Task(number) => (number, -1),
        Target::Cpu(number) => (-1, number),
    };
    let flags = bindings::PERF_FLAG_FD_CLOEXEC.into();
    // SAFETY: the description is valid for as long as the call reads it.
    let fd = unsafe { sys::perf_event_open(&raw mut attr, task, cpu, leader, flags) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just made this descriptor, and nothing else owns it.
    Ok(Counter(unsafe { OwnedFd::from_raw_fd(fd) }))
}

/// A counter.
pub struct Counter(OwnedFd);

/// What a counter says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reading {
    /// What it counted.
    Counts(Counts),
    /// It is in the error state: it was pinned, and there was no place for it.
    EndOfFile,
}

/// What was counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Counts {
    pub value: u64,
    /// For how many nanoseconds it was switched on.
    pub enabled: u64,
    /// For how many of them it was on the PMU.
    pub running: u64,
}

impl Counter {
    pub fn fd(&self) -> i32 {
        self.0.as_raw_fd()
    }

    pub fn read(&self) -> Result<Reading, Failure> {
        let mut counts = Counts { value: 0, enabled: 0, running: 0 };
        // SAFETY: the buffer is as long as is said, and any bytes are valid numbers.
        let length = unsafe { libc::read(self.fd(), (&raw mut counts).cast(), size_of::<Counts>()) };
        match checked("read a counter", i64::try_from(length).expect("the same size"))? {
            0 => Ok(Reading::EndOfFile),
            _ => Ok(Reading::Counts(counts)),
        }
    }

    /// What it counted, if it is not in the error state.
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
        // SAFETY: the requests that are made here take numbers, or the address of a number that outlives the call.
        let result = unsafe { libc::ioctl(self.fd(), request.into(), argument) };
        checked("make a request of a counter", result).map(drop)
    }

    pub fn enable(&self) -> Result<(), Failure> {
        self.request(bindings::ENABLE, 0)
    }

    pub fn disable(&self) -> Result<(), Failure> {
        self.request(bindings::DISABLE, 0)
    }

    pub fn call(&self, request: u32, argument: u64) -> Call {
        Call::ioctl(self.fd(), request, argument)
    }

    /// Goes round the loop with this counter switched on.
    pub fn over(&self, rounds: u64) -> Result<Loop, Failure> {
        code::run(self.call(bindings::ENABLE, 0), rounds, self.call(bindings::DISABLE, 0))
    }
}

/// Goes round the loop with all counters switched on that this thread has made.
pub fn over_all(rounds: u64) -> Result<Loop, Failure> {
    code::run(Call::enable_all(), rounds, Call::disable_all())
}

/// The values of counters.
pub fn values(counters: &[Counter]) -> Result<Vec<u64>, Failure> {
    counters.iter().map(Counter::value).collect()
}
