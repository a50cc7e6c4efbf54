//! Tests of `perf record`, `perf report` and `perf top` in a guest: there are as many samples as count and period
//! imply, each at the right instruction.
//!
//! The guests run the distribution's unmodified kernel and `perf`. Two boots of the simulated host serve all tests, and
//! each test checks sections of the scripts that ran there. Most samples are evaluated by awk scripts in the guest,
//! because there are so many. Every test runs with every selected model (see `model.rs`).

use std::collections::BTreeMap;

use guest_tests::lab::{OnEachHost, Results, Steps};
use guest_tests::model::{Loop, Model, list, selected_models};
use guest_tests::perf::{Script, Sections};
use guest_tests::programs::{
    MIGRATE, MIGRATE_INSTRUCTIONS, SPLIT, SPLIT_INSTRUCTIONS, SPLIT_PERIOD, TRACK, TRACK_INSTRUCTIONS,
    TRACK_LENGTH, YIELD,
};
use guest_tests::suite::{Test, on_intel, second_tier};
use guest_tests::tests;
use tally_lab::programs::{KNOWN, LIST_FUNCTIONS_ONLY, LOOP, LOOP_INSTRUCTIONS};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let storms = tests![
        a_hundred_thousand_samples_are_each_at_the_right_instruction,
        a_migrating_program_is_sampled_on_all_cpus,
        four_cpus_take_samples_at_once,
    ];
    [on_any_host(), second_tier([storms, on_intel(on_any_host())].concat())].concat()
}

pub fn on_any_host() -> Vec<Test> {
    tests![
        the_number_of_samples_is_the_count_divided_by_the_period,
        with_a_frequency_no_event_is_lost_between_samples,
        six_events_are_sampled_at_once,
        with_a_frequency_the_periods_of_six_events_add_up_to_their_counts,
        more_events_than_counters_are_sampled_in_turn,
        the_kernel_is_sampled_with_interrupts_off,
        functions_have_the_right_shares_of_samples,
        samples_have_call_chains,
        perf_top_shows_the_busiest_function_first,
    ]
}

/// Commands that set how much of its time a guest may spend on samples: the default limit, and no limit.
const LIMITED: &str = "echo 25 >/proc/sys/kernel/perf_cpu_time_max_percent";
const UNLIMITED: &str = "echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent";

/// Command that sets the shortest multiplexing interval, so that there are many turns in the time that a program takes.
const TURNS: &str = "echo 1 >/sys/bus/event_source/devices/cpu/perf_event_mux_interval_ms";

/// Command that prints the number of records of each type. perf prints several blocks, of which the first is for all
/// events.
const RECORDS: &str =
    "perf report -i data --stats 2>/dev/null | awk '$2 == \"events:\" && !seen[$1]++ { print $1, $3 }'";

/// Scripts that evaluate samples in the guest. Each documents what it prints.
const AWK_SCRIPTS: [(&str, &[u8]); 5] = [
    ("chains.awk", include_bytes!("../../programs/awk/chains.awk")),
    ("events.awk", include_bytes!("../../programs/awk/events.awk")),
    ("frequency.awk", include_bytes!("../../programs/awk/frequency.awk")),
    ("kernel.awk", include_bytes!("../../programs/awk/kernel.awk")),
    ("steps.awk", include_bytes!("../../programs/awk/steps.awk")),
];

/// Types of records that report missing samples.
const LOSS_RECORDS: [&str; 4] = ["LOST", "LOST_SAMPLES", "THROTTLE", "UNTHROTTLE"];

/// Period, program, and the program's number of instructions.
const PERIODS: [(u64, &str, u64); 3] = [
    (10_000, "split", SPLIT_INSTRUCTIONS),
    (100_000, "loop", LOOP_INSTRUCTIONS),
    (1_000_000, "loop", LOOP_INSTRUCTIONS),
];

/// Frequencies that are sampled at. `max` is the highest that [`MAX_FREQUENCY`] allows.
const FREQUENCIES: [&str; 4] = ["99", "1000", "4000", "max"];
const MAX_FREQUENCY: u64 = 4000;

