//! Changes to running VMs with `tally policy` and `tally log`, on the lab's simulated host.

use std::sync::LazyLock;

use guest_tests::lab::{Results, StepOutput, Steps};
use guest_tests::suite::Test;
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        a_policy_change_takes_effect_in_a_running_guest,
        a_policy_is_printed_in_the_policy_files_format,
        the_log_contains_notes_and_policy_changes_while_the_guest_runs,
        an_invalid_change_is_refused_in_one_line,
        a_vm_without_tallys_pmu_has_no_policy,
        a_note_for_an_unwritable_log_is_refused,
    ]
}

/// Command of the guest: counts a loop of 20,000,004 instructions for each line on its standard input.
const GUEST: &str =
    "while read go; do perf stat -x, -e instructions:u,rd1:u /lib/tally/loop 2>&1; echo counted; done";

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let begin = |options: &str| {
        format!(
            "rm -f go said; mkfifo go; ./tally run --name web {options} -- sh -c '{GUEST}' <go >said 2>told & \
             vm=$!; exec 3>go; counted=0; \
             count() {{ counted=$((counted + 1)); echo >&3; until [ $(grep -c counted said) = $counted ]; do sleep 0.1; done; }}"
        )
    };
    let end = "exec 3>&-; wait $vm";
    let status = |command: &str| format!("{command}; echo $? >&2");
    Steps::new("changes")
        .step(
            "changed",
            &format!(
                "{}; count; ./tally policy web tier=architectural; count; ./tally log web 'the third time'; ./tally policy web; \
                 ./tally policy $vm allow=rd1,instructions freeze=guest; count; ./tally log web; \
                 ./tally log --show events >before; {end}; cat said; cat told >&2",
                begin("--pmu-log events")
            ),
        )
        .step("before", "cat before")
        .step("log", "./tally log --show events")
        .step(
            "mistakes",
            &format!(
                "{}; count; {}; {}; {}; {}; {}; {end}",
                begin(""),
                status("./tally policy web teir=standard"),
                status("./tally policy web allow=instrutions"),
                status("./tally policy other tier=standard"),
                status("./tally policy web --file no-such-file"),
                status("./tally log web 'a note'"),
            ),
        )
        .step(
            "not-ours",
            "./tally run --name none --pmu none --kernel payload --append spin & vm=$!; \
             until ./tally list | grep -q none; do sleep 0.1; done; ./tally policy none tier=standard; status=$?; \
             kill $vm; wait $vm; exit $status",
        )
        .step(
            "full",
            "./tally run --name full --pmu-log /dev/full --kernel payload --append spin 2>told & vm=$!; \
             until ./tally list | grep -q full; do sleep 0.1; done; ./tally log full 'a note'; status=$?; \
             kill $vm; wait $vm; cat told; exit $status",
        )
        .run()
});

fn done(step: &str) -> &'static StepOutput {
    RESULTS.of(step)
}

/// Returns the counts of an event, one for each time that the guest counted.
fn counts(text: &str, event: &str) -> Vec<u64> {
    let counted = text.lines().filter_map(|line| {
        let mut fields = line.split(',');
        let (value, _, name) = (fields.next()?, fields.next()?, fields.next()?);
        (name == event).then(|| value.parse().unwrap_or_else(|error| panic!("{line}: {error}")))
    });
    counted.collect()
}

fn a_policy_change_takes_effect_in_a_running_guest() {
    let StepOutput { status, err, .. } = done("changed");
    let text = done("changed").text();
    assert_eq!(*status, 0, "{text}{err}");
    assert_eq!(counts(&text, "instructions:u"), [20_000_004; 3], "{text}");
    assert_eq!(counts(&text, "rd1:u"), [10_000_000, 0, 10_000_000], "{text}");
    assert!(err.contains("the policy denies rd1:u"), "{err}");
}

fn a_policy_is_printed_in_the_policy_files_format() {
    let text = done("changed").text();
    let policy = "tier = \"architectural\"\nmin-period = 1\nmax-interrupts-per-second = \"none\"\n\
                  freeze = \"guest\"\non-starvation = \"report\"\nspare-counters = 0\n";
    assert!(text.starts_with(policy), "{text}");
}

fn the_log_contains_notes_and_policy_changes_while_the_guest_runs() {
    for step in ["before", "log"] {
        let text = done(step).text();
        let at = |words: &str| text.find(words).unwrap_or_else(|| panic!("{step}: {words}: {text}"));
        let first = at("policy: tier = \"architectural\"");
        let second = at("the third time");
        let third = at("policy: allow = [\"r00d1\", \"instructions\"]");
        assert!(first < second && second < third, "{step}: {text}");
    }
    let is_running = |step: &str| done(step).text().contains("no end: the machine runs");
    assert!(is_running("before") && !is_running("log"));
}

fn an_invalid_change_is_refused_in_one_line() {
    let messages = &done("mistakes").err;
    let lines: Vec<&str> = messages.lines().collect();
    let expected = [
        ("unknown key `teir`: did you mean `tier`?", "125"),
        ("unknown event `instrutions`: did you mean `instructions`?", "125"),
        ("no VM `other` runs here; those that do: ", "125"),
        ("no-such-file: No such file or directory", "125"),
        ("it has no log: that is for `tally run --pmu-log FILE`", "125"),
    ];
    assert_eq!(lines.len(), 2 * expected.len(), "{messages}");
    for ((words, status), lines) in expected.iter().zip(lines.chunks(2)) {
        assert!(
            lines[0].starts_with("tally: ") && lines[0].contains(words) && lines[1] == *status,
            "{messages}"
        );
    }
}

fn a_vm_without_tallys_pmu_has_no_policy() {
    let StepOutput { status, err, .. } = done("not-ours");
    assert!(*status == 125 && err.contains("a policy is for Tally's own PMUs"), "{err}");
}

fn a_note_for_an_unwritable_log_is_refused() {
    let StepOutput { status, err, .. } = done("full");
    assert!(*status == 125 && err.contains("No space left on device"), "{err}");
    assert!(done("full").text().contains("No space left on device"), "the one who runs it is told as well");
}
