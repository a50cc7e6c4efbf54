//! What a guest's kernel does first when an overflow has interrupted it. Nearly all stop all counters, and look only then which
//! have overflowed. Where that is known, overflows between the interrupt and the stop are of that interrupt: nobody needs to be
//! called for each of them, and none is an interrupt of its own.

/// What it did the last time.
#[derive(Debug, Default)]
pub struct Habit {
    /// It was interrupted, and has not touched the counters since.
    is_called: bool,
    stops_first: bool,
}

impl Habit {
    /// It is interrupted.
    pub fn called(&mut self) {
        self.is_called = true;
    }

    /// It stops all counters; whether that is the first thing that it does.
    pub fn stops(&mut self) -> bool {
        let first = std::mem::take(&mut self.is_called);
        self.stops_first |= first;
        first
    }

    /// It does something else, or an alarm comes; whether that is the first thing.
    pub fn does_something_else(&mut self) -> bool {
        let first = std::mem::take(&mut self.is_called);
        self.stops_first &= !first;
        first
    }

    /// What it does first does not come here.
    pub fn is_not_seen(&mut self) {
        self.is_called = false;
    }

    /// Whether it is expected to stop them first when it is interrupted next.
    pub fn stops_first(&self) -> bool {
        self.stops_first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_done_first_the_last_time_is_expected() {
        let mut habit = Habit::default();
        assert!(!habit.stops() && !habit.stops_first(), "nothing has interrupted it");
        habit.called();
        assert!(habit.stops() && habit.stops_first());
        assert!(!habit.stops() && habit.stops_first(), "once for an interrupt");
        assert!(!habit.does_something_else() && habit.stops_first(), "behind the stop it may do as it likes");
        habit.called();
        habit.is_not_seen();
        assert!(!habit.does_something_else() && habit.stops_first(), "nobody knows what was first");
        habit.called();
        assert!(habit.does_something_else() && !habit.stops() && !habit.stops_first());
    }
}
