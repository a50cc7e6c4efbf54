//! Tests of attribution with the host's `perf`: instructions of a guest, of Tally, and of other programs on the host.
//!
//! Two boots of the simulated host serve all tests: one for guests that have no operating system, whose counts are
//! known exactly, and one for Linux guests. A guest is stopped with SIGSTOP while it waits for its timer, and continued
//! when the host's `perf` counts, so `perf` misses no instruction of the guest's user mode. Every test runs with both
//! vendors' PMUs.

use guest_tests::host::{self, Host};
use guest_tests::lab::{OnEachHost, PAUSED_GUESTS, Steps};
use guest_tests::model::MODELS;
use guest_tests::perf::{Count, STAT, Script, Sections, Value};
use guest_tests::suite::{Test, on_intel, third_tier};
use guest_tests::tests;
use tally_lab::programs::{LOOP, LOOP_INSTRUCTIONS};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [on_any_host(), third_tier(on_intel(on_any_host()))].concat()
}

fn on_any_host() -> Vec<Test> {
    tests![
        a_guests_loop_is_counted_as_guest_and_not_as_host,
        a_guest_and_its_host_count_the_same,
        a_busy_neighbour_on_the_same_cpu_changes_no_count,
        two_guests_on_one_cpu_do_not_change_each_others_counts,
        the_hosts_perf_counts_while_a_guest_counts,
        the_hosts_perf_keeps_its_counter_while_tally_looks_for_free_ones,
        the_hosts_perf_reports_not_counted_when_a_guest_holds_all_counters,
        perf_kvm_stat_reports_a_guests_exits_by_reason,
        tallys_work_for_a_guest_is_counted_as_host_and_not_as_guest,
        perf_kvm_record_samples_a_guests_loop_and_resolves_its_kernels_symbols,
    ]
}

/// Shell functions. `count ARGUMENTS...` starts `perf stat`. `finish` continues the guest, waits for its end, and stops
/// `perf stat`.
const FUNCTIONS: &str = "\
count() {
    perf stat -x'|' \"$@\" & perf=$!
    sleep 0.5
}
finish() {
    kill -CONT $tally
    ended $tally || return
    kill -INT $perf
    wait $perf || true
}
";

/// Words of a guest that counts a user-mode loop, and then lets four counters overflow a hundred times.
const WORK: &str = "timer=1000 count-user=0:0x4100c0,30000000,0 pmi=nmi,100,10000,0xf";
/// Count that the guest prints.
const WORK_COUNTED: u64 = rounds(30_000_000);
/// Number of instructions that this guest executes in user mode.
const WORK_INSTRUCTIONS: u64 = WORK_COUNTED + rounds(100 * 10_000 / 2 + 1);

/// Rounds of the loop in the guest that holds all counters.
const HELD_ROUNDS: u64 = 400_000_000;

/// Returns words that start all counters but the first, for a PMU with as many counters as the host's. Each counts a
/// different event, because counters with the same event share one host event.
fn all_other_counters(pmu: &str) -> &'static str {
    match (host::current(), pmu) {
        (Host::Amd, "intel") => {
            "timer=1000 wrmsr=0x187,0:0x41003c wrmsr=0x188,0:0x42003c wrmsr=0x189,0:0x4100c4 wrmsr=0x38d,0:0x33 \
             wrmsr=0x38f,3:0xf"
        }
        (Host::Amd, _) => {
            "timer=1000 wrmsr=0xc0010202,0:0x4200c0 wrmsr=0xc0010204,0:0x4300c0 wrmsr=0xc0010206,0:0x410076 \
             wrmsr=0xc0010208,0:0x420076 wrmsr=0xc001020a,0:0x430076"
        }
        (Host::Intel, _) => {
            "timer=1000 wrmsr=0x187,0:0x41003c wrmsr=0x188,0:0x42003c wrmsr=0x189,0:0x4100c4 wrmsr=0x18a,0:0x4200c4 \
             wrmsr=0x18b,0:0x4300c4 wrmsr=0x18c,0:0x4100c5 wrmsr=0x18d,0:0x4200c5 wrmsr=0x38d,0:0x333 \
             wrmsr=0x38f,7:0xff"
        }
    }
}

/// Returns true if a guest with this PMU can hold all of the host's counters.
fn can_hold_all_counters(pmu: &str) -> bool {
    host::current() == Host::Amd || pmu == "intel"
}

