//! Tests that the debugger rr, which stops programs at exact numbers of retired branches, records and replays programs
//! in guests.

use guest_images::{Progress, Suite};
use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, Results, Steps, with_installed_kernel};
use guest_tests::suite::{Test, on_intel, second_tier, third_tier};
use guest_tests::{program, tests};
use tally_lab::packed;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let longer =
        tests![rr_replays_racing_threads_in_chaos_mode, rr_replays_a_program_that_a_timer_interrupts];
    let on_amds = tests![rr_replays_on_debian_testings_kernel];
    let second = [on_any_host(), longer.clone(), on_amds, on_intel(on_any_host())].concat();
    [second_tier(second), third_tier(on_intel(longer))].concat()
}

pub fn on_any_host() -> Vec<Test> {
    tests![rr_replays_racing_threads]
}

/// Runs in the guest, in a folder that has rr: records what `racing` does in each of the cases that are its arguments
/// from the second on, replays the first case as often as the first argument says and the others once, and prints each
/// output.
const RECORD_AND_REPLAY: &str = "\
mount -t proc none proc; mount -t sysfs none sys; mount -t devtmpfs none dev; mount -t tmpfs none tmp
replays=$(seq $1); shift
for case; do
    set -- $case
    chroot . rr record $2 -o /tmp/trace /racing $1 >recorded 2>errors || { cat errors; exit 1; }
    echo \"case $case\"; cat recorded
    for replay in $replays; do
        chroot . rr replay -a /tmp/trace >replayed 2>errors || { cat errors; exit 1; }
        echo replayed; cat replayed
    done
    replays=1
    rm -r tmp/trace
done
";

/// Cases of `racing`. The Intel host runs the others with the third tier.
const FIRST: &str = "threads";
const LONGER: &str = "'threads --chaos' timer";

static GUESTS: OnEachHost = OnEachHost::new(|| match host::current() {
    Host::Amd => {
        let all = format!("{FIRST} {LONGER}");
        with_installed_kernel(unpacked("rr"), "trixie", Suite::Trixie)
            .step("stable", &run("", TWICE, &all))
            .step("testing", &run("--kernel ../trixie/boot/vmlinuz", ONCE, &all))
            .run()
    }
    Host::Intel => unpacked("rr").step("stable", &run("", TWICE, FIRST)).run(),
});

static LONGER_ON_INTEL: OnEachHost =
    OnEachHost::new(|| unpacked("rr long").step("stable", &run("", ONCE, LONGER)).run());

fn of(case: &str) -> &'static Results {
    if host::current() == Host::Intel && case != FIRST { &LONGER_ON_INTEL } else { &GUESTS }
}

/// Returns a group whose host has rr.
fn unpacked(name: &'static str) -> Steps {
    let archive =
        packed::archive("rr", &mut Progress::stderr("lab")).unwrap_or_else(|error| panic!("{error}"));
    Steps::new(name)
        .file(archive, "rr.tar")
        .file(program("racing"), "racing")
        .configure_host(|host| host.program(RECORD_AND_REPLAY.as_bytes(), "in-guest"))
        .step("unpack", "mkdir root; tar -C root -xf rr.tar; cp racing in-guest root; mkdir -p root/sys")
}

/// Numbers of replays of the first case.
const TWICE: usize = 2;
const ONCE: usize = 1;

/// Returns the command that runs these cases in a guest.
fn run(kernel: &str, replays: usize, cases: &str) -> String {
    format!(
        "cd root && ../tally run --memory 1G {kernel} --share .:rw -- \
         sh ./in-guest {replays} {cases}"
    )
}

/// Checks that all replays of a case printed what the recorded run printed.
fn assert_replayed(kernel: &str, replays: usize, case: &str) {
    let done = of(case).of(kernel);
    let text = done.text();
    assert_eq!(done.status, 0, "{text}{}", done.err);
    let (_, rest) = text.split_once(&format!("case {case}\n")).unwrap_or_else(|| panic!("{case}: {text}"));
    let output = rest.split("case ").next().unwrap_or_default();
    let runs: Vec<&str> = output.split("replayed\n").collect();
    assert_eq!(runs.len(), 1 + replays, "{text}");
    assert!(runs[0].lines().count() >= 5, "{text}");
    assert_eq!(runs[1..], vec![runs[0]; replays], "{kernel}, {case}");
}

fn rr_replays_racing_threads() {
    assert_replayed("stable", TWICE, "threads");
}

fn rr_replays_racing_threads_in_chaos_mode() {
    assert_replayed("stable", ONCE, "threads --chaos");
}

fn rr_replays_a_program_that_a_timer_interrupts() {
    assert_replayed("stable", ONCE, "timer");
}

fn rr_replays_on_debian_testings_kernel() {
    for case in ["threads", "threads --chaos", "timer"] {
        assert_replayed("testing", ONCE, case);
    }
}
