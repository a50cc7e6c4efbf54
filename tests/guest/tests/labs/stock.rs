//! A host that nobody has prepared: its distribution's settings, the NMI watchdog, and an ordinary user who types what
//! `tally doctor` tells him. Guests without an operating system count: a step takes a tenth of a second of a core.

use std::sync::LazyLock;

use guest_images::Suite;
use guest_images::payloads::{LOOP_BRANCHES, LOOP_INSTRUCTIONS};
use guest_tests::lab::{Results, StepOutput, Steps};
use guest_tests::program;
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use vpmu_perf::MORE_PAGES;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [
        tests![
            root_counts_exactly_whatever_the_distributions_setting,
            a_user_counts_as_soon_as_he_has_typed_what_doctor_says,
            a_program_with_cap_perfmon_counts_where_that_is_enough,
            doctors_verdict_is_what_a_run_does,
            counts_are_exact_where_pages_cannot_be_mapped_and_one_line_says_so,
            no_command_that_helps_makes_a_user_an_administrator,
            whatever_sockets_other_users_make_roots_commands_find_roots_vm,
        ],
        second_tier(tests![
            a_hundred_guests_of_four_vcpus_count_exactly_without_pages,
            on_debian_12s_kernel_root_and_users_count,
            on_the_newest_kernel_root_and_users_count,
        ]),
    ]
    .concat()
}

/// The values of `kernel.perf_event_paranoid` that there are. Debian's is 3, Ubuntu's 4.
const LEVELS: [i32; 6] = [-1, 0, 1, 2, 3, 4];
/// What a guest counts in user mode, and in its kernel.
const WORK: &str = "count-user=0:0x4100c0,1000000,0 count=0:0x4200c0,1000000,1";
/// Number of instructions in user mode: a loop of a million rounds, and the one that ends it.
const IN_USER_MODE: &str = "count 1000000 00000000001e8481";