/// Returns the number of instructions in these rounds of the user-mode loop.
const fn rounds(rounds: u64) -> u64 {
    2 * rounds + 1
}

/// Rounds of the loop in the guests without a counter: a short and a long run.
const ROUNDS: [u64; 2] = [10_000_000, 60_000_000];
/// Runs of each of these guests while its thread's instructions are counted.
const RUNS: usize = 3;

/// Results with guests without an operating system.
static PLAIN: OnEachHost = OnEachHost::new(|| {
    let steps = Steps::new("attribution::plain");
    on_the_host(steps, pmus(), whole_runs(Script::new()), plain).run()
});

/// Results with Linux guests.
static LINUX: OnEachHost = OnEachHost::new(|| {
    let guest = in_linux().into_bytes();
    let steps = Steps::new("attribution::linux").configure_host(|host| host.program(guest, "in-linux"));
    with_linux()
        .fold(on_the_host(steps, with_linux(), Script::new(), linux), |steps, pmu| {
            steps.step(pmu, &format!("cat said.{pmu}"))
        })
        .run()
});

/// Adds sections in which the host's `perf` counts all of a run of Tally.
fn whole_runs(script: Script) -> Script {
    let run = |pmu: &str, words: &str| {
        format!("{STAT} -e instructions:uG ./tally run --kernel payload --pmu {pmu} --append '{words}'")
    };
    // The first run after the host's boot has a guest before the user's, which finds out whether entries count.
    let script = script.section("first run", "./tally run --kernel payload --append hello; [ $? = 1 ]");
    pmus().fold(script, |script, pmu| {
        let loops = ROUNDS.iter().fold(script, |script, rounds| {
            let run = run(pmu, &format!("count-user=0:0,{rounds},0"));
            script.section(&format!("whole run, {rounds}, {pmu}"), &format!("{run}; [ $? = 1 ]"))
        });
        let run = run(pmu, &format!("timer=1000 count-user=0:0,{},0", ROUNDS[0]));
        loops.section(&format!("whole run with a timer, {pmu}"), &format!("{run}; [ $? = 1 ]")).section(
            &format!("whole run beside a client, {pmu}"),
            &format!("{run} & perf=$!; sleep 0.2; ./tally stat --count 2 --interval 0.2 >&2; wait $perf; [ $? = 1 ]"),
        )
    })
}

/// Adds the step `host`. It runs the sections that `add` creates for each PMU.
fn on_the_host(
    steps: Steps,
    pmus: impl Iterator<Item = &'static str>,
    script: Script,
    add: fn(Script, &str) -> Script,
) -> Steps {
    let script = pmus.fold(script, add).into_bytes();
    let script = [PAUSED_GUESTS.as_bytes(), FUNCTIONS.as_bytes(), &script].concat();
    steps
        .configure_host(|host| host.program(LOOP, "loop").program(script, "script"))
        .step("host", "sh ./script")
}

/// Returns the command that runs a guest without an operating system.
fn guest(pmu: &str, words: &str) -> String {
    format!("./tally run --kernel payload --pmu {pmu} --append '{words}'")
}

/// Adds a section in which the guest holds all of the host's counters.
fn with_all_counters_held(script: Script, pmu: &str) -> Script {
    script
        .section(
            &format!("all counters, {pmu}"),
            &format!(
                "begin {}; kill -CONT $tally; sleep 0.1\n\
                 for whom in \"-t $vcpu\" -a; do {STAT} -e instructions:G,instructions:H $whom sleep 0.1; done\n\
                 ended $tally",
                guest(pmu, &format!("{} count-user=0:0x4100c0,{HELD_ROUNDS},0", all_other_counters(pmu)))
            ),
        )
}