const COUNTERS: u64 = 6;
/// Period for six events at once.
const PERIOD_OF_SIX: u64 = 100_000;
/// Period for ten events, each of which is on a counter for a part of the time.
const PERIOD_OF_TEN: u64 = 100_000;

/// Period for code in the kernel, a prime number.
const KERNEL_PERIOD: u64 = 100_003;
/// Kernel functions that `yield` causes to be called with interrupts off, and that take so long that all are sampled.
const INTERRUPTS_OFF: [&str; 4] =
    ["pick_next_task_fair", "rcu_note_context_switch", "update_curr", "update_rq_clock"];

/// Period of the run with the most samples.
const STORM_PERIOD: u64 = 10_000;

/// Results of different kinds of sampling in guests of one CPU.
static COMMON: OnEachHost = OnEachHost::new(|| boot("sampling::common", 1, common));
/// Results with very many samples, and with samples on four CPUs.
static STORM: OnEachHost = OnEachHost::new(|| boot("sampling::storm", 4, |_| storm()));

fn boot(name: &'static str, cpus: u32, script: impl Fn(&Model) -> Script) -> Results {
    let (_, short) = KNOWN.iter().find(|(name, _)| *name == "loop").expect("it is one of them");
    let programs: [(&str, &[u8]); 6] = [
        ("loop", LOOP),
        ("short", short),
        ("migrate", MIGRATE),
        ("split", SPLIT),
        ("track", TRACK),
        ("yield", YIELD),
    ];
    let steps = programs
        .into_iter()
        .chain(AWK_SCRIPTS)
        .fold(Steps::new(name).long(), |steps, (name, program)| steps.in_guest(name, program));
    selected_models()
        .iter()
        .fold(steps, |steps, model| {
            let options = format!("--pmu {} {} --cpus {cpus}", model.pmu, model.options);
            let name = format!("script.{}", model.pmu);
            steps
                .in_guest(&name, script(model).into_bytes())
                .step(model.pmu, &format!("./tally run {options} -- sh ./{name}"))
        })
        .run()
}

/// Returns each model with the output of its guest.
fn guests(group: &'static OnEachHost) -> impl Iterator<Item = (&'static Model, Sections)> {
    selected_models().iter().map(|model| (model, Sections::of(group.of(model.pmu))))
}

/// Returns commands that set the maximum sampling frequency. The kernel refuses this while the time for samples is
/// unlimited.
fn set_max_frequency(frequency: u64) -> String {
    format!("{LIMITED} && echo {frequency} >/proc/sys/kernel/perf_event_max_sample_rate && {UNLIMITED}")
}

/// Returns commands that sample a program, print the numbers of records, and evaluate the samples with `evaluation`.
fn sampled(options: &str, program: &str, evaluation: &str) -> String {
    format!("perf record -q -N -o data {options} ./{program} 2>/dev/null; {RECORDS}; {evaluation}")
}