/// Shell functions: `user COMMAND...` runs it as a member of the group of `/dev/kvm` who has a folder of his own, and
/// `type_all` executes the commands between backticks in a text, as root.
const FUNCTIONS: &str = "\
chgrp 65534 /dev/kvm; chmod 660 /dev/kvm
user() { ./restricted unprivileged \"$@\"; }
sudo() { \"$@\"; }
type_all() { grep -o '`[^`]*`' | tr -d '`' | while read -r command; do eval \"$command\" >&2 || echo \"failed: $command\"; done; }
mkdir -p /tmp/bin; cp tally /tmp/bin/tally
level() { echo $1 >/proc/sys/kernel/perf_event_paranoid; }
";

fn run(program: &str) -> String {
    format!("{program} run --kernel payload --append '{WORK}'")
}

/// Adds steps for each setting: root's, an ordinary user's before and after each command of doctor's, and those of a
/// program with `CAP_PERFMON`.
fn at_each_level(steps: Steps) -> Steps {
    let steps = steps.file(program("restricted"), "restricted");
    LEVELS.iter().fold(steps, |steps, level| {
        let prepared = format!("{FUNCTIONS}level {level}; ");
        let user = run("/tmp/bin/tally");
        let refusal = "user /tmp/bin/tally doctor | grep '^BAD pmu'";
        let typed = |number: u32| {
            format!(
                "{prepared} command=$({refusal} | grep -o '`[^`]*`' | sed -n '{number}p'); echo \"$command\"; \
                 [ -n \"$command\" ] && echo \"$command\" | type_all && user {user}"
            )
        };
        steps
            .step(&format!("root{level}"), &format!("{prepared} {}", run("./tally")))
            .step(&format!("root-doctor{level}"), &format!("{prepared} ./tally doctor"))
            .step(&format!("user{level}"), &format!("{prepared} user {user}"))
            .step(&format!("doctor{level}"), &format!("{prepared} user /tmp/bin/tally doctor"))
            .step(&format!("first{level}"), &typed(1))
            .step(&format!("second{level}"), &typed(2))
            .step(
                &format!("capable{level}"),
                &format!("{prepared} ./restricted setcap {user}"),
            )
            .step(
                &format!("capable-doctor{level}"),
                &format!("{prepared} ./restricted setcap /tmp/bin/tally doctor"),
            )
            .step(&format!("without{level}"), "rm -r /tmp/bin")
    })
}

static SETTINGS: LazyLock<Results> =
    LazyLock::new(|| at_each_level(Steps::new("stock::settings").stock()).run());

fn on(suite: Suite, name: &'static str) -> Results {
    at_each_level(Steps::new(name).stock().configure_host(move |scenario| scenario.host(suite))).run()
}

/// Checks that a guest counted exactly.
fn assert_exact(done: &StepOutput, about: &str) {
    assert_eq!(done.status, 1, "{about}: {}{}", done.text(), done.err);
    let text = done.text();
    let counts: Vec<&str> = text.lines().filter(|line| line.starts_with("count ")).collect();
    let [user, kernel] = counts[..] else { panic!("{about}: {text}") };
    assert_eq!(user, IN_USER_MODE, "{about}");
    let kernel = u64::from_str_radix(kernel.rsplit(' ').next().expect("a number"), 16).expect("a number");
    assert!((2_000_000..2_000_100).contains(&kernel), "{about}: {kernel}");
    // The line that tells of the watchdog's counter.
    let others: Vec<&str> = done.err.lines().filter(|line| !line.contains("nmi_watchdog=0")).collect();
    assert!(others.is_empty(), "{about}: {others:?}");
}

/// Checks that a run ended at its start, with one line. Returns the commands in it.
fn commands_of_refusal(done: &StepOutput, about: &str) -> Vec<String> {
    assert_eq!((done.status, done.text().as_str()), (125, ""), "{about}: {}", done.err);
    assert_eq!(done.err.lines().count(), 1, "{about}: {}", done.err);
    done.err.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

const ALLOW: &str = "sudo sysctl kernel.perf_event_paranoid=1";
const GIVE: &str = "sudo setcap cap_perfmon+ep /tmp/bin/tally";

/// What an ordinary user is advised at a setting.
fn advice(level: i32) -> &'static [&'static str] {
    match level {
        ..2 => &[],
        2 => &[ALLOW, GIVE],
        3.. => &[ALLOW],
    }
}

fn root_counts(results: &Results) {
    for level in LEVELS {
        assert_exact(results.of(&format!("root{level}")), &format!("root at {level}"));
    }
}

fn root_counts_exactly_whatever_the_distributions_setting() {
    root_counts(&SETTINGS);
}

fn users_count_after_the_advice(results: &Results) {
    for level in LEVELS {
        let done = results.of(&format!("user{level}"));
        let about = format!("a user at {level}");
        if advice(level).is_empty() {
            assert_exact(done, &about);
            continue;
        }
        assert_eq!(commands_of_refusal(done, &about), advice(level), "{about}");
        for (step, command) in ["first", "second"].iter().zip(advice(level)) {
            let done = results.of(&format!("{step}{level}"));
            assert!(
                done.text().starts_with(&format!("`{command}`\n")),
                "{about}: {}{}",
                done.text(),
                done.err
            );
            assert_exact(&without_sysctls_answer(done), &format!("{about}, after {command}"));
        }
    }
}

/// Returns the output without what `sysctl` says of its change.
fn without_sysctls_answer(done: &StepOutput) -> StepOutput {
    let err =
        done.err.lines().filter(|line| !line.starts_with("kernel.")).flat_map(|line| [line, "\n"]).collect();
    StepOutput { err, ..done.clone() }
}

fn a_user_counts_as_soon_as_he_has_typed_what_doctor_says() {
    users_count_after_the_advice(&SETTINGS);
}

fn capable_programs_count(results: &Results) {
    for level in LEVELS {
        let (done, about) = (results.of(&format!("capable{level}")), format!("CAP_PERFMON at {level}"));
        if level <= 2 {
            assert_exact(done, &about);
        } else {
            assert_eq!(commands_of_refusal(done, &about), [ALLOW], "{about}");
        }
    }
}

fn a_program_with_cap_perfmon_counts_where_that_is_enough() {
    capable_programs_count(&SETTINGS);
}

fn doctors_verdict_is_what_a_run_does() {
    for (who, doctor) in [("root", "root-doctor"), ("user", "doctor"), ("capable", "capable-doctor")] {
        for level in LEVELS {
            let runs = SETTINGS.of(&format!("{who}{level}")).status != 125;
            let done = SETTINGS.of(&format!("{doctor}{level}"));
            assert_eq!(done.status == 0, runs, "{who} at {level}: {}", done.text());
            let verdict = done.text().lines().last().expect("a verdict").to_owned();
            assert_eq!(
                verdict.starts_with("ok  verdict     Linux guests with a PMU run here"),
                runs,
                "{verdict}"
            );
        }
    }
}

fn no_command_that_helps_makes_a_user_an_administrator() {
    for level in LEVELS {
        for who in ["doctor", "root-doctor", "capable-doctor"] {
            let text = SETTINGS.of(&format!("{who}{level}")).text();
            let commands = text.split('`').skip(1).step_by(2);
            for command in commands {
                assert!(!command.contains("sys_admin") && !command.contains("chmod u+s"), "{command}");
            }
        }
    }
}

fn on_debian_12s_kernel_root_and_users_count() {
    let results = on(Suite::Bookworm, "stock::bookworm");
    root_counts(&results);
    users_count_after_the_advice(&results);
    capable_programs_count(&results);
}

fn on_the_newest_kernel_root_and_users_count() {
    let results = on(Suite::Sid, "stock::sid");
    root_counts(&results);
    users_count_after_the_advice(&results);
    capable_programs_count(&results);
}

/// What a guest does: on each of its CPUs, a program is counted with six events of different kinds.
const SIX_EVENTS: &str = "\
cd /tmp
for cpu in $(seq 0 $(($(nproc) - 1))); do
    taskset -c $cpu perf stat -x, -o said.$cpu \\
        -e instructions:u,branches:u,instructions:k,branches:k,cycles:u,cycles:k /lib/tally/loop &
done
wait
cat said.*
";

/// Adds a step in which an ordinary user starts guests at the same time. He may lock no memory, so that pages are
/// mapped only as far as `kernel.perf_event_mlock_kb` allows it to all of his processes together.
fn users_guests(steps: Steps, name: &str, guests: u32, cpus: u32, before: &str) -> Steps {
    steps.step(
        name,
        &format!(
            "{FUNCTIONS}level 1; echo 0 >/proc/sys/kernel/nmi_watchdog; {before}
             mkdir -p /tmp/home /tmp/said; chown 65534:65534 /tmp/home; chmod 755 guest; export HOME=/tmp/home TALLY_BOOT=
             guest() {{ user /tmp/bin/tally run --cpus {cpus} -- \"$@\"; }}
             guest true || exit
             ulimit -l 0
             for number in $(seq {guests}); do
                 guest sh ./six-events >/tmp/said/$number.out 2>/tmp/said/$number.err &
             done
             wait
             cat /tmp/said/*.out; cat /tmp/said/*.err >&2; rm -r /tmp/said"
        ),
    )
}

fn with_users(name: &'static str) -> Steps {
    Steps::new(name)
        .stock()
        .file(program("restricted"), "restricted")
        .in_guest("six-events", SIX_EVENTS.as_bytes())
}

/// The least number of pages: one.
const ONE_PAGE: &str = "echo 4 >/proc/sys/kernel/perf_event_mlock_kb";

/// Root, and two users with hundreds of links to a socket, each have a VM of the same name. Root uses the one of that
/// name, without knowing of the others.
const NAMESAKES: &str = "\
level 1; cp payload /tmp/payload; chmod 644 /tmp/payload
vm() { \"$@\" run --name web --kernel /tmp/payload --append timer=100000 >&2 </dev/null 2>>vm.err & }
up() { until ls $1/*.sock >/dev/null 2>&1; do sleep 0.02; done; }
vm ./tally; mine=$!; up /run/tally
vm ./restricted unprivileged /tmp/bin/tally; nobodys=$!; up /tmp/tally-65534
vm ./restricted as-mallory /tmp/bin/tally; mallorys=$!; up /tmp/tally-1001
links() { socket=$(ls /tmp/tally-$1/*.sock); for link in $(seq $2); do ln $socket /tmp/tally-$1/$((4000000 + link)).sock; done; }
links 65534 100; links 1001 300
echo == list; ./tally list
./tally stat --metrics 127.0.0.1:9100 2>/dev/null & metrics=$!
until wget -q -O metrics http://127.0.0.1:9100/metrics 2>/dev/null; do sleep 0.02; done; kill $metrics
echo == roots; grep '^tally_machine_info.*user=\"root\"' metrics | sed \"s/pid=.$mine./pid=mine/\"
echo == others; grep '^tally_machine_info' metrics | grep -v 'user=\"root\"'
./tally snapshot web saved --stop 2>/dev/null; wait $mine
echo == after; ls saved | grep -c .; kill $nobodys $mallorys && echo both ran
rm -rf saved /tmp/tally-65534 /tmp/tally-1001
";

static PAGES: LazyLock<Results> = LazyLock::new(|| {
    let steps = users_guests(with_users("stock::pages"), "none", 2, 2, ONE_PAGE);
    users_guests(steps, "more", 2, 2, &format!("{ONE_PAGE}; {MORE_PAGES} >/dev/null"))
        .step("namesakes", &format!("{FUNCTIONS}{NAMESAKES}"))
        .step(
            "doctor",
            &format!("{FUNCTIONS}{ONE_PAGE}; ulimit -l 64; user /tmp/bin/tally doctor | grep pages"),
        )
        .run()
});

/// Checks that guests counted exactly on each of their CPUs. Returns the lines that Tally printed.
fn assert_counted(done: &StepOutput, cpus: usize) -> Vec<&str> {
    assert_eq!(done.status, 0, "{}{}", done.text(), done.err);
    let text = done.text();
    for (event, count) in [("instructions:u", LOOP_INSTRUCTIONS), ("branches:u", LOOP_BRANCHES)] {
        let counted = text.lines().filter(|line| line.contains(&format!(",{event},")));
        let exact = counted.clone().filter(|line| line.starts_with(&format!("{count},"))).count();
        assert_eq!((counted.count(), exact), (cpus, cpus), "{event}: {text}{}", done.err);
    }
    let full = text.lines().filter(|line| line.contains(",100.00,")).count();
    assert_eq!(full, 6 * cpus, "no event was multiplexed: {text}");
    done.err.lines().collect()
}

fn counts_are_exact_where_pages_cannot_be_mapped_and_one_line_says_so() {
    let line = "tally: vCPU N: the host maps no more pages of counters (Operation not permitted (os error 1)): counts \
                stay exact, but each reading is a system call; `sudo sysctl kernel.perf_event_mlock_kb=16384` lets users \
                map more";
    let lines = assert_counted(PAGES.of("none"), 4);
    let lines = lines.into_iter().map(|line| line.replace("vCPU 0", "vCPU N").replace("vCPU 1", "vCPU N"));
    assert_eq!(lines.collect::<Vec<_>>(), [line; 2], "one for each VM");
    assert_eq!(assert_counted(PAGES.of("more"), 4), [""; 0]);
    let doctor = PAGES.of("doctor").text();
    assert!(doctor.contains("the counters of 2 vCPUs of a VM can be read without a system call"), "{doctor}");
    assert!(doctor.contains(MORE_PAGES), "{doctor}");
}

fn whatever_sockets_other_users_make_roots_commands_find_roots_vm() {
    let done = PAGES.of("namesakes");
    let text = done.text();
    assert_eq!(done.status, 0, "{text}{}", done.err);
    let sections: Vec<&str> = text.split("== ").skip(1).collect();
    let [list, roots, others, after] = sections[..] else { panic!("{text}{}", done.err) };
    assert!(list.lines().any(|line| line.contains(" web ")), "{text}");
    // Four errors of each user's sockets, a line that there are more, and one that not all are asked.
    let errors = done.err.lines().filter(|line| line.contains(" does not answer: ")).count();
    let summaries = done.err.lines().filter(|line| line.contains(" has more sockets ")).count();
    assert_eq!((errors, summaries), (8, 3), "{}", done.err);
    let roots: Vec<&str> = roots.lines().skip(1).collect();
    assert!(matches!(roots[..], [line] if line.contains("name=\"web\",pid=mine")), "{text}");
    assert!(others.lines().skip(1).all(|line| !line.contains("user=\"root\"")), "{text}");
    assert_eq!(after, "after\n2\nboth ran\n", "{text}{}", done.err);
}

fn a_hundred_guests_of_four_vcpus_count_exactly_without_pages() {
    let steps = with_users("stock::hundred").long().configure_host(|scenario| scenario.memory_mib(8192));
    let results = users_guests(steps, "hundred", 100, 4, "").run();
    let lines = assert_counted(results.of("hundred"), 400);
    // The pages of all processes are enough for five VMs.
    assert!((95..=100).contains(&lines.len()), "at most one for each VM: {}", lines.len());
    assert!(lines.iter().all(|line| line.contains("the host maps no more pages of counters")), "{lines:?}");
}
