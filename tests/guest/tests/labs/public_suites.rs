//! Public test suites, which others wrote and which are not part of this project. The tests use the files in
//! `$TALLY_SUITES` or in `shared/suites` beside the project, and are skipped where there are none.

mod kvm_unit_tests;
mod perf_event_tests;

use std::path::PathBuf;
use std::{env, fs};

use guest_tests::suite::Test;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [kvm_unit_tests::tests(), perf_event_tests::tests()].concat()
}

/// Returns the folder of a built suite, which has this file. If there is none, prints that the calling test is skipped.
fn suite(name: &str, file: &str) -> Option<PathBuf> {
    let beside = || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/suites"));
    let folder = env::var_os("TALLY_SUITES").map_or_else(beside, PathBuf::from).join(name);
    if fs::exists(folder.join(file)).unwrap_or_default() {
        return Some(folder);
    }
    eprintln!("skipped: no {name} in {}: see $TALLY_SUITES", folder.display());
    None
}
