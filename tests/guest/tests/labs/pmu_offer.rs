//! Tests of the PMU that a guest is offered, and of refused options, on the lab's simulated host. The host's counters
//! can be free, partly or wholly in use, or forbidden to the user.

use std::sync::LazyLock;

use guest_tests::lab::{Results, Steps};
use guest_tests::suite::Test;
use guest_tests::tests;
use guest_tests::{example, payload, program};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        a_guest_is_offered_perfmonv2_and_all_counters,
        legacy_guests_have_six_counters_or_four,
        fewer_counters_can_be_requested,
        a_guest_is_offered_the_hosts_free_counters_and_the_log_says_why,
        a_guest_with_intels_pmu_is_offered_four_general_and_two_fixed_counters,
        requested_general_counters_take_precedence_over_fixed_ones,
        a_guest_with_intels_pmu_is_offered_the_hosts_free_counters,
        impossible_options_are_refused_in_one_line,
        a_counter_that_the_guest_stops_using_is_released_on_the_host,
        unprivileged_users_get_a_pmu_if_perf_event_paranoid_allows,
        another_vmm_counts_and_interrupts_with_the_same_library,
    ]
}

/// Option with which the guest prints the CPUID leaves with PerfMonV2 and its number of counters, and with the feature
/// `PerfCtrExtCore`.
const CPUID: &str = "--append 'cpuid=0x80000022,0 cpuid=0x80000001,0'";

/// Option with which the guest prints the CPUID leaves with Intel's architectural PMU, and with the feature `PDCM`
/// (`IA32_PERF_CAPABILITIES`).
const INTEL_CPUID: &str = "--append 'cpuid=0xa,0 cpuid=1,0'";

static OFFERS: LazyLock<Results> = LazyLock::new(|| {
    let run = "./tally run --kernel payload";
    // Keeps this number of counters of the only CPU busy while a command runs.
    let busy = |counters: usize, command: &str| {
        let events = vec!["instructions:D"; counters].join(",");
        format!(
            "perf stat -a -e {events} sleep 1000 2>/dev/null & sleep 1; {command}; status=$?; {{ kill $!; wait $!; }} 2>/dev/null; exit $status"
        )
    };
    let paranoid = |level: i32, how: &str| {
        format!(
            "chmod 666 /dev/kvm; echo {level} >/proc/sys/kernel/perf_event_paranoid; ./restricted {how} {run} --pmu amd \
             --append hello; status=$?; echo 3 >/proc/sys/kernel/perf_event_paranoid; exit $status"
        )
    };
    let watched = |command: &str| {
        let watchdog = "/proc/sys/kernel/nmi_watchdog";
        format!("echo 1 >{watchdog}; {command}; status=$?; echo 0 >{watchdog}; exit $status")
    };
    let intel = |options: &str| format!("{run} --pmu intel {options} {INTEL_CPUID}");
    let steps = (1..=8).fold(Steps::new("pmu_offer::offers"), |steps, counters| {
        steps.step(&format!("intel-{counters}"), &intel(&format!("--counters {counters}")))
    });
    steps
        .file(payload(), "payload")
        .file(program("restricted"), "restricted")
        .file(example("vpmu", "tiny_vmm"), "tiny_vmm")
        .step("default", &format!("{run} {CPUID}"))
        .step("legacy", &format!("{run} --pmu amd-legacy {CPUID}"))
        .step("three", &format!("{run} --counters 3 {CPUID}"))
        .step("four-legacy", &format!("{run} --pmu amd-legacy --counters 4 {CPUID}"))
        .step("watchdog", &watched(&format!("{run} {CPUID}")))
        .step("busy", &busy(2, &format!("{run} {CPUID}")))
        .step("busy-log", &busy(2, &format!("{run} --pmu-log log {CPUID} 2>/dev/null >&2; ./tally log --show log")))
        .step("too-busy", &busy(2, &format!("{run} --counters 5")))
        .step("legacy-too-busy", &busy(3, &format!("{run} --pmu amd-legacy")))
        .step("all-busy", &busy(6, run))
        .step("too-many", &format!("{run} --counters 7"))
        .step("none", &format!("{run} --counters 0"))
        .step("negative", &format!("{run} --counters -1"))
        .step("odd", &format!("{run} --pmu amd-legacy --counters 5"))
        .step("not-ours", &format!("{run} --pmu kvm --counters 4"))
        .step("intel", &intel(""))
        .step("intel-v2", &format!("{run} --pmu intel-v2 {INTEL_CPUID}"))
        .step("intel-watchdog", &watched(&intel("")))
        .step("intel-busy", &busy(2, &intel("")))
        .step("intel-very-busy", &busy(5, &intel("")))
        .step("intel-too-busy", &busy(2, &intel("--counters 5")))
        .step("intel-all-busy", &busy(6, &intel("")))
        .step("intel-none", &intel("--counters 0"))
        .step("intel-too-many", &intel("--counters 9"))
        .step("intel-v2-too-many", &format!("{run} --pmu intel-v2 --counters 9"))
        .step("unknown", &format!("{run} --pmu vax"))
        .step("no-log", &format!("{run} --pmu-log /does/not/exist"))
        .step(
            "given-back",
            &format!(
                "{run} --append 'wrmsr=0xc0010200,0:0x4300c0 loop=1000000 hello wrmsr=0xc0010200,0:0x300c0 spin' >said & sleep 0.5; \
                 ls -l /proc/$!/fd | grep -cF '[perf_event]'; sleep 3; ls -l /proc/$!/fd | grep -cF '[perf_event]'; kill $!; wait $!"
            ),
        )
        .step("paranoid", &paranoid(2, "unprivileged"))
        .step("paranoid-enough", &paranoid(1, "unprivileged"))
        .step("seccomp", &paranoid(-1, "seccomp"))
        .step("tiny-vmm", "./tiny_vmm")
        .run()
});

