//! Tests of programs in guests that read counters with RDPMC. The host's kernel is Debian stable's: on AMD's
//! processors, older KVMs let the instruction read 0, and then it is switched off
//! (`features::user_mode_rdpmc_is_disabled`).

use std::fs;
use std::sync::LazyLock;

use guest_images::{Progress, Suite};
use guest_tests::lab::{Results, Steps, with_installed_kernel};
use guest_tests::suite::{Test, second_tier};
use guest_tests::{program, tests};
use tally_lab::packed;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [
        tests![programs_see_what_they_see_on_the_host],
        second_tier(tests![
            programs_see_what_they_see_on_the_host_with_every_pmu,
            programs_see_what_they_see_on_the_host_with_isolated_page_tables,
            programs_see_what_they_see_on_the_host_with_newer_kernels,
            perfs_own_tests_of_such_reads_pass,
            papi_reads_counters_without_system_calls,
        ]),
    ]
    .concat()
}

const RUN: &str = "./tally run --cpus 2";

/// Options of the guests of the second tier in which `reader` runs.
const GUESTS: [(&str, &str); 6] = [
    ("amd-legacy", "--pmu amd-legacy"),
    ("intel", "--pmu intel"),
    ("intel-v2", "--pmu intel-v2"),
    ("isolated", "--pmu intel --append pti=on"),
    ("trixie", "--kernel trixie/boot/vmlinuz"),
    ("sid", "--kernel sid/boot/vmlinuz"),
];

/// Runs in the guest, in a folder that has PAPI: asks how it reads counters, and what the loop has executed.
const PAPI: &str = "\
mount -t proc none proc; mount -t sysfs none sys
chroot . papi_avail | grep -i 'fast counter'
chroot . papi_command_line PAPI_TOT_INS PAPI_BR_INS PAPI_TOT_CYC | grep -E '^PAPI'
chroot . papi_cost -t 1000 | grep -A 3 'PAPI_read '
";

static HOST: LazyLock<Results> = LazyLock::new(|| {
    let reader = fs::read(program("reader")).expect("it was built");
    Steps::new("rdpmc")
        .configure_host(|host| host.host(Suite::Trixie))
        .file(program("reader"), "reader")
        .in_guest("reader", reader)
        .step("host", "./reader")
        .step("amd", &format!("{RUN} --pmu amd -- ./reader"))
        .second_tier(|steps| {
            let steps = with_installed_kernel(steps, "trixie", Suite::Trixie);
            let mut steps = with_installed_kernel(steps, "sid", Suite::Sid);
            for (name, options) in GUESTS {
                steps = steps.step(name, &format!("{RUN} {options} -- ./reader"));
            }
            let papi = packed::archive("papi-tools", &mut Progress::stderr("lab"))
                .unwrap_or_else(|error| panic!("{error}"));
            steps
                .step("isolation", &format!("{RUN} --append pti=on -- sh -c 'dmesg | grep isolation'"))
                .step("perf", &format!("{RUN} -- perf test 'User space counter reading'"))
                .file(papi, "papi.tar")
                .configure_host(|host| host.program(PAPI.as_bytes(), "in-guest"))
                .step("unpack", "mkdir root; tar -C root -xf papi.tar; cp in-guest root")
                .step("papi", "cd root && ../tally run --share .:rw -- sh ./in-guest")
        })
        .run()
});

/// Checks that `reader` prints in a guest what it prints on the host.
fn reads_as_the_host(guest: &str) {
    let [host, done] = ["host", guest].map(|name| HOST.of(name));
    assert_eq!(done.status, 0, "{guest}: {}", done.err);
    assert_eq!(done.text(), host.text(), "{guest}");
}

fn programs_see_what_they_see_on_the_host() {
    let text = HOST.of("host").text();
    let expected = [
        "before mapping: fault",
        "page: read",
        "mapped: done",
        "1 rounds: 6 instructions",
        "1000 rounds: 2004 instructions",
        "1000000 rounds: 2000004 instructions",
        "no such counter: fault",
        "another fault: fault",
        "privileged instruction: fault",
        "32-bit code: read",
        "threads: read",
        "beside overflows in the kernel: read",
        "steps: [3, 4, 6, 7, 8]",
        "unmapped: fault",
    ];
    assert_eq!(text.lines().collect::<Vec<_>>(), expected);
    reads_as_the_host("amd");
}

fn programs_see_what_they_see_on_the_host_with_every_pmu() {
    ["amd-legacy", "intel", "intel-v2"].into_iter().for_each(reads_as_the_host);
}

fn programs_see_what_they_see_on_the_host_with_isolated_page_tables() {
    reads_as_the_host("isolated");
    let isolation = HOST.of("isolation").text();
    assert!(isolation.contains("page tables isolation: enabled"), "{isolation}");
}

fn programs_see_what_they_see_on_the_host_with_newer_kernels() {
    ["trixie", "sid"].into_iter().for_each(reads_as_the_host);
}

fn perfs_own_tests_of_such_reads_pass() {
    let done = HOST.of("perf");
    let text = done.text() + &done.err;
    assert_eq!(text.matches(": Ok").count(), 2, "{text}");
    assert!(!text.contains("FAILED") && !text.contains("Skip"), "{text}");
}

fn papi_reads_counters_without_system_calls() {
    let done = HOST.of("papi");
    let text = done.text();
    assert_eq!(done.status, 0, "{text}{}", done.err);
    assert!(text.lines().any(|line| line.contains("rdpmc") && line.contains("yes")), "{text}");
    let count = text.lines().find_map(|line| line.strip_prefix("PAPI_TOT_INS :")?.trim().parse().ok());
    assert!(count.is_some_and(|count: u64| count > 1_000_000), "{text}");
}
