//! `tally record` and `tally symbols`: a guest is sampled from outside, each sample is at the right instruction of the
//! right process, and the guest counts as if nobody looked. One host for all of them, and the host's `perf` reads what
//! was written.

mod on_riscv;

use std::collections::BTreeMap;

use guest_images::Suite;
use guest_tests::lab::{OnEachHost, StepOutput, Steps, with_installed_kernel};
use guest_tests::programs::{
    HEAVY_MILLIONS, LAYERS, LAYERS_BUILD_ID, LIGHT_MILLIONS, SPLIT, SPLIT_INSTRUCTIONS, SPLIT_PERIOD, TRACK,
    TRACK_INSTRUCTIONS, TRACK_LENGTH,
};
use guest_tests::suite::{Test, on_intel, second_tier};
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let second = tests![
        a_newer_kernels_symbols_and_processes_are_found,
        a_newer_kernels_functions_and_callers_are_those_of_its_own_perf,
        the_system_calls_are_those_of_the_sandbox,
    ];
    // The guest of this test takes as many counters as an AMD host has.
    let first = [on_any_host(), tests![without_a_free_counter_samples_are_taken_by_time]].concat();
    [first, second_tier([second, on_intel(on_any_host())].concat()), on_riscv::tests()].concat()
}

fn on_any_host() -> Vec<Test> {
    tests![
        every_sample_of_a_guest_without_a_pmu_is_at_the_right_instruction,
        call_chains_are_those_that_the_guests_own_perf_takes,
        a_guest_that_is_recorded_counts_the_same,
        symbols_are_those_that_the_guests_kernel_shows,
        functions_of_modules_are_named_as_the_guests_own_perf_names_them,
        callers_in_the_kernel_are_those_of_the_guests_own_perf,
        functions_of_a_module_that_is_loaded_while_it_is_recorded_are_named,
        functions_of_programs_on_a_share_are_named,
        a_flame_graph_has_a_tower_for_each_process,
        another_file_of_a_programs_name_does_not_name_its_functions,
        the_kernels_functions_are_named_and_its_callers_are_the_programs,
        samples_of_two_vcpus_have_the_processes_that_ran_there,
        top_shows_the_functions_of_all_vms,
        top_draws_them_on_a_terminal_of_80_columns_and_ends_with_a_key,
        what_cannot_be_recorded_is_one_line,
        what_was_taken_before_the_disk_was_full_can_be_read,
    ]
}

/// Counts between two samples of [`TRACK`]: no multiple of the loop's length.
const PERIOD: u64 = 1_000_003;

/// Shell functions. `guest NAME SCRIPT ARGUMENTS...` starts a guest that runs a script in a shell, and waits until that
/// prints `ready`. `record NAME ARGUMENTS...` records it until it prints `done`, and ends it.
const FUNCTIONS: &str = "\
said() { until grep -qs $2 $1.said; do sleep 0.05; done; }
guest() {
    name=$1 script=$2
    shift 2
    ./tally run --name $name \"$@\" -- sh -c \"$script\" >$name.said 2>$name.err </dev/null & vm=$!
    said $name ready
}
record() {
    name=$1
    shift
    ./tally record $name -o $name.data \"$@\" & recorder=$!
    said $name done
    # A shell's background command ignores SIGINT.
    kill -TERM $recorder
    wait $recorder; status=$?
    kill $vm; wait $vm
    return $status
}
samples() { perf script -i $1.data --kallsyms $1.data.kallsyms -F $2; }
";

/// A shell function that prints the sum of a list of symbols, without the difference that small letters make for those
/// of modules, and without what is no module. And a command that prints what is compared of a list of modules.
const HASHED: &str =
    "hashed() { (grep -vF [ $1; grep -F [ $1 | grep -vF -e bpf] -e __builtin | tr A-Z a-z) | sha256sum; };";
const LISTED: &str = "cut -d \" \" -f 1,2,6";

/// A command in a guest that calls functions of a module, that of shared folders, and counts between two samples of it.
/// Each byte takes nearly the same number of instructions: so many samples find all of them, even if the period is near
/// a multiple of that number.
const READ: &str = "dd if=zeroes of=/dev/null bs=1";
const READ_PERIOD: u64 = 30_011;

