//! A guest with the other vendor's PMU, on the lab's AMD host: its kernel takes the processor for that vendor's, and nothing
//! that it does for that makes it stumble.

use std::sync::LazyLock;

use guest_tests::lab::{Done, Results, Steps};
use guest_tests::programs::COMPAT;

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let intel = "./tally run --append cryptomgr.notests --cpus 2 --pmu intel --";
    Steps::new()
        .in_guest("compat", COMPAT)
        .step("processor", &format!("{intel} sed -n '/^vendor_id\\|^cpu family\\|^model\\t/p' /proc/cpuinfo"))
        .step("messages", &format!("{intel} dmesg"))
        .step("flaws", &format!("{intel} sh -c 'cd /sys/devices/system/cpu/vulnerabilities; grep . *'"))
        .step("topology", &format!("{intel} sh -c 'cat /sys/devices/system/cpu/cpu*/topology/core_id'"))
        .step("narrow", &format!("{intel} sh -c './compat; ./compat; echo $?'"))
        .run()
});

fn said(step: &str) -> String {
    let done: &Done = RESULTS.of(step);
    assert_eq!((done.status, done.err.as_str()), (0, ""), "{}", done.text());
    done.text()
}

#[test]
fn the_processor_is_one_of_intels_that_kernels_know_no_more_of() {
    let text = said("processor");
    let fields: Vec<&str> = text.lines().filter_map(|line| line.split(": ").nth(1)).collect();
    assert_eq!(fields, ["GenuineIntel", "6", "32", "GenuineIntel", "6", "32"], "{text}");
    assert!(said("messages").contains("generic architected perfmon"), "{}", said("messages"));
}

#[test]
fn its_kernel_touches_nothing_that_is_not_there() {
    let text = said("messages");
    for complaint in ["unchecked MSR", "Call Trace", "WARNING", "firmware bug"] {
        assert!(!text.contains(complaint), "{complaint}: {text}");
    }
}

#[test]
fn it_does_not_guard_against_intels_flaws_for_nothing() {
    let text = said("flaws");
    for flaw in ["meltdown", "mds", "l1tf", "mmio_stale_data"] {
        assert!(text.contains(&format!("{flaw}:Not affected")), "{flaw}: {text}");
    }
}

#[test]
fn its_cpus_are_cores_of_their_own() {
    assert_eq!(said("topology"), "0\n1\n");
}

#[test]
fn a_system_call_of_the_hosts_vendor_does_the_kernel_no_harm() {
    assert_eq!(said("narrow"), "0\n", "it has no effect");
}