fn plain(script: Script, pmu: &str) -> Script {
    let guest = |words: &str| guest(pmu, words);
    let counted = |words: &str, perf: &str| format!("begin {}; count {perf}; finish", guest(words));
    let work = |perf: &str| counted(WORK, perf);
    // `begin` stops a vCPU's thread somewhere on its way to the guest, and what is left of that is not the same in two
    // runs. So the guest goes on until it waits for its timer, for which it needs no exit. Even then, a stop sometimes
    // meets the thread between two entries, and costs it one more: the least of some runs is the same.
    let idle = |rounds: u64| {
        let guest = guest(&format!("timer=5000 count-user=0:0,{rounds},0"));
        let perf = "-e instructions:uG,instructions:uH,instructions:kH -t $vcpu";
        let run =
            format!("begin {guest}; kill -CONT $tally; sleep 0.05; kill -STOP $tally; count {perf}; finish");
        vec![run; RUNS].join(" && ")
    };
    let alone = work("-e instructions:uG -t $vcpu");
    let other = pmus().find(|other| *other != pmu).expect("there are two");
    let work_of_the_other = guest(WORK).replace(pmu, other);
    let script = if can_hold_all_counters(pmu) { with_all_counters_held(script, pmu) } else { script };
    script
        .section(&format!("short, {pmu}"), &idle(ROUNDS[0]))
        .section(&format!("long, {pmu}"), &idle(ROUNDS[1]))
        .section(&format!("alone, {pmu}"), &alone)
        .section(
            &format!("beside a program, {pmu}"),
            &format!("while :; do ./loop; done & neighbour=$!; {alone}; well=$?; kill $neighbour; exit $well"),
        )
        .section(
            &format!("beside a guest, {pmu}"),
            &format!(
                "begin {work_of_the_other} >other.out; other=$tally; begin {}; count -e instructions:uG -t $vcpu\n\
                 kill -CONT $other; finish && ended $other && cat other.out",
                guest(WORK)
            ),
        )
        .section(&format!("process, {pmu}"), &work("-e instructions:uG,instructions:uH -p $tally"))
        .section(&format!("system-wide, {pmu}"), &work("-e instructions:uG,instructions:uH -a"))
        .section(
            &format!("program, {pmu}"),
            &format!(
                "begin {}; kill -CONT $tally; {STAT} -e instructions:uG,instructions:uH ./loop; ended $tally",
                guest(WORK)
            ),
        )
        .section(
            &format!("exits, {pmu}"),
            &format!(
                "perf kvm stat record -o exits {}; [ $? = 1 ] && perf kvm -i exits stat report",
                guest("rdmsr=0xc0010200 rdmsr=0xc0010200 rdmsr=0xc0010200")
            ),
        )
}

fn linux(script: Script, pmu: &str) -> Script {
    let symbols = "--guestkallsyms=share/kallsyms --guestmodules=share/modules";
    let record = format!(
        "perf kvm --guest {symbols} record -q -o samples -e instructions:uG,instructions:kG -c {PERIOD} -t $vcpu"
    );
    script
        .section(
            &format!("guest, {pmu}"),
            &format!(
                "rm -rf share; mkdir share; cp in-linux loop share; cd share\n\
                 dd if=/dev/urandom of=file bs=1M count=8 2>/dev/null; cp file ../disk\n\
                 ../tally run --pmu {pmu} --disk ../disk:ro --share .:rw -- \
                 sh ./in-linux >../said.{pmu} &\n\
                 tally=$!\n\
                 until [ -e ready ] || ! kill -0 $tally; do sleep 0.02; done\n\
                 cd ..\n\
                 {STAT} --per-thread -e instructions:G,instructions:H -p $tally 2>threads & perf=$!\n\
                 find_vcpu; {record} & record=$!\n\
                 wait $tally; status=$?\n\
                 kill -INT $perf $record; wait $perf; wait $record; exit $status"
            ),
        )
        .section(&format!("threads, {pmu}"), "cat threads")
        .section(
            &format!("samples, {pmu}"),
            &format!("perf kvm --guest {symbols} report -i samples --stdio -n"),
        )
}

/// Returns the script of the Linux guest. It reads the same data from memory, a shared folder and a disk. Then it reads
/// from the folder and the disk again, and runs a loop, while the host counts.
fn in_linux() -> Script {
    let drop_caches = "echo 3 >/proc/sys/vm/drop_caches";
    let read = |file: &str| format!("{drop_caches}; {STAT} -e instructions:u cat {file} >/dev/null");
    Script::new()
        .section(
            "prepare",
            "echo 0 >/proc/sys/kernel/randomize_va_space; cat /proc/kallsyms >kallsyms; cat /proc/modules >modules\n\
             cp file /tmp/file",
        )
        .section("memory", &read("/tmp/file"))
        .section("folder", &read("file"))
        .section("disk", &read("/dev/vda"))
        .section("work", &format!("touch ready; sleep 2; {drop_caches}; cat file /dev/vda >/dev/null; ./loop"))
}

