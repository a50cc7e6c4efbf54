//! Counters whose hardware others on the host take away while a guest counts and samples with them, on the lab's simulated
//! host: what is told of it, when, and what is counted all the same. One instruction takes one nanosecond there, so a guest that
//! does nothing but loop misses no more counts than a gap has nanoseconds.
//!
//! The thief (`tests/lab/programs/counter_thief.rs`) says when it took counters and gave them back, and Tally's lines get the time as they
//! come, in hundredths of a second. Every test holds for the PMUs of both vendors.

use std::collections::BTreeSet;
use std::sync::LazyLock;
use std::time::Duration;

use guest_tests::lab::{PAUSED_GUESTS, Results, Steps};
use guest_tests::model::{Model, selected_models};
use guest_tests::program;
use guest_tests::suite::Test;
use guest_tests::tests;
use tally_lab::programs::{LOOP, LOOP_INSTRUCTIONS};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        a_theft_is_told_within_a_tenth_of_a_second,
        every_theft_is_told_with_the_counters_that_it_hit_and_what_they_count,
        a_gap_is_told_with_a_length_that_nothing_missed_exceeds,
        counts_before_and_after_a_gap_are_exact,
        a_machine_that_stands_still_misses_what_was_gone_before_that,
        an_estimate_is_right_to_a_hundredth,
        no_overflow_is_lost_that_was_counted,
        what_perf_samples_in_linux_is_a_period_apart_beyond_a_gap_too,
        counters_that_were_left_miss_nothing,
    ]
}

/// How often a guest goes round its three loops in user mode, each of which it counts. Counters are taken during the second.
const ROUNDS: [u64; 3] = [10_000_000, 150_000_000, 20_000_000];
/// How many overflows of each of its counters another guest is to have, and how many instructions from one to the next.
const OVERFLOWS: u64 = 250;
const PERIOD: u64 = 1_000_000;

/// How soon a theft is to be told.
const SOON: Duration = Duration::from_millis(100);
/// How exact the times of Tally's lines are.
const TICK: Duration = Duration::from_millis(10);

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let steps = Steps::new("starvation").in_guest("long", LOOP).in_guest("sample", SAMPLE);
    let steps = steps.configure_host(|host| host.file(program("counter-thief"), "counter-thief"));
    selected_models()
        .iter()
        .fold(steps, |steps, model| robbed_linux(robbed(steps, model.pmu), model.pmu))
        .run()
});

/// Linux samples a program, and lists how much each event had counted since the sample before. It is not to lower the rate.
const SAMPLE: &[u8] = b"\
echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent
echo ready >&2
perf record -q -o data -c 1000000 -e '{instructions:u,branches:u}:S' ./long
perf script -i data -F event,period | sort | uniq -c
";

fn robbed_linux(steps: Steps, pmu: &str) -> Steps {
    let commands = format!(
        ">linux\n\
         ./tally run --pmu {pmu} --append cryptomgr.notests -- sh ./sample 2>linux & tally=$!\n\
         until grep -q '^ready' linux || ! kill -0 $tally; do sleep 0.01; done\n\
         ./counter-thief 6 --for 0.03 --times 8 --every 0.13 >/dev/null; wait $tally; cat linux >&2"
    );
    steps.step(&format!("linux-{pmu}"), &commands)
}

