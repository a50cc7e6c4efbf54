//! Tests of starvation on the lab's simulated host: another process takes the host's counters while a guest counts and
//! samples. The tests check Tally's messages, their times, and the guest's counts. One instruction takes one nanosecond
//! there, so a guest in a loop misses no more counts than a starvation interval has nanoseconds.
//!
//! The program `counter-thief` (`vmm/lab/programs/counter_thief.rs`) prints when it took counters and gave them back.
//! A shell loop prefixes each of Tally's messages with its time, in hundredths of a second. Every test runs with each
//! selected model.

use std::collections::BTreeSet;
use std::time::Duration;

use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, PAUSED_GUESTS, Steps};
use guest_tests::model::{Model, selected_models};
use guest_tests::program;
use guest_tests::suite::{Test, on_intel, third_tier};
use guest_tests::tests;
use tally_lab::programs::{LOOP, LOOP_INSTRUCTIONS};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [on_any_host(), third_tier(on_intel(on_any_host()))].concat()
}

pub fn on_any_host() -> Vec<Test> {
    tests![
        starvation_is_reported_within_a_tenth_of_a_second,
        each_starved_counter_is_reported_with_its_event,
        each_report_of_starvation_says_who_holds_the_hardware,
        the_reported_length_is_an_upper_bound_of_the_missed_counts,
        counts_before_and_after_starvation_are_exact,
        a_stopped_vm_misses_only_counts_before_the_stop,
        an_estimate_is_within_one_percent,
        no_counted_overflow_is_lost,
        perfs_samples_in_linux_stay_a_period_apart_after_starvation,
        counters_that_keep_their_hardware_miss_nothing,
    ]
}

/// Rounds of a guest's three user-mode loops, each of which is counted. The counters are taken during the second.
const ROUNDS: [u64; 3] = [10_000_000, 150_000_000, 20_000_000];
/// Number of overflows of each counter in the guest that samples.
const OVERFLOWS: u64 = 250;
/// Period of these overflows in instructions.
const PERIOD: u64 = 1_000_000;

/// Time within which starvation must be reported.
const REPORTED_WITHIN: Duration = Duration::from_millis(100);
/// Resolution of the times of Tally's messages.
const TICK: Duration = Duration::from_millis(10);

static RESULTS: OnEachHost = OnEachHost::new(|| {
    let steps = Steps::new("starvation").in_guest("long", LOOP).in_guest("sample", SAMPLE);
    let steps = steps.configure_host(|host| host.file(program("counter-thief"), "counter-thief"));
    selected_models()
        .iter()
        .fold(steps, |steps, model| linux_guest(bare_metal_guests(steps, model), model))
        .run()
});

/// Script of the Linux guest: samples a program, and prints how much each event has counted since the sample before.
/// The first line keeps the kernel from lowering the sampling rate.
const SAMPLE: &[u8] = b"\
echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent
echo ready >&2
perf record -q -o data -c 1000000 -e '{instructions:u,branches:u}:S' ./long
perf script -i data -F event,period | sort | uniq -c
";

/// Returns arguments of `counter-thief` that take all of the host's counters that can count instructions or cycles.
fn all_counters() -> &'static str {
    match host::current() {
        Host::Amd => "6",
        Host::Intel => "9,1",
    }
}

/// Returns arguments of `counter-thief` that leave one counter, on which a guest can count cycles.
fn all_but_one() -> &'static str {
    match host::current() {
        Host::Amd => "5",
        Host::Intel => "9",
    }
}

/// Adds the Linux guest, and takes the counters eight times while it samples.
fn linux_guest(steps: Steps, Model { pmu, options, .. }: &Model) -> Steps {
    let all = all_counters();
    let commands = format!(
        ">linux\n\
         ./tally run --pmu {pmu} {options} -- sh ./sample 2>linux & tally=$!\n\
         until grep -q '^ready' linux || ! kill -0 $tally; do sleep 0.01; done\n\
         ./counter-thief {all} --for 0.03 --times 8 --every 0.13 >/dev/null; wait $tally; cat linux >&2"
    );
    steps.step(&format!("linux-{pmu}"), &commands)
}

