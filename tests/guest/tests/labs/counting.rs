//! Tests that `perf stat` in a guest counts exactly what it counts on hardware.
//!
//! The guests run the distribution's unmodified kernel and `perf`. Booting takes most of the time, so three boots of
//! the simulated host serve all tests: one for events of all kinds, one for programs in guests of one CPU, and one for
//! programs in guests of four CPUs. Each test checks sections of the scripts that ran there, for each model (see
//! `model.rs`).

use std::collections::BTreeMap;

use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, Steps};
use guest_tests::model::{Loop, Model, Named, Raw, list, selected_models};
use guest_tests::perf::{self, Count, STAT, Script, Sections, Value};
use guest_tests::programs::{
    BETWEEN_PAUSES, BRANCHES_BETWEEN_PAUSES, FAMILY, FAMILY_INSTRUCTIONS, FAMILY_PARENT_INSTRUCTIONS,
    INTERVAL, INTERVAL_BRANCHES, INTERVAL_INSTRUCTIONS, MIGRATE, MIGRATE_INSTRUCTIONS,
    MIGRATE_INSTRUCTIONS_BY_CPU, YIELD, YIELD_INSTRUCTIONS,
};
use guest_tests::suite::{Test, on_intel, second_tier, third_tier};
use guest_tests::tests;
use tally_lab::programs::{KNOWN, LOOP, LOOP_BRANCHES, LOOP_INSTRUCTIONS};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let on_intels = [second_tier(on_intel(of_programs())), third_tier(on_intel(of_events()))].concat();
    [of_programs(), of_events(), on_intels].concat()
}

pub fn of_events() -> Vec<Test> {
    tests![
        a_guest_has_the_named_events_that_its_host_has,
        perf_lists_the_named_events_that_a_guest_has,
        raw_events_count_what_the_hardware_counts,
        events_that_the_host_lacks_count_nothing_and_are_reported,
    ]
}

pub fn of_programs() -> Vec<Test> {
    tests![
        a_program_of_known_length_is_counted_exactly,
        six_events_in_a_group_are_all_exact,
        counts_of_user_and_kernel_mode_add_up,
        system_wide_counts_differ_by_the_programs_lengths,
        counts_by_interval_add_up,
        a_repeated_run_counts_the_same,
        more_events_than_counters_are_multiplexed_and_scaled,
        children_and_the_programs_that_they_execute_are_counted,
        a_running_process_is_counted_from_the_attachment,
        migration_between_cpus_loses_no_counts,
        each_cpu_counts_what_ran_on_it,
        counts_of_user_and_kernel_mode_add_up_on_each_cpu,
        programs_on_four_cpus_are_counted_separately,
        guest_and_host_agree_to_the_instruction,
    ]
}

/// Number of instructions of the program `loop` of [`KNOWN`]. The guests have [`LOOP`] as `long`.
const SHORT_LOOP_INSTRUCTIONS: u64 = Loop::SHORT.instructions();
/// Number of instructions of the program `rep` of [`KNOWN`].
const REP_INSTRUCTIONS: u64 = 12;

/// All named events of perf that the kernel maps to hardware events.
const NAMED_EVENTS: &str = "cycles instructions cache-references cache-misses branches branch-misses bus-cycles \
    stalled-cycles-frontend stalled-cycles-backend ref-cycles \
    L1-dcache-loads L1-dcache-load-misses L1-dcache-stores L1-dcache-store-misses L1-dcache-prefetches \
    L1-dcache-prefetch-misses L1-icache-loads L1-icache-load-misses L1-icache-prefetches \
    L1-icache-prefetch-misses LLC-loads LLC-load-misses LLC-stores LLC-store-misses LLC-prefetches \
    LLC-prefetch-misses dTLB-loads dTLB-load-misses dTLB-stores dTLB-store-misses dTLB-prefetches \
    dTLB-prefetch-misses iTLB-loads iTLB-load-misses branch-loads branch-load-misses node-loads \
    node-load-misses node-stores node-store-misses node-prefetches node-prefetch-misses";

