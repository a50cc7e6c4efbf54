//! Guests that start from a template count, and differ from each other, as guests that boot. One host for all of them,
//! some 20 guests and 10 boots: two minutes of a core. The Intel host boots one guest, with two vCPUs.

use std::collections::BTreeSet;

use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, StepOutput, Steps};
use guest_tests::suite::{Test, on_intel, second_tier};
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let first = tests![
        the_first_guest_makes_a_template_and_the_next_ones_start_from_it,
        a_template_counts_and_samples_exactly,
        no_two_guests_draw_the_same_random_numbers,
        a_guest_has_the_hosts_time_and_its_own_streams_and_status,
        a_template_that_was_changed_is_not_used,
    ];
    let second = second_tier(tests![
        every_pmu_has_a_template_of_its_own,
        shares_are_mounted,
        signals_and_flame_graphs_reach_a_guest_from_a_template,
        two_first_runs_make_one_template,
        without_a_cache_a_guest_boots,
        a_template_for_which_there_is_no_room_is_not_made_again,
        no_process_stays,
        many_guests_share_the_memory_of_a_template,
        the_system_calls_of_all_threads_are_those_of_the_sandbox,
    ]);
    let on_any_host = tests![vcpus_count_separately];
    let intel = on_intel([on_any_host.clone(), tests![a_template_counts_and_samples_exactly]].concat());
    [first, second, second_tier([on_any_host, intel].concat())].concat()
}

/// Instructions of `/lib/tally/loop`.
const LOOP: u64 = 20_000_004;
const COUNT: &str = "perf stat -x, -e instructions:u,branches:u /lib/tally/loop";
/// PMUs of an AMD host.
const PMUS: [&str; 4] = ["amd-legacy", "intel", "intel-v2", "none"];
/// Virtual time of a run that starts from a template, in hundredths of a second; one that makes the template takes over
/// five times as long.
const SOON: u64 = 25;

static RESULTS: OnEachHost = OnEachHost::new(|| match host::current() {
    Host::Amd => on_amd(Steps::new("templates").configure_host(|host| host.memory_mib(4 << 10))).run(),
    // All its guests have two vCPUs, so that they have one template.
    Host::Intel => counting(on_two_cpus(Steps::new("templates")), "--cpus 2").run(),
});

fn tally(options: &str, command: &str) -> String {
    format!("TALLY_CACHE=$PWD/cache TALLY_BOOT= ./tally run {options} -- {command}")
}

fn twice(options: &str, command: &str) -> String {
    format!("{0}; {0}", tally(options, command))
}

fn on_two_cpus(steps: Steps) -> Steps {
    let both = "sh -c 'for cpu in 0 1; do taskset -c $cpu perf stat -x, -e instructions:u /lib/tally/loop 2>&1; done'";
    steps.step("vcpus", &twice("-v --cpus 2", both))
}

/// Adds guests that count and sample, with a template that exists already.
fn counting(steps: Steps, options: &str) -> Steps {
    let sample = "sh -c 'perf record -q -o /tmp/data -e instructions:u -c 1000000 /lib/tally/loop; \
                  perf script -i /tmp/data -F ip | grep -c .'";
    steps.step("count", &tally(options, COUNT)).step("sample", &tally(options, sample))
}