fn common(model: &Model) -> Script {
    let frequency = "perf script -i data -D 2>/dev/null | awk -f frequency.awk";
    let by_event = "perf script -i data -F event,period | awk -f events.awk";
    let chains = "perf script -i data -F ip,sym | awk -f chains.awk";
    let report = "perf report -i data --stdio --no-children -g none -F overhead,sym 2>/dev/null | grep -v '^#' | grep %";
    let in_the_kernel =
        format!("perf script -i data -F period,ip,sym,iregs | awk -v PERIOD={KERNEL_PERIOD} -f kernel.awk");
    let mut script =
        Script::new().section("no limit in time", UNLIMITED).section("functions only", LIST_FUNCTIONS_ONLY);
    for (period, program, _) in PERIODS {
        script = script
            .section(
                &format!("every {period}"),
                &sampled(&format!("-c {period} -e instructions:u"), program, "true"),
            )
            .section(&format!("every {period}: places"), "perf script -i data -F period,ip | sort -u");
    }
    for rate in FREQUENCIES {
        if rate == "max" {
            script = script.section("limit", &set_max_frequency(MAX_FREQUENCY));
        }
        let options = format!("-i -F {rate} -e '{{instructions:u}}:S'");
        script = script.section(&format!("at {rate}"), &sampled(&options, "loop", frequency));
    }
    script = script.section("no limit", &set_max_frequency(100_000));
    for (name, event) in [("kernel", "instructions:k"), ("both modes", "instructions")] {
        let options = format!("-i -c {KERNEL_PERIOD} -e '{{{event}}}:S' --intr-regs=flags");
        script = script.section(name, &sampled(&options, "yield", &in_the_kernel));
    }
    let (six, ten) = (list(&model.six(Loop::LONG), ","), list(&model.ten(Loop::LONG), ","));
    script
        .section("six", &sampled(&format!("-c {PERIOD_OF_SIX} -e {six}"), "short", by_event))
        .section("six at a rate", &sampled(&format!("-F 1000 -e {six}"), "loop", by_event))
        .section("turns", TURNS)
        .section("ten", &sampled(&format!("-c {PERIOD_OF_TEN} -e {ten}"), "loop", by_event))
        .section(
            "split",
            &sampled(&format!("-c {SPLIT_PERIOD} -e instructions:u --call-graph fp"), "split", chains),
        )
        .section("split: report", report)
        // The input outlasts perf, which at its end draws screen after screen, and makes older samples weigh less at
        // each.
        .section(
            "top",
            "(while :; do ./split; done) & \
             sleep 4 | (timeout 3 perf top --stdio -d 1 -F 99 -e instructions:u; kill $!; echo)",
        )
}

fn storm() -> Script {
    let steps = format!(
        "perf script -i data -F ip | awk -v PERIOD={STORM_PERIOD} -v LENGTH={TRACK_LENGTH} -f steps.awk"
    );
    let instructions = format!("-c {STORM_PERIOD} -e instructions:u");
    let all_cpus = "for cpus in 1 2 4 8; do";
    Script::new()
        .section("no limit in time", UNLIMITED)
        .section("functions only", LIST_FUNCTIONS_ONLY)
        .section(
            "migrating",
            &format!(
                "perf record -q -N -o data --sample-cpu {instructions} ./migrate; \
                 perf script -i data -F cpu | sort | uniq -c | awk '{{ print $2, $1 }}'"
            ),
        )
        .section(
            "at once",
            &format!(
                "{all_cpus} taskset $cpus perf record -q -N -o data.$cpus -c 1000000 -e instructions:u ./loop & \
                 done; wait; {all_cpus} echo $cpus $(perf script -i data.$cpus -F ip | wc -l); done"
            ),
        )
        // Bound to one CPU: perf opens an event for each CPU, and a program that migrates leaves the rest of a period
        // behind.
        .section("storm", &format!("taskset 1 {}", sampled(&instructions, "track", &steps)))
}

/// Returns the numbers of a section. Checks that it has this number of samples, and no records of lost samples.
fn complete<'a>(pmu: &str, guest: &'a Sections, section: &str, samples: u64) -> BTreeMap<&'a str, u64> {
    let found = guest.numbers(section);
    assert_eq!(found.get("SAMPLE"), Some(&samples), "{pmu}, {section}: {found:?}");
    assert_no_losses(pmu, section, &found);
    found
}

/// Checks that there are no records of lost samples.
fn assert_no_losses(pmu: &str, section: &str, found: &BTreeMap<&str, u64>) {
    for record in LOSS_RECORDS {
        assert!(!found.contains_key(record), "{pmu}, {section}: {found:?}");
    }
}

fn the_number_of_samples_is_the_count_divided_by_the_period() {
    for (Model { pmu, .. }, guest) in guests(&COMMON) {
        for (period, _, instructions) in PERIODS {
            let section = format!("every {period}");
            complete(pmu, &guest, &section, instructions / period);
            // The periods are multiples of the programs' rounds, so all samples are at the same instruction.
            let places = guest.text(&format!("{section}: places"));
            let fields: Vec<&str> = places.split_whitespace().collect();
            assert_eq!((fields.len(), fields[0]), (2, period.to_string().as_str()), "{pmu}: {places}");
        }
    }
}

