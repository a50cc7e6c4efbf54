//! A minute of each fuzz target: the second tier of tests. `cargo fuzz --minutes N` runs them for longer.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fuzz_targets::target;
use guest_images::Progress;
use tally_fuzz::{Error, Fuzzer};

/// Runs a target for a minute on one core. Panics at a finding.
fn a_minute(name: &str) {
    static BUILD: Mutex<()> = Mutex::new(());
    let fuzzer = {
        let _guard = BUILD.lock().unwrap_or_else(PoisonError::into_inner);
        Fuzzer::build(&mut Progress::stderr("fuzz")).unwrap_or_else(|error| panic!("{error}"))
    };
    let target = target(name).expect("there is a target with this name");
    let outcome = fuzzer.run(target, Duration::from_mins(1)).unwrap_or_else(|error| match &error {
        // Nobody may be able to read the log later.
        Error::Failed { log, .. } => panic!("{error}:\n{}", end(log)),
        _ => panic!("{error}"),
    });
    if let Some(finding) = outcome.finding {
        let input = finding.input.display();
        panic!(
            "{}\n  cargo fuzz {name} --replay {input}\nin hexadecimal:{}",
            finding.what,
            hex(&finding.input)
        );
    }
    assert!(outcome.executions > 0 && outcome.edges > Some(0), "{outcome:?}");
}

/// Returns the last lines of a log.
fn end(log: &Path) -> String {
    let log = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&log);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].join("\n")
}

/// Returns the bytes of a file, as `xxd -r -p` reads them.
fn hex(file: &Path) -> String {
    let mut text = String::new();
    for line in fs::read(file).unwrap_or_default().chunks(50) {
        text.push('\n');
        for byte in line {
            write!(text, "{byte:02x}").expect("strings can be written");
        }
    }
    text
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
    any_image_is_unpacked_into_its_folder_or_refused_with_one_line: "image",
    any_kernel_file_is_loaded_or_refused_with_one_line: "kernels",
    any_memory_of_a_guest_is_read_without_harm: "memory",
    no_mirror_gets_anywhere_else: "mirror",
    no_vm_and_no_log_can_draw_on_the_operators_terminal: "operator",
    no_register_access_costs_the_host_more_than_a_bounded_time: "pmu",
    rdpmc_is_found_in_any_kernel_in_bounded_time: "rdpmc",
    any_riscv_kernel_is_changed_as_told_or_left_as_it_is: "riscv",
    no_request_leads_out_of_a_share_whose_files_change: "share",
    any_saved_state_is_refused_or_works_as_what_a_guest_has_set_up: "snapshot",
    any_rings_and_registers_leave_a_device_in_order: "virtio",
}
