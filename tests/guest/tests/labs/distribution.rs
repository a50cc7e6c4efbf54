//! Test of a whole distribution on a disk: it boots to its login prompt, counts with its own perf, and powers off.

use guest_images::Progress;
use guest_tests::debian;
use guest_tests::lab::Steps;
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use tally_lab::programs::LOOP_INSTRUCTIONS;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![debian_boots_from_its_disk_to_its_login_prompt_and_counts_with_its_own_perf,])
}

fn debian_boots_from_its_disk_to_its_login_prompt_and_counts_with_its_own_perf() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: only root can install a Debian in a folder, to make the disk of");
        return;
    }
    let mut progress = Progress::stderr("debian");
    tally_lab::ensure(&debian::NEEDS, &mut progress).unwrap_or_else(|error| panic!("{error}"));
    let image = debian::image(&mut progress).unwrap_or_else(|error| panic!("{error}"));
    let keys = "expect:login: 'type:root\\r' 'expect:# ' 'type:systemctl --failed | cat\\r' 'expect:0 loaded units' 'expect:# ' \
                'type:perf stat -x, -e instructions:u loop\\r' expect:,,instructions:u 'expect:# ' \
                'type:systemctl poweroff\\r' 'expect:Power down'";
    let run = "./tally run --disk debian --append root=/dev/vda";
    let results = Steps::new("distribution")
        .file(image, "debian")
        .step("boot", &format!("./typist {keys} -- {run}"))
        .run();
    let done = results.of("boot");
    assert_eq!(done.status, 0, "{}{}", done.text(), done.err);
    let counted = format!("\r{LOOP_INSTRUCTIONS},,instructions:u,");
    assert!(done.text().contains(&counted), "{}", done.text());
}