fn with_a_frequency_no_event_is_lost_between_samples() {
    for (Model { pmu, .. }, guest) in guests(&COMMON) {
        for rate in FREQUENCIES {
            let section = format!("at {rate}");
            let found = guest.numbers(&section);
            let compared = found["compared"];
            assert!(compared >= 10, "{pmu}, {section}: {found:?}");
            // At the maximum frequency the kernel throttles the event, which then does not count, and may want a much
            // shorter period each time.
            let throttled = found.get("THROTTLE").copied().unwrap_or(0);
            let shortened = found["shortened"].min(throttled);
            let exact = [found["ended"], found["begun"] + shortened];
            assert!(exact.contains(&compared), "{pmu}, {section}: {found:?}");
            if rate != "max" {
                assert_no_losses(pmu, &section, &found);
                let rest = 0..found["longest"];
                assert!(rest.contains(&(LOOP_INSTRUCTIONS - found["value"])), "{pmu}, {section}: {found:?}");
            }
        }
    }
}

fn six_events_are_sampled_at_once() {
    for (model @ Model { pmu, .. }, guest) in guests(&COMMON) {
        let six = model.six(Loop::SHORT);
        let samples = six.iter().map(|(_, count)| count / PERIOD_OF_SIX).sum();
        let found = complete(pmu, &guest, "six", samples);
        for (event, count) in six {
            let samples = found[&*format!("{event} samples")];
            assert_eq!(samples, count / PERIOD_OF_SIX, "{pmu}: {event}: {found:?}");
        }
    }
}

/// Returns the period with which Linux' driver for Intel's processors starts its search for a frequency of 1000. No
/// sample contains this period: this driver's samples contain the period that begins at the sample.
fn first_period(event: &str) -> u64 {
    match event {
        "instructions:u" | "cycles:u" => 500_000,
        "branches:u" => 125_000,
        _ => 256,
    }
}

fn with_a_frequency_the_periods_of_six_events_add_up_to_their_counts() {
    for (model @ Model { pmu, .. }, guest) in guests(&COMMON) {
        let found = guest.numbers("six at a rate");
        assert_no_losses(pmu, "six at a rate", &found);
        // True if samples contain the period that begins at them, instead of the one that ends there.
        let alone = guest.numbers("at 1000");
        let begun = alone["begun"] == alone["compared"];
        for (event, count) in model.six(Loop::LONG) {
            let number = |what: &str| found[&*format!("{event} {what}")];
            let (unseen, ahead) = if begun { (first_period(event), number("last")) } else { (0, 0) };
            let sum = unseen + number("sum") - ahead;
            let rest = 0..number("longest");
            assert!(rest.contains(&(count - sum)), "{pmu}: {event}: {found:?}");
        }
    }
}

fn more_events_than_counters_are_sampled_in_turn() {
    for (model, guest) in guests(&COMMON) {
        let pmu = model.pmu;
        let found = guest.numbers("ten");
        assert_no_losses(pmu, "ten", &found);
        // In thousandths of the count of an event that is on a counter all the time.
        let shares: Vec<u64> = model
            .ten(Loop::LONG)
            .into_iter()
            .map(|(event, count)| found[&*format!("{event} samples")] * PERIOD_OF_TEN * 1000 / count)
            .collect();
        let (all, each) = (shares.iter().sum::<u64>(), 1000 * COUNTERS / shares.len() as u64);
        assert!(all.abs_diff(1000 * COUNTERS) <= 10 * COUNTERS, "{pmu}: {all}: {shares:?}, {found:?}");
        // The length of a turn depends on the cost of the samples in it.
        let fair = each * 4 / 5..=each * 6 / 5;
        assert!(shares.iter().all(|share| fair.contains(share)), "{pmu}: {shares:?}, {found:?}");
    }
}

