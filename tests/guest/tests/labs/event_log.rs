//! Tests of the event log that `tally run --pmu-log` writes and `tally log --show` prints, on the lab's simulated host.
//! The log has an overflow at the right address for every sample that a guest takes.

use std::sync::LazyLock;

use guest_tests::lab::{Results, Steps};
use guest_tests::model::{Model, selected_models};
use guest_tests::suite::Test;
use guest_tests::tests;
use tally_lab::programs::{LOOP, LOOP_INSTRUCTIONS};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        each_sample_has_an_overflow_record_with_its_address,
        configurations_are_shown_with_event_names,
        the_summary_matches_the_records,
        lost_records_are_reported_at_first_and_counted_at_the_end,
        a_truncated_log_is_shown_up_to_its_end,
        the_last_record_says_how_the_vm_ended,
        files_that_cannot_be_shown_are_refused_in_one_line,
        a_reader_may_close_the_pipe_early,
    ]
}

const PERIOD: u64 = 1_000_000;
const SAMPLES: u64 = LOOP_INSTRUCTIONS / PERIOD;
/// Period for more overflows than fit in the log's buffer and on a small file system.
const SHORT_PERIOD: u64 = 40_000;
const MANY_OVERFLOWS: u64 = LOOP_INSTRUCTIONS / SHORT_PERIOD;

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    // Without this setting the guest's kernel may lower the sampling rate when samples take much time.
    let sample = |period, then| {
        format!(
            "sh -c 'echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent; \
             perf record -q -N -o data -c {period} -e instructions:u ./loop{then}'"
        )
    };
    let run = |options: &str| format!("./tally run {options} --");
    let (places, many) = (sample(PERIOD, " && perf script -i data -F ip"), sample(SHORT_PERIOD, ""));
    let steps = Steps::new("event_log").in_guest("loop", LOOP);
    let steps = selected_models().iter().fold(steps, |steps, Model { pmu, .. }| {
        let options = format!("--pmu {pmu} --pmu-log {pmu}.log");
        steps
            .step(&format!("{pmu}-run"), &format!("{} {places}", run(&options)))
            .step(&format!("{pmu}-all"), &format!("./tally log --show {pmu}.log"))
            .step(&format!("{pmu}-summary"), &format!("./tally log --show {pmu}.log --summary"))
    });
    let small = "mkdir small && mount -t tmpfs -o size=40k none small";
    steps
        .step("full", &format!("{} {many}", run("--pmu-log /dev/full")))
        .step("small", &format!("{small} && {} {many}", run("--pmu-log small/log")))
        .step("small-log", "./tally log --show small/log")
        .step("refused", "./tally run --pmu-log refused --kernel /does/not/exist")
        .step("refused-log", "./tally log --show refused")
        .step("killed", &format!("{} sleep 9 & sleep 2; kill $!; wait $!", run("--pmu-log killed")))
        .step("killed-log", "./tally log --show killed")
        .step("head", "./tally log --show small/log | head -n 1")
        .step("full-output", "./tally log --show amd.log >/dev/full")
        .step("cut", "head -c 1000 amd.log >cut && ./tally log --show cut")
        .step("none", "./tally log --show none")
        .step("other", "./tally log --show payload")
        .step("folder", "./tally log --show .")
        .run()
});

/// A log as `tally log --show` prints it.
struct Shown {
    text: String,
    /// Records of vCPU 0: text and the guest's address.
    records: Vec<(String, String)>,
    /// Lines of the summary, split into words.
    summary: Vec<Vec<String>>,
}

/// Parses the log that a step printed.
fn shown(step: &str) -> Shown {
    let text = RESULTS.of(step).text();
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    let records = text.lines().filter_map(|line| line.split_once(" vCPU 0 at 0x")?.1.split_once(": "));
    let records = records.map(|(place, what)| (what.to_owned(), place.to_owned())).collect();
    let summary = text.lines().skip_while(|line| !line.starts_with("summary: ")).map(words).collect();
    Shown { text, records, summary }
}

impl Shown {
    /// Returns the records that start with `begin` and contain `middle`.
    fn of(&self, begin: &str, middle: &str) -> Vec<&(String, String)> {
        self.records.iter().filter(|(what, _)| what.starts_with(begin) && what.contains(middle)).collect()
    }

    /// Returns the number of records in the summary.
    fn count(&self) -> u64 {
        self.summary[0][1].parse().unwrap_or_else(|_| panic!("{}", self.text))
    }

    /// Returns the summary's line for the counter that sampled.
    fn counter(&self) -> &[String] {
        let samples = SAMPLES.to_string();
        let counter = self.summary.iter().find(|words| words.len() == 7 && words[3] == samples);
        counter.unwrap_or_else(|| panic!("{}", self.text))
    }
}

fn each_sample_has_an_overflow_record_with_its_address() {
    for Model { pmu, .. } in selected_models() {
        let run = RESULTS.of(&format!("{pmu}-run"));
        assert_eq!((run.status, run.err.as_str()), (0, ""), "{pmu}");
        let text = run.text();
        let sampled: Vec<&str> = text.split_whitespace().collect();
        assert_eq!(sampled.len() as u64, SAMPLES, "{pmu}: {text}");
        let log = shown(&format!("{pmu}-all"));
        let overflows: Vec<&str> = log
            .of("counter ", " overflows, and the guest is interrupted")
            .iter()
            .map(|(_, place)| &**place)
            .collect();
        assert_eq!(overflows, sampled, "{pmu}: {}", log.text);
    }
}