/// Commands in a guest that load a module and call its functions.
const LOAD: &str = "modprobe overlay; mkdir over; mount -t overlay none -o lowerdir=/bin:/etc over; \
                    for i in 1 2 3 4 5 6 7 8 9 10; do ls -l over >/dev/null; done";

/// The guests wait for so long until they are recorded.
const WAIT: &str = "echo ready; sleep 4;";

static RESULTS: OnEachHost = OnEachHost::new(|| {
    let steps =
        Steps::new("record").in_guest("track", TRACK).in_guest("split", SPLIT).in_guest("layers", LAYERS);
    let steps = steps.configure_host(|scenario| scenario.program(SPLIT, "split").program(LAYERS, "layers"));
    let step = |commands: &str| format!("{FUNCTIONS} {commands}");
    let stat = "perf stat -x, -e instructions:u,branches:u ./split 2>&1";
    let own = format!(
        "perf record -q -o /tmp/data --call-graph fp -e instructions:u -c {SPLIT_PERIOD} ./split; perf script -i /tmp/data -F ip"
    );
    let steps = steps
        .step(
            "track",
            &step(&format!(
                "guest track '{WAIT} ./track; echo done; sleep 9' --pmu none; \
                 record track -e instructions:u -c {PERIOD} && samples track comm,ip"
            )),
        )
        .step(
            "chains",
            &step(&format!(
                "guest chains '{own}; {WAIT} ./split; echo done; sleep 9'; \
                 record chains -e instructions:u -c {SPLIT_PERIOD} --call-graph fp && sed /ready/q chains.said && echo && \
                 samples chains comm,ip"
            )),
        )
        .step(
            "counts",
            &step(&format!(
                "guest counts '{stat}; echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent; {WAIT} {stat}; perf record -q -o /tmp/data -e instructions:u -c 100001 ./split; \
                 perf script -i /tmp/data | wc -l; echo done; sleep 9'; record counts -F 4000 --call-graph fp && cat counts.said"
            )),
        )
        .step(
            "symbols",
            &step(&format!(
                "{HASHED} guest symbols '{HASHED} hashed /proc/kallsyms; {LISTED} /proc/modules; echo ready; sleep 9' --share .; \
                 ./tally symbols symbols folder && hashed folder/kallsyms && {LISTED} folder/modules && echo && \
                 cat symbols.said; kill $vm; wait $vm; ls folder",
            )),
        )
        .step("modules", &reads("modules", ""))
        .step(
            "programs",
            &step(&format!(
                "guest programs '{WAIT} ./split; ./layers; echo done; sleep 9' --share .; \
                 record programs -e instructions:u -c {SPLIT_PERIOD} --call-graph no --flamegraph programs.svg && \
                 samples programs comm,ip,sym,dso && pwd && grep -o \"<title>[^<]*\" programs.svg && \
                 perf script -i programs.data --show-mmap-events | grep MMAP2 && cp split layers && echo replaced && samples programs comm,ip,sym"
            )),
        )
        .step(
            "kernel",
            &step(&format!(
                "guest kernel '{WAIT} ./layers; {LOAD}; echo done; sleep 9'; record kernel -e instructions:k -c 100003 --flamegraph kernel.svg && \
                 samples kernel comm,ip,sym && grep -o '<title>[^<]*' kernel.svg"
            )),
        )
        .step(
            "timed",
            &step(
                "guest timed 'perf stat -a -e instructions,cycles,branches,branch-misses,cache-references,cache-misses \
                 sh -c \"echo ready; sleep 4; ./track; echo done; sleep 9\"'; \
                 ./tally record timed -o timed.data -c 1000003 --duration 0.1; echo \"status $?\" >&2; \
                 record timed -e cycles:u && samples timed comm,ip && perf evlist -i timed.data",
            ),
        )
        .step(
            "processes",
            &step(&format!(
                "guest processes '{WAIT} sh -c \"echo track \\$\\$; exec taskset -c 0 ./track\" & \
                 sh -c \"echo split \\$\\$; exec taskset -c 1 ./split\" & wait; echo done; sleep 9' --cpus 2; \
                 record processes -e instructions:u -c {SPLIT_PERIOD} && cat processes.said && samples processes comm,pid,tid,cpu"
            )),
        )
        .step(
            "refused",
            &step(
                "try() { ./tally record \"$@\" --duration 0.2; echo \"status $?\" >&2; }
                 guest kvm 'echo ready; sleep 99' --pmu kvm; try nobody; try kvm -F 1000000; try kvm -e node-prefetches; try kvm -o /none/data; \
                 ./tally record kvm -o one & first=$!; until [ -s one ]; do sleep 0.1; done; try kvm -o two; kill $vm; wait $vm; wait $first; \
                 echo \"status $?\" >&2; echo 'record = false' >policy; guest forbidden 'echo ready; sleep 99' --pmu-policy policy; \
                 try forbidden; ./tally symbols forbidden folder; kill $vm; wait $vm; ls two folder",
            ),
        )
        .step(
            "top",
            &step(
                "guest one 'echo ready; while :; do ./split; done' --share .; first=$vm; \
                 guest two 'echo ready; while :; do ./track; done'; \
                 ./tally top -e instructions:u --interval 0.5 --count 2 && echo && \
                 ./tally top two -e instructions:u --interval 1 --count 1 -F 50; status=$?; echo \\# drawn; \
                 ./typist size:24x80 'expect:seventy' 'type:x' 'expect:[track]' size:6x40 'expect:2 VMs' 'expect:2 VMs' 'type:q' \
                 -- ./tally top -e instructions --interval 0.5; echo \\# ended $?; \
                 kill $first $vm; wait $first; wait $vm; ./tally top >nothing; echo \"status $?\" >&2; \
                 wc -c <nothing; exit $status",
            ),
        )
        .step(
            "full",
            &step(
                "mkdir small; mount -t tmpfs -o size=20K none small; guest full 'while :; do :; done & echo ready; wait'; \
                 ./tally record full -o small/data -F 5000 --duration 20; echo \"status $?\" >&2; kill $vm; wait $vm; \
                 stat -c '%n %s' small/*; perf script -i small/data -F comm | wc -l",
            ),
        );
    steps.second_tier(second).long().run()
});

