//! What this crate asks of `perf_event_open`: an event, the thread that it counts, and what it is for. The attributes
//! of every event of this crate are made here.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use perf_event_open_sys as sys;
use sys::bindings::{
    PERF_FLAG_FD_CLOEXEC, PERF_FORMAT_TOTAL_TIME_ENABLED, PERF_FORMAT_TOTAL_TIME_RUNNING, PERF_TYPE_SOFTWARE,
    perf_event_attr,
};

use vpmu::event::{Filter, Scope};
use vpmu::source::FAR;

/// `type` and `config` of `perf_event_attr`, by which the host's kernel knows an event.
pub type Encoded = (u32, u64);

/// An event that is to be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// The event.
    pub event: Encoded,
    /// The thread that it counts, on whatever CPU that runs.
    pub thread: libc::pid_t,
    /// What it is for.
    pub purpose: Purpose,
}

/// What an event is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// It is the guest's: it is pinned, counts at once, and sends `SIGIO` to its thread every `period` counts.
    Counter {
        /// The privilege levels that it counts.
        filter: Filter,
        /// Whether it counts in the guest only.
        scope: Scope,
        /// Number of counts from one signal to the next.
        period: u64,
    },
    /// It finds out whether a counter is free, once it is enabled.
    Probe(Precedence),
    /// It finds out whether the host has the event, and takes no counter.
    Existence,
    /// It keeps the host's PMU in use, and takes no counter.
    Reservation,
    /// It counts what its thread does on one side, if there is a free counter.
    Attribution(Side),
    /// It measures what its thread does in the guest, if there is a free counter.
    Measurement(Filter),
    /// It counts the entries of its thread into a guest's user mode: the tracepoint of [`crate::entries`].
    Entries,
    /// It samples what its thread does in the guest, if there is a free counter: it sends [`SAMPLE_SIGNAL`] to its
    /// thread at each overflow.
    Sampling {
        /// The privilege levels that it samples.
        filter: Filter,
        /// When it overflows.
        rate: Rate,
    },
}

/// When a sampling event overflows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rate {
    /// Every time that it has counted so much.
    Period(u64),
    /// About so often in a second: Linux adapts the period.
    Frequency(u64),
}

/// The signal of a sampling event. It is none of the signals that events send otherwise, it is not queued, and by
/// default it does nothing.
pub const SAMPLE_SIGNAL: libc::c_int = libc::SIGURG;

/// Whether an event takes a counter from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precedence {
    /// It takes a free counter only. Linux gives the counters to events of this kind in the order in which they were
    /// opened.
    Flexible,
    /// It takes a counter from a flexible event if none is free.
    Pinned,
}

/// Where an event counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// While its thread runs the guest.
    Guest,
    /// While its thread runs in the host, in user mode or in the kernel.
    Host,
}

/// What `exclude_user` and `exclude_kernel` of `perf_event_attr` exclude.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PrivilegeLevels {
    /// The privilege levels of the guest and of the host alike.
    GuestAndHost,
    /// The guest's privilege levels if `config1` says so, or else the host's: RISC-V (`pmu_sbi_get_filter_flags` in
    /// Linux).
    GuestOrHost,
}

/// What this host's kernel excludes.
const LEVELS: PrivilegeLevels =
    if cfg!(target_arch = "riscv64") { PrivilegeLevels::GuestOrHost } else { PrivilegeLevels::GuestAndHost };

impl PrivilegeLevels {
    /// Restricts an event to a filter's privilege levels and to a scope.
    fn restrict(self, attr: &mut perf_event_attr, filter: Filter, scope: Scope) {
        /// `RISCV_PMU_CONFIG1_GUEST_EVENTS`, which Linux takes with events of every type.
        const GUEST_EVENTS: u64 = 1;
        attr.set_exclude_user((filter == Filter::Kernel).into());
        attr.set_exclude_kernel((filter == Filter::User).into());
        attr.set_exclude_host((scope == Scope::Guest).into());
        if self == Self::GuestOrHost {
            attr.__bindgen_anon_3.config1 = GUEST_EVENTS;
            // With GUEST_EVENTS, `exclude_hv` excludes the host's kernel. The host's user mode cannot be excluded by
            // itself. So an event that counts a guest's kernel and the host's work for it also counts this process in
            // user mode.
            attr.set_exclude_hv((filter == Filter::User || scope == Scope::Guest).into());
        }
    }
}

