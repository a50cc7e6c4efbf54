//! Tests on a RISC-V host whose PMU makes the mistakes of real ones: the interrupt of an overflow comes up to 50
//! instructions late, or one in some is lost, as a processor in the field does it. One boot of a minute of a core for
//! each.

use std::sync::LazyLock;

use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_images::payloads::riscv64::{LOOP, LOOP_BRANCHES};
use guest_tests::lab::{Results, Steps};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    second_tier(tests![
        late_interrupts_lose_no_sample_and_no_count,
        where_interrupts_are_lost_counts_are_exact_and_the_next_program_is_sampled,
    ])
}

/// Longer than the longest skid, and than what Tally takes for a flood.
const PERIODS: [u64; 2] = [11_000, 100_000];

/// Prints the counts of a program, and the number of its samples for each period.
fn measure() -> String {
    let count =
        "perf stat -x, -o /tmp/stat -e instructions:u,branches:u $1; grep -o '^[0-9]*,' /tmp/stat | tr -d ,";
    let sampled = PERIODS.map(|period| {
        format!(
            "perf record -q -o /tmp/data -c {period} -e instructions:u $1 2>/dev/null
            perf script -i /tmp/data -F period | wc -l"
        )
    });
    let complaints = "dmesg | grep -iE 'spurious|unexpected|irq.*nobody'";
    ["echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent", count, &sampled.join("\n"), complaints, "exit 0"]
        .join("\n")
}

fn on(name: &'static str, silicon: &'static str) -> Results {
    Steps::on_riscv(name)
        .in_guest("measure", measure().into_bytes())
        .configure_host(move |host| {
            host.silicon(silicon.parse().expect("these are the lab's knobs"))
                .program(LOOP, "loop")
                .program(measure(), "measure")
        })
        .step("host", "sh ./measure ./loop")
        .step("guest", "./tally run -- sh measure /lib/tally/loop")
        .run()
}

static LATE: LazyLock<Results> = LazyLock::new(|| on("riscv::silicon::late", "riscv"));
static LOST: LazyLock<Results> = LazyLock::new(|| on("riscv::silicon::lost", "riscv,pmi-lost=100"));

fn numbers(results: &Results, step: &str) -> Vec<u64> {
    let done = results.of(step);
    let text = done.text();
    assert_eq!(done.status, 0, "{step}: {text}{}", done.err);
    let numbers =
        text.lines().map(|line| line.parse().unwrap_or_else(|_| panic!("{step}: {text}{}", done.err)));
    numbers.collect()
}

fn late_interrupts_lose_no_sample_and_no_count() {
    let samples = PERIODS.map(|period| LOOP_INSTRUCTIONS / period);
    let right = [&[LOOP_INSTRUCTIONS, LOOP_BRANCHES][..], &samples].concat();
    for step in ["host", "guest"] {
        assert_eq!(numbers(&LATE, step), right, "{step}");
    }
}

/// No interrupt follows a lost one until something else looks at the counter, such as a switch of tasks. So samples are
/// fewer, on the host as well, but the next program is sampled again.
fn where_interrupts_are_lost_counts_are_exact_and_the_next_program_is_sampled() {
    let all = PERIODS.map(|period| LOOP_INSTRUCTIONS / period);
    for step in ["host", "guest"] {
        let found = numbers(&LOST, step);
        assert_eq!(found[..2], [LOOP_INSTRUCTIONS, LOOP_BRANCHES], "{step}");
        let samples = &found[2..];
        println!("{step}: {samples:?} of {all:?} samples where one interrupt in 100 is lost");
        let some = samples.iter().zip(all).all(|(samples, all)| (1..=all).contains(samples));
        assert!(some && samples[0] < all[0], "{step}: {samples:?} of {all:?}");
    }
}
