//! A minute of each fuzz target: the second tier of tests. `cargo fuzz --minutes N` runs them for longer.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fuzz_targets::target;
use guest_images::Progress;
use tally_fuzz::Fuzzer;

/// Runs a target for a minute on one core. Panics at a finding.
fn a_minute(name: &str) {
    static BUILD: Mutex<()> = Mutex::new(());
    let fuzzer = {
        let _guard = BUILD.lock().unwrap_or_else(PoisonError::into_inner);
        Fuzzer::build(&mut Progress::stderr("fuzz")).unwrap_or_else(|error| panic!("{error}"))
    };
    let target = target(name).expect("there is a target with this name");
    let outcome = fuzzer.run(target, Duration::from_mins(1)).unwrap_or_else(|error| panic!("{error}"));
    if let Some(finding) = outcome.finding {
        panic!("{}\n  cargo fuzz {name} --replay {}", finding.what, finding.input.display());
    }
    assert!(outcome.executions > 0 && outcome.edges > 0, "{outcome:?}");
}

/// Defines tests, each of a target.
macro_rules! minutes {
    ($($test:ident: $target:literal),* $(,)?) => {$(
        #[test]
        #[ignore = "second tier: takes a minute"]
        fn $test() {
            a_minute($target);
        }
    )*};
}

minutes! {
    any_agent_is_heard_without_harm: "agent",
    any_kernel_file_is_loaded_or_refused_with_one_line: "kernels",
    no_vm_and_no_log_can_draw_on_the_operators_terminal: "operator",
    no_register_access_costs_the_host_more_than_a_bounded_time: "pmu",
    rdpmc_is_found_in_any_kernel_in_bounded_time: "rdpmc",
    any_riscv_kernel_is_changed_as_told_or_left_as_it_is: "riscv",
    no_request_leads_out_of_a_share_whose_files_change: "share",
    any_rings_and_registers_leave_a_device_in_order: "virtio",
}
