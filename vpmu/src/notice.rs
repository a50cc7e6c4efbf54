//! Notices for the operator: whatever makes a guest's count differ from what the guest expects, such as an event that
//! the host refuses or a counter without hardware.

use std::fmt;
use std::mem::discriminant;
use std::time::Duration;

use crate::event::{Event, Selection};

/// Maximum number of notices of one vCPU at once. A hostile guest can cause any number of them.
const AT_ONCE: u32 = 16;
/// Time after which one more notice is allowed.
const PAUSE: Duration = Duration::from_secs(10);

/// Notices of one vCPU that the operator has not been told yet, at a limited rate.
#[derive(Debug, Default)]
pub(crate) struct Notices {
    waiting: Vec<Notice>,
    /// Number of notices added of late. It decreases by one in each [`PAUSE`].
    recent: u32,
    /// Time at which `recent` was last decreased.
    since: Duration,
}

impl Notices {
    /// Adds a notice. Returns false if it was dropped because there were too many of late.
    pub fn add(&mut self, notice: Notice, now: Duration) -> bool {
        let pauses = now.saturating_sub(self.since).as_secs() / PAUSE.as_secs();
        if pauses > 0 {
            self.recent = self.recent.saturating_sub(u32::try_from(pauses).unwrap_or(u32::MAX));
            self.since = now;
        }
        // The host may take several counters at once. That counts as one notice.
        let is_same = self.waiting.last().is_some_and(|last| discriminant(last) == discriminant(&notice));
        if is_same && notice.is_caused_by_host() {
            self.waiting.push(notice);
            return true;
        }
        if self.recent >= AT_ONCE {
            return false;
        }
        self.recent += 1;
        self.waiting.push(notice);
        if self.recent == AT_ONCE {
            self.waiting.push(Notice::TooMany);
        }
        true
    }

    /// Takes the waiting notices.
    pub fn take(&mut self) -> Vec<Notice> {
        std::mem::take(&mut self.waiting)
    }
}

/// Something that the operator should know about a vCPU's counters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// The host does not count the event, so the counter stands still.
    Refused {
        /// The counter.
        counter: usize,
        /// What it should count.
        selection: Selection,
        /// The host's reason.
        why: String,
    },
    /// The host refused to set an alarm for a counter's overflow, so the guest may miss an interrupt.
    Unarmed {
        /// The counter.
        counter: usize,
        /// The host's reason.
        why: String,
    },
    /// Notices are dropped from now on, because there were too many.
    TooMany,
    /// The counter has lost its hardware and misses counts from now on.
    Starved {
        /// The counter.
        counter: usize,
        /// What it counts.
        selection: Selection,
        /// Who holds the hardware instead.
        holders: Holders,
    },
    /// A starved counter has hardware again.
    Recovered {
        /// The counter.
        counter: usize,
        /// What it counts.
        selection: Selection,
        /// Longest time for which it can have missed counts.
        missed: Duration,
    },
    /// The guest stopped using a counter that was still starved.
    GivenUp {
        /// The counter.
        counter: usize,
        /// What it should have counted.
        selection: Selection,
        /// Longest time for which it can have missed counts.
        missed: Duration,
    },
    /// The VM is paused until this vCPU's counters have hardware.
    Paused,
    /// The VM has resumed.
    Resumed {
        /// Length of the pause.
        after: Duration,
    },
    /// The guest has taken so many interrupts that its periods are raised for a while.
    RateFloor {
        /// Least period meanwhile, in counts.
        period: u64,
        /// Number of times that this has happened since the guest started.
        times: u64,
    },
}

/// Who holds the host's hardware counters while one of a vCPU's counters has none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holders {
    /// Number of hardware counters that the guest's counters stand for.
    pub counters: usize,
    /// The vCPU's own events that are on the hardware.
    pub own: Vec<Holder>,
}

/// An event of the host that holds hardware.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    /// What it counts.
    pub selection: Selection,
    /// The hardware counter that it is on, if that is known.
    pub hardware: Option<u32>,
    /// Number of hardware counters that it takes.
    pub takes: usize,
    /// All counters of the guest that it counts for stand still.
    pub stands_still: bool,
}

impl fmt::Display for Holders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = self.own.iter().map(|holder| holder.takes).sum::<usize>();
        let others = self.counters.saturating_sub(held);
        let own: Vec<_> = self.own.iter().map(ToString::to_string).collect();
        match &own[..] {
            [] => write!(f, "others hold all {others}"),
            own => {
                write!(f, "of {} this vCPU holds {held} ({}), others {others}", self.counters, own.join(", "))
            }
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(hardware) = self.hardware {
            write!(f, "{hardware}: ")?;
        }
        write!(f, "{}", self.selection)?;
        if self.takes > 1 {
            write!(f, " on {}", self.takes)?;
        }
        if self.stands_still { write!(f, " stopped") } else { Ok(()) }
    }
}

impl Notice {
    /// Returns the counter that it is about, if it is about one.
    pub(crate) fn counter(&self) -> Option<usize> {
        match self {
            Self::Refused { counter, .. }
            | Self::Unarmed { counter, .. }
            | Self::Starved { counter, .. }
            | Self::Recovered { counter, .. }
            | Self::GivenUp { counter, .. } => Some(*counter),
            Self::TooMany | Self::Paused | Self::Resumed { .. } | Self::RateFloor { .. } => None,
        }
    }

    /// Returns whether the cause is on the host. All other notices are caused by the guest.
    fn is_caused_by_host(&self) -> bool {
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
            Self::TooMany => write!(f, "too many notices: further ones are dropped for some seconds"),
            Self::Unarmed { counter, why } => {
                write!(
                    f,
                    "counter {counter}: the host refuses an alarm for its overflow, the guest may miss an interrupt: {why}"
                )
            }
            Self::Starved { counter, selection, holders } => {
                write!(
                    f,
                    "counter {counter} ({selection}) is starved: the host has no hardware for it; {holders}"
                )
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
            Self::Paused => write!(f, "the VM is paused until its counters have hardware"),
            Self::Resumed { after } => write!(f, "the VM has resumed, after {after:.3?}"),
            Self::RateFloor { period, times } => write!(
                f,
                "rate floor: the guest's overflows come too fast, periods under {period} are raised to it for some \
                 milliseconds (so far {times} times)"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Filter, Scope};

    fn selection(code: u64) -> Selection {
        Selection { event: Event::Raw(code), filter: Filter::User, scope: Scope::Guest }
    }

    fn said(own: Vec<Holder>) -> String {
        let holders = Holders { counters: 6, own };
        Notice::Starved { counter: 5, selection: selection(0xc2), holders }.to_string()
    }

    #[test]
    fn a_notice_of_starvation_says_who_holds_the_hardware() {
        let begin = "counter 5 (rc2:u) is starved: the host has no hardware for it; ";
        assert_eq!(said(Vec::new()), format!("{begin}others hold all 6"));
        let holder = Holder { selection: selection(0xc0), hardware: Some(3), takes: 1, stands_still: false };
        let pair = Holder { selection: selection(0x03), hardware: Some(0), takes: 2, stands_still: true };
        let unknown = Holder { hardware: None, ..holder.clone() };
        assert_eq!(
            said(vec![pair, holder]),
            format!("{begin}of 6 this vCPU holds 3 (0: r3:u on 2 stopped, 3: rc0:u), others 3")
        );
        assert_eq!(said(vec![unknown]), format!("{begin}of 6 this vCPU holds 1 (rc0:u), others 5"));
    }
}