/// Adds the guests without an operating system: name, options, words, and arguments of `counter-thief`.
fn bare_metal_guests(steps: Steps, Model { pmu, options: counters, .. }: &Model) -> Steps {
    let count = ROUNDS.map(|rounds| format!("count-user=0:0x4100c0,{rounds},0")).join(" ");
    let sample = format!("pmi=nmi,{OVERFLOWS},{PERIOD},0x3f");
    // Counters with the same event share one host event. Here three count instructions and three count cycles, and both
    // events have the same count in each loop. Intel's two fixed counters come last, and have events of their own.
    let cycles = if *pmu == "intel" { "0x51003c" } else { "0x510076" };
    let sample_both = format!("{sample},0:0x5100c0,0x23,0:{cycles}");
    let all = all_counters();
    [
        ("counts", "", &count, all, "--for 0.06"),
        ("counts-twice", "", &count, all, "--for 0.02 --times 2 --every 0.14"),
        ("stops", "--on-starvation stop", &count, all, "--for 0.06"),
        ("estimates", "--on-starvation scale", &count, all, "--for 0.06"),
        ("samples", "", &sample, all, "--for 0.06"),
        ("keeps-three", "", &sample_both, all_but_one(), "--for 0.06"),
    ]
    .into_iter()
    .fold(steps, |steps, (name, options, words, counters_to_take, times)| {
        let guest = format!("./tally run --kernel payload --pmu {pmu} {counters} {options} --append 'timer=1000 {words}'");
        let theft = format!("{counters_to_take} {times}");
        let commands = format!(
            "{PAUSED_GUESTS}\n\
             mkfifo told\n\
             while read -r line; do read -r now _ </proc/uptime; echo \"$now $line\" >&2; done <told & told=$!\n\
             begin {guest} 2>told; kill -CONT $tally; sleep 0.1; ./counter-thief {theft}\n\
             ended $tally; well=$?; wait $told; rm told; exit $well"
        );
        steps.step(&format!("{name}-{pmu}"), &commands)
    })
}

/// Result of a guest whose counters were taken.
struct StarvedGuest {
    name: String,
    /// Output of the guest and of `counter-thief`.
    output: String,
    /// Tally's messages about the vCPU, with their times.
    messages: Vec<(Duration, String)>,
}

/// Time span in which `counter-thief` held counters.
struct Theft {
    since: Duration,
    until: Duration,
}

/// Returns the results of this guest for each PMU.
fn guests(name: &str) -> impl Iterator<Item = StarvedGuest> {
    selected_models().iter().map(move |model| {
        let name = format!("{name}-{}", model.pmu);
        let done = RESULTS.of(&name);
        assert_eq!(done.status, 0, "{name}: {}{}", done.text(), done.err);
        let messages = done.err.lines().map(|line| {
            let (time, what) =
                line.split_once(" tally: vCPU 0: ").unwrap_or_else(|| panic!("{name}: {}", done.err));
            (Duration::from_secs_f64(time.parse().expect("a time in seconds")), what.to_owned())
        });
        StarvedGuest { messages: messages.collect(), output: done.text(), name }
    })
}

impl StarvedGuest {
    fn thefts(&self) -> Vec<Theft> {
        let times = |begin: &str| {
            let lines = self.output.lines().filter(|line| line.starts_with(begin)).collect::<Vec<_>>();
            let times = lines.iter().map(|line| line.rsplit(' ').next().and_then(|time| time.parse().ok()));
            times.map(|time| Duration::from_nanos(time.expect("a time in nanoseconds"))).collect::<Vec<_>>()
        };
        let thefts = times("holds ").into_iter().zip(times("gave back "));
        thefts.map(|(since, until)| Theft { since, until }).collect()
    }

    /// Returns the messages that a counter is starved: time and counter.
    fn starved(&self) -> Vec<(Duration, &str)> {
        self.starved_with_holders().map(|(time, counter, _)| (time, counter)).collect()
    }

    /// Returns the same messages with who holds the hardware.
    fn starved_with_holders(&self) -> impl Iterator<Item = (Duration, &str, &str)> {
        self.messages.iter().filter_map(|(time, what)| {
            let (counter, holders) = what.split_once(" is starved: the host has no hardware for it; ")?;
            Some((*time, counter, holders))
        })
    }

    /// Returns the messages that a counter counts again: counter and length of the interval.
    fn recovered(&self) -> Vec<(&str, Duration)> {
        let recovered =
            self.messages.iter().filter_map(|(_, what)| what.split_once(" counts again, after up to "));
        recovered
            .map(|(counter, length)| {
                let milliseconds: f64 =
                    length.strip_suffix("ms").and_then(|number| number.parse().ok()).expect("milliseconds");
                // The message has the length in whole microseconds.
                (counter, Duration::from_secs_f64(milliseconds / 1e3) + Duration::from_micros(1))
            })
            .collect()
    }

    /// Returns the number of missed counts in each loop.
    fn missed(&self) -> [i64; 3] {
        ROUNDS.map(|rounds| {
            let counted = self.output.lines().find_map(|line| line.strip_prefix(&format!("count {rounds} ")));
            let counted = counted.unwrap_or_else(|| panic!("{}: {}", self.name, self.output));
            let counted = i64::from_str_radix(counted, 16).expect("it prints digits");
            i64::try_from(2 * rounds + 1).expect("it is small") - counted
        })
    }