/// Returns a step in which a guest with these options reads a shared file byte by byte, first under its own perf.
fn reads(name: &str, options: &str) -> String {
    format!(
        "{FUNCTIONS} dd if=/dev/zero of=zeroes bs=1k count=64 2>/dev/null; \
         guest {name} '{READ}; echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent; \
         perf record -q -o /tmp/data -g -e instructions:k -c {READ_PERIOD} {READ}; perf script -i /tmp/data -F comm,ip,sym,dso; \
         {WAIT} {READ}; echo done; sleep 9' --share . {options}; \
         record {name} -e instructions:k -c {READ_PERIOD} --flamegraph {name}.svg && sed /ready/q {name}.said && \
         samples {name} comm,ip,sym,dso && grep -o '<title>[^<]*' {name}.svg"
    )
}

fn second(steps: Steps) -> Steps {
    let newer = |steps, name, suite| {
        let step = format!(
            "{FUNCTIONS} {HASHED} guest {name} '{HASHED} hashed /proc/kallsyms; {WAIT} ./track; echo done; sleep 9' --kernel {name}/boot/vmlinuz; \
             record {name} -e instructions:u -c {PERIOD} && hashed {name}.data.kallsyms && cat {name}.said && samples {name} comm,ip && \
             perf script -i {name}.data --show-mmap-events | grep MMAP"
        );
        let again = reads(&format!("{name}-again"), &format!("--kernel {name}/boot/vmlinuz"));
        with_installed_kernel(steps, name, suite)
            .step(&format!("with-{name}"), &step)
            .step(&format!("{name}-again"), &again)
    };
    newer(newer(steps, "trixie", Suite::Trixie), "sid", Suite::Sid).step(
        "confined",
        &format!(
            "{FUNCTIONS} dmesg -c >/dev/null; guest confined '{WAIT} ./layers; echo done; sleep 9' --sandbox log; \
             record confined -F 2000 --call-graph fp && perf script -i confined.data --show-mmap-events | grep -c 'MMAP2.*/layers'; \
             for again in 1 2 3; do ./tally symbols confined folder; done; dmesg | grep -c type=1326"
        ),
    )
}