/// Period of the host's samples, in instructions of the guest.
const PERIOD: u64 = 100_000;

/// Returns the output of the host's script.
fn host(group: &'static OnEachHost) -> Sections {
    Sections::of(group.of("host"))
}

fn pmus() -> impl Iterator<Item = &'static str> {
    MODELS.iter().map(|model| model.pmu)
}

/// Returns the PMUs of Linux guests. The Intel host, which is slow, has one guest.
fn with_linux() -> impl Iterator<Item = &'static str> {
    pmus().filter(|pmu| host::current() == Host::Amd || *pmu == "intel")
}

/// Returns the lines of a guest's output that start with `word`.
fn lines_of<'a>(text: &'a str, word: &str) -> Vec<&'a str> {
    text.lines().filter(|line| line.starts_with(word)).collect()
}

/// Checks that each of the guests counted [`WORK`] exactly, and got every overflow interrupt.
fn assert_worked(pmu: &str, text: &str, guests: usize) {
    let counted = format!("count 30000000 {WORK_COUNTED:016x}");
    assert_eq!(lines_of(text, "count"), vec![counted; guests], "{pmu}: {text}");
    let overflows =
        "pmi 100 interrupts, 400 overflows, at 0..0, value 0..0, status 0f, left 00, entry 00000400, 0 late";
    assert_eq!(lines_of(text, "pmi"), vec![overflows; guests], "{pmu}: {text}");
}

fn a_guests_loop_is_counted_as_guest_and_not_as_host() {
    let host = host(&PLAIN);
    for pmu in pmus() {
        let counted = ["short", "long"].map(|name| host.values(&format!("{name}, {pmu}")));
        let [short, long] = counted.each_ref().map(|values| {
            let (runs, rest) = values.as_chunks::<3>();
            assert_eq!((runs.len(), rest.len()), (RUNS, 0), "{pmu}");
            *runs.iter().min_by_key(|[_, tally, _]| tally).expect("there are some")
        });
        assert_eq!([short[0], long[0]], ROUNDS.map(rounds), "{pmu}: in the guest");
        assert_eq!(short[1], long[1], "{pmu}: in Tally");
        // The host's timer interrupts the longer run more often.
        let ticks = long[2].abs_diff(short[2]);
        assert!(ticks < (long[0] - short[0]) / 10, "{pmu}: in the host's kernel: {short:?} {long:?}");
    }
}

/// Checks that in this step each of so many guests counts exactly what it executes.
fn assert_exact(step: &str, guests: usize) {
    let host = host(&PLAIN);
    for pmu in pmus() {
        let name = format!("{step}, {pmu}");
        assert_worked(pmu, host.text(&name), guests);
        assert_eq!(host.values(&name), [WORK_INSTRUCTIONS], "{pmu}");
    }
}

fn a_guest_and_its_host_count_the_same() {
    assert_exact("alone", 1);
}

fn a_busy_neighbour_on_the_same_cpu_changes_no_count() {
    assert_exact("beside a program", 1);
}

fn two_guests_on_one_cpu_do_not_change_each_others_counts() {
    assert_exact("beside a guest", 2);
}

fn the_hosts_perf_counts_while_a_guest_counts() {
    let host = host(&PLAIN);
    for pmu in pmus() {
        for whom in ["process", "system-wide"] {
            let name = format!("{whom}, {pmu}");
            assert_worked(pmu, host.text(&name), 1);
            let counted = host.values(&name);
            assert_eq!(counted[0], WORK_INSTRUCTIONS, "{name}");
            assert!(counted[1] > 0, "{name}: nobody runs a guest without working");
        }
        let name = format!("program, {pmu}");
        assert_worked(pmu, host.text(&name), 1);
        assert_eq!(host.values(&name), [0, LOOP_INSTRUCTIONS], "{pmu}: a program of the host's own");
    }
}

fn the_hosts_perf_keeps_its_counter_while_tally_looks_for_free_ones() {
    let host = host(&PLAIN);
    for pmu in pmus() {
        // `values` checks that the event has run for 100 % of the time.
        let [short, long] = ROUNDS.map(|rounds| host.values(&format!("whole run, {rounds}, {pmu}")));
        assert_eq!(long[0] - short[0], rounds(ROUNDS[1]) - rounds(ROUNDS[0]), "{pmu}: {short:?} {long:?}");
        let [alone, beside] =
            ["with a timer", "beside a client"].map(|case| host.values(&format!("whole run {case}, {pmu}")));
        assert_eq!(alone, beside, "{pmu}");
    }
}