fn configurations_are_shown_with_event_names() {
    for Model { pmu, .. } in selected_models() {
        let log = shown(&format!("{pmu}-all"));
        assert!(
            !log.of("counter ", " counts instructions:u, and interrupts").is_empty(),
            "{pmu}: {}",
            log.text
        );
    }
}

fn the_summary_matches_the_records() {
    for Model { pmu, .. } in selected_models() {
        let log = shown(&format!("{pmu}-all"));
        let (lines, header_lines) = (log.text.lines().count(), 1);
        assert_eq!(log.count(), (lines - header_lines - log.summary.len()) as u64, "{}", log.text);
        let [vcpu, number, configurations, overflows, _rate, starvations, missed] = log.counter() else {
            panic!("{}", log.text)
        };
        let of_counter = format!("counter {number} ");
        assert_eq!(*configurations, log.of(&of_counter, " counts ").len().to_string(), "{}", log.text);
        assert_eq!(*overflows, log.of(&of_counter, " overflows").len().to_string(), "{}", log.text);
        assert_eq!([vcpu, starvations, missed], ["0", "0", "0.000000000"]);
        assert!(log.text.contains(&format!("vCPU 0: {SAMPLES} interrupts\n")), "{}", log.text);
        assert!(log.text.contains(" 0 lost; the machine has ended\n"), "{}", log.text);
        let (first, rest) = log.text.split_once('\n').expect("there are lines");
        let (_, summary) = rest.split_once("summary: ").expect("there is a summary");
        let alone = RESULTS.of(&format!("{pmu}-summary")).text();
        assert_eq!(alone, format!("{first}\nsummary: {summary}"), "{pmu}");
    }
}

/// Returns the number of lost records from the last message of a run. Checks that the first message reports the error.
fn lost(step: &str, path: &str) -> u64 {
    let run = RESULTS.of(step);
    let cause = "No space left on device (os error 28)";
    let lines: Vec<&str> = run.err.lines().collect();
    let [first, last] = &*lines else { panic!("{}", run.err) };
    assert_eq!((run.status, *first), (0, &*format!("tally: {path}: the log cannot be written: {cause}")));
    let records = last.strip_prefix(&format!("tally: {path}: ")).and_then(|rest| rest.split_once(' '));
    let (records, rest) = records.unwrap_or_else(|| panic!("{last}"));
    assert_eq!(rest, format!("records are lost: {cause}"));
    records.parse().unwrap_or_else(|_| panic!("{last}"))
}

fn lost_records_are_reported_at_first_and_counted_at_the_end() {
    // Beside the overflows there are records of configurations, and of changes to the guest's kernel.
    let all = MANY_OVERFLOWS + 2..MANY_OVERFLOWS + 100;
    let lost_all = lost("full", "/dev/full");
    assert!(all.contains(&lost_all), "{lost_all}");
    let log = shown("small-log");
    let overflows = log.of("counter ", " overflows").len() as u64;
    assert!((500..MANY_OVERFLOWS).contains(&overflows), "{}", log.summary[0].join(" "));
    let sum = log.count() + lost("small", "small/log");
    assert!(all.contains(&sum), "{sum}");
}

fn a_truncated_log_is_shown_up_to_its_end() {
    for (step, path) in [("cut", "cut"), ("small-log", "small/log")] {
        let done = RESULTS.of(step);
        assert_eq!(done.status, 125, "{path}");
        assert!(
            done.err.starts_with(&format!("tally: {path}: the log breaks off in the record at byte ")),
            "{}",
            done.err
        );
        assert_eq!(done.err.lines().count(), 1, "{}", done.err);
        assert!(done.text().contains("no end: the machine runs, or was killed"), "{}", done.text());
    }
}

fn the_last_record_says_how_the_vm_ended() {
    let ends = |step: &str, how: &str| {
        let text = RESULTS.of(step).text();
        assert!(text.contains(&format!(" end: {how}\nsummary: ")), "{step}: {text}");
    };
    ends("amd-all", "the guest's command ended with status 0");
    ends("killed-log", "signal 15 ended the machine");
    assert_eq!(RESULTS.of("refused").status, 125);
    ends("refused-log", "/does/not/exist: cannot read it: No such file or directory (os error 2)");
}

fn files_that_cannot_be_shown_are_refused_in_one_line() {
    for (step, says) in [
        ("none", "none: No such file or directory (os error 2)"),
        ("other", "payload: not an event log of `tally run --pmu-log`"),
        ("folder", ".: cannot be read: Is a directory (os error 21)"),
        ("full-output", "cannot print the log: No space left on device (os error 28)"),
    ] {
        let done = RESULTS.of(step);
        assert_eq!((done.status, done.text().as_str()), (125, ""), "{step}");
        assert_eq!(done.err, format!("tally: {says}\n"), "{step}");
    }
}

fn a_reader_may_close_the_pipe_early() {
    let done = RESULTS.of("head");
    assert_eq!(done.err, "");
    assert!(done.text().starts_with("began 2"), "{}", done.text());
}
