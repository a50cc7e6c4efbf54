//! Events that no counter needs for now. A guest that has more events than counters, or whose tasks have different
//! ones, soon wants them again: enabling an event is some microseconds, and having one opened is ten times as many, in
//! which the guest stands still. A parked event is disabled: it takes no counter of the host, and nobody waits for it.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::process::{Resource, getrlimit};
use vpmu::event::Selection;

use crate::event::PerfEvent;
use crate::page_limits::PageLimits;

/// The parked events of one thread, those that were parked last at the end.
pub struct Parked {
    events: Vec<OfSelection>,
    places: Places,
}

/// An event, and what it counts.
struct OfSelection {
    selection: Selection,
    backing: PerfEvent,
    /// It was parked before [`Parked::close_idle`] was called last.
    is_idle: bool,
    _place: Place,
}

impl Parked {
    /// Greatest number of events of a thread. Linux passes each of them by whenever it schedules the thread's events.
    const MOST: usize = 32;

    /// Creates a place for the parked events of this thread.
    pub fn new() -> Self {
        Self { events: Vec::new(), places: Places::of_this_process() }
    }

    /// Parks an event, or closes it if it cannot be parked or the place of another one is not to be had.
    pub fn park(&mut self, selection: Selection, event: PerfEvent) {
        // An event without a page was opened when pages were short.
        if event.unmapped().is_some() || event.disable().is_err() {
            return;
        }
        if self.events.len() >= Self::MOST {
            self.events.remove(0);
        }
        let place = self.places.take().or_else(|| {
            // The longest parked one of this thread goes.
            (!self.events.is_empty()).then(|| self.events.remove(0)).and_then(|_| self.places.take())
        });
        if let Some(place) = place {
            self.events.push(OfSelection { selection, backing: event, is_idle: false, _place: place });
        }
    }

    /// Takes an event that counts this selection, if there is one.
    pub fn take(&mut self, selection: Selection) -> Option<PerfEvent> {
        let at = self.events.iter().rposition(|parked| parked.selection == selection)?;
        Some(self.events.remove(at).backing)
    }

    /// Closes the events that were parked before the last call.
    pub fn close_idle(&mut self) {
        self.events.retain(|parked| !parked.is_idle);
        self.events.iter_mut().for_each(|parked| parked.is_idle = true);
    }

    /// Closes all events, for others that need what they occupy. Returns whether there were any.
    pub fn close_all(&mut self) -> bool {
        let had_some = !self.events.is_empty();
        self.events.clear();
        had_some
    }
}

/// How many more events the threads of this process may park together: each has a file descriptor and a mapped page, of
/// which a process has so many.
#[derive(Clone, Copy)]
struct Places(&'static AtomicUsize);

/// One of the [`Places`].
struct Place(Places);

impl Places {
    fn of_this_process() -> Self {
        static LEFT: OnceLock<AtomicUsize> = OnceLock::new();
        Self(LEFT.get_or_init(|| {
            let pages = PageLimits::of_this_process().map(|limits| limits.of_process);
            AtomicUsize::new(number(getrlimit(Resource::Nofile).current, pages))
        }))
    }

    fn take(self) -> Option<Place> {
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        taken.is_ok().then_some(Place(self))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Returns how many events a process may park that may have so many files and pages: a quarter of either, so that most
/// are left for what is in use.
fn number(files: Option<u64>, pages: Option<u64>) -> usize {
    let least = files.unwrap_or(u64::MAX).min(pages.unwrap_or(u64::MAX));
    usize::try_from(least / 4).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_parked_leaves_most_files_and_pages_for_what_is_in_use() {
        assert_eq!(number(Some(1024), Some(2048)), 256);
        assert_eq!(number(Some(1024), Some(16)), 4, "before Linux 5.16");
        assert_eq!(number(None, None), usize::MAX / 4);
    }

    #[test]
    fn a_place_is_free_again_once_its_event_is_closed() {
        let places = Places(Box::leak(Box::new(AtomicUsize::new(2))));
        let (first, second) = (places.take(), places.take());
        assert!(first.is_some() && second.is_some() && places.take().is_none());
        drop(first);
        assert!(places.take().is_some());
    }
}