/// Group of instructions in user mode, in the kernel, and in both.
const BY_MODE: &str = "{instructions:u,instructions:k,instructions:uk}";

/// Results with events of all kinds, in guests of one CPU and on the host for comparison.
static EVENTS: OnEachHost = OnEachHost::new(|| {
    let host = host_script().into_bytes();
    let steps = Steps::new("counting::events").long().with_the_hosts_kernel();
    let steps = programs().fold(steps, |steps, (name, program)| {
        steps.in_guest(name, program).configure_host(move |scenario| scenario.program(program, name))
    });
    let steps =
        steps.configure_host(move |scenario| scenario.program(host, "script")).step("host", "sh ./script");
    in_guests(steps, events).run()
});

/// Results of programs in guests of one CPU.
static ONE_CPU: OnEachHost = OnEachHost::new(|| {
    let steps = programs()
        .fold(Steps::new("counting::one_cpu").long(), |steps, (name, program)| steps.in_guest(name, program));
    in_guests(steps, one_cpu).run()
});

/// Adds a guest of one CPU for each model, which runs the model's script.
fn in_guests(steps: Steps, script: impl Fn(&Model) -> Script) -> Steps {
    selected_models().iter().fold(steps, |steps, model| {
        let name = script_of(model);
        steps
            .in_guest(&name, script(model).into_bytes())
            .step(model.pmu, &format!("{} -- sh ./{name}", run(model, 1)))
    })
}

/// Results of programs in guests of four CPUs.
static FOUR_CPUS: OnEachHost = OnEachHost::new(|| {
    let steps = programs().fold(Steps::new("counting::four_cpus").long(), |steps, (name, program)| {
        steps.in_guest(name, program)
    });
    selected_models()
        .iter()
        .fold(steps.in_guest("script", four_cpus().into_bytes()), |steps, model| {
            let guest = format!("{} {} -v -- sh ./script", run(model, 4), model.spare_two_counters);
            steps.step(model.pmu, &observed(&guest))
        })
        .run()
});

fn programs() -> impl Iterator<Item = (&'static str, &'static [u8])> {
    let ours: [(&str, &[u8]); 5] =
        [("long", LOOP), ("family", FAMILY), ("interval", INTERVAL), ("migrate", MIGRATE), ("yield", YIELD)];
    ours.into_iter().chain(KNOWN.iter().copied())
}

fn run(model: &Model, cpus: u32) -> String {
    format!("./tally run --pmu {} {} --cpus {cpus}", model.pmu, model.options)
}

fn script_of(model: &Model) -> String {
    format!("script.{}", model.pmu)
}

/// Returns commands that run a guest and count the instructions of its vCPU threads in guest mode meanwhile.
///
/// The guest prints `ready` and `done` on its console at the two pauses of `interval`. The host counts from one pause
/// to the other; the second begins a moment after `done` appears. The host's events need counters that the guest does
/// not hold.
fn observed(guest: &str) -> String {
    format!(
        "rm -f console.out\n\
         {guest} >guest.out 2>console.out & tally=$!\n\
         until grep -qs '^ready' console.out || ! kill -0 $tally; do sleep 0.02; done\n\
         threads=$(cd /proc/$tally/task; grep -l '^vcpu' */comm | sed 's:/comm::' | tr '\\n' ,)\n\
         {STAT} -e instructions:uG,branches:uG -t ${{threads%,}} 2>host.out & perf=$!\n\
         until grep -q '^done' console.out || ! kill -0 $tally; do sleep 0.02; done\n\
         sleep 0.1\n\
         kill -INT $perf; wait $perf; wait $tally; status=$?\n\
         [ $status = 0 ] || cat console.out >&2\n\
         cat guest.out; echo '#### observed'; cat host.out; echo '#### status 0'; exit $status"
    )
}

/// Returns the host's script: all sections that the guests' counts are compared with.
fn host_script() -> Script {
    selected_models().iter().fold(named(), |script, model| {
        with_raw(script, model, |raw| raw.host, |program| raw_on_the_host(model, program))
    })
}

/// Number of named events that perf counts at a time. They fit on the counters of each model.
const AT_A_TIME: usize = 4;