fn on_amd(steps: Steps) -> Steps {
    let timed = format!(
        "read begun rest </proc/uptime; {}; read ended rest </proc/uptime; echo $begun $ended",
        tally("-v", "echo hello")
    );
    let random = "sh -c 'head -c 16 /dev/urandom | od -An -tx1; cat /proc/sys/kernel/random/uuid /proc/sys/kernel/random/boot_id'";
    let steps = counting(steps.step("first", &timed).step("second", &timed), "")
        .step("random", &twice("", random))
        .step("time", &format!("date +%s; {}; date +%s", tally("", "date +%s")))
        .step("streams", &format!("echo in | {}", tally("", "sh -c 'cat; echo err >&2; exit 7'")))
        .step(
            "changed",
            &format!(
                // The memory is not copied: `cp` would write its holes.
                "template=$(echo cache/template-*); mkdir kept; ln $template/memory kept; cp $template/state.json kept; \
                 sed -i 's/\"is_linux\":true/\"is_linux\":7/' $template/state.json; {hello}; \
                 mkdir -m 700 $template; cp kept/state.json $template; truncate -s 1M $template/memory; {hello}; \
                 mkdir -m 700 $template; mv kept/* $template",
                hello = tally("-v", "echo hello")
            ),
        );
    steps
        .second_tier(|steps| {
            let steps = PMUS.into_iter().fold(steps, |steps, pmu| {
                steps.step(pmu, &twice(&format!("-v --pmu {pmu}"), &format!("sh -c \"{COUNT} 2>&1\"")))
            });
            let many = format!(
                "for guest in $(seq 20); do {} & guests=\"$guests $!\"; done; for guest in $guests; do wait $guest; echo $?; done",
                tally("", "true")
            );
            on_two_cpus(steps)
                .step(
                    "shares",
                    &format!(
                        "mkdir a b; echo one >a/file; {}; cat b/made",
                        twice("-v --share a --share b:rw", "sh -c 'cat /scenario/a/file; date +%s >>/scenario/b/made; ls /scenario'")
                    ),
                )
                .step("many", &many)
                .step(
                    "signal",
                    &format!(
                        "{} >said & tally=$!; until grep -qs ready said; do sleep 0.1; done; kill -USR1 $tally; wait $tally; echo $?; cat said",
                        tally("", "sh -c 'trap \"echo caught; exit 3\" USR1; echo ready; while true; do sleep 0.1; done'")
                    ),
                )
                .step(
                    "graph",
                    &format!(
                        "{}; grep -q '<svg' out.svg && echo drawn",
                        tally("--pmu-policy tenant --flamegraph out.svg", "sh -c '/lib/tally/loop; /lib/tally/loop'")
                    ),
                )
                .step(
                    "at-once",
                    &format!(
                        "rm -r cache; for guest in 1 2; do {} & guests=\"$guests $!\"; done; for guest in $guests; do wait $guest; echo $?; done; \
                         ls -d other/template-* | wc -l",
                        tally("", "echo hello").replace("PWD/cache", "PWD/other")
                    ),
                )
                .step(
                    "small-cache",
                    &format!(
                        "mkdir small; mount -t tmpfs -o size=100m,mode=700 tmpfs small; {}; {}",
                        tally("", "echo hello").replace("PWD/cache", "PWD/small"),
                        tally("-v", "echo hello").replace("PWD/cache", "PWD/small")
                    ),
                )
                .step("no-cache", &tally("-v", "echo hello").replace("$PWD/cache", "/proc/none"))
                .step(
                    "processes",
                    &format!(
                        "{} >said & tally=$!; until grep -qs ready said; do sleep 0.1; done; \
                         grep -ls tally-teardown /proc/[0-9]*/comm | wc -l; kill -KILL $tally; wait $tally; sleep 1; \
                         grep -ls -e tally -e vcpu /proc/[0-9]*/comm | wc -l",
                        tally("", "sh -c 'echo ready; sleep 100'")
                    ),
                )
                .step(
                    "confined",
                    &format!(
                        "rm -r cache; dmesg -C; {}; dmesg | grep -c type=1326",
                        twice("-v --sandbox log --cpus 2", COUNT)
                    ),
                )
        })
}

/// Returns the virtual time that a step took, in hundredths of a second, and whether its guest booted.
fn time_of(step: &str) -> (u64, bool) {
    let done = RESULTS.of(step);
    let text = done.text();
    let ["hello", times] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}{}", done.err) };
    let times: Vec<u64> =
        times.replace('.', "").split(' ').map(|time| time.parse().expect("a time")).collect();
    (times[1] - times[0], done.err.contains("kernel command line"))
}

fn the_first_guest_makes_a_template_and_the_next_ones_start_from_it() {
    let (first, booted) = time_of("first");
    assert!(first > 5 * SOON && !booted, "{first}");
    let (second, booted) = time_of("second");
    assert!(second < SOON && !booted, "{second}");
}

