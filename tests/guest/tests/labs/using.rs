//! Tests of flame graphs, unprivileged users, guests with many CPUs, and basic services of a guest: time, random
//! numbers and power-off.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use guest_tests::lab::{Results, StepOutput, Steps};
use guest_tests::model::selected_models;
use guest_tests::perf::{STAT, Script, Sections};
use guest_tests::program;
use guest_tests::programs::{HEAVY_MILLIONS, LAYERS, LIGHT_MILLIONS, SPREAD, spread_instructions};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use tally_packaging::build::Commit;
use tally_packaging::deb;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [
        tests![
            a_flame_graph_shows_the_command_and_the_kernel_below_it,
            a_guest_that_sends_garbage_samples_does_no_harm,
            a_guest_has_the_hosts_time_and_a_seeded_rng_before_init,
            power_off_ends_with_status_0,
            a_member_of_group_kvm_counts_samples_and_owns_the_guests_files,
            a_member_of_group_kvm_counts_with_the_program_of_the_debian_package,
            a_user_without_perf_access_gets_the_same_fix_as_from_doctor,
            cap_perfmon_on_the_program_lets_every_user_count,
            a_user_without_kvm_access_gets_a_fix,
        ],
        second_tier(tests![
            without_a_pmu_a_flame_graph_samples_by_the_clock,
            a_sampled_command_fails_as_without_sampling,
            an_interrupted_command_still_gives_a_flame_graph,
            flame_graphs_leave_no_temporary_files,
            sixteen_vcpus_count_separately_on_a_host_with_one_cpu,
        ]),
    ]
    .concat()
}

const RUN: &str = "tally run";
/// Number of instructions that `/lib/tally/loop` executes.
const LOOP_INSTRUCTIONS: u64 = 20_000_004;

/// Results of commands with `--flamegraph`, and of a guest's basic services.
static FLAME_GRAPHS: LazyLock<Results> = LazyLock::new(|| {
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

/// Results of an ordinary user's commands, in a directory that the user owns.
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
    let folder = tempfile::tempdir().expect("temporary folders can be made");
    let programs = program("tally").parent().expect("it is in a folder").to_owned();
    let commit = Commit { hash: "1234567".to_owned(), time: 1_700_000_000 };
    let package = deb::write(&programs, &commit, folder.path()).expect("the package can be made");
    Steps::new("using::users")
        .file(program("restricted"), "restricted")
        .file(package, "tally.deb")
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
        // There is no dpkg on this host.
        .step(
            "package",
            &format!(
                "ar -p tally.deb data.tar.gz | tar -C / -xz; {}/scenario/restricted unprivileged {RUN} -- {count}",
                host(65534, 1)
            ),
        )
        .run()
});

/// Results of guests with sixteen CPUs, on a host with one.
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

/// Returns the number of samples of each frame in a flame graph, summed by name. Checks that the file is complete.
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

/// Checks the number of samples of each of the program's frames. One sample is a millisecond, or a million
/// instructions. There may be `percent` more samples, because of interrupts, or because perf searches for the right
/// period.
fn assert_frames(frames: &BTreeMap<String, u64>, percent: u64) {
    let [layers, work, heavy, light, ask] =
        ["layers", "work", "heavy", "light", "ask"].map(|name| frames[name]);
    assert_eq!(frames["_start"], work, "{frames:?}");
    assert_eq!(work, heavy + light + ask, "the three share all of it: {frames:?}");
    assert!(layers - work <= 3, "but for what the kernel does to start it: {frames:?}");
    for (samples, millions) in [(heavy, HEAVY_MILLIONS), (light, LIGHT_MILLIONS)] {
        assert!((millions - 1..=millions * (100 + percent) / 100).contains(&samples), "{frames:?}");
    }
    assert!(heavy.abs_diff(3 * light) <= 15, "three to one: {frames:?}");
    // The kernel's functions are above the function that makes the system call.
    let [call, random] = ["__x64_sys_getrandom", "get_random_bytes_user"].map(|name| frames[name]);
    assert!(random <= call && call <= ask && random * 10 >= ask * 9, "{frames:?}");
}

/// Checks that a step was refused with a one-line message that contains all of `words`.
fn assert_refused(done: &StepOutput, words: &[&str]) {
    assert_eq!((done.status, done.err.lines().count()), (125, 1), "{}{}", done.text(), done.err);
    for word in words {
        assert!(done.err.contains(word), "{word}: {}", done.err);
    }
}