    /// Returns the numbers of interrupts and overflows that the guest printed. Checks that each interrupt was exact
    /// (the counter read 0), at any address of the loop.
    fn overflows(&self) -> (u64, u64) {
        let numbers = self.output.lines().find_map(|line| {
            let rest = line.strip_suffix(", value 0..0, status 3f, left 00, entry 00000400, 0 late")?;
            let (numbers, _) = rest.strip_prefix("pmi ")?.split_once(" overflows, at ")?;
            let (interrupts, overflows) = numbers.split_once(" interrupts, ")?;
            Some((interrupts.parse().ok()?, overflows.parse().ok()?))
        });
        numbers.unwrap_or_else(|| panic!("{}: {}", self.name, self.output))
    }
}

/// Returns the maximum number of counts that an interval can miss: one instruction per nanosecond.
fn most_missed(interval: Duration) -> u64 {
    interval.as_nanos().try_into().expect("intervals are short")
}

/// Returns Tally's names of the counters of a guest in which all six count instructions. Intel's last one can count
/// only cycles.
fn six_counters(guest: &StarvedGuest) -> [&'static str; 6] {
    if guest.name.ends_with("intel") {
        [
            "counter 0 (instructions:u)",
            "counter 1 (instructions:u)",
            "counter 2 (instructions:u)",
            "counter 3 (instructions:u)",
            "counter 4 (instructions:u)",
            "counter 5 (cycles:u)",
        ]
    } else {
        [
            "counter 0 (rc0:u)",
            "counter 1 (rc0:u)",
            "counter 2 (rc0:u)",
            "counter 3 (rc0:u)",
            "counter 4 (rc0:u)",
            "counter 5 (rc0:u)",
        ]
    }
}

fn starvation_is_reported_within_a_tenth_of_a_second() {
    for name in ["counts", "counts-twice", "stops", "estimates", "samples", "keeps-three"] {
        for guest in guests(name) {
            let thefts = guest.thefts();
            let starved = guest.starved();
            assert!(
                !thefts.is_empty() && starved.len() >= thefts.len(),
                "{}: {:?}",
                guest.name,
                guest.messages
            );
            for (time, _) in starved {
                let in_time =
                    |theft: &Theft| time + TICK > theft.since && time <= theft.since + REPORTED_WITHIN;
                assert!(thefts.iter().any(in_time), "{}: {:?}: {}", guest.name, guest.messages, guest.output);
            }
        }
    }
}

fn each_starved_counter_is_reported_with_its_event() {
    for guest in guests("counts").chain(guests("stops")).chain(guests("estimates")) {
        let starved: Vec<_> = guest.starved().into_iter().map(|(_, counter)| counter).collect();
        assert_eq!(starved, six_counters(&guest)[..1], "{}", guest.name);
    }
    for guest in guests("samples") {
        let starved: Vec<_> = guest.starved().into_iter().map(|(_, counter)| counter).collect();
        assert_eq!(starved, six_counters(&guest), "{}", guest.name);
    }
    // An interval that is over before Tally checks the counter is found as well.
    for guest in guests("counts-twice") {
        let starved: Vec<_> = guest.starved().into_iter().map(|(_, counter)| counter).collect();
        assert_eq!(starved, [six_counters(&guest)[0]; 2], "{}", guest.name);
    }
}

fn each_report_of_starvation_says_who_holds_the_hardware() {
    for guest in guests("counts").chain(guests("samples")) {
        for (_, _, holders) in guest.starved_with_holders() {
            assert!(holders.starts_with("others hold all "), "{}: {holders}", guest.name);
        }
    }
    // The counters that keep their hardware share one event of the host.
    for guest in guests("keeps-three") {
        for (_, _, holders) in guest.starved_with_holders() {
            assert!(holders.contains(" this vCPU holds 1 ("), "{}: {holders}", guest.name);
            let is_known = host::current() == Host::Intel || holders.ends_with("), others 5");
            assert!(is_known, "{}: {holders}", guest.name);
        }
    }
}

