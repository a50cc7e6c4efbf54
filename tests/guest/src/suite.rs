//! Runs the tests that need simulated hosts, in two tiers.
//!
//! Tests share hosts, and a host keeps a core busy for up to minutes. So nearly all tests begin at once, each waits for the
//! host that did what it looks at, and hosts get the cores in the order of how long they took last time ([`tally_lab::cores`]).
//! A host that no selected test looks at does not boot.

use std::any::Any;
use std::collections::HashMap;
use std::fmt::Write;
use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::OnceLock;
use std::thread;
use std::time::Duration;

use guest_images::cache::Cache;
use libtest_mimic::{Arguments, Failed, Trial};
use tally_lab::cores::{self, Durations};

/// A function that panics if what its name says does not hold.
#[derive(Clone, Copy)]
pub struct Test {
    name: &'static str,
    run: fn(),
    tier: Tier,
}

/// When a test runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tier {
    /// Always: it is the one that holds a promise.
    First,
    /// When everything runs: it holds a promise on more kernels, for more of everything, or measures.
    Second,
}

impl Test {
    /// What [`tests!`](crate::tests) makes of a function.
    pub fn new(path: &'static str, run: fn()) -> Self {
        // The first part is the name of the test program.
        let name = path.split_once("::").map_or(path, |(_, name)| name);
        Self { name, run, tier: Tier::First }
    }

    fn trial(self) -> Trial {
        let Self { name, run, tier } = self;
        Trial::test(name, move || run_in_own_thread(name, run, tier)).with_ignored_flag(tier == Tier::Second)
    }
}

/// Makes a `Vec` of [`Test`], of the first tier, of the names of functions.
#[macro_export]
macro_rules! tests {
    ($($test:ident),* $(,)?) => {
        vec![$($crate::suite::Test::new(concat!(module_path!(), "::", stringify!($test)), $test)),*]
    };
}

/// Moves tests to the second tier.
pub fn breadth(tests: Vec<Test>) -> Vec<Test> {
    tests.into_iter().map(|test| Test { tier: Tier::Second, ..test }).collect()
}

/// How many groups are listed at the end of a run.
const SLOWEST: usize = 10;

static TIER: OnceLock<Tier> = OnceLock::new();

/// Returns whether tests of the second tier run, too.
pub fn has_breadth() -> bool {
    TIER.get() == Some(&Tier::Second)
}

/// The `main` of a test program. It takes the arguments that Rust's own take; `--include-ignored` runs the second tier as well.
pub fn main(tests: Vec<Test>) -> ExitCode {
    let mut arguments = Arguments::from_args();
    let with_breadth = arguments.include_ignored || arguments.ignored;
    TIER.get_or_init(|| if with_breadth { Tier::Second } else { Tier::First });
    // Tests wait for hosts, and those for cores.
    arguments.test_threads.get_or_insert(tests.len());
    let record = Record::open();
    cores::expect(record.known());
    let conclusion = libtest_mimic::run(&arguments, tests.into_iter().map(Test::trial).collect());
    let taken = cores::taken();
    print!("{}", slowest(&taken));
    record.update(taken);
    conclusion.exit_code()
}

/// A thread of the test's name, for messages to name it and for what it runs to be called so.
fn run_in_own_thread(name: &str, run: fn(), tier: Tier) -> Result<(), Failed> {
    let thread = thread::Builder::new().name(name.to_owned()).spawn(run).expect("threads can be made");
    thread.join().map_err(|panic| {
        let tier = if tier == Tier::Second { " --include-ignored" } else { "" };
        format!("{}\nalone: cargo labs{tier} --exact {name}", message(&*panic)).into()
    })
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("it panicked")
}

/// Lists what took longest.
fn slowest(taken: &Durations) -> String {
    let mut all: Vec<_> = taken.iter().collect();
    all.sort_by_key(|(name, duration)| (std::cmp::Reverse(**duration), *name));
    let sum: Duration = taken.values().sum();
    let mut text = String::new();
    if all.len() > 1 {
        let _ =
            writeln!(text, "\nthe slowest of {} groups, which took {} s of cores:", all.len(), sum.as_secs());
    }
    for (name, duration) in all.into_iter().take(SLOWEST) {
        let _ = writeln!(text, "{:>7.1} s  {name}", duration.as_secs_f64());
    }
    text
}

/// How long groups took when they last ran on this machine: lines of milliseconds and names, in the cache.
struct Record(Option<PathBuf>);

impl Record {
    fn open() -> Self {
        Self(Cache::open().ok().map(|cache| cache.root().join("test-durations")))
    }

    fn known(&self) -> Durations {
        let text = self.0.as_ref().and_then(|path| fs::read_to_string(path).ok()).unwrap_or_default();
        let line = |line: &str| {
            let (milliseconds, name) = line.split_once(' ')?;
            Some((name.to_owned(), Duration::from_millis(milliseconds.parse().ok()?)))
        };
        text.lines().filter_map(line).collect()
    }

    /// What cannot be written is measured again next time.
    fn update(&self, taken: Durations) {
        let Some(path) = &self.0 else { return };
        let mut all: HashMap<_, _> = self.known();
        all.extend(taken);
        let mut lines: Vec<_> =
            all.into_iter().map(|(name, duration)| format!("{} {name}\n", duration.as_millis())).collect();
        lines.sort();
        let _ = fs::write(path, lines.concat());
    }
}
