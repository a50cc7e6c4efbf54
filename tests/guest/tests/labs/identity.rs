//! A guest with the other vendor's PMU, on the lab's AMD host: its kernel takes the processor for that vendor's, and nothing
//! that it does for that makes it stumble.

use std::sync::LazyLock;

use guest_tests::lab::{Results, Steps};
use guest_tests::perf::{Script, Sections};
use guest_tests::programs::COMPAT;
use guest_tests::suite::Test;
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        the_processor_is_one_of_intels_that_kernels_know_no_more_of,
        its_kernel_touches_nothing_that_is_not_there,
        it_does_not_guard_against_intels_flaws_for_nothing,
        its_cpus_are_cores_of_their_own,
        a_system_call_of_the_hosts_vendor_does_the_kernel_no_harm,
    ]
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let script = Script::new()
        .section("processor", "sed -n '/^vendor_id\\|^cpu family\\|^model\\t/p' /proc/cpuinfo")
        .section("flaws", "cd /sys/devices/system/cpu/vulnerabilities; grep . *")
        .section("topology", "cat /sys/devices/system/cpu/cpu*/topology/core_id")
        .section("narrow", "./compat; ./compat; echo $?")
        .section("messages", "dmesg");
    Steps::new("identity")
        .in_guest("compat", COMPAT)
        .in_guest("script", script.into_bytes())
        .step("guest", "./tally run --append cryptomgr.notests --cpus 2 --pmu intel -- sh ./script")
        .run()
});

fn said(section: &str) -> String {
    let done = RESULTS.of("guest");
    assert_eq!((done.status, done.err.as_str()), (0, ""), "{}", done.text());
    Sections::of(done).text(section).to_owned()
}

fn the_processor_is_one_of_intels_that_kernels_know_no_more_of() {
    let text = said("processor");
    let fields: Vec<&str> = text.lines().filter_map(|line| line.split(": ").nth(1)).collect();
    assert_eq!(fields, ["GenuineIntel", "6", "32", "GenuineIntel", "6", "32"], "{text}");
    assert!(said("messages").contains("generic architected perfmon"), "{}", said("messages"));
}

fn its_kernel_touches_nothing_that_is_not_there() {
    let text = said("messages");
    for complaint in ["unchecked MSR", "Call Trace", "WARNING", "firmware bug"] {
        assert!(!text.contains(complaint), "{complaint}: {text}");
    }
}

fn it_does_not_guard_against_intels_flaws_for_nothing() {
    let text = said("flaws");
    for flaw in ["meltdown", "mds", "l1tf", "mmio_stale_data"] {
        assert!(text.contains(&format!("{flaw}:Not affected")), "{flaw}: {text}");
    }
}

fn its_cpus_are_cores_of_their_own() {
    assert_eq!(said("topology"), "0\n1\n");
}

fn a_system_call_of_the_hosts_vendor_does_the_kernel_no_harm() {
    assert_eq!(said("narrow"), "0\n", "it has no effect");
}