fn the_kernel_is_sampled_with_interrupts_off() {
    for (Model { pmu, .. }, guest) in guests(&COMMON) {
        for section in ["kernel", "both modes"] {
            let found = guest.numbers(section);
            assert_no_losses(pmu, section, &found);
            assert_eq!(found["exact"], found["SAMPLE"], "{pmu}, {section}: {found:?}");
            for function in INTERRUPTS_OFF {
                assert!(found.contains_key(&*format!("off {function}")), "{pmu}: {function}: {found:?}");
                assert!(!found.contains_key(&*format!("on {function}")), "{pmu}: {function}: {found:?}");
            }
        }
    }
}

fn functions_have_the_right_shares_of_samples() {
    for (Model { pmu, .. }, guest) in guests(&COMMON) {
        complete(pmu, &guest, "split", SPLIT_INSTRUCTIONS / SPLIT_PERIOD);
        let lines = |section| -> Vec<Vec<&str>> {
            guest.text(section).lines().map(|line| line.split_whitespace().collect()).collect()
        };
        assert_eq!(
            lines("split: report"),
            [["70.00%", "[.]", "seventy"], ["30.00%", "[.]", "thirty"]],
            "{pmu}"
        );
    }
}

fn samples_have_call_chains() {
    for (Model { pmu, .. }, guest) in guests(&COMMON) {
        let mut chains = guest.numbers("split");
        chains.retain(|chain, _| chain.contains('<'));
        // At three instructions of `seventy` the frame pointer is its caller's, so `thirty` is missing in the chain: at
        // the two that set up the frame, and at the one after its removal.
        let expected = [("seventy<_start", 3), ("seventy<thirty<_start", 697), ("thirty<_start", 300)];
        assert_eq!(chains, BTreeMap::from(expected), "{pmu}");
    }
}

/// Returns the functions that a screen of `perf top` shows, in their order.
fn functions(screen: &str) -> Vec<&str> {
    screen.lines().filter_map(|line| line.split_once("[.] ")).map(|(_, name)| name.trim()).collect()
}

fn perf_top_shows_the_busiest_function_first() {
    for (Model { pmu, .. }, guest) in guests(&COMMON) {
        let text = guest.text("top");
        // perf is killed, so its last screens may be cut off; functions of perf itself may be further down.
        let screens: Vec<_> =
            text.split("PerfTop:").map(functions).filter(|screen| !screen.is_empty()).collect();
        assert!(screens.iter().all(|screen| "seventy".starts_with(screen[0])), "{pmu}: {text}");
        assert!(screens.iter().any(|screen| screen.starts_with(&["seventy", "thirty"])), "{pmu}: {text}");
    }
}

fn a_hundred_thousand_samples_are_each_at_the_right_instruction() {
    for (Model { pmu, .. }, guest) in guests(&STORM) {
        let samples = TRACK_INSTRUCTIONS / STORM_PERIOD;
        assert!(samples >= 100_000);
        let found = complete(pmu, &guest, "storm", samples);
        // If an event is resumed with a remaining period of 1, Linux programs a period of 2.
        assert_eq!(found["exact"] + found["one-late"], samples, "{pmu}: {found:?}");
        assert!(found["one-late"] <= samples / STORM_PERIOD, "{pmu}: {found:?}");
    }
}

fn a_migrating_program_is_sampled_on_all_cpus() {
    for (Model { pmu, .. }, guest) in guests(&STORM) {
        // perf opens an event for each CPU, and the rest of a period stays on the CPU.
        let samples = MIGRATE_INSTRUCTIONS / 4 / STORM_PERIOD;
        let by_cpu = ["[000]", "[001]", "[002]", "[003]"].map(|cpu| (cpu, samples));
        assert_eq!(guest.numbers("migrating"), by_cpu.into(), "{pmu}");
    }
}

fn four_cpus_take_samples_at_once() {
    for (Model { pmu, .. }, guest) in guests(&STORM) {
        let samples = LOOP_INSTRUCTIONS / 1_000_000;
        assert_eq!(guest.numbers("at once"), ["1", "2", "4", "8"].map(|cpu| (cpu, samples)).into(), "{pmu}");
    }
}