fn named() -> Script {
    let events: Vec<_> = NAMED_EVENTS.split_whitespace().map(|event| format!("{event}:u")).collect();
    let lists: Vec<_> = events.chunks(AT_A_TIME).map(|events| events.join(",")).collect();
    Script::new()
        .section("named", &for_each(&lists.join(" "), "stream"))
        .section("listed", "perf list --no-desc hw cache | sort")
}

/// Programs in which the Intel host, which is slow, counts raw events.
const KNOWN_ON_INTEL: [&str; 4] = ["rep", "fault", "call", "operands"];

/// Returns the names of the programs in which raw events are counted.
fn known() -> impl Iterator<Item = &'static str> {
    let runs_here = |name: &&str| host::current() == Host::Amd || KNOWN_ON_INTEL.contains(name);
    KNOWN.iter().map(|(name, _)| *name).filter(runs_here)
}

/// Adds a section for each program of [`known`] that counts the model's raw events in the encoding that `events`
/// selects.
fn with_raw(
    script: Script,
    model: &Model,
    events: impl Fn(&Raw) -> &'static str,
    section: impl Fn(&str) -> String,
) -> Script {
    known().fold(script, |script, program| {
        let commands: Vec<_> =
            model.raw.iter().map(|raw| format!("{STAT} -e {} ./{program}", events(raw))).collect();
        script.section(&section(program), &commands.join("; "))
    })
}

fn raw_on_the_host(model: &Model, program: &str) -> String {
    format!("raw {program}, for {}", model.pmu)
}

fn raw_in_the_guest(program: &str) -> String {
    format!("raw {program}")
}

fn for_each(events: &str, program: &str) -> String {
    format!("for event in {events}; do {STAT} -e $event ./{program}; done")
}

/// Returns commands that run a command four times. System-wide counts include perf itself, which executes a dozen more
/// instructions if it has to read the clock again. The minimum of the counts is without these.
fn several_times(command: &str) -> String {
    format!("for turn in 1 2 3 4; do {command}; done")
}

fn events(model: &Model) -> Script {
    let refused: Vec<_> = model.refused.iter().map(|(event, _)| *event).collect();
    with_raw(named(), model, |raw| raw.guest, raw_in_the_guest)
        .section("refused", &for_each(&refused.join(" "), "loop"))
}

fn one_cpu(model: &Model) -> Script {
    let ten = ["cycles:u,instructions:u"; 5].join(",");
    Script::new()
        .section("alone", &for_each(&list(&model.six(Loop::SHORT), " "), "loop"))
        .section("six", &format!("{STAT} -e '{{{}}}' ./loop", list(&model.six(Loop::SHORT), ",")))
        .section("modes", &format!("{STAT} -e '{BY_MODE}' ./yield"))
        .section("system-wide, rep", &several_times(&format!("{STAT} -a -e '{BY_MODE}' ./rep")))
        .section("system-wide, loop", &several_times(&format!("{STAT} -a -e '{BY_MODE}' ./loop")))
        .section("one CPU, rep", &several_times(&format!("{STAT} -C 0 -e instructions:u ./rep")))
        .section("one CPU, loop", &several_times(&format!("{STAT} -C 0 -e instructions:u ./loop")))
        .section("by intervals", &format!("{STAT} -I 20 -e instructions:u,branches:u ./long"))
        .section("repeated", &format!("{STAT} -r 3 -e instructions:u ./loop"))
        .section("more than counters", &format!("{STAT} -e {ten} ./long"))
        .section("family", &format!("{STAT} -e instructions:u ./family"))
        .section("parent alone", &format!("{STAT} -i -e instructions:u ./family"))
        .section("by process", &format!("./interval >/dev/null & sleep 1; {STAT} -e instructions:u -p $!"))
}

