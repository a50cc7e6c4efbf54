//! Tally as people use it: flame graphs, users without privileges, guests of many CPUs, and what every guest takes for
//! granted: the time, random numbers, an end.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use guest_tests::lab::{Results, StepOutput, Steps};
use guest_tests::model::selected_models;
use guest_tests::perf::{STAT, Script, Sections};
use guest_tests::program;
use guest_tests::programs::{HEAVY_MILLIONS, LAYERS, LIGHT_MILLIONS, SPREAD, spread_instructions};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [
        tests![
            a_flame_graph_shows_the_command_and_the_kernel_below_it,
            a_guest_that_reports_rubbish_does_no_harm,
            a_guest_has_the_hosts_time_and_random_numbers_before_its_init,
            a_guest_that_is_switched_off_has_ended_well,
            a_user_of_the_group_kvm_counts_and_samples_and_owns_what_the_guest_makes,
            a_user_who_may_not_count_is_told_the_commands_that_the_doctor_tells,
            a_program_with_the_right_to_count_does_so_for_every_user,
            a_user_who_may_not_use_kvm_is_told_the_command_that_mends_it,
        ],
        second_tier(tests![
            without_a_pmu_a_flame_graph_comes_of_the_clock,
            a_sampled_command_fails_as_it_would_otherwise,
            a_command_that_is_broken_off_is_drawn_until_then,
            pictures_leave_nothing_else_behind,
            each_of_sixteen_cpus_counts_its_own_work_on_a_host_of_one,
        ]),
    ]
    .concat()
}

/// The kernel's self-tests of its ciphers take half of its boot.
const RUN: &str = "tally run --append cryptomgr.notests";
/// How many instructions `/lib/tally/loop` executes.
const LOOP_INSTRUCTIONS: u64 = 20_000_004;

/// Commands that are drawn, and a guest's everyday.
static PICTURES: LazyLock<Results> = LazyLock::new(|| {
    let draw = |name: &str, options: &str, command: &str| {
        format!(
            "./{RUN} {options} --flamegraph {name}.svg -- {command}; status=$?; cp {name}.svg $OUT/; exit $status"
        )
    };
    let everyday = "date +%s; cat /sys/devices/system/clocksource/clocksource0/current_clocksource; dmesg | \
        sed -n \"/crng init done/ s/.*/seeded/p; /Run .init as init/ s/.*/init/p\"; head -c 32 /dev/random | wc -c; \
        read before rest </proc/uptime; sleep 1; read after rest </proc/uptime; echo $before $after";
    Steps::new("using::pictures")
        .in_guest("layers", LAYERS)
        .file(program("interruptible"), "interruptible")
        .step("pmu", &draw("pmu", "", "sh -c './layers; echo out; echo err >&2; exit 3'"))
        .step("picture", "cat pmu.svg")
        .step(
            "hostile",
            &format!("./{RUN} --flamegraph /proc/self/fd/1 -- sh -c 'echo said; exec >/dev/vport0p5; head -c 300000 /dev/urandom; exit 4'"),
        )
        .step("everyday", &format!("date +%s; ./{RUN} -- sh -c '{everyday}'; date +%s"))
        .step("power-off", &format!("./typist 'expect:# ' 'type:poweroff -f\\r' -- ./{RUN}"))
        .second_tier(|steps| {
            steps
                .step("clock", &format!("{} && cat clock.svg", draw("clock", "--pmu none", "./layers").replace("exit $status", "(exit $status)")))
                .step("missing", &format!("./{RUN} --flamegraph missing.svg -- no-such-program"))
                .step("killed", &format!("./{RUN} --flamegraph killed.svg -- sh -c 'kill -9 $$'"))
                .step(
                    "broken-off",
                    &format!(
                        "./interruptible ./{RUN} --flamegraph broken-off.svg -- sh -c './layers; echo ready; while :; do :; done' >said & \
                         until grep -qs ready said; do sleep 0.1; done; kill -INT $!; wait $!; status=$?; cat broken-off.svg; exit $status"
                    ),
                )
                .step("nowhere", &format!("./{RUN} --flamegraph no/such/folder.svg -- true"))
                .step("left", "ls -A | grep -e svg -e '^[.]'; ls -A /tmp")
        })
        .run()
});

