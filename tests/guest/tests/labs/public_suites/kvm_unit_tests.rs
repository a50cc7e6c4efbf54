//! Kernels of kvm-unit-tests, built as multiboot images.

use std::iter;

use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, Results, StepOutput, Steps};
use guest_tests::suite::{Test, on_intel, second_tier, third_tier};
use guest_tests::tests;

const MODELS: [&str; 4] = ["amd", "amd-legacy", "intel", "intel-v2"];

/// Test kernels, without the extension `.flat`.
const KERNELS: [&str; 9] =
    ["apic", "eventinj", "hypercall", "idt_test", "pmu", "smptest", "syscall", "tsc", "xsave"];
/// A kernel that runs on the Intel host only: it uses an instruction that the AMD host's processor lacks.
const DEBUG: &str = "debug";

/// The models with which a kernel runs. On the Intel host, which is slow, only the PMU's kernel runs with all, and the
/// others with the host's own. `syscall` makes system calls that only AMD's processors have.
fn models(kernel: &str) -> &'static [&'static str] {
    match (host::current(), kernel) {
        (Host::Amd, _) | (Host::Intel, "pmu") => &MODELS,
        (Host::Intel, "syscall") => &[],
        (Host::Intel, _) => &["intel"],
    }
}

/// Returns true if the simulated Intel processor fails checks of this kernel with these PMUs.
fn fails(kernel: &str, model: &str) -> bool {
    host::current() == Host::Intel && kernel == "pmu" && model.starts_with("intel")
}

static GUESTS: OnEachHost<Option<Results>> = OnEachHost::new(|| {
    let folder = super::suite("kvm-unit-tests", "pmu.flat")?;
    let on_intel_only = (host::current() == Host::Intel).then_some(DEBUG);
    let mut steps = Steps::new("public_suites").file(folder.join("env"), "env");
    for kernel in KERNELS.into_iter().chain(on_intel_only) {
        steps = steps.file(folder.join(format!("{kernel}.flat")), kernel);
        let kvms_own = (kernel == DEBUG).then_some("kvm");
        for model in models(kernel).iter().copied().chain(kvms_own) {
            let run = format!("./tally run --kernel {kernel} --initrd env --memory 256M --pmu {model}");
            steps = steps.step(&format!("{kernel}-{model}"), &run);
        }
    }
    Some(steps.long().run())
});

/// Returns the lines about failed checks.
fn failures(done: &StepOutput) -> Vec<String> {
    done.text().lines().filter(|line| line.starts_with("FAIL")).map(str::to_owned).collect()
}

/// Checks that a kernel has passed all its checks on every model.
fn passes(kernel: &str) {
    let Some(guests) = &*GUESTS else { return };
    for model in models(kernel) {
        let done = guests.of(&format!("{kernel}-{model}"));
        let text = done.text();
        assert!(text.contains("PASS") || kernel == "smptest", "{kernel} on {model}:\n{text}");
        if fails(kernel, model) {
            continue;
        }
        assert_eq!(done.status, 1, "{kernel} on {model}: {}\n{text}", done.err);
        assert_eq!(failures(done), Vec::<String>::new(), "{kernel} on {model}:\n{text}");
    }
}

/// Returns what the PMU's kernel says of this many counters on the Intel host. A loop reads a million lines of memory,
/// and the kernel accepts up to a million misses of the last cache. The simulated cache has no prefetcher, so each of
/// them is a miss, as is the line of the stack after the loop.
fn one_miss_too_many(checks: &str, counters: usize) -> Vec<String> {
    let named = (0..counters).map(|counter| format!("llc misses-{counter}"));
    let checks =
        named.chain(iter::once("all counters".to_owned())).map(|name| format!("FAIL: {checks}: {name}"));
    checks.flat_map(|line| ["FAIL: 1 <= 1000001 <= 1000000".to_owned(), line]).collect()
}

/// On the Intel host, what fails under KVM's own PMU, too, is the processor's fault.
fn kvm_unit_tests_pmu_finds_only_too_many_cache_misses() {
    const COUNTERS: usize = 8;
    let Some(guests) = &*GUESTS else { return };
    let of_version_2 = one_miss_too_many("Intel", COUNTERS);
    let with_full_width_writes = one_miss_too_many("Intel: full-width writes", COUNTERS);
    assert_eq!(failures(guests.of("pmu-intel-v2")), of_version_2);
    assert_eq!(failures(guests.of("pmu-intel")), [of_version_2, with_full_width_writes].concat());
}

fn kvm_unit_tests_debug_fails_as_under_kvms_own_pmu() {
    let Some(guests) = &*GUESTS else { return };
    let found = failures(guests.of("debug-intel"));
    // Bochs does not hold back exceptions after MOV SS as processors do.
    assert_eq!(found.len(), 3, "{found:?}");
    assert_eq!(found, failures(guests.of("debug-kvm")));
}

macro_rules! kernels {
    ($($test:ident: $kernel:literal,)*) => {
        $(
            fn $test() {
                passes($kernel);
            }
        )*

        /// The tests of this module.
        pub fn tests() -> Vec<Test> {
            let on_each_host = tests![$($test),*];
            let on_intel_only = tests![
                kvm_unit_tests_pmu_finds_only_too_many_cache_misses,
                kvm_unit_tests_debug_fails_as_under_kvms_own_pmu,
            ];
            let kernels = [$($kernel),*].into_iter().zip(on_each_host.clone());
            let also_on_intel = kernels.filter(|(kernel, _)| *kernel != "syscall").map(|(_, test)| test);
            let on_intel = on_intel(also_on_intel.chain(on_intel_only).collect());
            [second_tier(on_each_host), third_tier(on_intel)].concat()
        }
    };
}

kernels! {
    kvm_unit_tests_apic: "apic",
    kvm_unit_tests_eventinj: "eventinj",
    kvm_unit_tests_hypercall: "hypercall",
    kvm_unit_tests_idt_test: "idt_test",
    kvm_unit_tests_pmu: "pmu",
    kvm_unit_tests_smptest: "smptest",
    kvm_unit_tests_syscall: "syscall",
    kvm_unit_tests_tsc: "tsc",
    kvm_unit_tests_xsave: "xsave",
}