fn printed(name: &str) -> String {
    RESULTS.of(name).printed(name)
}

/// Returns the addresses of a program's samples, in their order, from lines of name and address.
fn addresses(text: &str, program: &str) -> Vec<u64> {
    let address = |line: &str| {
        let (name, address) = line.trim().rsplit_once(char::is_whitespace)?;
        (name.trim() == program).then(|| u64::from_str_radix(address, 16).expect("an address"))
    };
    text.lines().filter_map(address).collect()
}

/// Checks that the samples of [`TRACK`] are each as far behind the one before as the period says.
fn are_all_in_order(text: &str) {
    let samples = addresses(text, "track");
    let expected = TRACK_INSTRUCTIONS / PERIOD;
    assert!((expected..=expected + 1).contains(&(samples.len() as u64)), "{} samples", samples.len());
    for pair in samples.windows(2) {
        let distance = (pair[1] + TRACK_LENGTH - pair[0]) % TRACK_LENGTH;
        assert_eq!(distance, PERIOD % TRACK_LENGTH, "{pair:x?}");
    }
}

fn every_sample_of_a_guest_without_a_pmu_is_at_the_right_instruction() {
    are_all_in_order(&printed("track"));
}

/// Returns how often there is each chain: addresses, between empty lines. perf prints those of a program that it knows
/// without where the program is, which is at 4 MiB.
fn chains<'a>(blocks: impl Iterator<Item = &'a str>) -> BTreeMap<Vec<u64>, usize> {
    const PROGRAM: u64 = 4 << 20;
    let address = |word: &str| u64::from_str_radix(word, 16).expect("an address") % PROGRAM;
    let mut chains = BTreeMap::new();
    for block in blocks {
        *chains.entry(block.split_whitespace().map(address).collect()).or_default() += 1;
    }
    chains
}

fn call_chains_are_those_that_the_guests_own_perf_takes() {
    let text = printed("chains");
    let (own, ours) = text.split_once("ready").expect("it has waited");
    let is_whole = |block: &&str| !block.trim().is_empty();
    let own = chains(own.split("\n\n").filter(is_whole));
    let ours = chains(ours.split("\n\n").filter_map(|block| block.trim().strip_prefix("split")));
    assert_eq!(own.values().sum::<usize>() as u64, SPLIT_INSTRUCTIONS / SPLIT_PERIOD);
    // The samples hit each instruction once, wherever they begin.
    assert_eq!(ours, own);
}

fn a_guest_that_is_recorded_counts_the_same() {
    let text = printed("counts");
    let count = |line: &str| line.split(',').next().unwrap_or_default().to_owned();
    let counts: Vec<String> = text.lines().filter(|line| line.contains(":u,")).map(count).collect();
    assert_eq!(counts.len(), 4, "{text}");
    assert_eq!(counts[..2], counts[2..]);
    assert_eq!(counts[0], SPLIT_INSTRUCTIONS.to_string());
    let samples = SPLIT_INSTRUCTIONS / 100_001;
    assert!(text.lines().any(|line| line.trim() == samples.to_string()), "{text}");
}

fn symbols_are_those_that_the_guests_kernel_shows() {
    let text = printed("symbols");
    let (ours, own) = text.split_once("\n\n").expect("both are printed");
    let own: Vec<&str> = own.lines().collect();
    let ours: Vec<&str> = ours.lines().collect();
    assert_eq!(own[..ours.len()], ours, "{text}");
    assert!(ours[1..].iter().any(|line| line.starts_with("fuse ")), "{text}");
    assert_eq!(own[ours.len()..], ["ready", "kallsyms", "modules"], "{text}");
}

