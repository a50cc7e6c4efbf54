//! Tests of a guest with Intel's PMU on the lab's AMD host. Its kernel sees an Intel processor, and must run without
//! errors.

use std::sync::LazyLock;

use guest_tests::lab::{Results, Steps};
use guest_tests::perf::{Script, Sections};
use guest_tests::programs::COMPAT;
use guest_tests::suite::Test;
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        the_guest_sees_an_intel_processor_with_architectural_perfmon,
        the_kernel_accesses_no_missing_registers,
        the_kernel_enables_no_mitigations_for_intels_vulnerabilities,
        each_vcpu_is_a_core_of_its_own,
        syscall_in_compatibility_mode_does_no_harm,
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
        .step("guest", "./tally run --cpus 2 --pmu intel -- sh ./script")
        .run()
});

fn section(name: &str) -> String {
    let done = RESULTS.of("guest");
    assert_eq!((done.status, done.err.as_str()), (0, ""), "{}", done.text());
    Sections::of(done).text(name).to_owned()
}

fn the_guest_sees_an_intel_processor_with_architectural_perfmon() {
    let text = section("processor");
    let fields: Vec<&str> = text.lines().filter_map(|line| line.split(": ").nth(1)).collect();
    assert_eq!(fields, ["GenuineIntel", "6", "32", "GenuineIntel", "6", "32"], "{text}");
    assert!(section("messages").contains("generic architected perfmon"), "{}", section("messages"));
}

fn the_kernel_accesses_no_missing_registers() {
    let text = section("messages");
    for complaint in ["unchecked MSR", "Call Trace", "WARNING", "firmware bug"] {
        assert!(!text.contains(complaint), "{complaint}: {text}");
    }
}

fn the_kernel_enables_no_mitigations_for_intels_vulnerabilities() {
    let text = section("flaws");
    for flaw in ["meltdown", "mds", "l1tf", "mmio_stale_data"] {
        assert!(text.contains(&format!("{flaw}:Not affected")), "{flaw}: {text}");
    }
}

fn each_vcpu_is_a_core_of_its_own() {
    assert_eq!(section("topology"), "0\n1\n");
}

fn syscall_in_compatibility_mode_does_no_harm() {
    assert_eq!(section("narrow"), "0\n", "it has no effect");
}
