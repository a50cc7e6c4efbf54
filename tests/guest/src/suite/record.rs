//! What earlier runs on this machine tell the next one: how long each group of tests took, and when that was.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use guest_images::cache::Cache;
use tally_lab::cores::{Durations, Order};

/// A file in the cache: lines of milliseconds, the second since 1970 in which the group was last seen to end, and the
/// group's name. `None` without a cache.
pub struct Record(Option<PathBuf>);

/// The last run of a group.
#[derive(Clone, Copy)]
struct Last {
    took: Duration,
    /// Time since 1970.
    ended: Duration,
}

impl Record {
    pub fn open() -> Self {
        Self(Cache::open().ok().map(|cache| cache.root().join("test-runs")))
    }

    /// The group that took longest begins first.
    pub fn longest_first(&self) -> Order {
        Order {
            known: self.known().into_iter().map(|(name, last)| (name, last.took)).collect(),
            unknown: None,
        }
    }

    /// Groups that have never run begin first, then that whose last run is longest ago.
    pub fn oldest_first(&self) -> Order {
        let now = now();
        let age = |(name, last): (String, Last)| (name, now.saturating_sub(last.ended));
        Order { known: self.known().into_iter().map(age).collect(), unknown: Some(Duration::MAX) }
    }

    /// Writes the durations of this run to the file. An error is ignored: the next run measures them again.
    pub fn update(&self, taken: &Durations) {
        let Some(path) = &self.0 else { return };
        let mut all = self.known();
        for (name, took) in taken {
            let last =
                all.entry(name.clone()).or_insert(Last { took: Duration::ZERO, ended: Duration::ZERO });
            // What this run has written before keeps its time.
            if last.took.as_millis() != took.as_millis() {
                *last = Last { took: *took, ended: now() };
            }
        }
        let line = |(name, last): (String, Last)| {
            format!("{} {} {name}\n", last.took.as_millis(), last.ended.as_secs())
        };
        let lines: Vec<_> = all.into_iter().map(line).collect();
        let new = path.with_extension("new");
        let _ = fs::write(&new, lines.concat()).and_then(|()| fs::rename(&new, path));
    }

    fn known(&self) -> BTreeMap<String, Last> {
        let text = self.0.as_ref().and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
        let line = |line: &str| {
            let mut words = line.splitn(3, ' ');
            let mut number = || words.next()?.parse().ok();
            let (took, ended) = (Duration::from_millis(number()?), Duration::from_secs(number()?));
            Some((words.next()?.to_owned(), Last { took, ended }))
        };
        text.lines().filter_map(line).collect()
    }
}

/// Returns the time since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