impl Purpose {
    /// Returns the attributes of an event for this purpose. No event of this crate counts hypervisors.
    fn attributes(self, (type_, config): Encoded) -> perf_event_attr {
        let size = u32::try_from(size_of::<perf_event_attr>()).expect("the structure is small");
        let mut attr = perf_event_attr { size, type_, config, ..Default::default() };
        attr.read_format = u64::from(PERF_FORMAT_TOTAL_TIME_ENABLED | PERF_FORMAT_TOTAL_TIME_RUNNING);
        attr.set_exclude_hv(1);
        match self {
            Self::Counter { filter, scope, period } => {
                attr.sample_period = period;
                attr.set_pinned(1);
                LEVELS.restrict(&mut attr, filter, scope);
            }
            Self::Probe(precedence) => {
                attr.sample_period = FAR;
                attr.set_disabled(1);
                attr.set_pinned((precedence == Precedence::Pinned).into());
                attr.set_exclude_host(1);
            }
            Self::Existence => {
                attr.sample_period = FAR;
                attr.set_disabled(1);
                attr.set_exclude_host(1);
            }
            Self::Reservation => {
                attr.set_disabled(1);
                // Every user may open this who may count anything.
                attr.set_exclude_kernel(1);
                // A host whose KVM gives its PMU to guests refuses events that count in guests while such a guest runs.
                attr.set_exclude_guest(1);
            }
            Self::Measurement(filter) => LEVELS.restrict(&mut attr, filter, Scope::Guest),
            Self::Entries => {}
            Self::Sampling { filter, rate } => {
                match rate {
                    Rate::Period(period) => attr.sample_period = period,
                    Rate::Frequency(frequency) => {
                        attr.set_freq(1);
                        attr.sample_freq = frequency;
                    }
                }
                if type_ == PERF_TYPE_SOFTWARE {
                    // To a clock, a guest is the host's kernel.
                    attr.set_exclude_user(1);
                } else {
                    LEVELS.restrict(&mut attr, filter, Scope::Guest);
                }
            }
            Self::Attribution(Side::Guest) => attr.set_exclude_host(1),
            Self::Attribution(Side::Host) => attr.set_exclude_guest(1),
        }
        attr
    }
}

impl Request {
    /// Opens the event with the rights of this thread.
    pub fn open_directly(&self) -> io::Result<OwnedFd> {
        const ANY_CPU: libc::c_int = -1;
        const NO_GROUP: libc::c_int = -1;
        let mut attr = self.purpose.attributes(self.event);
        let flags = PERF_FLAG_FD_CLOEXEC.into();
        // SAFETY: `attr` is initialised, its size is that of its type, and it asks for no memory to be written.
        let fd = unsafe { sys::perf_event_open(&raw mut attr, self.thread, ANY_CPU, NO_GROUP, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the file descriptor is new and nothing else owns it.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        match self.purpose {
            Purpose::Counter { .. } => signal_thread(&event, self.thread, None)?,
            Purpose::Sampling { .. } => signal_thread(&event, self.thread, Some(SAMPLE_SIGNAL))?,
            _ => {}
        }
        if self.purpose == Purpose::Entries {
            filter(&event, IN_USER_MODE)?;
        }
        Ok(event)
    }
}

/// The command of `fcntl` that says which thread an event signals.
pub(crate) const F_SETOWN_EX: libc::c_int = 15;

/// The command of `fcntl` that says which signal an event sends.
pub(crate) const F_SETSIG: libc::c_int = 10;

/// Makes every overflow send a signal to this thread and to no other: `SIGIO` if no other one is named. Neither is a
/// real-time signal, so at most one of each is pending however many events overflow.
fn signal_thread(event: &OwnedFd, thread: libc::pid_t, signal: Option<libc::c_int>) -> io::Result<()> {
    #[repr(C)]
    struct Owner {
        kind: libc::c_int,
        id: libc::pid_t,
    }
    const F_OWNER_TID: libc::c_int = 0;
    let fd = event.as_raw_fd();
    let owner = Owner { kind: F_OWNER_TID, id: thread };
    // SAFETY: `owner` has the layout of `f_owner_ex`, and is only read.
    to_result(unsafe { libc::fcntl(fd, F_SETOWN_EX, &raw const owner) })?;
    if let Some(signal) = signal {
        // SAFETY: `F_SETSIG` takes a number and no pointer.
        to_result(unsafe { libc::fcntl(fd, F_SETSIG, signal) })?;
    }
    // SAFETY: `F_SETFL` takes flags and no pointer.
    to_result(unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_ASYNC | libc::O_NONBLOCK) })
}