/// A user like any other, in a folder that is theirs.
static USERS: LazyLock<Results> = LazyLock::new(|| {
    let host = |owner: u32, level: i32| {
        format!(
            "chgrp {owner} /dev/kvm; chmod 660 /dev/kvm; echo {level} >/proc/sys/kernel/perf_event_paranoid; cd /tmp/home; "
        )
    };
    let user = "/scenario/restricted unprivileged /scenario/";
    let count = "perf stat -x, -e instructions:u /lib/tally/loop";
    let work =
        format!("{count}; perf stat -x, -e instructions:k true; id -u; mkdir folder; echo made >folder/file");
    Steps::new("using::users")
        .file(program("restricted"), "restricted")
        .step("home", "mkdir /tmp/home; chown 65534:65534 /tmp/home; mkdir /tmp/bin; cp tally /tmp/bin")
        .step(
            "member",
            &format!(
                "{}{user}{RUN} --share .:rw --flamegraph out.svg -- sh -c '{work}'; status=$?; stat -c '%u %g %a %n' * */*; exit $status",
                host(65534, 1)
            ),
        )
        .step("forbidden", &format!("{}{user}{RUN} -- true", host(65534, 2)))
        .step("forbidden-doctor", &format!("{}{user}tally doctor", host(65534, 2)))
        .step(
            "capable",
            &format!("{}/scenario/restricted setcap /tmp/bin/{RUN} -- {count}", host(65534, 2)),
        )
        .step("stranger", &format!("{}{user}{RUN} -- true", host(0, 1)))
        .run()
});

/// Guests of sixteen CPUs, on a host of one.
static CPUS: LazyLock<Results> = LazyLock::new(|| {
    let by_cpu = |program: &str| format!("taskset 1 {STAT} -C 1-15 -A -e instructions:u {program}");
    let script = Script::new()
        .section("cpus", "nproc")
        .section("by CPU, nothing", &by_cpu("/lib/tally/loop"))
        .section("by CPU", &by_cpu("./spread"));
    selected_models()
        .iter()
        .fold(
            Steps::new("using::cpus").in_guest("spread", SPREAD).in_guest("script", script.into_bytes()),
            |steps, model| {
                steps.step(model.pmu, &format!("./{RUN} --pmu {} --cpus 16 -- sh ./script", model.pmu))
            },
        )
        .run()
});

/// How many samples each frame of a picture has, by its name, wherever it is; and that it is a picture.
fn frames(svg: &str) -> BTreeMap<String, u64> {
    assert!(svg.starts_with("<?xml") && svg.trim_end().ends_with("</svg>"), "{svg}");
    let mut frames = BTreeMap::new();
    for title in svg.split("<title>").skip(1) {
        let (title, _) = title.split_once("</title>").expect("a title ends");
        let (name, rest) = title.rsplit_once(" (").expect("a frame has a name and a number");
        let count =
            rest.split_once(" samples").and_then(|(count, _)| count.replace(',', "").parse::<u64>().ok());
        *frames.entry(name.to_owned()).or_default() += count.unwrap_or_else(|| panic!("no count: {title}"));
    }
    frames
}

/// Every frame of our program is there as long as it should be: a millisecond is a million instructions. There may be so
/// many percent more samples, for the interrupts on the way or because perf looks for the right period.
fn is_right(frames: &BTreeMap<String, u64>, percent: u64) {
    let [layers, work, heavy, light, ask] =
        ["layers", "work", "heavy", "light", "ask"].map(|name| frames[name]);
    assert_eq!(frames["_start"], work, "{frames:?}");
    assert_eq!(work, heavy + light + ask, "the three share all of it: {frames:?}");
    assert!(layers - work <= 3, "but for what the kernel does to start it: {frames:?}");
    for (samples, millions) in [(heavy, HEAVY_MILLIONS), (light, LIGHT_MILLIONS)] {
        assert!((millions - 1..=millions * (100 + percent) / 100).contains(&samples), "{frames:?}");
    }
    assert!(heavy.abs_diff(3 * light) <= 15, "three to one: {frames:?}");
    // What the kernel does for a call is above it.
    let [call, random] = ["__x64_sys_getrandom", "get_random_bytes_user"].map(|name| frames[name]);
    assert!(random <= call && call <= ask && random * 10 >= ask * 9, "{frames:?}");
}

fn one_line(done: &StepOutput, words: &[&str]) {
    assert_eq!((done.status, done.err.lines().count()), (125, 1), "{}{}", done.text(), done.err);
    for word in words {
        assert!(done.err.contains(word), "{word}: {}", done.err);
    }
}

fn a_flame_graph_shows_the_command_and_the_kernel_below_it() {
    let done = PICTURES.of("pmu");
    assert_eq!((done.status, done.text().as_str(), done.err.as_str()), (3, "out\n", "err\n"));
    let svg = PICTURES.of("picture").text();
    is_right(&frames(&svg), 20);
    assert!(
        svg.contains("sh -c ./layers; echo out; echo err &gt;&amp;2; exit 3"),
        "the title is the command"
    );
}

fn without_a_pmu_a_flame_graph_comes_of_the_clock() {
    let done = PICTURES.of("clock");
    assert_eq!((done.status, done.err.as_str()), (0, ""), "{}", done.text());
    is_right(&frames(&done.text()), 3);
}

fn a_sampled_command_fails_as_it_would_otherwise() {
    let missing = PICTURES.of("missing");
    assert_eq!(missing.status, 127, "{}", missing.err);
    assert_eq!(
        missing.err,
        "no-such-program: command not found\ntally: --flamegraph: the command ended before perf took a sample\n"
    );
    let killed = PICTURES.of("killed");
    assert_eq!((killed.status, killed.err.as_str()), (128 + 9, ""));
    one_line(PICTURES.of("nowhere"), &["--flamegraph no/such/folder.svg: No such file or directory"]);
}

