//! KVM's parameters, by which hosts differ: a guest counts and samples exactly with each. A boot of a guest for each
//! set, on one simulated host.

use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, Steps};
use guest_tests::perf::{Count, STAT, counts};
use guest_tests::suite::{Test, on_intel, second_tier, third_tier};
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let tests = tests![a_guest_counts_and_samples_exactly_whatever_kvms_parameters];
    [second_tier(tests.clone()), third_tier(on_intel(tests))].concat()
}

/// Returns KVM's module, and sets of its parameters that are not the default. Not `vnmi=0` of `kvm_intel`: see
/// `docs/limits.md`.
fn parameters() -> (&'static str, &'static [&'static str]) {
    match host::current() {
        Host::Amd => ("kvm_amd", &["npt=0", "nrips=0 vgif=0"]),
        Host::Intel => {
            ("kvm_intel", &["vpid=0 flexpriority=0 preemption_timer=0", "unrestricted_guest=0", "ept=0"])
        }
    }
}

/// Returns the step's name for a set: its first parameter.
fn name(set: &str) -> &str {
    set.split('=').next().unwrap_or_default()
}

/// Instructions between two samples.
const PERIOD: u64 = 100_000;

static GUESTS: OnEachHost = OnEachHost::new(|| {
    let guest = format!(
        "{STAT} -e instructions:u /lib/tally/loop 2>&1; \
         perf record -q -o /tmp/data -c {PERIOD} -e instructions:u /lib/tally/loop; \
         perf script -i /tmp/data -F ip | sort | uniq -c; awk '/NMI/ {{ print \"NMIs\", $2 }}' /proc/interrupts"
    );
    let (module, sets) = parameters();
    let steps = Steps::new("parameters").in_guest("measure", guest.into_bytes());
    sets.iter()
        .fold(steps, |steps, set| {
            steps.step(
                name(set),
                &format!(
                    "until rmmod {module} 2>/dev/null; do sleep 0.05; done; \
                     insmod /lib/modules/{module}.ko {set} || exit; \
                     ./tally run -- sh ./measure"
                ),
            )
        })
        .run()
});

fn a_guest_counts_and_samples_exactly_whatever_kvms_parameters() {
    let samples = LOOP_INSTRUCTIONS / PERIOD;
    for set in parameters().1 {
        let done = GUESTS.of(name(set));
        let text = done.text();
        let counted: Vec<u64> = counts(&text).iter().map(Count::exact).collect();
        assert_eq!(counted, [LOOP_INSTRUCTIONS], "{set}: {text}{}", done.err);
        let words: Vec<&str> = text.lines().skip(1).flat_map(str::split_whitespace).collect();
        // All of them are at the loop's last instruction.
        let number = samples.to_string();
        assert_eq!(words, [&*number, "401007", "NMIs", &*number], "{set}: {text}{}", done.err);
    }
}