fn robbed(steps: Steps, pmu: &str) -> Steps {
    let count = ROUNDS.map(|rounds| format!("count-user=0:0x4100c0,{rounds},0")).join(" ");
    let sample = format!("pmi=nmi,{OVERFLOWS},{PERIOD},0x3f");
    // Counters of the same share one of the host's: three count instructions here and three cycles, as many in each loop.
    // Of Intel's fixed ones, the last two, each has its own.
    let cycles = if pmu == "intel" { "0x51003c" } else { "0x510076" };
    let sample_both = format!("{sample},0:0x5100c0,0x23,0:{cycles}");
    [
        ("counts", "", &count, "6 --for 0.06"),
        ("counts-twice", "", &count, "6 --for 0.02 --times 2 --every 0.14"),
        ("stops", "--on-starvation stop", &count, "6 --for 0.06"),
        ("estimates", "--on-starvation scale", &count, "6 --for 0.06"),
        ("samples", "", &sample, "6 --for 0.06"),
        ("keeps-three", "", &sample_both, "5 --for 0.06"),
    ]
    .into_iter()
    .fold(steps, |steps, (name, options, words, theft)| {
        let guest = format!("./tally run --kernel payload --pmu {pmu} {options} --append 'timer=1000 {words}'");
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

/// A robbed guest.
struct Robbed {
    name: String,
    /// What it and the thief printed.
    said: String,
    /// What Tally told of its vCPU, and when.
    told: Vec<(Duration, String)>,
}

/// Counters were gone from one time to another.
struct Theft {
    since: Duration,
    until: Duration,
}

/// The robbed guests of that name, one for each PMU.
fn guests(name: &str) -> impl Iterator<Item = Robbed> {
    selected_models().iter().map(move |model| {
        let name = format!("{name}-{}", model.pmu);
        let done = RESULTS.of(&name);
        assert_eq!(done.status, 0, "{name}: {}{}", done.text(), done.err);
        let told = done.err.lines().map(|line| {
            let (time, what) =
                line.split_once(" tally: vCPU 0: ").unwrap_or_else(|| panic!("{name}: {}", done.err));
            (Duration::from_secs_f64(time.parse().expect("a time in seconds")), what.to_owned())
        });
        Robbed { told: told.collect(), said: done.text(), name }
    })
}

impl Robbed {
    fn thefts(&self) -> Vec<Theft> {
        let times = |begin: &str| {
            let lines = self.said.lines().filter(|line| line.starts_with(begin)).collect::<Vec<_>>();
            let times = lines.iter().map(|line| line.rsplit(' ').next().and_then(|time| time.parse().ok()));
            times.map(|time| Duration::from_nanos(time.expect("a time in nanoseconds"))).collect::<Vec<_>>()
        };
        let thefts = times("holds ").into_iter().zip(times("gave back "));
        thefts.map(|(since, until)| Theft { since, until }).collect()
    }

    /// When it was told that a counter is starved, and which.
    fn starved(&self) -> Vec<(Duration, &str)> {
        let told = self.told.iter();
        told.filter_map(|(time, what)| {
            let counter = what.strip_suffix(" is starved: the host has no hardware for it")?;
            Some((*time, counter))
        })
        .collect()
    }

    /// Which counter counts again, and after what time.
    fn recovered(&self) -> Vec<(&str, Duration)> {
        let told = self.told.iter().filter_map(|(_, what)| what.split_once(" counts again, after up to "));
        told.map(|(counter, length)| {
            let milliseconds: f64 =
                length.strip_suffix("ms").and_then(|number| number.parse().ok()).expect("milliseconds");
            // It is told to the microsecond.
            (counter, Duration::from_secs_f64(milliseconds / 1e3) + Duration::from_micros(1))
        })
        .collect()
    }

    /// How many counts were missed in each loop, if its counter told all but these.
    fn missed(&self) -> [i64; 3] {
        ROUNDS.map(|rounds| {
            let counted = self.said.lines().find_map(|line| line.strip_prefix(&format!("count {rounds} ")));
            let counted = counted.unwrap_or_else(|| panic!("{}: {}", self.name, self.said));
            let counted = i64::from_str_radix(counted, 16).expect("it prints digits");
            i64::try_from(2 * rounds + 1).expect("it is small") - counted
        })
    }

    /// How many interrupts and overflows it saw, all of them at the very instruction that its counter overflowed at, wherever
    /// in the loop that was.
    fn overflows(&self) -> (u64, u64) {
        let numbers = self.said.lines().find_map(|line| {
            let rest = line.strip_suffix(", value 0..0, status 3f, left 00, entry 00000400, 0 late")?;
            let (numbers, _) = rest.strip_prefix("pmi ")?.split_once(" overflows, at ")?;
            let (interrupts, overflows) = numbers.split_once(" interrupts, ")?;
            Some((interrupts.parse().ok()?, overflows.parse().ok()?))
        });
        numbers.unwrap_or_else(|| panic!("{}: {}", self.name, self.said))
    }
}

/// A gap in nanoseconds, in each of which an instruction can be missed.
fn counts(gap: Duration) -> u64 {
    gap.as_nanos().try_into().expect("gaps are short")
}

/// What Tally calls the counters of a guest that has all six count instructions. The last of Intel's counts cycles only.
fn six_counters(guest: &Robbed) -> [&'static str; 6] {
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

fn a_theft_is_told_within_a_tenth_of_a_second() {
    for name in ["counts", "counts-twice", "stops", "estimates", "samples", "keeps-three"] {
        for guest in guests(name) {
            let thefts = guest.thefts();
            let starved = guest.starved();
            assert!(!thefts.is_empty() && starved.len() >= thefts.len(), "{}: {:?}", guest.name, guest.told);
            for (told, _) in starved {
                let in_time = |theft: &Theft| told + TICK > theft.since && told <= theft.since + SOON;
                assert!(thefts.iter().any(in_time), "{}: {:?}: {}", guest.name, guest.told, guest.said);
            }
        }
    }
}

fn every_theft_is_told_with_the_counters_that_it_hit_and_what_they_count() {
    for guest in guests("counts").chain(guests("stops")).chain(guests("estimates")) {
        let starved: Vec<_> = guest.starved().into_iter().map(|(_, counter)| counter).collect();
        assert_eq!(starved, six_counters(&guest)[..1], "{}", guest.name);
    }
    for guest in guests("samples") {
        let starved: Vec<_> = guest.starved().into_iter().map(|(_, counter)| counter).collect();
        assert_eq!(starved, six_counters(&guest), "{}", guest.name);
    }
    // One that is over before anybody looks is found all the same.
    for guest in guests("counts-twice") {
        let starved: Vec<_> = guest.starved().into_iter().map(|(_, counter)| counter).collect();
        assert_eq!(starved, [six_counters(&guest)[0]; 2], "{}", guest.name);
    }
}

fn a_gap_is_told_with_a_length_that_nothing_missed_exceeds() {
    for guest in guests("counts").chain(guests("counts-twice")) {
        let (thefts, recovered) = (guest.thefts(), guest.recovered());
        assert_eq!(recovered.len(), thefts.len(), "{}: {:?}", guest.name, guest.told);
        for (theft, (_, length)) in thefts.iter().zip(&recovered) {
            // It is looked for before the gap, and after it.
            let held = theft.until.saturating_sub(theft.since);
            assert!(*length >= held && *length <= held + 2 * SOON, "{}: {:?}", guest.name, guest.told);
        }
        let told: u64 = recovered.iter().map(|(_, length)| counts(*length)).sum();
        let missed = guest.missed()[1];
        assert!(
            u64::try_from(missed).is_ok_and(|missed| missed > 0 && missed <= told),
            "{}: {missed}",
            guest.name
        );
    }
}

fn counts_before_and_after_a_gap_are_exact() {
    for name in ["counts", "counts-twice", "stops", "estimates"] {
        for guest in guests(name) {
            let [before, _, after] = guest.missed();
            assert_eq!((before, after), (0, 0), "{}: {}", guest.name, guest.said);
        }
    }
}

fn a_machine_that_stands_still_misses_what_was_gone_before_that() {
    for guest in guests("stops") {
        let missed = guest.missed()[1];
        let recovered = guest.recovered();
        let told = |words: &str| guest.told.iter().filter(|(_, what)| what.starts_with(words)).count();
        let stops =
            ["the machine stands still until its counters have hardware", "the machine goes on, after "]
                .map(told);
        assert_eq!((stops, recovered.len()), ([1, 1], 1), "{}: {:?}", guest.name, guest.told);
        let most = counts(recovered[0].1).min(counts(SOON));
        assert!(u64::try_from(missed).is_ok_and(|missed| missed <= most), "{}: {missed}", guest.name);
    }
}

fn an_estimate_is_right_to_a_hundredth() {
    for guest in guests("estimates") {
        let missed = guest.missed()[1];
        assert!(missed.unsigned_abs() < 2 * ROUNDS[1] / 100, "{}: {missed}", guest.name);
    }
}

fn no_overflow_is_lost_that_was_counted() {
    for guest in guests("samples") {
        let recovered = guest.recovered();
        assert_eq!(recovered.len(), 6, "{}: {:?}", guest.name, guest.told);
        let longest = recovered.iter().map(|(_, length)| *length).max().expect("there are six");
        let (interrupts, overflows) = guest.overflows();
        assert_eq!(overflows, 6 * interrupts, "{}: all six lose the same", guest.name);
        let least = OVERFLOWS - counts(longest).div_ceil(PERIOD);
        assert!((least..OVERFLOWS).contains(&interrupts), "{}: {interrupts}: {least}", guest.name);
    }
}

fn what_perf_samples_in_linux_is_a_period_apart_beyond_a_gap_too() {
    for Model { pmu, .. } in selected_models() {
        let done = RESULTS.of(&format!("linux-{pmu}"));
        let (text, err) = (done.text(), &done.err);
        // How often an event had counted so much since its last sample.
        let (mut instructions, mut branches) = (0, 0);
        for line in text.lines() {
            let words: Vec<_> = line.split_whitespace().collect();
            let [times, counted, event] = words[..] else { panic!("{pmu}: {text}{err}") };
            let number = |word: &str| word.parse::<u64>().expect("uniq and perf print numbers");
            match (event, number(counted)) {
                ("instructions:u:", PERIOD) => instructions += number(times),
                // Every other instruction is a branch, from whichever of them on.
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

fn counters_that_were_left_miss_nothing() {
    for guest in guests("keeps-three") {
        let starved: BTreeSet<_> = guest.starved().into_iter().map(|(_, counter)| counter).collect();
        let recovered = guest.recovered();
        assert_eq!((starved.len(), recovered.len()), (3, 3), "{}: {:?}", guest.name, guest.told);
        let (interrupts, overflows) = guest.overflows();
        // Those that were left interrupt every time, and the others at times of their own.
        assert!(interrupts >= OVERFLOWS, "{}: {interrupts}", guest.name);
        let least: u64 =
            recovered.iter().map(|(_, length)| OVERFLOWS - counts(*length).div_ceil(PERIOD)).sum();
        let of_the_starved = overflows - 3 * OVERFLOWS;
        assert!((least..3 * OVERFLOWS).contains(&of_the_starved), "{}: {overflows}", guest.name);
    }
}
