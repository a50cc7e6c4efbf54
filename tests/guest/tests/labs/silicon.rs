//! Hosts whose PMUs misbehave as those of real processors do: an overflow's interrupt comes thousands of instructions
//! late, or twice, or right after an exit; two overflows share one; each entry into a guest counts as something that
//! the guest does; reserved bits are set. `vmm/lab/cpu/README.md` has the list, and `docs/silicon.md` what is exact all
//! the same.
//!
//! There are tests of this module's own, on one host of a minute of a core (of AMD's; Intel's takes three), and those
//! of other modules.

use guest_images::payloads::{LOOP_BRANCHES, LOOP_INSTRUCTIONS};
use guest_tests::host::{self, Host, Silicon};
use guest_tests::lab::{OnEachHost, Steps};
use guest_tests::suite::{self, Test, except, on_silicon, second_tier, third_tier};
use guest_tests::tests;
use tally_lab::programs::LOOP;

use super::{counting, ebb, features, policy, rr, sampling, snapshots, starvation, turns};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let first = [own(), of_programs(), of_starvation()].concat();
    let policies = except(policy::on_any_host(), &["a_period_below_the_minimum_is_raised_to_it"]);
    let others = [
        counting::of_events(),
        of_samples(),
        ebb::of_late_interrupts(),
        // Leaving entries out takes time at each change of turns, which scaled counts do not know of.
        except(turns::on_x86(), &["scaled_counts_are_near_what_they_should_be"]),
        of_features(),
        policies.clone(),
    ]
    .concat();
    // Ten minutes of a core; on the Intel host, an hour.
    let long = [
        rr::on_any_host(),
        except(snapshots::tests(), &["over_ten_snapshots_no_count_and_no_sample_is_lost_or_made_up"]),
    ]
    .concat();
    let zens = [
        on_silicon(Silicon::Zen2, first.clone()),
        second_tier(on_silicon(Silicon::Zen2, others.clone())),
        third_tier(on_silicon(Silicon::Zen2, long.clone())),
        second_tier(on_silicon(Silicon::Zen4, own())),
        third_tier(on_silicon(
            Silicon::Zen4,
            [of_programs(), of_starvation(), others.clone(), long.clone()].concat(),
        )),
    ];
    // Bochs is slow, and other tests count on the eight counters of `icelake`.
    let repeated =
        [of_programs(), of_starvation(), counting::of_events(), of_samples(), ebb::of_late_interrupts()]
            .concat();
    let repeated = [repeated, of_features(), policies, long].concat();
    let cores = [
        on_silicon(Silicon::Skylake, of_any_processor()),
        third_tier(on_silicon(Silicon::Skylake, of_programs())),
        third_tier(on_silicon(Silicon::Icelake, [of_any_processor(), repeated].concat())),
    ];
    [zens.concat(), cores.concat()].concat()
}

fn own() -> Vec<Test> {
    let of_entries = tests![entries_are_left_out_of_what_a_guest_counts, leaving_entries_out_costs_little];
    [of_any_processor(), of_entries].concat()
}

fn of_any_processor() -> Vec<Test> {
    tests![
        the_host_sees_the_mistakes_and_copes,
        as_many_samples_are_taken_as_counts_and_periods_say,
        tallys_check_measures_how_late_interrupts_are,
        no_interrupt_is_one_that_nobody_wants,
    ]
}

/// The host counts the entries into its guests.
fn of_programs() -> Vec<Test> {
    except(counting::of_programs(), &["guest_and_host_agree_to_the_instruction"])
}

/// The others are of guests that are no Linux, and count user mode alone, or are about the places of samples.
fn of_starvation() -> Vec<Test> {
    const OTHERS: [&str; 4] = [
        "counts_before_and_after_starvation_are_exact",
        "no_counted_overflow_is_lost",
        "perfs_samples_in_linux_stay_a_period_apart_after_starvation",
        "counters_that_keep_their_hardware_miss_nothing",
    ];
    except(starvation::on_any_host(), &OTHERS)
}

/// The others are about the places of samples.
fn of_samples() -> Vec<Test> {
    const PLACES: [&str; 5] = [
        "the_number_of_samples_is_the_count_divided_by_the_period",
        "with_a_frequency_no_event_is_lost_between_samples",
        "with_a_frequency_the_periods_of_six_events_add_up_to_their_counts",
        "functions_have_the_right_shares_of_samples",
        "samples_have_call_chains",
    ];
    except(sampling::on_any_host(), &PLACES)
}

