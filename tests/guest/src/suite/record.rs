//! What earlier runs on this machine tell the next one: how long each group of tests took, and when it last began.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use guest_images::cache::Cache;
use tally_lab::cores::{Durations, Order};

/// A file in the cache, which may be missing: lines of the milliseconds that a group took, the second since 1970 in
/// which it last began, and its name.
pub struct Record {
    path: Option<PathBuf>,
    /// When this run has begun, as time since 1970. `None` if it has only the first tier: its groups may have tests of
    /// the second as well, which then have not begun.
    begun: Option<Duration>,
}

/// The last run of a group.
#[derive(Clone, Copy)]
struct Last {
    took: Duration,
    /// Time since 1970.
    begun: Duration,
}

impl Record {
    pub fn open(has_second_tier: bool) -> Self {
        let path = Cache::open().ok().map(|cache| cache.root().join("test-runs"));
        Self { path, begun: has_second_tier.then(now) }
    }

    /// The group that took longest begins first.
    pub fn longest_first(&self) -> Order {
        let took = |(name, last): (String, Last)| (!last.took.is_zero()).then_some((name, last.took));
        Order { known: self.known().into_iter().filter_map(took).collect(), unknown: None }
    }

    /// Groups that have never run begin first, then that whose last run is longest ago.
    pub fn oldest_first(&self) -> Order {
        let now = now();
        let age = |(name, last): (String, Last)| (name, now.saturating_sub(last.begun));
        Order { known: self.known().into_iter().map(age).collect(), unknown: Some(Duration::MAX) }
    }

    /// Writes what is known of this run to the file. An error is ignored: the next run measures it again.
    pub fn update(&self, taken: &Durations) {
        let Some(path) = &self.path else { return };
        let mut all = self.known();
        for (name, took) in taken {
            let last =
                all.entry(name.clone()).or_insert(Last { took: Duration::ZERO, begun: Duration::ZERO });
            if !took.is_zero() {
                last.took = *took;
            }
            if self.begun.is_some_and(|begun| last.begun < begun) {
                last.begun = now();
            }
        }
        let line = |(name, last): (String, Last)| {
            format!("{} {} {name}\n", last.took.as_millis(), last.begun.as_secs())
        };
        let lines: Vec<_> = all.into_iter().map(line).collect();
        let new = path.with_extension("new");
        let _ = fs::write(&new, lines.concat()).and_then(|()| fs::rename(&new, path));
    }

    fn known(&self) -> BTreeMap<String, Last> {
        let text = self.path.as_ref().and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
        let line = |line: &str| {
            let mut words = line.splitn(3, ' ');
            let mut number = || words.next()?.parse().ok();
            let (took, begun) = (Duration::from_millis(number()?), Duration::from_secs(number()?));
            Some((words.next()?.to_owned(), Last { took, begun }))
        };
        text.lines().filter_map(line).collect()
    }
}

/// Returns the time since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