fn four_cpus() -> Script {
    Script::new()
        .section("migrating", &format!("{STAT} -e instructions:u,cycles:u ./migrate"))
        .section("by CPU", &format!("taskset 1 {STAT} -C 1,2,3 -A -e instructions:u ./migrate"))
        .section("by CPU, nothing", &format!("taskset 1 {STAT} -C 1,2,3 -A -e instructions:u ./loop"))
        .section("system-wide", &format!("{STAT} -a -A -e '{BY_MODE}' ./migrate"))
        .section("family", &format!("{STAT} -e instructions:u ./family"))
        .section(
            "at once",
            &format!(
                "for cpus in 1 2 4 8; do taskset $cpus {STAT} -o at-once.$cpus -e instructions:u,cycles:u ./long & done; \
                 wait; cat at-once.*"
            ),
        )
        .section("by process", &format!("./interval >/dev/null & sleep 1; {STAT} -e instructions:u -p $!"))
        .section(
            "observed from inside",
            &format!("{STAT} -o inside -e instructions:u,branches:u ./interval >/dev/console; cat inside"),
        )
}

/// Returns each model with the output of its guest.
fn guests(group: &'static OnEachHost) -> impl Iterator<Item = (&'static Model, Sections)> {
    selected_models().iter().map(|model| (model, Sections::of(group.of(model.pmu))))
}

fn host() -> Sections {
    Sections::of(EVENTS.of("host"))
}

/// Checks that the counts of both modes add up, and returns the count of user mode.
fn user_part(pmu: &str, by_mode: &[u64]) -> u64 {
    let [user, kernel, both] = by_mode else { panic!("{pmu}: {by_mode:?} are not three counts") };
    assert!(*kernel > 0, "{pmu}: nothing is done without the kernel: {by_mode:?}");
    assert_eq!(user + kernel, *both, "{pmu}: {by_mode:?}");
    *user
}

fn a_program_of_known_length_is_counted_exactly() {
    for (model, guest) in guests(&ONE_CPU) {
        assert_eq!(guest.values("alone"), model.six(Loop::SHORT).map(|(_, count)| count), "{}", model.pmu);
    }
}

fn six_events_in_a_group_are_all_exact() {
    for (model, guest) in guests(&ONE_CPU) {
        assert_eq!(guest.values("six"), model.six(Loop::SHORT).map(|(_, count)| count), "{}", model.pmu);
    }
}

fn counts_of_user_and_kernel_mode_add_up() {
    for (Model { pmu, .. }, guest) in guests(&ONE_CPU) {
        assert_eq!(user_part(pmu, &guest.values("modes")), YIELD_INSTRUCTIONS, "{pmu}");
    }
}

fn system_wide_counts_differ_by_the_programs_lengths() {
    for (Model { pmu, .. }, guest) in guests(&ONE_CPU) {
        let user = |name: &str| {
            let values = guest.values(name);
            values.chunks(3).map(|by_mode| user_part(pmu, by_mode)).min().expect("something was counted")
        };
        let difference = user("system-wide, loop") - user("system-wide, rep");
        assert_eq!(difference, SHORT_LOOP_INSTRUCTIONS - REP_INSTRUCTIONS, "{pmu}");
        let least = |name: &str| guest.values(name).into_iter().min().expect("something was counted");
        let difference = least("one CPU, loop") - least("one CPU, rep");
        assert_eq!(difference, SHORT_LOOP_INSTRUCTIONS - REP_INSTRUCTIONS, "{pmu}");
    }
}

fn counts_by_interval_add_up() {
    for (Model { pmu, .. }, guest) in guests(&ONE_CPU) {
        let mut sums = BTreeMap::new();
        let counts = guest.counts("by intervals");
        for count in &counts {
            *sums.entry(count.event.as_str()).or_default() += count.exact();
        }
        assert!(counts.len() > 2 * sums.len(), "{pmu}: more than one interval: {counts:?}");
        assert_eq!(
            sums,
            BTreeMap::from([("instructions:u", LOOP_INSTRUCTIONS), ("branches:u", LOOP_BRANCHES)]),
            "{pmu}"
        );
    }
}

fn a_repeated_run_counts_the_same() {
    for (Model { pmu, .. }, guest) in guests(&ONE_CPU) {
        let text = guest.text("repeated");
        let expected = format!("{SHORT_LOOP_INSTRUCTIONS}||instructions:u|0.00%|");
        assert!(text.contains(&expected), "{pmu}: {text}");
    }
}