fn the_hosts_perf_reports_not_counted_when_a_guest_holds_all_counters() {
    let host = host(&PLAIN);
    for pmu in pmus().filter(|pmu| can_hold_all_counters(pmu)) {
        let name = format!("all counters, {pmu}");
        let counts = host.counts(&name);
        let (of_the_thread, of_all) = counts.split_at(2);
        let nothing = |count: &Count| count.value == Value::NotCounted;
        assert!(of_the_thread.iter().all(nothing), "{pmu}: {of_the_thread:?}");
        // The system-wide events are on the counters only while other threads than the vCPU run.
        assert!(of_all.iter().all(|count| count.running < 10.0), "{pmu}: {of_all:?}");
        let counted = format!("count {HELD_ROUNDS} {:016x}", rounds(HELD_ROUNDS));
        assert_eq!(lines_of(host.text(&name), &counted).len(), 1, "{pmu}: {}", host.text(&name));
    }
}

fn perf_kvm_stat_reports_a_guests_exits_by_reason() {
    let [msr, io] = match host::current() {
        Host::Amd => ["msr", "io"],
        Host::Intel => ["MSR_READ", "IO_INSTRUCTION"],
    };
    let host = host(&PLAIN);
    for pmu in pmus() {
        let text = host.text(&format!("exits, {pmu}"));
        let printed: usize = lines_of(text, "rdmsr").iter().map(|line| line.len() + 1).sum();
        let exits = |reason: &str| {
            let mut words = text.lines().map(str::split_whitespace);
            words.find_map(
                |mut words| if words.next() == Some(reason) { words.next()?.parse().ok() } else { None },
            )
        };
        assert_eq!((exits(msr), exits(io)), (Some(3), Some(printed)), "{pmu}: {text}");
    }
}

fn tallys_work_for_a_guest_is_counted_as_host_and_not_as_guest() {
    let host = host(&LINUX);
    for pmu in with_linux() {
        let guest = Sections::of(LINUX.of(pmu));
        let read = |from: &str| guest.values(from);
        assert_eq!(read("folder"), read("memory"), "{pmu}: in the guest");
        assert_eq!(read("disk"), read("memory"), "{pmu}: in the guest");

        let counts = host.counts(&format!("threads, {pmu}"));
        let of = |thread: &str| {
            let found = |event: &str| {
                let count =
                    counts.iter().find(|count| count.label.starts_with(thread) && count.event == event);
                count.unwrap_or_else(|| panic!("{pmu}: {thread}: {event}: {counts:?}")).exact()
            };
            (found("instructions:G"), found("instructions:H"))
        };
        for thread in ["disk0", "share0", "agent", "tally"] {
            let (in_the_guest, in_the_host) = of(thread);
            assert!(in_the_guest == 0 && in_the_host > 0, "{pmu}: {thread}: {counts:?}");
        }
        assert!(of("vcpu0").0 > LOOP_INSTRUCTIONS, "{pmu}: {counts:?}");
    }
}

fn perf_kvm_record_samples_a_guests_loop_and_resolves_its_kernels_symbols() {
    /// Offsets of the loop's instructions from the program's entry point.
    const IN_THE_LOOP: [u64; 2] = [5, 7];
    let entry = u64::from_le_bytes(LOOP[24..32].try_into().expect("eight bytes"));
    let places = IN_THE_LOOP.map(|offset| format!("{:#018x}", entry + offset));
    let host = host(&LINUX);
    for pmu in with_linux() {
        let text = host.text(&format!("samples, {pmu}"));
        // Columns: percentage, samples, thread, file, mode, and address or symbol.
        let lines = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let samples = |chosen: &dyn Fn(&[&str]) -> bool| -> u64 {
            lines
                .clone()
                .filter(|words| words.len() == 6 && chosen(words))
                .map(|words| words[1].parse().unwrap_or(0))
                .sum()
        };
        let in_the_loop = samples(&|words| places.iter().any(|place| words[5] == place));
        assert_eq!(in_the_loop, LOOP_INSTRUCTIONS / PERIOD, "{pmu}: {text}");
        let named = samples(&|words| words[3] == "[guest.kernel.kallsyms]" && !words[5].starts_with("0x"));
        assert!(named > 0, "{pmu}: {text}");
    }
}
