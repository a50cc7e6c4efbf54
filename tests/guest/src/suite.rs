//! Test runner for the tests that need simulated hosts, in three tiers.
//!
//! Many tests share one boot of a simulated host, and a host keeps a core busy for up to minutes. The runner therefore
//! starts all tests at once, and each waits for the host whose results it checks. Hosts get the cores in the order of
//! how long they took last time ([`tally_lab::cores`]), or, when the second tier runs alone, of how long ago that was:
//! `.ci/run` ends that tier when its time is over, and goes on with what is left in its next run. A host is booted by
//! the first test that needs it, so a host that no selected test needs does not boot.

mod record;

use std::any::Any;
use std::env;
use std::fmt::Write;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use tally_lab::cores::{self, Durations};

use crate::host::{self, Host, Silicon};
use record::Record;

/// A test: a function that panics if the statement in its name is false.
#[derive(Clone, Copy)]
pub struct Test {
    name: &'static str,
    run: fn(),
    tier: Tier,
    host: Host,
    silicon: Option<Silicon>,
}

/// Decides when a test runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tier {
    /// Always. Each promise of the project has a test in this tier.
    First,
    /// With `--include-ignored` only: the test checks a promise on more kernels or models, or measures.
    Second,
    /// With `--include-ignored` and a filter that its name matches: the test repeats others on another host, and takes
    /// minutes for what few changes can break.
    Third,
}

impl Test {
    /// Creates a test from a function and its path. [`tests!`](crate::tests) calls this.
    pub fn new(path: &'static str, run: fn()) -> Self {
        // The first part of the path is the name of the test program.
        let name = path.split_once("::").map_or(path, |(_, name)| name);
        Self { name, run, tier: Tier::First, host: Host::Amd, silicon: None }
    }

    fn trial(self) -> Trial {
        Trial::test(self.name, move || self.run_in_own_thread()).with_ignored_flag(self.tier != Tier::First)
    }
}

impl Test {
    /// Runs the test in a thread with the test's name, so that messages and the hosts that the test boots have this
    /// name.
    fn run_in_own_thread(self) -> Result<(), Failed> {
        let Self { name, run, tier, host, silicon } = self;
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            host::set(host);
            host::set_silicon(silicon);
            run();
        });
        thread.expect("threads can be made").join().map_err(|panic| {
            let tier = if tier == Tier::First { "" } else { " --include-ignored" };
            format!("{}\nalone: cargo labs{tier} --exact {name}", message(&*panic)).into()
        })
    }
}

/// Creates a `Vec` of [`Test`] of the first tier from the names of functions.
#[macro_export]
macro_rules! tests {
    ($($test:ident),* $(,)?) => {
        vec![$($crate::suite::Test::new(concat!(module_path!(), "::", stringify!($test)), $test)),*]
    };
}

/// Moves tests to the second tier.
pub fn second_tier(tests: Vec<Test>) -> Vec<Test> {
    tests.into_iter().map(|test| Test { tier: Tier::Second, ..test }).collect()
}

/// Moves tests to the third tier.
pub fn third_tier(tests: Vec<Test>) -> Vec<Test> {
    tests.into_iter().map(|test| Test { tier: Tier::Third, ..test }).collect()
}

/// Returns tests that run the same functions on the Intel host, as `intel::NAME`.
pub fn on_intel(tests: Vec<Test>) -> Vec<Test> {
    let named = |name| &*Box::leak(format!("intel::{name}").into_boxed_str());
    tests.into_iter().map(|test| Test { name: named(test.name), host: Host::Intel, ..test }).collect()
}

/// Returns tests that run the same functions on a host whose PMU misbehaves as those of real processors do, as
/// `zen2::NAME`, `skylake::NAME`, and so on.
pub fn on_silicon(silicon: Silicon, tests: Vec<Test>) -> Vec<Test> {
    let named = |name| &*Box::leak(format!("{}::{name}", silicon.name()).into_boxed_str());
    let host = silicon.host();
    let on = |test: Test| Test { name: named(test.name), host, silicon: Some(silicon), ..test };
    tests.into_iter().map(on).collect()
}

/// Returns the tests without some, by the last part of their names.
///
/// # Panics
/// If there is none of a name.
#[must_use]
pub fn except(mut tests: Vec<Test>, names: &[&str]) -> Vec<Test> {
    for name in names {
        let before = tests.len();
        tests.retain(|test| test.name.rsplit("::").next() != Some(name));
        assert_ne!(tests.len(), before, "there is no test {name}");
    }
    tests
}

/// Time between two updates of the record: a run that is cut off teaches the next one what it has learnt.
const RECORDED: Duration = Duration::from_secs(30);

/// Number of groups that are listed at the end of a run.
const SLOWEST_SHOWN: usize = 10;

static TIER: OnceLock<Tier> = OnceLock::new();

/// Returns true if tests of the second tier run, too, in this run of the program or, with `TALLY_BOTH_TIERS` set, in
/// another.
pub fn runs_second_tier() -> bool {
    TIER.get() == Some(&Tier::Second)
}

/// Runs the tests: the `main` of a test program. It accepts the arguments of Rust's own test runner;
/// `--include-ignored` runs the second tier as well, and the third as far as a filter names it.
pub fn main(mut tests: Vec<Test>) -> ExitCode {
    let mut arguments = Arguments::from_args();
    let runs_second_tier = arguments.include_ignored || arguments.ignored;
    // Whoever runs the tiers one after the other wants of the first what it does in a run of both.
    let is_thorough = runs_second_tier || env::var_os("TALLY_BOTH_TIERS").is_some();
    TIER.get_or_init(|| if is_thorough { Tier::Second } else { Tier::First });
    if arguments.filter.is_none() {
        let all = tests.len();
        tests.retain(|test| test.tier != Tier::Third);
        if runs_second_tier {
            let left_out = all - tests.len();
            println!(
                "skipped: {left_out} tests of the third tier, which run by name: cargo labs --include-ignored intel::, zen2::, zen4::"
            );
        }
    }
    // One thread for each test: tests only wait for hosts, and the hosts wait for cores.
    arguments.test_threads.get_or_insert(tests.len());
    let record = Record::open(runs_second_tier);
    cores::set_order(if arguments.ignored { record.oldest_first() } else { record.longest_first() });
    let conclusion = thread::scope(|scope| {
        let (running, ended) = mpsc::channel::<()>();
        let record = &record;
        scope.spawn(move || {
            while ended.recv_timeout(RECORDED) == Err(RecvTimeoutError::Timeout) {
                record.update(&cores::taken());
            }
        });
        let conclusion = libtest_mimic::run(&arguments, tests.into_iter().map(Test::trial).collect());
        drop(running);
        conclusion
    });
    let taken = cores::taken();
    print!("{}", slowest(&taken));
    record.update(&taken);
    conclusion.exit_code()
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked")
}

/// Lists the groups that took longest, for the end of a run.
fn slowest(taken: &Durations) -> String {
    let mut all: Vec<_> = taken.iter().collect();
    all.sort_by_key(|(name, duration)| (std::cmp::Reverse(**duration), *name));
    let sum: Duration = taken.values().sum();
    let mut text = String::new();
    if all.len() > 1 {
        let _ =
            writeln!(text, "\nthe slowest of {} groups, which took {} s of cores:", all.len(), sum.as_secs());
    }
    for (name, duration) in all.into_iter().take(SLOWEST_SHOWN) {
        let _ = writeln!(text, "{:>7.1} s  {name}", duration.as_secs_f64());
    }
    text
}