/// Returns EAX, EBX, ECX and EDX of a CPUID leaf, as the guest printed them.
fn leaf(step: &str, function: u32) -> [u32; 4] {
    let done = OFFERS.of(step);
    let text = done.text();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("cpuid {function:08x} ")));
    let line = line.unwrap_or_else(|| panic!("{text}{}", done.err));
    let words: Vec<_> =
        line.split(' ').map(|word| u32::from_str_radix(word, 16).expect("hexadecimal")).collect();
    words.try_into().expect("there are four")
}

/// Returns whether CPUID reported PerfMonV2, its number of counters, and whether it reported `PerfCtrExtCore`.
fn offered(step: &str) -> (bool, u32, bool) {
    let ([v2, counters, ..], [_, _, features, _]) = (leaf(step, 0x8000_0022), leaf(step, 0x8000_0001));
    (v2 & 1 != 0, counters & 0xf, features & 1 << 23 != 0)
}

/// Intel's architectural PMU as CPUID reported it.
#[derive(Debug, PartialEq)]
struct Architectural {
    version: u32,
    general: u32,
    fixed: u32,
}

/// Returns the version and the numbers of counters. Checks the fields that do not depend on these numbers: the width of
/// 48 bits, the events and the features.
fn architectural(step: &str) -> Architectural {
    const WIDTH: u32 = 48;
    const EVENTS: u32 = 7;
    /// Absent events: bus cycles, last-level cache references and misses.
    const ABSENT: u32 = 0b1_1100;
    const PDCM: u32 = 1 << 15;
    const NO_ANY_THREAD: u32 = 1 << 15;
    let [eax, ebx, ecx, edx] = leaf(step, 0xa);
    let [version, general, width, events] = eax.to_le_bytes().map(u32::from);
    let fixed = edx & 0x1f;
    let (fixed_set, any_thread, capabilities) = match version {
        2 => (0, 0, 0),
        _ => ((1 << fixed) - 1, NO_ANY_THREAD, PDCM),
    };
    assert_eq!((width, events, ebx), (WIDTH, EVENTS, ABSENT), "{step}");
    assert_eq!((ecx, edx & !0x1f), (fixed_set, WIDTH << 5 | any_thread), "{step}");
    assert_eq!(leaf(step, 1)[2] & PDCM, capabilities, "{step}");
    Architectural { version, general, fixed }
}

fn a_guest_is_offered_perfmonv2_and_all_counters() {
    assert_eq!(offered("default"), (true, 6, true));
    assert_eq!(OFFERS.of("default").err, "");
}

fn legacy_guests_have_six_counters_or_four() {
    assert_eq!(offered("legacy"), (false, 0, true));
    assert_eq!(offered("four-legacy"), (false, 0, false));
}

fn fewer_counters_can_be_requested() {
    assert_eq!(offered("three"), (true, 3, true));
    assert_eq!(OFFERS.of("three").err, "");
}

fn a_guest_is_offered_the_hosts_free_counters_and_the_log_says_why() {
    for (step, counters) in [("watchdog", 5), ("busy", 4)] {
        assert_eq!(offered(step), (true, counters, true));
        let err = &OFFERS.of(step).err;
        assert!(err.contains(&format!("the guest gets {counters} counters of 6")), "{err}");
        assert_eq!(err.contains("sysctl kernel.nmi_watchdog=0"), step == "watchdog", "{err}");
        assert_eq!(err.lines().count(), 1, "{err}");
    }
    let log = OFFERS.of("busy-log").text();
    assert!(log.contains("the guest gets 4 counters of 6"), "{log}");
}

