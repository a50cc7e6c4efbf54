//! Runs each fuzz target on its corpus, so that what was once found stays mended.

use std::fs;

use fuzz_targets::{TARGETS, target};

/// Runs a target on its corpus.
fn replay(name: &str) {
    let target = target(name).expect("there is a target with this name");
    let inputs = target.inputs().unwrap_or_else(|error| panic!("{error}"));
    assert!(!inputs.is_empty(), "{name} has no corpus");
    for (input, bytes) in inputs {
        assert!(bytes.len() <= target.max_len, "{input} is too long");
        let result = std::panic::catch_unwind(|| (target.run)(&bytes));
        assert!(result.is_ok(), "cargo fuzz {name} --replay {input}");
    }
}

/// Returns an input that a person has named.
fn named(target: &str, input: &str) -> Vec<u8> {
    let target = fuzz_targets::target(target).expect("there is a target with this name");
    fs::read(target.named().join(input)).expect("it is in the corpus")
}

/// Defines tests, each of a target.
macro_rules! corpora {
    ($($test:ident: $target:literal),* $(,)?) => {
        /// Names of the targets that have a test here.
        const TESTED: &[&str] = &[$($target),*];

        $(
            #[test]
            fn $test() {
                replay($target);
            }
        )*
    };
}

corpora! {
    what_agents_have_said_does_no_harm: "agent",
    images_of_containers_get_nowhere_else: "image",
    kernel_files_are_loaded_or_refused_with_one_line: "kernels",
    what_a_guest_has_in_its_memory_is_read_without_harm: "memory",
    what_mirrors_have_sent_gets_nowhere_else: "mirror",
    what_vms_and_logs_have_said_cannot_draw_on_a_terminal: "operator",
    register_accesses_cost_the_host_a_bounded_time: "pmu",
    rdpmc_is_found_in_bounded_time: "rdpmc",
    riscv_kernels_are_changed_as_told_or_left_as_they_are: "riscv",
    requests_do_not_lead_out_of_a_share_whose_files_change: "share",
    saved_states_are_refused_or_work_as_what_a_guest_has_set_up: "snapshot",
    rings_and_registers_leave_a_device_in_order: "virtio",
}

#[test]
fn every_target_has_a_test() {
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(names, TESTED);
}

/// The project has few files, and each has a name that says something.
#[test]
fn every_file_in_the_corpora_is_a_pack_or_has_a_name() {
    let is_hash = |name: &str| name.len() == 40 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
    for target in &TARGETS {
        for (input, _) in target.inputs().unwrap_or_else(|error| panic!("{error}")) {
            let name = input.rsplit('/').next().unwrap_or_default();
            assert!(
                !is_hash(name),
                "{input}: `cargo fuzz --merge` puts such inputs into {}.inputs",
                target.name
            );
        }
    }
}

/// Answers that nobody understands do no harm either, so the ones from which runs begin have to be real.
#[test]
fn answers_in_the_corpus_are_understood() {
    for (name, says) in [("look-many", "instructions:u"), ("report-many", "tally_")] {
        let input = named("operator", name);
        let shown = tally::untrusted::answers(&input[1..]).unwrap_or_default();
        assert!(shown.contains(says), "{name}: {shown}");
    }
}

/// As with answers: the images have to be some that are unpacked.
#[test]
#[cfg(target_arch = "x86_64")]
fn images_in_the_corpus_are_unpacked() {
    for name in ["docker", "oci"] {
        let (folder, input) = (tempfile::tempdir().unwrap(), named("image", name));
        let image = folder.path().join("image");
        fs::write(&image, &input[1..]).unwrap();
        guest_images::untrusted::open_image(&image, &folder.path().join("cache")).expect(name);
    }
}

/// As with answers: the guest has to be one of this architecture.
#[test]
#[cfg(target_arch = "x86_64")]
fn the_guest_in_the_corpus_is_understood() {
    let input = named("snapshot", "guest");
    let machine = tally::untrusted::saved_guest(&input[1..]).expect("it is a guest's state");
    assert_eq!(tally_machine::untrusted::saved_devices(&machine).len(), 3);
    assert_eq!(tally_machine::untrusted::saved_pmus(&machine).len(), 1);
    assert_eq!(tally_machine::untrusted::restore_console(&machine), Ok(()));
}
