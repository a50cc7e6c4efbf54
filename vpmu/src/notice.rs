//! What the operator is to know: every count that is not what the guest takes it for.

use std::fmt;
use std::mem::discriminant;
use std::time::Duration;

use crate::event::{Event, Selection};

/// So many are told of one vCPU at once, and then one in each pause: a hostile guest can cause any number of them.
const AT_ONCE: u32 = 16;
const PAUSE: Duration = Duration::from_secs(10);

/// Notices that wait to be told.
#[derive(Debug, Default)]
pub struct Notices {
    waiting: Vec<Notice>,
    /// How many were told of late; it goes down by one in each pause.
    told: u32,
    since: Duration,
}

impl Notices {
    /// Has this told, unless there were too many of late; says whether it will be.
    pub fn tell(&mut self, notice: Notice, now: Duration) -> bool {
        let pauses = now.saturating_sub(self.since).as_secs() / PAUSE.as_secs();
        if pauses > 0 {
            self.told = self.told.saturating_sub(u32::try_from(pauses).unwrap_or(u32::MAX));
            self.since = now;
        }
        // What happens to several counters at once counts once.
        let is_same = self.waiting.last().is_some_and(|last| discriminant(last) == discriminant(&notice));
        if is_same && notice.is_of_the_host() {
            self.waiting.push(notice);
            return true;
        }
        if self.told >= AT_ONCE {
            return false;
        }
        self.told += 1;
        self.waiting.push(notice);
        if self.told == AT_ONCE {
            self.waiting.push(Notice::TooMany);
        }
        true
    }

    /// What is to be told, once.
    pub fn take(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.waiting)
    }
}

/// Something that happened to a vCPU's counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// The host does not count this event: the counter stands still.
    Refused {
        /// Which counter.
        counter: usize,
        /// What it was to count.
        selection: Selection,
        /// What the host said.
        why: String,
    },
    /// The host did not take the request to say when a counter overflows: the guest may miss an interrupt.
    Unarmed {
        /// Which counter.
        counter: usize,
        /// What the host said.
        why: String,
    },
    /// There was more to tell than anybody wants to read.
    TooMany,
    /// The host has taken the counter's hardware away: it misses counts from here on.
    Starved {
        /// Which counter.
        counter: usize,
        /// What it counts.
        selection: Selection,
    },
    /// It counts again.
    Recovered {
        /// Which counter.
        counter: usize,
        /// What it counts.
        selection: Selection,
        /// For how long it may have missed counts.
        missed: Duration,
    },
    /// It was without hardware until the guest had no use for it any more.
    GivenUp {
        /// Which counter.
        counter: usize,
        /// What it was to count.
        selection: Selection,
        /// For how long it may have missed counts.
        missed: Duration,
    },
    /// The whole machine waits for this vCPU's counters to have hardware.
    StandsStill,
    /// It waits no more.
    GoesOn {
        /// After so long.
        after: Duration,
    },
    /// The guest has asked for so many interrupts that its periods are raised for a while.
    RateFloor {
        /// To at least so many counts.
        period: u64,
        /// How often that has happened since the guest started.
        times: u64,
    },
}

impl Notice {
    /// Whether others on the host are the cause, and not the guest.
    fn is_of_the_host(&self) -> bool {
        matches!(self, Self::Starved { .. } | Self::Recovered { .. })
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { counter, selection, .. } if matches!(selection.event, Event::Denied { .. }) => {
                write!(f, "counter {counter} stands still: the policy denies {selection}")
            }
            Self::Refused { counter, selection, why } => {
                write!(f, "counter {counter} stands still: the host refuses {selection}: {why}")
            }
            Self::TooMany => write!(f, "that is a lot: for some seconds no more of it is told"),
            Self::Unarmed { counter, why } => {
                write!(f, "counter {counter}: the host does not say when it overflows: {why}")
            }
            Self::Starved { counter, selection } => {
                write!(f, "counter {counter} ({selection}) is starved: the host has no hardware for it")
            }
            Self::Recovered { counter, selection, missed } => {
                write!(f, "counter {counter} ({selection}) counts again, after up to {missed:.3?}")
            }
            Self::GivenUp { counter, selection, missed } => {
                write!(
                    f,
                    "counter {counter} ({selection}) is no longer used, after it missed counts for up to {missed:.3?}"
                )
            }
            Self::StandsStill => write!(f, "the machine stands still until its counters have hardware"),
            Self::GoesOn { after } => write!(f, "the machine goes on, after {after:.3?}"),
            Self::RateFloor { period, times } => write!(
                f,
                "rate floor: the guest's overflows come too fast, periods under {period} are raised to it for some \
                 milliseconds (so far {times} times)"
            ),
        }
    }
}