/// Returns the names of the functions in the kernel and in its modules, the latest first, and how often there is each
/// such chain of the program that reads: from blocks of lines of address, name and file. The thunks through which
/// functions return on an AMD processor stand for their callers: each run has samples at others of their instructions.
fn kernel_chains(text: &str) -> BTreeMap<Vec<&str>, usize> {
    let mut chains = BTreeMap::new();
    for block in text.split("\n\n").filter_map(|block| block.trim().strip_prefix("dd")) {
        let lines = block.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
        let in_kernel = lines.take_while(|words| words[0].starts_with("ffffffff"));
        let functions = in_kernel.map(|words| words[1]).filter(|name| !name.starts_with("srso_"));
        *chains.entry(functions.collect()).or_default() += 1;
    }
    chains
}

/// Returns what the guest's own perf and Tally have found in a guest that reads a file.
fn own_and_ours(text: &str) -> [BTreeMap<Vec<&str>, usize>; 2] {
    let (own, ours) = text.split_once("ready").expect("it has waited");
    [own, ours].map(kernel_chains)
}

/// Checks that what one of them has so often is known to the other: each run's samples are at other instructions of the
/// same code.
fn are_the_same<T: Ord + std::fmt::Debug>([own, ours]: &[BTreeMap<T, usize>; 2], often: usize) {
    are_known(own, ours, often);
    are_known(ours, own, often);
}

/// Checks that what one of them has so often is known to the other.
fn are_known<T: Ord + std::fmt::Debug>(one: &BTreeMap<T, usize>, other: &BTreeMap<T, usize>, often: usize) {
    let often: Vec<_> = one.iter().filter(|(_, samples)| **samples >= often).collect();
    let unknown: Vec<_> = often.iter().filter(|(what, _)| !other.contains_key(*what)).collect();
    assert!(!often.is_empty() && unknown.is_empty(), "{unknown:#?} {one:#?} {other:#?}");
}

fn are_those_of_its_own_perf(step: &str) {
    let text = printed(step);
    let chains = own_and_ours(&text);
    assert!(chains[0].keys().any(|chain| chain.len() > 5), "{chains:#?}");
    are_the_same(&chains, 60);
}

fn callers_in_the_kernel_are_those_of_the_guests_own_perf() {
    are_those_of_its_own_perf("modules");
}

fn a_newer_kernels_functions_and_callers_are_those_of_its_own_perf() {
    are_those_of_its_own_perf("trixie-again");
    are_those_of_its_own_perf("sid-again");
}

/// Returns how often each function of the module for shared folders is in a sample or called what is.
fn functions_of_fuse(text: &str) -> [BTreeMap<&str, usize>; 2] {
    own_and_ours(text).map(|chains| {
        let mut functions = BTreeMap::new();
        for (chain, samples) in chains {
            for function in chain.into_iter().filter(|function| function.starts_with("fuse_")) {
                *functions.entry(function).or_default() += samples;
            }
        }
        functions
    })
}

fn functions_of_modules_are_named_as_the_guests_own_perf_names_them() {
    let text = printed("modules");
    are_the_same(&functions_of_fuse(&text), 30);
    let (_, ours) = text.split_once("ready").expect("it has waited");
    let of_module = ours.lines().filter(|line| line.contains(" fuse_"));
    assert!(
        of_module.clone().count() > 0 && of_module.clone().all(|line| line.ends_with(" ([fuse])")),
        "{text}"
    );
    assert!(text.contains("<title>fuse_file_read_iter [fuse] ("), "{text}");
}

/// Returns how many samples a program has with these words behind the address.
fn samples_with(text: &str, program: &str, words: &str) -> u64 {
    let is_one = |line: &&str| {
        let mut found = line.split_whitespace();
        found.next() == Some(program) && found.skip(1).eq(words.split(' '))
    };
    text.lines().filter(is_one).count() as u64
}

fn functions_of_a_module_that_is_loaded_while_it_is_recorded_are_named() {
    let text = printed("kernel");
    let of_module = |line: &&str| line.contains(" ovl_");
    assert!(text.lines().filter(of_module).count() > 10, "{text}");
    let has_title = |line: &str| line.starts_with("<title>ovl_") && line.contains(" [overlay] (");
    assert!(text.lines().any(has_title), "{text}");
}