/// The others say at which instruction an overflow is, which they do not on the host either. A sample that is late by
/// the last instructions of a program has no registers of it, and then has room in a buffer that is full for others.
fn of_features() -> Vec<Test> {
    const PLACES: [&str; 9] = [
        "a_full_buffer_says_how_much_was_lost",
        "every_overflow_is_a_sample_at_its_instruction",
        "all_counters_may_overflow_at_once",
        "two_sampled_events_do_not_disturb_each_other",
        "a_changed_period_holds_at_once",
        "a_counter_can_stop_at_its_overflow",
        "a_sample_has_the_counts_of_a_group",
        "a_buffer_that_is_read_loses_nothing",
        "a_self_monitoring_thread_gets_its_signals",
    ];
    except(features::on_x86(), &PLACES)
}

/// PMUs of the guests whose overflows are counted. The Intel host takes three minutes for each.
fn pmus() -> &'static [&'static str] {
    match host::current() {
        _ if suite::runs_second_tier() => &["amd", "amd-legacy", "intel", "intel-v2"],
        Host::Amd => &["amd", "intel"],
        Host::Intel => &["intel"],
    }
}

/// Periods that are longer than the longest skid.
const PERIODS: [u64; 3] = [50_000, 100_000, 1_000_000];

/// Stops a kernel that has an NMI which nobody wants.
const STRICT: &str = "echo 1 >/proc/sys/kernel/unknown_nmi_panic";
const COMPLAINTS: &str = "dmesg | grep -iE 'uhhuh|unknown nmi|dazed|irq loop|spurious'";

/// Rounds of two instructions, and the instructions of the rest of what the guest counts.
const ROUNDS: u64 = 10_000_000;
const REST: u64 = 0x34;

/// Prints what the host executes for a guest's samples, and three times for few and for many reads of a counter: with
/// entries left out, and as if the host did not count them.
const COST: &str = "\
numbers=$(ls ~/.cache/tally/entry-ticks-*/numbers) kept=$(cat $numbers)
cost() {
    perf stat -x, -o counted -e instructions:H ./tally run --kernel payload --append \"$1\" >said
    [ $(grep -cE '4000 overflows|^rdmsr c0010201' said) = $2 ] && grep -o '^[0-9]*,' counted | tr -d ,
}
for ticks in \"$kept\" '0 0 0 0 0 0'; do
    chmod u+w $numbers; echo $ticks >$numbers
    cost 'pmi=nmi,4000,50000' 1
    for number in 100 400; do
        reads=$(for read in $(seq $number); do printf 'rdmsr=0xc0010201 '; done)
        for run in 1 2 3; do cost \"wrmsr=0xc0010200,0x0:0x4300c0 $reads\" $number; done
    done
done
echo $kept >$numbers
";
/// Number of these samples, and how many more the many reads are than the few.
const SAMPLES: u64 = 4000;
const READS: u64 = 300;
/// The most instructions that leaving entries out costs a sample: a system call for each of its exits.
const COST_OF_A_SAMPLE: u64 = 8000;
/// The same for a read: one system call.
const COST_OF_A_READ: u64 = 1700;

static RESULTS: OnEachHost = OnEachHost::new(|| {
    let places = "perf record -q -o data -c 100000 -e instructions:u ./long 2>/dev/null; \
                  perf script -i data -F ip | sort | uniq -c | awk '{ n += $1 } END { print NR, n }'";
    let steps = Steps::new("silicon")
        .configure_host(|host| host.program(LOOP, "long"))
        .step("places", &format!("{STRICT}; {places}"))
        .step("check", "./tally check");
    let steps = match host::current() {
        Host::Intel => steps,
        Host::Amd => steps
            .step("doctor", "./tally doctor | grep entries")
            .bare_metal("sum", "", &format!("timer=100 count=0:0x4300c0,{ROUNDS},0"))
            .step("cost", COST),
    };
    let steps = pmus().iter().fold(steps, |steps, pmu| {
        let sampled = PERIODS.map(|period| {
            format!(
                "perf record -q -o /tmp/data -c {period} -e instructions:u /lib/tally/loop 2>/dev/null; \
                 perf script -i /tmp/data -F period | wc -l"
            )
        });
        let counted = "perf stat -x, -o /tmp/stat -e instructions:u,branches:u /lib/tally/loop; \
                       grep -o '^[0-9]*,' /tmp/stat | tr -d ,";
        let limits = "echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent";
        let script = [STRICT, limits, counted, &sampled.join("; "), COMPLAINTS, "exit 0"].join("; ");
        steps.step(pmu, &format!("./tally run --pmu {pmu} -- sh -c \"{script}\""))
    });
    steps.step("complaints", &format!("{COMPLAINTS}; exit 0")).run()
});

