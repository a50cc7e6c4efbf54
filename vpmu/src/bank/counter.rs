//! What the bank keeps of a counter, and of what counts for it.

use std::time::Duration;

use super::Alarm;
use super::gap::Gaps;
use crate::event::Selection;

/// One counter.
pub struct Counter<B> {
    /// What it showed when it was last looked at.
    pub value: u64,
    pub selection: Option<Selection>,
    pub alarm: Alarm,
    pub backed: Option<Backed<B>>,
    /// What the host refused when it was last asked, and why: that is told once.
    pub refused: Option<(Selection, String)>,
    pub overflows: u64,
    /// How much of what it shows is an estimate.
    pub estimated: u64,
    /// Whether it has overflowed too soon after the last time, and nobody is to know yet.
    pub put_off: bool,
    pub gaps: Gaps,
}

/// What counts for a counter.
pub struct Backed<B> {
    pub backing: B,
    /// Its count when the counter was last looked at while it ran.
    pub mark: u64,
    /// How much of that was an estimate.
    pub mark_estimated: u64,
    pub alarm: Armed,
    /// The count at which its last alarm came, and when that was.
    pub last_alarm: (u64, Duration),
    /// The count before which no overflow may interrupt.
    pub earliest: u64,
    /// Whether nobody has used it since it was last asked for.
    pub idle: bool,
    /// When it began.
    pub since: Duration,
    /// How long the counter had been without hardware until then, in all.
    pub starved_before: Duration,
}

/// What a look at a counter has found.
pub struct Look {
    /// What was counted behind it.
    pub count: u64,
    /// Whether it was without hardware, and has some again.
    pub recovered: bool,
}

/// The alarm that is set.
#[derive(Debug, Clone, Copy)]
pub struct Armed {
    /// The count at which it comes.
    pub at: u64,
    /// How many counts after it was set; the host repeats it with this distance.
    pub distance: u64,
    /// Whether it has come and been left to repeat.
    pub repeats: bool,
}

impl<B> Default for Counter<B> {
    fn default() -> Self {
        Self {
            value: 0,
            selection: None,
            alarm: Alarm::Off,
            backed: None,
            refused: None,
            overflows: 0,
            estimated: 0,
            put_off: false,
            gaps: Gaps::default(),
        }
    }
}