fn functions_of_programs_on_a_share_are_named() {
    let text = printed("programs");
    let folder = text.lines().find(|line| line.starts_with('/')).expect("the host's folder");
    let of = |program, function| samples_with(&text, program, &format!("{function} ({folder}/{program})"));
    assert_eq!([of("split", "seventy"), of("split", "thirty")], [700, 300], "{text}");
    // The program's loops have millions of instructions.
    for (function, millions) in [("heavy", HEAVY_MILLIONS), ("light", LIGHT_MILLIONS)] {
        let expected = millions * 1_000_000 / SPLIT_PERIOD;
        assert!((expected..=expected + 1).contains(&of("layers", function)), "{function}: {text}");
    }
    let identity =
        |line: &&str| line.contains(LAYERS_BUILD_ID) && line.ends_with(&format!("{folder}/layers"));
    assert_eq!(text.lines().filter(identity).count(), 1, "{text}");
}

fn a_flame_graph_has_a_tower_for_each_process() {
    let text = printed("programs");
    let samples_of = |what: &str| {
        let titles = text.lines().filter_map(|line| line.strip_prefix("<title>")?.split_once(" ("));
        let words = titles.filter(|(name, _)| name.split('-').next() == Some(what)).map(|(_, count)| count);
        words.map(|count| count.split(' ').next()?.replace(',', "").parse::<u64>().ok()).collect::<Vec<_>>()
    };
    assert_eq!(samples_of("split"), [Some(1000)], "{text}");
    assert_eq!([samples_of("seventy"), samples_of("thirty")], [[Some(700)], [Some(300)]], "{text}");
    // The kernel's functions are above the program that has called them, whose file is not on the host.
    let text = printed("kernel");
    let has = |part: &str| text.lines().any(|line| line.starts_with("<title>") && line.contains(part));
    assert!(has("chacha_permute (") && has("[layers] (") && has("layers-"), "{text}");
}

fn another_file_of_a_programs_name_does_not_name_its_functions() {
    let text = printed("programs");
    let (before, replaced) = text.split_once("replaced\n").expect("it has been replaced");
    let is_sample = |line: &&str| line.trim_start().starts_with("layers ") && !line.contains("MMAP2");
    let all = before.lines().filter(is_sample).count() as u64;
    assert!(all > 0 && samples_with(replaced, "layers", "[unknown]") == all, "{text}");
}

fn the_kernels_functions_are_named_and_its_callers_are_the_programs() {
    let text = printed("kernel");
    let blocks = text.split("\n\n").filter_map(|block| block.trim().strip_prefix("layers"));
    let blocks: Vec<Vec<&str>> = blocks.map(|block| block.split_whitespace().collect()).collect();
    let of = |name| blocks.iter().filter(|words| words.get(1) == Some(&name)).collect::<Vec<_>>();
    let busiest = of("chacha_permute");
    assert!(busiest.len() * 2 > blocks.len(), "{} of {} samples", busiest.len(), blocks.len());
    // The system call is called by `ask`, that by `work`, that by the start.
    let callers = &busiest[0][busiest[0].len() - 6..];
    for words in &busiest {
        let (kernel, program) = words.split_at(words.len() - 6);
        assert!(kernel.contains(&"do_syscall_64") && program == callers, "{busiest:?}");
    }
}

fn without_a_free_counter_samples_are_taken_by_time() {
    let timed = RESULTS.of("timed");
    let said: Vec<&str> = timed.err.lines().filter(|line| line.contains("no counter")).collect();
    assert!(
        matches!(said[..], [first, second] if !first.contains("by time") && second.contains("by time")),
        "{said:?}"
    );
    assert!(timed.err.contains("status 125"), "{}", timed.err);
    let text = printed("timed");
    assert!(text.contains("cpu-clock"), "{text}");
    // A thousand million instructions are a second, in which there are 999 samples, none of them in the kernel. There
    // are some more while the host works for the VM.
    let samples = addresses(&text, "track");
    assert!((950..=1100).contains(&samples.len()), "{} samples: {}", samples.len(), timed.err);
    assert!(samples.iter().all(|address| address >> 63 == 0), "{samples:x?}");
}

