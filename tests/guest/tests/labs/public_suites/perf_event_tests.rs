//! `perf_event_tests`, built: programs that test the system call `perf_event_open`. Their verdicts in a guest must be
//! those on the host.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::LazyLock;

use guest_images::Suite;
use guest_tests::lab::{Results, Steps};
use guest_tests::suite::{Test, second_tier};
use guest_tests::{temporary, tests};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![perf_event_tests_give_the_verdicts_of_the_host])
}

static VERDICTS: LazyLock<Option<Results>> = LazyLock::new(|| {
    let folder = super::suite("perf_event_tests", "run_tests.sh")?;
    let archive = temporary(&[]);
    let packed = Command::new("tar").arg("-C").arg(&folder).arg("-cf").arg(archive.path()).arg(".").status();
    assert!(packed.is_ok_and(|status| status.success()), "tar cannot pack {}", folder.display());
    let steps = Steps::new("perf_event_tests")
        .configure_host(|host| host.host(Suite::Trixie))
        .file(archive.path(), "suite.tar")
        .step("unpack", "mkdir suite; tar -C suite -xf suite.tar")
        .step("host", "cd suite && sh ./run_tests.sh")
        .step("guest", "cd suite && ../tally run --memory 512M --share .:rw -- sh ./run_tests.sh");
    Some(steps.long().run())
});

/// Returns the verdict of each test. A line with the test's path is followed by what the test says, with the verdict
/// in capital letters.
fn verdicts(text: &str) -> BTreeMap<&str, &str> {
    const VERDICTS: [&str; 3] = ["PASSED", "FAILED", "SKIPPED"];
    let tests = text.split(" + ").skip(1).filter_map(|said| said.split_once('\n'));
    tests
        .map(|(path, said)| {
            let verdict = VERDICTS.into_iter().find(|verdict| said.contains(verdict));
            (path.trim(), verdict.unwrap_or("another"))
        })
        .collect()
}

fn perf_event_tests_give_the_verdicts_of_the_host() {
    let Some(results) = &*VERDICTS else { return };
    let [host, guest] = ["host", "guest"].map(|name| results.of(name).text());
    let [host, guest] = [&host, &guest].map(|text| verdicts(text));
    assert!(host.values().any(|verdict| *verdict == "PASSED"), "{host:?}");
    assert_eq!(guest, host);
}