fn a_guest_with_intels_pmu_is_offered_four_general_and_two_fixed_counters() {
    for (step, version) in [("intel", 5), ("intel-v2", 2)] {
        assert_eq!(architectural(step), Architectural { version, general: 4, fixed: 2 });
        assert_eq!(OFFERS.of(step).err, "", "{step}");
    }
}

fn requested_general_counters_take_precedence_over_fixed_ones() {
    for (general, fixed) in [(1, 2), (2, 2), (3, 2), (4, 2), (5, 1), (6, 0)] {
        let step = format!("intel-{general}");
        assert_eq!(architectural(&step), Architectural { version: 5, general, fixed });
        assert_eq!(OFFERS.of(&step).err, "", "{step}");
    }
}

fn a_guest_with_intels_pmu_is_offered_the_hosts_free_counters() {
    for (step, general, fixed) in [("intel-watchdog", 3, 2), ("intel-busy", 2, 2), ("intel-very-busy", 1, 0)]
    {
        assert_eq!(architectural(step), Architectural { version: 5, general, fixed }, "{step}");
    }
    let err = &OFFERS.of("intel-watchdog").err;
    assert!(err.contains("the guest gets 3 general counters and 2 fixed ones"), "{err}");
    assert!(err.contains("sysctl kernel.nmi_watchdog=0") && err.lines().count() == 1, "{err}");
}

fn impossible_options_are_refused_in_one_line() {
    for (step, words) in [
        ("too-busy", &["--counters 5", "4 free"][..]),
        ("legacy-too-busy", &["3 free", "--pmu amd "]),
        ("all-busy", &["all counters", "ending other users", "--pmu none"]),
        ("too-many", &["--counters 7", "1 to 6"]),
        ("none", &["--counters 0", "1 to 6"]),
        ("negative", &["-1", "--counters"]),
        ("odd", &["--counters 5", "4 or 6"]),
        ("intel-7", &["--counters 7", "6 free"]),
        ("intel-8", &["--counters 8", "6 free"]),
        ("intel-too-busy", &["--counters 5", "4 free"]),
        ("intel-all-busy", &["all counters", "ending other users", "--pmu none"]),
        ("intel-none", &["--counters 0", "--pmu intel ", "1 to 8"]),
        ("intel-too-many", &["--counters 9", "--pmu intel ", "1 to 8"]),
        ("intel-v2-too-many", &["--counters 9", "--pmu intel-v2 ", "1 to 8"]),
        ("not-ours", &["--counters", "--pmu kvm"]),
        ("unknown", &["vax", "amd", "none"]),
        ("no-log", &["/does/not/exist"]),
        (
            "paranoid",
            &["kernel.perf_event_paranoid is 2", "sysctl kernel.perf_event_paranoid=1", "cap_perfmon"],
        ),
        ("seccomp", &["seccomp", "--cap-add PERFMON"]),
    ] {
        let done = OFFERS.of(step);
        assert_eq!((done.status, done.err.lines().count()), (125, 1), "{step}: {}{}", done.text(), done.err);
        assert_eq!(done.text(), "", "{step}");
        for word in words {
            assert!(done.err.contains(word), "{step}: {}", done.err);
        }
        assert!(!done.err.contains("nmi_watchdog"), "{step}: the watchdog is off: {}", done.err);
    }
}

/// One event stays open as long as the VM runs: it takes no counter (`vpmu_perf::Reservation`).
fn a_counter_that_the_guest_stops_using_is_released_on_the_host() {
    assert_eq!(OFFERS.of("given-back").text(), "2\n1\n", "{}", OFFERS.of("given-back").err);
}

fn unprivileged_users_get_a_pmu_if_perf_event_paranoid_allows() {
    let done = OFFERS.of("paranoid-enough");
    assert_eq!((done.status, done.text().as_str()), (1, "Hello from the guest\n"), "{}", done.err);
}

/// The guest's loop has 200,000 instructions, and there are 3 more before the write that disables the counter, which is
/// the last that counts. After each of the 20 overflows, the handler has 3 instructions left once it has written the
/// counter.
fn another_vmm_counts_and_interrupts_with_the_same_library() {
    let done = OFFERS.of("tiny-vmm");
    assert_eq!(
        done.text(),
        format!("{} instructions, 20 overflows\n", 200_000 + 3 + 1 + 20 * 3),
        "{}",
        done.err
    );
}