fn a_command_that_is_broken_off_is_drawn_until_then() {
    let done = PICTURES.of("broken-off");
    assert_eq!((done.status, done.err.as_str()), (128 + 2, ""));
    is_right(&frames(&done.text()), 20);
}

fn a_guest_that_reports_rubbish_does_no_harm() {
    let done = PICTURES.of("hostile");
    let text = done.text();
    assert_eq!((done.status, done.err.as_str()), (4, ""), "{text}");
    // The picture comes after what the command wrote to the same file.
    assert!(!frames(text.strip_prefix("said\n").expect("the command's output")).is_empty());
}

fn pictures_leave_nothing_else_behind() {
    assert_eq!(PICTURES.of("left").text(), "broken-off.svg\nclock.svg\nkilled.svg\npmu.svg\n");
}

fn a_guest_has_the_hosts_time_and_random_numbers_before_its_init() {
    let done = PICTURES.of("everyday");
    let text = done.text();
    let lines: Vec<&str> = text.lines().collect();
    let [before, time, clock, seeded, init, random, sleep, after] = lines[..] else {
        panic!("{text}{}", done.err)
    };
    assert_eq!([clock, seeded, init, random], ["kvm-clock", "seeded", "init", "32"]);
    let second = |text: &str| text.parse::<u64>().expect("a time");
    assert!((second(before)..=second(after)).contains(&second(time)), "{text}");
    let slept = sleep.split_once(' ').map(|(begun, ended)| [begun, ended].map(|time| time.replace('.', "")));
    let [begun, ended] = slept.expect("two times").map(|time| second(&time));
    // In hundredths: a shell and a program begin and end meanwhile.
    assert!((100..=105).contains(&(ended - begun)), "{text}");
}

fn a_guest_that_is_switched_off_has_ended_well() {
    let done = PICTURES.of("power-off");
    assert_eq!((done.status, done.err.as_str()), (0, ""), "{}", done.text());
    assert!(done.text().trim_end().ends_with("reboot: Power down"), "{}", done.text());
    assert!(!done.text().contains("Call Trace"), "{}", done.text());
}

fn a_user_of_the_group_kvm_counts_and_samples_and_owns_what_the_guest_makes() {
    let done = USERS.of("member");
    assert_eq!(
        (done.status, done.text().as_str()),
        (0, "0\n65534 65534 755 folder\n65534 65534 644 out.svg\n65534 65534 644 folder/file\n"),
        "{}",
        done.err
    );
    let [user, kernel] = done.err.lines().collect::<Vec<_>>()[..] else { panic!("{}", done.err) };
    assert!(user.starts_with(&format!("{LOOP_INSTRUCTIONS},,instructions:u,")), "{user}");
    assert!(kernel.contains(",,instructions:k,") && !kernel.starts_with('<'), "{kernel}");
}

fn a_user_who_may_not_count_is_told_the_commands_that_the_doctor_tells() {
    let done = USERS.of("forbidden");
    one_line(
        done,
        &[
            "kernel.perf_event_paranoid is 2",
            "sudo sysctl kernel.perf_event_paranoid=1",
            "setcap cap_perfmon+ep",
        ],
    );
    let doctor = USERS.of("forbidden-doctor");
    assert_eq!(doctor.status, 1, "{}", doctor.text());
    let refusal =
        done.err.strip_prefix("tally: ").and_then(|line| line.split_once("; or run")).expect("its form").0;
    assert!(
        doctor
            .text()
            .lines()
            .any(|line| line == format!("BAD pmu         {refusal}; or run without a PMU: --pmu none")),
        "{}",
        doctor.text()
    );
}

fn a_program_with_the_right_to_count_does_so_for_every_user() {
    let done = USERS.of("capable");
    assert_eq!(done.status, 0, "{}", done.err);
    assert!(done.err.starts_with(&format!("{LOOP_INSTRUCTIONS},,instructions:u,")), "{}", done.err);
}

fn a_user_who_may_not_use_kvm_is_told_the_command_that_mends_it() {
    one_line(USERS.of("stranger"), &["/dev/kvm: permission denied", "`sudo usermod -aG kvm $USER`"]);
}

fn each_of_sixteen_cpus_counts_its_own_work_on_a_host_of_one() {
    for model in selected_models() {
        let guest = Sections::of(CPUS.of(model.pmu));
        assert_eq!(guest.text("cpus"), "16\n");
        // Perf itself visits each CPU, to read its counters there.
        let visits = guest.counts("by CPU, nothing");
        let counts = guest.counts("by CPU");
        let counted: Vec<_> = counts
            .iter()
            .zip(&visits)
            .map(|(count, visit)| (count.label.clone(), count.exact() - visit.exact()))
            .collect();
        let known: Vec<_> = (1..16).map(|cpu| (format!("CPU{cpu}"), spread_instructions(cpu))).collect();
        assert_eq!(counted, known, "{}", model.pmu);
    }
}
