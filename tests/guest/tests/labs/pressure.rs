//! A host that makes it hard: it permits few overflows, moves and stops a vCPU's thread, unplugs its processor, gives
//! it a part of the time, or turns the clock. A guest without an operating system counts and interrupts exactly.
//! All of it is one host, and takes half a minute of a core.

use std::sync::LazyLock;

use guest_tests::lab::{PAUSED_GUESTS, Results, Steps};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![
        a_host_that_permits_few_overflows_loses_none,
        a_thread_that_is_moved_stopped_or_slowed_down_counts_exactly,
        a_clock_that_is_turned_changes_no_count,
    ])
}

/// What a guest does: counts a loop, then lets four counters overflow a thousand times, ten thousand times a second.
const WORK: &str = "timer=100 count-user=0:0x4100c0,100000000,0 pmi=nmi,1000,100000,0xf";
const COUNTED: &str = "count 100000000 000000000bebc201";
const OVERFLOWS: &str =
    "pmi 1000 interrupts, 4000 overflows, at 0..0, value 0..0, status 0f, left 00, entry 00000400, 0 late";

/// Shell functions: `under COMMAND` executes a command again and again while a guest runs, whose vCPU's thread is
/// `$vcpu`. `$n` says how often it has succeeded.
const UNDER: &str = "\
limit() { echo $1 >/proc/sys/kernel/perf_event_max_sample_rate; }
under() {
    ./tally run --kernel payload --append \"$work\" & tally=$!
    find_vcpu
    n=0
    while kill -0 $tally 2>/dev/null; do \"$@\" 2>/dev/null && n=$((n + 1)); done
    ended $tally && [ $n -gt 3 ]
}
sinks() { limit $((20000 - n * 200 > 500 ? 20000 - n * 200 : 500)) && sleep 0.004; }
moves() { taskset -p $((n % 2 + 1)) $vcpu >/dev/null && sleep 0.004; }
unplugs() {
    taskset -p 3 $vcpu >/dev/null && echo 0 >/sys/devices/system/cpu/cpu1/online && sleep 0.01 &&
        echo 1 >/sys/devices/system/cpu/cpu1/online && sleep 0.01
}
stops() { kill -STOP $tally && sleep 0.004 && kill -CONT $tally && sleep 0.004; }
slows() {
    if ! [ -e /tmp/slow ]; then
        mkdir /tmp/slow; mount -t cgroup2 none /tmp/slow; echo +cpu >/tmp/slow/cgroup.subtree_control
        mkdir /tmp/slow/part; echo '2000 10000' >/tmp/slow/part/cpu.max; echo $tally >/tmp/slow/part/cgroup.procs
    fi
    sleep 0.01; ! grep -q '^nr_throttled 0' /tmp/slow/part/cpu.stat
}
turns() { date -s @$(($(date +%s) + 3600)) >/dev/null && sleep 0.01; }
";

/// The limits for overflows a second that are tried. The last permits one in each tick of the host's kernel, which has
/// 250 a second.
const LIMITS: [u32; 4] = [2000, 1000, 500, 250];
/// What is done again and again while a guest runs.
const DONE: [&str; 6] = ["sinks", "moves", "unplugs", "stops", "slows", "turns"];

static HOST: LazyLock<Results> = LazyLock::new(|| {
    let prepared = format!("{PAUSED_GUESTS}{UNDER}work='{WORK}'; ");
    let steps = Steps::new("pressure").configure_host(|host| host.processors(2));
    let steps = LIMITS.iter().fold(steps, |steps, limit| {
        steps.step(&format!("limit-{limit}"), &format!("{prepared}limit {limit}; under sleep 0.01"))
    });
    let steps = steps.step("no-limit", &format!("{prepared}limit 100000"));
    DONE.iter()
        .fold(steps, |steps, done| {
            steps.step(done, &format!("{prepared}under {done}; s=$?; limit 100000; exit $s"))
        })
        .run()
});

fn assert_exact(step: &str) {
    let done = HOST.of(step);
    let text = done.text();
    assert_eq!((done.status, done.err.as_str()), (0, ""), "{step}: {text}");
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with("timer ")).collect();
    assert_eq!(lines, [COUNTED, OVERFLOWS], "{step}");
}

fn a_host_that_permits_few_overflows_loses_none() {
    for limit in LIMITS {
        assert_exact(&format!("limit-{limit}"));
    }
    assert_exact("sinks");
}

fn a_thread_that_is_moved_stopped_or_slowed_down_counts_exactly() {
    ["moves", "unplugs", "stops", "slows"].into_iter().for_each(assert_exact);
}

fn a_clock_that_is_turned_changes_no_count() {
    assert_exact("turns");
}