fn more_events_than_counters_are_multiplexed_and_scaled() {
    for (Model { pmu, .. }, guest) in guests(&ONE_CPU) {
        let counts = guest.counts("more than counters");
        assert_eq!(counts.len(), 10, "{pmu}");
        for count in counts {
            let Value::Counted(value) = count.value else { panic!("{pmu}: {count:?}") };
            assert!(count.running > 0.0 && count.running < 100.0, "{pmu}: {count:?}");
            assert!(value.abs_diff(LOOP_INSTRUCTIONS) <= LOOP_INSTRUCTIONS / 20, "{pmu}: {count:?}");
        }
    }
}

fn a_guest_has_the_named_events_that_its_host_has() {
    let supported = |count: &Count| count.value != Value::NotSupported;
    let on_the_host = host().counts("named");
    assert!(on_the_host.iter().any(supported) && !on_the_host.iter().all(supported), "{on_the_host:?}");
    for (Model { pmu, named, .. }, guest) in guests(&EVENTS) {
        let in_the_guest = guest.counts("named");
        assert_eq!(in_the_guest.len(), on_the_host.len(), "{pmu}");
        for (there, here) in on_the_host.iter().zip(&in_the_guest) {
            let expected = match named {
                Named::OfTheHost => supported(there),
                Named::OfTheHostWithout(absent) => {
                    supported(there) && !absent.iter().any(|name| here.event.starts_with(name))
                }
                Named::These(names) => names.iter().any(|name| here.event == format!("{name}:u")),
            };
            assert_eq!(supported(here), expected, "{pmu}: {there:?} {here:?}");
            // The program has the processor to itself while it runs. Events that the host lacks count nothing.
            if expected {
                let nothing = [Value::Counted(0), Value::NotSupported].contains(&there.value);
                assert_eq!(here.value == Value::Counted(0), nothing, "{pmu}: {here:?}, {there:?}");
            }
        }
    }
}

fn perf_lists_the_named_events_that_a_guest_has() {
    for (Model { pmu, named, .. }, guest) in guests(&EVENTS) {
        let listed = guest.text("listed");
        match named {
            Named::OfTheHost => assert_eq!(listed, host().text("listed"), "{pmu}"),
            Named::OfTheHostWithout(absent) => {
                let is_absent = |line: &&str| absent.iter().any(|name| line.trim_start().starts_with(name));
                let (host, guest) = (host(), listed.lines().collect::<Vec<_>>());
                let there = host.text("listed").lines().filter(|line| !is_absent(line));
                assert_eq!(guest, there.collect::<Vec<_>>(), "{pmu}");
            }
            Named::These(names) => {
                let events: Vec<_> = listed.lines().filter(|line| line.contains("event]")).collect();
                assert_eq!(events.len(), names.len(), "{pmu}: {listed}");
                for name in *names {
                    let has = |line: &&str| line.split_whitespace().any(|word| word == *name);
                    assert!(events.iter().any(has), "{pmu}: {name}: {listed}");
                }
            }
        }
    }
}

fn raw_events_count_what_the_hardware_counts() {
    let host = host();
    let (section, expected) = match host::current() {
        Host::Amd => (
            "raw call, for amd",
            [
                &[800_006, 800_006, 700_001, 100_000, 700_000, 400_000][..],
                &[700_001, 100_005, 0, 800_006, 100_002, 100_002],
                &[700_001, 100_005, 0, 800_006, 100_002, 100_000],
            ],
        ),
        Host::Intel => (
            "raw call, for intel",
            [
                &[800_006, 800_006, 700_001, 100_000][..],
                &[700_001, 100_005, 0, 800_006],
                &[100_002, 100_002, 100_005, 100_000],
            ],
        ),
    };
    assert_eq!(host.values(section), expected.concat());
    for (model, guest) in guests(&EVENTS) {
        for program in known() {
            let counted = guest.values(&raw_in_the_guest(program));
            assert_eq!(counted, host.values(&raw_on_the_host(model, program)), "{}: {program}", model.pmu);
        }
    }
}

