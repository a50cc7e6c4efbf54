//! Tests that different guest kernels count and sample on Tally's PMU. Their drivers differ, and so does the code in
//! which they execute RDPMC.
//!
//! The guests with AMD's PMUs share one boot of the simulated host, and those with Intel's another. The Intel host has
//! fewer guests, all in one boot.

use guest_images::cache::Cache;
use guest_images::{Progress, Suite, kernel_needs, small_kernel};
use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, Results, StepOutput, Steps, with_installed_kernel};
use guest_tests::suite::{Test, on_intel, second_tier, third_tier};
use guest_tests::tests;
use tally_lab::programs::{LOOP, LOOP_INSTRUCTIONS};

/// Guests: name, kernel and PMU model.
const GUESTS: [(&str, &str, &str); 14] = [
    ("stable", "guest/kernel", "amd"),
    ("stable-legacy", "guest/kernel", "amd-legacy"),
    ("testing", "trixie/boot/vmlinuz", "amd"),
    ("testing-legacy", "trixie/boot/vmlinuz", "amd-legacy"),
    ("newest", "sid/boot/vmlinuz", "amd"),
    ("newest-legacy", "sid/boot/vmlinuz", "amd-legacy"),
    ("small", "small", "amd"),
    ("small-legacy", "small", "amd-legacy"),
    ("stable-intel", "guest/kernel", "intel"),
    ("stable-intel-v2", "guest/kernel", "intel-v2"),
    ("testing-intel", "trixie/boot/vmlinuz", "intel"),
    ("newest-intel", "sid/boot/vmlinuz", "intel"),
    ("small-intel", "small", "intel"),
    ("small-intel-v2", "small", "intel-v2"),
];

const PERIOD: u64 = 1_000_000;

/// The guests on the Intel host. Other tests there have the first kernel with the PMUs `amd` and `intel`.
const ON_INTEL: [&str; 5] = ["stable-legacy", "newest", "stable-intel-v2", "newest-intel", "small-intel"];

static AMDS: OnEachHost = OnEachHost::new(|| boot("kernels::amds", "amd"));
static INTELS: OnEachHost = OnEachHost::new(|| boot("kernels::intels", "intel"));
static ALL: OnEachHost = OnEachHost::new(|| boot("kernels", ""));

/// Returns the result of a guest.
fn guest(name: &str) -> &'static StepOutput {
    let (_, _, model) = GUESTS.iter().find(|(guest, ..)| *guest == name).expect("it is in the list");
    let group = match host::current() {
        Host::Intel => &ALL,
        Host::Amd if model.starts_with("intel") => &INTELS,
        Host::Amd => &AMDS,
    };
    group.of(name)
}

/// Boots a host, and runs the guests with a PMU whose name starts with this.
fn boot(name: &'static str, vendor: &str) -> Results {
    let cache = Cache::open().expect("there is a cache");
    let mut progress = Progress::stderr("lab");
    tally_lab::ensure(&kernel_needs(), &mut progress).unwrap_or_else(|error| panic!("{error}"));
    let steps = with_installed_kernel(Steps::new(name).in_guest("loop", LOOP), "trixie", Suite::Trixie);
    let steps = with_installed_kernel(steps, "sid", Suite::Sid)
        .file(small_kernel(&cache, &mut progress).unwrap_or_else(|error| panic!("{error}")).image, "small");
    let count = "perf stat -x, -o /tmp/count -e instructions:u ./loop; grep instructions /tmp/count";
    let sample = format!(
        "perf record -q -c {PERIOD} -e instructions:u -o /tmp/data ./loop; perf script -i /tmp/data -F period,ip | sort | uniq -c"
    );
    let runs_here = |name: &str| host::current() == Host::Amd || ON_INTEL.contains(&name);
    let guests = GUESTS.iter().filter(|(name, _, model)| model.starts_with(vendor) && runs_here(name));
    guests
        .fold(steps, |steps, (name, kernel, model)| {
            steps.step(
                name,
                &format!(
                    "./tally run --pmu {model} --pmu-log {name}.log --kernel {kernel} -- \
                     sh -c '{count}; {sample}'; status=$?; ./tally log --show {name}.log >&2; exit $status"
                ),
            )
        })
        .run()
}

fn assert_counts_and_samples(name: &str) {
    let done = guest(name);
    let text = done.text();
    let mut lines = text.lines();
    let counted = lines.next().and_then(|line| line.split(',').next());
    assert_eq!(counted, Some(LOOP_INSTRUCTIONS.to_string().as_str()), "{text}{}", done.err);
    let samples: Vec<Vec<&str>> = lines.map(|line| line.split_whitespace().collect()).collect();
    let (taken, period) = ((LOOP_INSTRUCTIONS / PERIOD).to_string(), PERIOD.to_string());
    assert_eq!(samples, [[taken.as_str(), &period, "401007"]], "all at one place: {text}{}", done.err);
}

/// Returns the number of RDPMC instructions in the kernel that Tally replaced, according to the event log.
fn replaced_instructions(name: &str) -> usize {
    guest(name).err.lines().filter(|line| line.contains("RDPMC became RDMSR at 0x")).count()
}

macro_rules! kernels {
    ($($test:ident: $name:literal,)*) => {
        $(
            fn $test() {
                assert_counts_and_samples($name);
            }
        )*

        /// The tests of this module.
        pub fn tests() -> Vec<Test> {
            let each = [$($name),*].into_iter().zip(tests![$($test),*]);
            let on_intels = each.clone().filter(|(name, _)| ON_INTEL.contains(name)).map(|(_, test)| test);
            let on_intels = on_intel(on_intels.collect());
            let on_amds = each.map(|(_, test)| test).chain(tests![changes_to_a_kernel_are_logged]);
            [second_tier(on_amds.collect()), third_tier(on_intels)].concat()
        }
    };
}

kernels! {
    debian_stables_kernel: "stable",
    debian_stables_kernel_without_perfmonv2: "stable-legacy",
    debian_testings_kernel: "testing",
    debian_testings_kernel_without_perfmonv2: "testing-legacy",
    the_newest_kernel: "newest",
    the_newest_kernel_without_perfmonv2: "newest-legacy",
    a_kernel_that_reads_counters_in_several_places: "small",
    a_kernel_that_reads_counters_in_several_places_without_perfmonv2: "small-legacy",
    debian_stables_kernel_on_intels_pmu: "stable-intel",
    debian_stables_kernel_on_intels_pmu_of_version_2: "stable-intel-v2",
    debian_testings_kernel_on_intels_pmu: "testing-intel",
    the_newest_kernel_on_intels_pmu: "newest-intel",
    a_kernel_that_reads_counters_in_several_places_on_intels_pmu: "small-intel",
    a_kernel_that_reads_counters_in_several_places_on_intels_pmu_of_version_2: "small-intel-v2",
}

fn changes_to_a_kernel_are_logged() {
    for name in ["stable", "testing", "newest"] {
        assert_eq!(replaced_instructions(name), 1, "{name}: {}", guest(name).err);
    }
    assert!(replaced_instructions("small") > 1, "{}", guest("small").err);
}
