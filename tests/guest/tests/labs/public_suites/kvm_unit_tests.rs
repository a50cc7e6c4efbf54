//! Kernels of kvm-unit-tests, built as multiboot images.

use std::sync::LazyLock;

use guest_tests::lab::{Results, Steps};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;

const MODELS: [&str; 4] = ["amd", "amd-legacy", "intel", "intel-v2"];

/// Test kernels, without the extension `.flat`.
const KERNELS: [&str; 9] =
    ["apic", "eventinj", "hypercall", "idt_test", "pmu", "smptest", "syscall", "tsc", "xsave"];

static GUESTS: LazyLock<Option<Results>> = LazyLock::new(|| {
    let folder = super::suite("kvm-unit-tests", "pmu.flat")?;
    let mut steps = Steps::new("public_suites").file(folder.join("env"), "env");
    for kernel in KERNELS {
        steps = steps.file(folder.join(format!("{kernel}.flat")), kernel);
        for model in MODELS {
            let run = format!("./tally run --kernel {kernel} --initrd env --memory 256M --pmu {model}");
            steps = steps.step(&format!("{kernel}-{model}"), &run);
        }
    }
    Some(steps.long().run())
});

/// Checks that a kernel has passed all its checks on every model.
fn passes(kernel: &str) {
    let Some(guests) = &*GUESTS else { return };
    for model in MODELS {
        let done = guests.of(&format!("{kernel}-{model}"));
        let text = done.text();
        assert_eq!(done.status, 1, "{kernel} on {model}: {}\n{text}", done.err);
        assert!(!text.contains("FAIL"), "{kernel} on {model}:\n{text}");
        assert!(text.contains("PASS") || kernel == "smptest", "{kernel} on {model}:\n{text}");
    }
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
            second_tier(tests![$($test),*])
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