fn samples_of_two_vcpus_have_the_processes_that_ran_there() {
    let text = printed("processes");
    for (program, cpu, instructions) in
        [("track", "[000]", TRACK_INSTRUCTIONS), ("split", "[001]", SPLIT_INSTRUCTIONS)]
    {
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .filter(|line: &Vec<&str>| line.first() == Some(&program))
            .collect();
        let (said, samples): (Vec<_>, Vec<_>) = lines.into_iter().partition(|line| line.len() == 2);
        let process = said[0][1];
        let both = format!("{process}/{process}");
        assert!(samples.iter().all(|line| line[1..] == [both.as_str(), cpu]), "{:?}", samples[0]);
        let expected = instructions / SPLIT_PERIOD;
        assert!((expected - 1..=expected + 1).contains(&(samples.len() as u64)), "{}", samples.len());
    }
}

/// Returns what `tally top` has printed, what it has drawn on a terminal, and what is behind that.
fn printed_and_drawn(text: &str) -> [&str; 3] {
    let (printed, rest) = text.split_once("# drawn\n").expect("it has drawn");
    let (drawn, after) = rest.split_once("# ended ").expect("it has ended");
    [printed, drawn, after]
}

fn top_draws_them_on_a_terminal_of_80_columns_and_ends_with_a_key() {
    let text = RESULTS.of("top").text();
    let [_, drawn, after] = printed_and_drawn(&text);
    assert!(after.starts_with("0\n"), "{text:?}");
    let (before, shown) = drawn.split_once("\x1b[?1049h").expect("the screen is entered");
    let (shown, left) = shown.rsplit_once("\x1b[?1049l").expect("the screen is left");
    assert_eq!([before.trim(), left.trim()], [""; 2], "{text:?}");
    let pictures = shown.split("\x1b[H").skip(1).map(|picture| {
        let (lines, _) = picture.split_once("\x1b[J").expect("what is below is cleared");
        lines.split("\r\n").map(|line| line.strip_suffix("\x1b[K").expect("the rest is cleared")).collect()
    });
    let pictures: Vec<Vec<&str>> = pictures.collect();
    let fit = |picture: &[&str], rows: usize, columns: usize| {
        let is_plain = |line: &str| line.chars().count() <= columns && !line.contains(char::is_control);
        picture.len() <= rows && picture.iter().all(|line| is_plain(line))
    };
    assert!(pictures.iter().all(|picture| fit(picture, 24, 80)), "{pictures:#?}");
    assert!(pictures.last().is_some_and(|picture| fit(picture, 6, 40)), "{pictures:#?}");
    assert!(pictures[0][0].starts_with("the first figures come in a moment"), "{pictures:#?}");
    let full = pictures.iter().find(|picture| picture.len() > 6).unwrap_or_else(|| panic!("{pictures:#?}"));
    assert!(
        full[0].starts_with("2 VMs: ") && full[0].contains(" samples of instructions in 0."),
        "{full:#?}"
    );
    assert_eq!(full[1].split_whitespace().collect::<Vec<_>>(), ["share", "VM", "command", "function"]);
    // All columns are below their headings, functions of programs and of the kernel, those with most samples first.
    let column = |name: &str| full[1].find(name).expect("it is a heading");
    let shares: Vec<f64> = full[2..]
        .iter()
        .map(|line| {
            assert!(["one ", "two "].contains(&&line[column("VM")..][..4]), "{full:#?}");
            assert!(["[.] ", "[k] "].contains(&&line[column("function")..][..4]), "{full:#?}");
            line[..6].trim().parse().expect("a share")
        })
        .collect();
    assert!(shares.is_sorted_by(|one, next| one >= next), "{full:#?}");
    let line = |vm: &str, command: &str, function: &str| {
        full.iter()
            .any(|line| line.split_whitespace().collect::<Vec<_>>()[1..] == [vm, command, "[.]", function])
    };
    assert!(line("one", "split", "seventy") && line("two", "track", "[track]"), "{full:#?}");
}