fn events_that_the_host_lacks_count_nothing_and_are_reported() {
    for (Model { pmu, refused, .. }, guest) in guests(&EVENTS) {
        let counts = perf::counts(guest.text("refused"));
        let found: Vec<_> = counts.iter().map(|count| (count.event.as_str(), count.exact())).collect();
        let expected: Vec<_> = refused.iter().map(|(event, _)| (*event, 0)).collect();
        assert_eq!(found, expected, "{pmu}");
        let err = &EVENTS.of(pmu).err;
        let notices: Vec<_> = err.lines().filter(|line| line.contains("the host refuses")).collect();
        assert_eq!(notices.is_empty(), refused.is_empty(), "{pmu}: {err}");
        for (_, words) in *refused {
            assert!(notices.iter().any(|line| line.contains(words)), "{pmu}: {words}: {err}");
        }
    }
}

fn children_and_the_programs_that_they_execute_are_counted() {
    for group in [&ONE_CPU, &FOUR_CPUS] {
        for (Model { pmu, .. }, guest) in guests(group) {
            assert_eq!(guest.values("family"), [FAMILY_INSTRUCTIONS + SHORT_LOOP_INSTRUCTIONS], "{pmu}");
        }
    }
    for (Model { pmu, .. }, guest) in guests(&ONE_CPU) {
        assert_eq!(guest.values("parent alone"), [FAMILY_PARENT_INSTRUCTIONS], "{pmu}");
    }
}

fn a_running_process_is_counted_from_the_attachment() {
    /// Instructions that `interval` executes after its second pause.
    const EXIT: u64 = 3;
    for group in [&ONE_CPU, &FOUR_CPUS] {
        for (Model { pmu, .. }, guest) in guests(group) {
            assert_eq!(guest.values("by process"), [BETWEEN_PAUSES + EXIT], "{pmu}");
        }
    }
}

fn migration_between_cpus_loses_no_counts() {
    for (Model { pmu, .. }, guest) in guests(&FOUR_CPUS) {
        assert_eq!(guest.values("migrating"), [MIGRATE_INSTRUCTIONS; 2], "{pmu}");
    }
}

fn each_cpu_counts_what_ran_on_it() {
    for (Model { pmu, .. }, guest) in guests(&FOUR_CPUS) {
        // perf itself runs on each CPU to read its counters there. `visits` has the counts of that alone.
        let visits = guest.counts("by CPU, nothing");
        let counts = guest.counts("by CPU");
        let by_cpu: Vec<_> = counts
            .iter()
            .zip(&visits)
            .map(|(count, visit)| (count.label.as_str(), count.exact() - visit.exact()))
            .collect();
        assert_eq!(by_cpu, MIGRATE_INSTRUCTIONS_BY_CPU, "{pmu}");
    }
}

fn counts_of_user_and_kernel_mode_add_up_on_each_cpu() {
    for (Model { pmu, .. }, guest) in guests(&FOUR_CPUS) {
        let mut by_cpu = BTreeMap::<_, Vec<_>>::new();
        for count in guest.counts("system-wide") {
            by_cpu.entry(count.label.clone()).or_default().push(count.exact());
        }
        assert_eq!(by_cpu.len(), 4, "{pmu}: {by_cpu:?}");
        for counts in by_cpu.values() {
            user_part(pmu, counts);
        }
    }
}

fn programs_on_four_cpus_are_counted_separately() {
    for (Model { pmu, .. }, guest) in guests(&FOUR_CPUS) {
        assert_eq!(guest.values("at once"), [LOOP_INSTRUCTIONS; 8], "{pmu}");
    }
}

fn guest_and_host_agree_to_the_instruction() {
    for (Model { pmu, .. }, guest) in guests(&FOUR_CPUS) {
        assert_eq!(guest.values("observed"), [BETWEEN_PAUSES, BRANCHES_BETWEEN_PAUSES], "{pmu}: the host");
        let inside = [INTERVAL_INSTRUCTIONS, INTERVAL_BRANCHES];
        assert_eq!(guest.values("observed from inside"), inside, "{pmu}: the guest");
    }
}