fn assert_counts(text: &str, times: usize) {
    let count = |event: &str| {
        let counts = text.lines().filter(|line| line.contains(&format!(",,{event}:u,")));
        counts.map(|line| line.split(',').next().unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(count("instructions"), vec![LOOP.to_string(); times], "{text}");
}

/// Checks that both guests of a step with `-v` started from a template.
fn assert_from_template(done: &StepOutput) {
    assert_eq!(done.err.matches("the guest starts from the template").count(), 2, "{}", done.err);
    assert!(!done.err.contains("the guest boots"), "{}", done.err);
}

fn a_template_counts_and_samples_exactly() {
    let done = RESULTS.of("count");
    assert_counts(&done.err, 1);
    assert!(done.err.lines().any(|line| line.starts_with("10000001,,branches:u,")), "{}", done.err);
    let done = RESULTS.of("sample");
    assert_eq!((done.status, done.text().as_str()), (0, "20\n"), "{}", done.err);
}

fn no_two_guests_draw_the_same_random_numbers() {
    let text = RESULTS.of("random").text();
    let drawn: BTreeSet<&str> = text.lines().collect();
    assert_eq!((text.lines().count(), drawn.len()), (6, 6), "{text}");
}

fn a_guest_has_the_hosts_time_and_its_own_streams_and_status() {
    let text = RESULTS.of("time").text();
    let times: Vec<u64> = text.lines().map(|time| time.parse().expect("a time")).collect();
    assert!(times.len() == 3 && times[0] <= times[1] && times[1] <= times[2], "{text}");
    let done = RESULTS.of("streams");
    assert_eq!((done.status, done.text().as_str(), done.err.as_str()), (7, "in\n", "err\n"));
}

fn a_template_that_was_changed_is_not_used() {
    let done = RESULTS.of("changed");
    assert_eq!(done.text(), "hello\nhello\n", "{}", done.err);
    assert_eq!(done.err.matches("the guest boots: ").count(), 2, "{}", done.err);
}

fn every_pmu_has_a_template_of_its_own() {
    for pmu in PMUS {
        let done = RESULTS.of(pmu);
        assert_eq!(done.status, 0, "{pmu}: {}", done.err);
        assert_from_template(done);
        if pmu == "none" {
            assert_eq!(done.text().matches("<not supported>,,instructions:u").count(), 2, "{}", done.text());
        } else {
            assert_counts(&done.text(), 2);
        }
    }
}

fn vcpus_count_separately() {
    let done = RESULTS.of("vcpus");
    assert_counts(&done.text(), 4);
    assert_from_template(done);
}

fn shares_are_mounted() {
    let done = RESULTS.of("shares");
    assert_from_template(done);
    let text = done.text();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines[..6], ["one", "a", "b", "one", "a", "b"], "{text}{}", done.err);
    assert_eq!(lines.len(), 8, "{text}");
}

fn many_guests_share_the_memory_of_a_template() {
    let done = RESULTS.of("many");
    assert_eq!(done.text(), "0\n".repeat(20), "{}", done.err);
}

fn signals_and_flame_graphs_reach_a_guest_from_a_template() {
    let done = RESULTS.of("signal");
    assert_eq!(done.text(), "3\nready\ncaught\n", "{}", done.err);
    let done = RESULTS.of("graph");
    assert_eq!((done.status, done.text().as_str()), (0, "drawn\n"), "{}", done.err);
}

fn two_first_runs_make_one_template() {
    let done = RESULTS.of("at-once");
    let text = done.text();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["0", "0", "1", "hello", "hello"], "{}", done.err);
}

fn without_a_cache_a_guest_boots() {
    let done = RESULTS.of("no-cache");
    assert_eq!((done.status, done.text().as_str()), (0, "hello\n"), "{}", done.err);
    assert!(done.err.contains("the guest boots: "), "{}", done.err);
}

fn a_template_for_which_there_is_no_room_is_not_made_again() {
    let done = RESULTS.of("small-cache");
    assert_eq!((done.status, done.text().as_str()), (0, "hello\nhello\n"), "{}", done.err);
    assert!(
        done.err.contains("No space left on device (os error 28); remove it to try again"),
        "{}",
        done.err
    );
    assert!(!done.err.contains("saving a guest"), "{}", done.err);
}

fn no_process_stays() {
    let done = RESULTS.of("processes");
    assert_eq!(done.text(), "1\n0\n", "{}", done.err);
}

fn the_system_calls_of_all_threads_are_those_of_the_sandbox() {
    let done = RESULTS.of("confined");
    assert_eq!(done.text(), "0\n", "{}", done.err);
    assert_from_template(done);
    assert_counts(&done.err, 2);
}