fn top_shows_the_functions_of_all_vms() {
    let done = RESULTS.of("top");
    let text = done.text();
    let [printed, _, after] = printed_and_drawn(&text);
    let blocks: Vec<Vec<&str>> = printed.split("\n\n").map(|block| block.lines().collect()).collect();
    let [first, second, one_vm] = &blocks[..] else { panic!("{text}{}", done.err) };
    for block in [first, second] {
        assert!(
            block[0].starts_with("2 VMs: ") && block[0].contains(" samples of instructions:u in 0."),
            "{text}"
        );
        let has = |vm: &str, process: &str, function: &str| {
            block.iter().any(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                matches!(words[..], [_, name, program, "[.]", of] if [name, program, of] == [vm, process, function])
            })
        };
        assert!(has("one", "split", "seventy") && has("two", "track", "[track]"), "{text}");
    }
    assert!(one_vm[0].starts_with("1 VM: ") && !one_vm.iter().any(|line| line.contains("split")), "{text}");
    assert!(one_vm.iter().any(|line| line.contains("[track]")), "{text}");
    let samples = |line: &str| line.split(' ').nth(2).and_then(|number| number.parse::<u32>().ok());
    // Half as many vCPUs, and a tenth of the rate.
    assert!(
        samples(one_vm[0]) > Some(10) && samples(one_vm[0]).map(|few| few * 4) < samples(second[0]),
        "{text}"
    );
    let said: Vec<&str> = done.err.lines().collect();
    assert!(said.iter().any(|line| line.contains("no VM of this user's runs here")), "{said:?}");
    assert_eq!(
        (said.last(), after.lines().last(), done.status),
        (Some(&"status 125"), Some("0"), 0),
        "{said:?}"
    );
}

fn what_cannot_be_recorded_is_one_line() {
    let StepOutput { err, .. } = RESULTS.of("refused");
    let is_remark = |line: &&str| line.contains("does not say which process") || line.contains("perf report");
    let said: Vec<&str> = err.lines().filter(|line| !is_remark(line)).collect();
    let expected = [
        "no VM `nobody` runs here",
        "status 125",
        "-F 1000000: this host takes",
        "status 125",
        "it has no such event",
        "status 125",
        "/none/data: No such file",
        "status 125",
        "it is being recorded already",
        "status 125",
        "has ended",
        "status 0",
        "its policy forbids that: `record = false`",
        "status 125",
        "its policy forbids that: `record = false`",
    ];
    let is_as_expected = said.iter().zip(expected).all(|(said, expected)| said.contains(expected));
    assert!(is_as_expected && said.len() >= expected.len(), "{said:#?}");
}

fn what_was_taken_before_the_disk_was_full_can_be_read() {
    let full = RESULTS.of("full");
    let text = full.text();
    assert!(
        full.err.contains("small/data: No space left on device") && full.err.contains("status 125"),
        "{}",
        full.err
    );
    let [file, samples] = text.lines().collect::<Vec<_>>()[..] else { panic!("{text}{}", full.err) };
    let size: u64 =
        file.strip_prefix("small/data ").and_then(|size| size.parse().ok()).expect("the only file");
    // There was no room for one more sample, with a name for its process.
    assert!((20_480 - 100..=20_480).contains(&size), "{text}{}", full.err);
    assert!(full.err.contains(&format!("small/data: {samples} samples\n")), "{text}{}", full.err);
    assert!(samples.parse::<usize>().is_ok_and(|samples| samples > 50), "{text}{}", full.err);
}

fn a_newer_kernels_symbols_and_processes_are_found() {
    for name in ["with-trixie", "with-sid"] {
        let text = printed(name);
        let mut lines = text.lines();
        assert_eq!(lines.next(), lines.next(), "{name}");
        // Which drivers are modules, kernels decide: that of memory-mapped devices always is one.
        assert!(text.contains("[virtio_mmio]"), "{name}: {text}");
        are_all_in_order(&text);
        assert!(
            text.lines().any(|line| line.contains("MMAP2") && line.ends_with(" /root/track")),
            "{name}: {text}"
        );
    }
}

fn the_system_calls_are_those_of_the_sandbox() {
    let confined = RESULTS.of("confined");
    assert_eq!(confined.text().lines().collect::<Vec<_>>(), ["1", "0"], "{}", confined.err);
}
