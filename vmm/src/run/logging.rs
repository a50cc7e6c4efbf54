//! Logging. Messages come from the macros of the crate `log`. They are printed on standard error, more of them with
//! `-v` and `RUST_LOG`; those about the guest's counters also go into the event log of `--pmu-log`.
//!
//! Levels: `warn` is for what a user has to know without asking; `info` (`-v`) for what Tally does and why, once or a
//! few times in a run; `debug` (`-vv`) for what it does now and then; `trace` (`-vvv`) for every access to the PMU's
//! registers.

use std::env;
use std::sync::Arc;
use std::thread;

use env_filter::{Builder, Filter, ParseError};
use log::{LevelFilter, Metadata, Record, warn};
use tally_machine::target::COUNTERS;

use crate::host::printer;
use crate::run::event_log::EventLog;

/// Most detailed level that goes into the event log.
const COUNTERS_LEVEL: LevelFilter = LevelFilter::Info;

/// Crates whose messages `-v` shows. Those of other crates are shown only if `RUST_LOG` names them: a guest can cause
/// many of them.
const SHOWN_CRATES: [&str; 4] = ["tally", "vpmu", "devices", "guest_images"];
/// Environment variable that adds messages by target: `tally::pmu=trace,vpmu=debug`.
pub const VARIABLE: &str = "RUST_LOG";

struct Logger {
    shown: Shown,
    counters: Option<Arc<EventLog>>,
}

/// Installs the logger. `verbosity` is the number of `-v`; `counters` is the event log.
///
/// # Panics
/// If it is called twice.
pub fn begin(verbosity: u8, counters: Option<Arc<EventLog>>) {
    let variable = env::var(VARIABLE).unwrap_or_default();
    let (shown, mistake) = Shown::new(verbosity, &variable);
    let most = if counters.is_some() { COUNTERS_LEVEL } else { LevelFilter::Off };
    log::set_max_level(shown.level().max(most));
    log::set_boxed_logger(Box::new(Logger { shown, counters })).expect("no other logger is installed");
    if let Some(mistake) = mistake {
        warn!("{VARIABLE}: {mistake}");
    }
}

/// Filters for standard error: that of the options, and that of [`VARIABLE`], which adds to it.
struct Shown {
    options: Filter,
    variable: Filter,
}

impl Shown {
    /// Creates the filters. Also returns the mistake in the variable, if there is one.
    fn new(verbosity: u8, variable: &str) -> (Self, Option<ParseError>) {
        let level = match verbosity {
            0 => LevelFilter::Warn,
            1 => LevelFilter::Info,
            2 => LevelFilter::Debug,
            _ => LevelFilter::Trace,
        };
        let mut options = Builder::new();
        for name in SHOWN_CRATES {
            options.filter_module(name, level);
        }
        let mut named = Builder::new();
        let mistake = named.filter_level(LevelFilter::Off).try_parse(variable).err();
        (Self { options: options.build(), variable: named.build() }, mistake)
    }

    /// Returns the most detailed level that can be shown.
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
    /// Returns the event log, if this record goes into it.
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
        let line = format!("{}{}", prefix(thread::current().name()), record.args());
        if self.shown.matches(record) {
            printer::say(&line);
        }
        if let Some(log) = self.log_of(record.metadata()) {
            log.message(&line);
        }
    }

    /// Flushes the event log before the process ends suddenly.
    fn flush(&self) {
        if let Some(log) = &self.counters {
            log.flush_if_unlocked();
        }
    }
}

/// Returns a prefix that names a vCPU's or a device's thread. The main thread has none.
fn prefix(thread: Option<&str>) -> String {
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
    fn each_v_shows_one_more_level() {
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
    fn messages_of_libraries_are_not_shown() {
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
    fn a_mistake_in_the_variable_leaves_the_options_in_force() {
        let (_, mistake) = Shown::new(0, "tally=loud");
        assert!(mistake.unwrap().to_string().contains("loud"));
        assert!(shows(1, "tally=loud", "tally::run", Level::Info));
        assert!(!shows(0, "tally=loud", "tally::run", Level::Info));
    }

    #[test]
    fn a_line_names_its_thread() {
        assert_eq!(prefix(Some("vcpu2")), "vCPU 2: ");
        assert_eq!(prefix(Some("virtio-blk")), "virtio-blk: ");
        assert_eq!(prefix(Some("main")), "");
    }
}
