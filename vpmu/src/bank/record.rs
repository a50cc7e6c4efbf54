//! What is recorded of the counters for others: notices for the operator, the journal, and statistics.

use std::time::Duration;

use crate::journal::{Entry, Journal};
use crate::notice::{Notice, Notices};
use crate::report::Statistics;

/// The records of one vCPU.
#[derive(Debug, Default)]
pub struct Record {
    pub journal: Journal,
    pub statistics: Statistics,
    notices: Notices,
    /// Number of overflows when the last alarm was handled.
    overflows_at_alarm: u64,
}

impl Record {
    /// Adds a notice for the operator. Returns false if it was dropped because there were too many of late.
    pub fn add_notice(&mut self, notice: Notice, now: Duration) -> bool {
        self.journal.add(|| Entry::Noticed(notice.clone()));
        self.notices.add(notice, now)
    }

    /// Takes the notices for the operator.
    pub fn take_notices(&mut self) -> Vec<Notice> {
        self.notices.take()
    }

    /// Counts an expired alarm; `overflows` is the number of all overflows so far.
    pub fn alarm(&mut self, overflows: u64) {
        self.statistics.alarms += 1;
        // The alarm's overflow may have been found before, on the way here.
        if std::mem::replace(&mut self.overflows_at_alarm, overflows) == overflows {
            self.statistics.ignored_alarms += 1;
        }
    }
}