fn the_reported_length_is_an_upper_bound_of_the_missed_counts() {
    for guest in guests("counts").chain(guests("counts-twice")) {
        let (thefts, recovered) = (guest.thefts(), guest.recovered());
        assert_eq!(recovered.len(), thefts.len(), "{}: {:?}", guest.name, guest.messages);
        for (theft, (_, length)) in thefts.iter().zip(&recovered) {
            // Tally checks counters at intervals, so the beginning and the end can each be late by this.
            let held = theft.until.saturating_sub(theft.since);
            assert!(
                *length >= held && *length <= held + 2 * REPORTED_WITHIN,
                "{}: {:?}",
                guest.name,
                guest.messages
            );
        }
        let most: u64 = recovered.iter().map(|(_, length)| most_missed(*length)).sum();
        let missed = guest.missed()[1];
        assert!(
            u64::try_from(missed).is_ok_and(|missed| missed > 0 && missed <= most),
            "{}: {missed}",
            guest.name
        );
    }
}

fn counts_before_and_after_starvation_are_exact() {
    for name in ["counts", "counts-twice", "stops", "estimates"] {
        for guest in guests(name) {
            let [before, _, after] = guest.missed();
            assert_eq!((before, after), (0, 0), "{}: {}", guest.name, guest.output);
        }
    }
}

fn a_stopped_vm_misses_only_counts_before_the_stop() {
    for guest in guests("stops") {
        let missed = guest.missed()[1];
        let recovered = guest.recovered();
        let count = |words: &str| guest.messages.iter().filter(|(_, what)| what.starts_with(words)).count();
        let stops =
            ["the VM is paused until its counters have hardware", "the VM has resumed, after "].map(count);
        assert_eq!((stops, recovered.len()), ([1, 1], 1), "{}: {:?}", guest.name, guest.messages);
        let most = most_missed(recovered[0].1).min(most_missed(REPORTED_WITHIN));
        assert!(u64::try_from(missed).is_ok_and(|missed| missed <= most), "{}: {missed}", guest.name);
    }
}

fn an_estimate_is_within_one_percent() {
    for guest in guests("estimates") {
        let missed = guest.missed()[1];
        assert!(missed.unsigned_abs() < 2 * ROUNDS[1] / 100, "{}: {missed}", guest.name);
    }
}

fn no_counted_overflow_is_lost() {
    for guest in guests("samples") {
        let recovered = guest.recovered();
        assert_eq!(recovered.len(), 6, "{}: {:?}", guest.name, guest.messages);
        let longest = recovered.iter().map(|(_, length)| *length).max().expect("there are six");
        let (interrupts, overflows) = guest.overflows();
        assert_eq!(overflows, 6 * interrupts, "{}: all six lose the same", guest.name);
        let least = OVERFLOWS - most_missed(longest).div_ceil(PERIOD);
        assert!((least..OVERFLOWS).contains(&interrupts), "{}: {interrupts}: {least}", guest.name);
    }
}

fn perfs_samples_in_linux_stay_a_period_apart_after_starvation() {
    for Model { pmu, .. } in selected_models() {
        let done = RESULTS.of(&format!("linux-{pmu}"));
        let (text, err) = (done.text(), &done.err);
        // Number of samples of each event with the expected distance from the sample before.
        let (mut instructions, mut branches) = (0, 0);
        for line in text.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            let [times, counted, event] = words[..] else { panic!("{pmu}: {text}{err}") };
            let number = |word: &str| word.parse::<u64>().expect("uniq and perf print numbers");
            match (event, number(counted)) {
                ("instructions:u:", PERIOD) => instructions += number(times),
                // Every other instruction is a branch, whichever instruction a period begins at.
                ("branches:u:", counted) if counted.abs_diff(PERIOD / 2) <= 1 => branches += number(times),
                _ => panic!("{pmu}: {text}{err}"),
            }
        }
        assert_eq!(branches, instructions, "{pmu}: {text}");
        let all = LOOP_INSTRUCTIONS / PERIOD;
        assert!((1..all).contains(&instructions), "{pmu}: some were missed: {text}");
        assert!(err.contains(" is starved: ") && err.contains(" counts again, "), "{pmu}: {err}");
    }
}

fn counters_that_keep_their_hardware_miss_nothing() {
    for guest in guests("keeps-three") {
        let starved: BTreeSet<_> = guest.starved().into_iter().map(|(_, counter)| counter).collect();
        let recovered = guest.recovered();
        assert_eq!((starved.len(), recovered.len()), (3, 3), "{}: {:?}", guest.name, guest.messages);
        let (interrupts, overflows) = guest.overflows();
        // The counters that kept their hardware interrupt at each overflow, and the others at different times.
        assert!(interrupts >= OVERFLOWS, "{}: {interrupts}", guest.name);
        let least: u64 =
            recovered.iter().map(|(_, length)| OVERFLOWS - most_missed(*length).div_ceil(PERIOD)).sum();
        let of_the_starved = overflows - 3 * OVERFLOWS;
        assert!((least..3 * OVERFLOWS).contains(&of_the_starved), "{}: {overflows}", guest.name);
    }
}