fn a_flame_graph_shows_the_command_and_the_kernel_below_it() {
    let done = FLAME_GRAPHS.of("pmu");
    assert_eq!((done.status, done.text().as_str(), done.err.as_str()), (3, "out\n", "err\n"));
    let svg = FLAME_GRAPHS.of("picture").text();
    assert_frames(&frames(&svg), 20);
    assert!(
        svg.contains("sh -c ./layers; echo out; echo err &gt;&amp;2; exit 3"),
        "the title is the command"
    );
}

fn without_a_pmu_a_flame_graph_samples_by_the_clock() {
    let done = FLAME_GRAPHS.of("clock");
    assert_eq!((done.status, done.err.as_str()), (0, ""), "{}", done.text());
    assert_frames(&frames(&done.text()), 3);
}

fn a_sampled_command_fails_as_without_sampling() {
    let missing = FLAME_GRAPHS.of("missing");
    assert_eq!(missing.status, 127, "{}", missing.err);
    assert_eq!(
        missing.err,
        "no-such-program: command not found\ntally: --flamegraph: the command ended before perf took a sample\n"
    );
    let killed = FLAME_GRAPHS.of("killed");
    assert_eq!((killed.status, killed.err.as_str()), (128 + 9, ""));
    assert_refused(
        FLAME_GRAPHS.of("nowhere"),
        &["--flamegraph no/such/folder.svg: No such file or directory"],
    );
}

fn an_interrupted_command_still_gives_a_flame_graph() {
    let done = FLAME_GRAPHS.of("broken-off");
    assert_eq!((done.status, done.err.as_str()), (128 + 2, ""));
    assert_frames(&frames(&done.text()), 20);
}

fn a_guest_that_sends_garbage_samples_does_no_harm() {
    let done = FLAME_GRAPHS.of("hostile");
    let text = done.text();
    assert_eq!((done.status, done.err.as_str()), (4, ""), "{text}");
    // The file begins with the command's output, and the flame graph follows.
    assert!(!frames(text.strip_prefix("said\n").expect("the command's output")).is_empty());
}

fn flame_graphs_leave_no_temporary_files() {
    assert_eq!(FLAME_GRAPHS.of("left").text(), "broken-off.svg\nclock.svg\nkilled.svg\npmu.svg\n");
}

fn a_guest_has_the_hosts_time_and_a_seeded_rng_before_init() {
    let done = FLAME_GRAPHS.of("everyday");
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
    // Hundredths of a second. The guest also starts and ends a shell and a program in this time.
    assert!((100..=105).contains(&(ended - begun)), "{text}");
}

fn power_off_ends_with_status_0() {
    let done = FLAME_GRAPHS.of("power-off");
    assert_eq!((done.status, done.err.as_str()), (0, ""), "{}", done.text());
    assert!(done.text().trim_end().ends_with("reboot: Power down"), "{}", done.text());
    assert!(!done.text().contains("Call Trace"), "{}", done.text());
}

fn a_member_of_group_kvm_counts_samples_and_owns_the_guests_files() {
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

fn a_member_of_group_kvm_counts_with_the_program_of_the_debian_package() {
    let done = USERS.of("package");
    assert_eq!(done.status, 0, "{}", done.err);
    assert!(done.err.starts_with(&format!("{LOOP_INSTRUCTIONS},,instructions:u,")), "{}", done.err);
}

fn a_user_without_perf_access_gets_the_same_fix_as_from_doctor() {
    let done = USERS.of("forbidden");
    assert_refused(
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

fn cap_perfmon_on_the_program_lets_every_user_count() {
    let done = USERS.of("capable");
    assert_eq!(done.status, 0, "{}", done.err);
    assert!(done.err.starts_with(&format!("{LOOP_INSTRUCTIONS},,instructions:u,")), "{}", done.err);
}

fn a_user_without_kvm_access_gets_a_fix() {
    assert_refused(USERS.of("stranger"), &["/dev/kvm: permission denied", "`sudo usermod -aG kvm $USER`"]);
}

fn sixteen_vcpus_count_separately_on_a_host_with_one_cpu() {
    for model in selected_models() {
        let guest = Sections::of(CPUS.of(model.pmu));
        assert_eq!(guest.text("cpus"), "16\n");
        // perf itself runs on each CPU to read its counters there. `visits` has the counts of that alone.
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