/// What the tracepoint of entries is filtered by: the guest's instruction pointer is in the lower half.
const IN_USER_MODE: &CStr = c"rip < 0x8000000000000000";

/// Lets a tracepoint's event count only what passes a filter.
fn filter(event: &OwnedFd, filter: &CStr) -> io::Result<()> {
    // SAFETY: `filter` ends with a zero, and is only read.
    to_result(unsafe { libc::ioctl(event.as_raw_fd(), sys::bindings::SET_FILTER.into(), filter.as_ptr()) })
}

fn to_result(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Returns the id of the current thread.
pub fn this_thread() -> libc::pid_t {
    // Not libc's: the standard library refers to that one weakly, which a statically linked program optimised as a
    // whole may be left with, and then it calls address 0.
    rustix::thread::gettid().as_raw_pid()
}

/// Number of words of an encoded request.
pub const WORDS: usize = 5;

/// All purposes, with no period. Their numbers are how processes that were forked from one another name them.
const PURPOSES: [Purpose; 22] = [
    counter(Filter::User, Scope::Guest),
    counter(Filter::Kernel, Scope::Guest),
    counter(Filter::All, Scope::Guest),
    counter(Filter::User, Scope::Thread),
    counter(Filter::Kernel, Scope::Thread),
    counter(Filter::All, Scope::Thread),
    Purpose::Probe(Precedence::Flexible),
    Purpose::Probe(Precedence::Pinned),
    Purpose::Existence,
    Purpose::Reservation,
    Purpose::Attribution(Side::Guest),
    Purpose::Attribution(Side::Host),
    Purpose::Measurement(Filter::User),
    Purpose::Measurement(Filter::Kernel),
    Purpose::Measurement(Filter::All),
    Purpose::Entries,
    sampling(Filter::User, Rate::Period(0)),
    sampling(Filter::Kernel, Rate::Period(0)),
    sampling(Filter::All, Rate::Period(0)),
    sampling(Filter::User, Rate::Frequency(0)),
    sampling(Filter::Kernel, Rate::Frequency(0)),
    sampling(Filter::All, Rate::Frequency(0)),
];

const fn sampling(filter: Filter, rate: Rate) -> Purpose {
    Purpose::Sampling { filter, rate }
}

const fn counter(filter: Filter, scope: Scope) -> Purpose {
    Purpose::Counter { filter, scope, period: 0 }
}

impl Request {
    /// Encodes the request for the broker.
    pub fn to_words(self) -> [u64; WORDS] {
        let (purpose, period) = match self.purpose {
            Purpose::Counter { filter, scope, period } => (counter(filter, scope), period),
            Purpose::Sampling { filter, rate: Rate::Period(period) } => {
                (sampling(filter, Rate::Period(0)), period)
            }
            Purpose::Sampling { filter, rate: Rate::Frequency(frequency) } => {
                (sampling(filter, Rate::Frequency(0)), frequency)
            }
            other => (other, 0),
        };
        let number = PURPOSES.iter().position(|one| *one == purpose).expect("all purposes are there");
        let (type_, config) = self.event;
        [self.thread.cast_unsigned().into(), type_.into(), config, number as u64, period]
    }

    /// Decodes a request. Returns `None` if these words are none.
    pub fn from_words([thread, type_, config, number, period]: [u64; WORDS]) -> Option<Self> {
        let purpose = match *PURPOSES.get(usize::try_from(number).ok()?)? {
            Purpose::Counter { filter, scope, .. } => Purpose::Counter { filter, scope, period },
            Purpose::Sampling { filter, rate: Rate::Period(_) } => sampling(filter, Rate::Period(period)),
            Purpose::Sampling { filter, rate: Rate::Frequency(_) } => {
                sampling(filter, Rate::Frequency(period))
            }
            other => other,
        };
        let thread = libc::pid_t::try_from(thread).ok()?;
        Some(Self { event: (u32::try_from(type_).ok()?, config), thread, purpose })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVENT: Encoded = (4, 0xc0);

    /// Returns the exclude bits of user mode, kernel, hypervisor and host, and `config1`.
    fn restricted(levels: PrivilegeLevels, filter: Filter, scope: Scope) -> ([u64; 4], u64) {
        let mut attr = counter(filter, scope).attributes(EVENT);
        levels.restrict(&mut attr, filter, scope);
        let excluded = [attr.exclude_user(), attr.exclude_kernel(), attr.exclude_hv(), attr.exclude_host()];
        // SAFETY: all fields of the union are integers.
        (excluded, unsafe { attr.__bindgen_anon_3.config1 })
    }

    #[test]
    fn a_filter_excludes_privilege_levels_of_the_guest_and_where_the_kernel_cannot_tell_of_the_host() {
        for (filter, [user, kernel]) in
            [(Filter::User, [0, 1]), (Filter::Kernel, [1, 0]), (Filter::All, [0, 0])]
        {
            use PrivilegeLevels::{GuestAndHost, GuestOrHost};
            assert_eq!(restricted(GuestAndHost, filter, Scope::Guest), ([user, kernel, 1, 1], 0));
            assert_eq!(restricted(GuestAndHost, filter, Scope::Thread), ([user, kernel, 1, 0], 0));
            assert_eq!(restricted(GuestOrHost, filter, Scope::Guest), ([user, kernel, 1, 1], 1));
            // The host's kernel is excluded only from counts of user mode.
            let host_kernel = u64::from(filter == Filter::User);
            assert_eq!(restricted(GuestOrHost, filter, Scope::Thread), ([user, kernel, host_kernel, 0], 1));
        }
    }

    #[test]
    fn only_a_counter_of_the_guest_and_a_pinned_probe_take_counters_from_others() {
        let takes = PURPOSES.map(|purpose| purpose.attributes(EVENT).pinned() == 1);
        let expected = PURPOSES
            .map(|purpose| matches!(purpose, Purpose::Counter { .. } | Purpose::Probe(Precedence::Pinned)));
        assert_eq!(takes, expected);
    }

    #[test]
    fn a_reservation_takes_no_counter_and_needs_no_right_to_count_the_kernel() {
        let attr = Purpose::Reservation.attributes(EVENT);
        assert_eq!((attr.disabled(), attr.pinned(), attr.exclusive(), attr.inherit()), (1, 0, 0, 0));
        assert_eq!((attr.enable_on_exec(), attr.exclude_kernel(), attr.exclude_guest()), (0, 1, 1));
    }

    #[test]
    fn a_clock_that_samples_runs_in_the_hosts_kernel() {
        let clock = sampling(Filter::User, Rate::Frequency(999)).attributes(crate::Sampling::CLOCK);
        let excluded = [clock.exclude_user(), clock.exclude_kernel(), clock.exclude_host()];
        assert_eq!((excluded, clock.freq()), ([1, 0, 0], 1));
    }

    #[test]
    fn no_event_follows_children_or_writes_records() {
        for purpose in PURPOSES {
            let attr = purpose.attributes(EVENT);
            assert_eq!((attr.inherit(), attr.sample_type, attr.precise_ip()), (0, 0, 0), "{purpose:?}");
            assert_eq!((attr.mmap(), attr.comm(), attr.task(), attr.write_backward()), (0, 0, 0, 0));
        }
    }

    #[test]
    fn every_request_can_be_encoded() {
        for purpose in PURPOSES {
            let purpose = match purpose {
                Purpose::Counter { filter, scope, .. } => Purpose::Counter { filter, scope, period: FAR },
                Purpose::Sampling { filter, rate: Rate::Period(_) } => sampling(filter, Rate::Period(71)),
                Purpose::Sampling { filter, rate: Rate::Frequency(_) } => {
                    sampling(filter, Rate::Frequency(72))
                }
                other => other,
            };
            let request = Request { event: (4, u64::MAX), thread: 71, purpose };
            assert_eq!(Request::from_words(request.to_words()), Some(request));
        }
    }

    #[test]
    fn other_words_are_no_request() {
        let words = Request { event: EVENT, thread: 71, purpose: Purpose::Existence }.to_words();
        for (word, value) in
            [(0, u64::from(u32::MAX)), (1, 1 << 32), (3, PURPOSES.len() as u64), (3, u64::MAX)]
        {
            let mut other = words;
            other[word] = value;
            assert_eq!(Request::from_words(other), None, "{word}: {value:#x}");
        }
    }
}
