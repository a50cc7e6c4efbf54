//! What Tally tells while it works. All of it is said with the macros of the crate `log`, and comes out here: on standard
//! error what matters, with `-v` and `RUST_LOG` more, and in the event log of `--pmu-log` what concerns the guest's counters.
//!
//! Warnings are for what a user has to know though nobody asked; `info` (`-v`) is what Tally does and why, once or a few
//! times in a run; `debug` (`-vv`) what it does now and then; `trace` (`-vvv`) every access to the PMU's registers.

use std::env;
use std::sync::Arc;
use std::thread;

use env_filter::{Builder, Filter, ParseError};
use log::{LevelFilter, Metadata, Record, warn};
use tally_machine::target::COUNTERS;

use crate::event_log::EventLog;
use crate::stderr;

/// How detailed the counters' own log is.
const COUNTERS_LEVEL: LevelFilter = LevelFilter::Info;

/// The crates that `-v` is about. What others have to say is for those who ask for it: a guest can make them say a lot.
const OURS: [&str; 4] = ["tally", "vpmu", "devices", "guest_images"];
/// Says in more detail what is shown: `tally::pmu=trace,vpmu=debug`.
pub const VARIABLE: &str = "RUST_LOG";

struct Logger {
    shown: Shown,
    counters: Option<Arc<EventLog>>,
}

/// Begins to tell, in such detail; `counters` is the log of what happens to the guest's counters.
///
/// # Panics
/// If it is called twice.
pub fn begin(verbosity: u8, counters: Option<Arc<EventLog>>) {
    let variable = env::var(VARIABLE).unwrap_or_default();
    let (shown, mistake) = Shown::new(verbosity, &variable);
    let most = if counters.is_some() { COUNTERS_LEVEL } else { LevelFilter::Off };
    log::set_max_level(shown.level().max(most));
    log::set_boxed_logger(Box::new(Logger { shown, counters })).expect("nobody else tells anything");
    if let Some(mistake) = mistake {
        warn!("{VARIABLE}: {mistake}");
    }
}

/// What is shown on standard error: what the options say, and what the variable adds.
struct Shown {
    options: Filter,
    variable: Filter,
}

impl Shown {
    /// That, and what is wrong with the variable.
    fn new(verbosity: u8, variable: &str) -> (Self, Option<ParseError>) {
        let level = match verbosity {
            0 => LevelFilter::Warn,
            1 => LevelFilter::Info,
            2 => LevelFilter::Debug,
            _ => LevelFilter::Trace,
        };
        let mut options = Builder::new();
        for name in OURS {
            options.filter_module(name, level);
        }
        let mut named = Builder::new();
        let mistake = named.filter_level(LevelFilter::Off).try_parse(variable).err();
        (Self { options: options.build(), variable: named.build() }, mistake)
    }

    /// The most that it can show.
    fn level(&self) -> LevelFilter {
        self.options.filter().max(self.variable.filter())
    }

    fn enabled(&self, metadata: &Metadata) -> bool {
        self.options.enabled(metadata) || self.variable.enabled(metadata)
    }

    fn matches(&self, record: &Record) -> bool {
        self.options.matches(record) || self.variable.matches(record)
    }
}

impl Logger {
    /// The log that a record belongs into.
    fn log_of(&self, metadata: &Metadata) -> Option<&EventLog> {
        let is_counters = metadata.target() == COUNTERS && metadata.level() <= COUNTERS_LEVEL;
        self.counters.as_deref().filter(|_| is_counters)
    }
}

impl log::Log for Logger {
    fn enabled(&self, metadata: &Metadata) -> bool {
        self.shown.enabled(metadata) || self.log_of(metadata).is_some()
    }

    fn log(&self, record: &Record) {
        let line = format!("{}{}", speaker(thread::current().name()), record.args());
        if self.shown.matches(record) {
            stderr::say(&line);
        }
        if let Some(log) = self.log_of(record.metadata()) {
            log.say(&line);
        }
    }

    /// Before this process ends all of a sudden.
    fn flush(&self) {
        if let Some(log) = &self.counters {
            log.rescue();
        }
    }
}

/// Whose line it is, by the name of the thread: a vCPU's or a device's. The main thread's lines are the program's.
fn speaker(thread: Option<&str>) -> String {
    match thread {
        None | Some("main") => String::new(),
        Some(name) => match name.strip_prefix("vcpu") {
            Some(number) => format!("vCPU {number}: "),
            None => format!("{name}: "),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use log::Level;

    fn shows(verbosity: u8, variable: &str, target: &str, level: Level) -> bool {
        let (shown, _) = Shown::new(verbosity, variable);
        shown.enabled(&Metadata::builder().target(target).level(level).build())
    }

    #[test]
    fn each_v_shows_more() {
        let levels = [Level::Warn, Level::Info, Level::Debug, Level::Trace];
        for (verbosity, shown) in [(0, 1), (1, 2), (2, 3), (3, 4), (9, 4)] {
            let seen = levels.iter().filter(|level| shows(verbosity, "", "tally::run", **level)).count();
            assert_eq!(seen, shown, "-{}", "v".repeat(verbosity.into()));
            assert!(shows(verbosity, "", COUNTERS, Level::Warn), "a starved counter is told of always");
        }
    }

    #[test]
    fn the_machine_is_a_part_of_tally_to_whoever_selects_messages() {
        assert!(shows(1, "", "tally_machine::virtio", Level::Info));
        assert!(shows(0, "tally=debug", "tally_machine::vcpu", Level::Debug));
    }

    #[test]
    fn a_guest_cannot_make_a_library_talk() {
        assert!(!shows(3, "", "virtio_queue::queue", Level::Error));
    }

    #[test]
    fn the_variable_adds_what_it_names() {
        let adds = |variable, target, level| shows(0, variable, target, level);
        assert!(adds("tally::pmu=trace", "tally::pmu::thread", Level::Trace));
        assert!(!adds("tally::pmu=trace", "tally::run", Level::Info));
        assert!(adds("tally::pmu=trace", COUNTERS, Level::Warn), "what matters is shown all the same");
        assert!(adds("debug", "virtio_queue", Level::Debug) && !adds("debug", "vpmu", Level::Trace));
    }

    #[test]
    fn a_mistake_in_the_variable_costs_nothing_but_what_it_asks_for() {
        let (_, mistake) = Shown::new(0, "tally=loud");
        assert!(mistake.unwrap().to_string().contains("loud"));
        assert!(shows(1, "tally=loud", "tally::run", Level::Info));
        assert!(!shows(0, "tally=loud", "tally::run", Level::Info));
    }

    #[test]
    fn a_line_says_whose_it_is() {
        assert_eq!(speaker(Some("vcpu2")), "vCPU 2: ");
        assert_eq!(speaker(Some("virtio-blk")), "virtio-blk: ");
        assert_eq!(speaker(Some("main")), "");
    }
}