fn the_host_sees_the_mistakes_and_copes() {
    let text = RESULTS.of("places").text();
    let numbers: Vec<u64> = text.split_whitespace().filter_map(|number| number.parse().ok()).collect();
    let [places, samples] = numbers[..] else { panic!("{text}") };
    assert_eq!(samples, 2000);
    assert!(places > 1, "without mistakes, all samples are at the same of the loop's two instructions");
}

fn entries_are_left_out_of_what_a_guest_counts() {
    let doctor = RESULTS.of("doctor").text();
    assert!(doctor.contains("counts each entry into a guest"), "{doctor}");
    let sum = RESULTS.of("sum");
    let expected = format!("count {ROUNDS} {:016x}", 2 * ROUNDS + REST);
    assert!(sum.text().lines().any(|line| line == expected), "{}, not {expected}", sum.text());
}

fn as_many_samples_are_taken_as_counts_and_periods_say() {
    for pmu in pmus() {
        let done = RESULTS.of(pmu);
        let text = done.text();
        let numbers: Vec<u64> = text.lines().filter_map(|line| line.parse().ok()).collect();
        let samples = PERIODS.map(|period| LOOP_INSTRUCTIONS / period);
        let expected = [&[LOOP_INSTRUCTIONS, LOOP_BRANCHES][..], &samples].concat();
        assert_eq!((done.status, numbers), (0, expected), "{pmu}: {text}{}", done.err);
    }
}

fn tallys_check_measures_how_late_interrupts_are() {
    let check = RESULTS.of("check");
    let text = check.text();
    assert_eq!(check.status, 0, "{text}");
    assert!(text.contains(", 0 wrong"), "{text}");
    let of_linux: Vec<&str> = text.lines().filter(|line| line.contains("perf ")).collect();
    assert!(of_linux.len() == 3 && of_linux.iter().all(|line| line.ends_with("exact")), "{text}");
    let late = text.lines().find(|line| line.contains("late by so many instructions"));
    let numbers: Vec<u64> =
        late.unwrap_or(&text).split([' ', ',']).filter_map(|word| word.parse().ok()).collect();
    let [least, most, median, ..] = numbers[..] else { panic!("{text}") };
    let skid = host::silicon().expect("it has a profile").skid();
    // The second interrupt of an overflow, or one that an exit has brought forward, may be less late for another one.
    assert!(0 < least && least < median && median < most, "{text}");
    assert!(skid.contains(&median) && most <= *skid.end(), "{text}");
}

fn no_interrupt_is_one_that_nobody_wants() {
    for step in pmus().iter().chain(&["complaints"]) {
        let done = RESULTS.of(step);
        let text = done.text();
        let said = text.lines().filter(|line| line.parse::<u64>().is_err()).collect::<Vec<_>>();
        assert_eq!((done.status, said), (0, Vec::new()), "{step}: {}", done.err);
    }
}

fn leaving_entries_out_costs_little() {
    let text = RESULTS.of("cost").text();
    let numbers: Vec<u64> = text.lines().filter_map(|line| line.parse().ok()).collect();
    // The host's timer interrupts runs, some more often than others.
    let least = |runs: &[u64]| *runs.iter().min().expect("there are three");
    let of = |numbers: &[u64; 7]| {
        let [samples, few_and_many @ ..] = numbers;
        let (few, many) = few_and_many.split_at(3);
        (*samples, least(many) - least(few))
    };
    let [left_out, kept] = numbers.as_chunks().0 else { panic!("{text}{}", RESULTS.of("cost").err) };
    let ((sampled, read), (sampled_without, read_without)) = (of(left_out), of(kept));
    let sample = sampled.saturating_sub(sampled_without) / SAMPLES;
    let read = read.saturating_sub(read_without) / READS;
    println!("leaving entries out costs a sample {sample} instructions, and a read {read}");
    assert!((1..=COST_OF_A_SAMPLE).contains(&sample), "{sample} instructions: {text}");
    assert!((1..=COST_OF_A_READ).contains(&read), "{read} instructions: {text}");
}
