//! Tests of `tally list`, `tally stat` and `tally policy` with running VMs, on the lab's simulated host: the output
//! shows the guest's state, and observing a guest does not change it.

use std::sync::LazyLock;

use guest_tests::lab::{Results, StepOutput, Steps};
use guest_tests::program;
use guest_tests::suite::Test;
use guest_tests::tests;
use serde_json::{Value, json};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        without_a_vm_list_is_empty_and_stat_fails,
        a_running_vm_is_listed_with_its_properties,
        stat_shows_a_counter_as_the_guest_sees_it,
        stat_shows_the_hosts_counters_by_holder,
        stat_shows_a_vcpus_instructions_in_guest_and_host,
        stat_shows_tallys_and_kvms_exits_by_reason,
        stat_prints_text_at_each_interval,
        the_live_view_ends_with_a_key_and_restores_the_terminal,
        the_live_view_ends_with_the_vm,
        one_address_has_the_metrics_of_all_vms,
        unknown_and_ambiguous_vm_names_are_refused_in_one_line,
        a_disabled_counter_does_not_move_until_it_is_enabled,
        observing_changes_no_count_and_costs_less_than_a_thousandth,
        misbehaving_clients_do_no_harm,
        the_socket_is_removed_however_a_vm_ends,
        a_killed_vms_socket_is_removed_by_list,
        users_see_their_own_vms_and_root_sees_all,
    ]
}

/// AMD's first event select and its counter.
const SELECT: u32 = 0xc001_0200;
const COUNTER: u32 = 0xc001_0201;
/// Rounds of the user-mode loop of DEC and JNZ, which ends with an INT.
const ROUNDS: u64 = 1_000_000;
const INSTRUCTIONS: u64 = 2 * ROUNDS + 1;
/// Distance of the first counter from its overflow at the start.
const DISTANCE: u64 = 1_000;

/// Returns the words of a guest that counts user-mode instructions with counters 0 and 1. Counter 0 overflows once. The
/// guest then executes `end` in the kernel, where neither counts.
fn counting(end: &str) -> String {
    let start = (1_u64 << 48) - DISTANCE;
    format!(
        "wrmsr={COUNTER:#x},{:#x}:{:#x} wrmsr={SELECT:#x},0:0x4100c0 count-user=0:0x4100c0,{ROUNDS},1 {end}",
        start >> 32,
        start & 0xffff_ffff
    )
}

/// Returns commands that start a guest in the background as `$vm`, and wait until it has counted.
fn started(name: &str, words: &str) -> String {
    format!(
        "rm -f {name}.said; ./tally run --name {name} --kernel payload --append '{words}' >{name}.said & vm=$!; \
         until grep -qs '^count' {name}.said; do sleep 0.05; done"
    )
}

/// Prints the time that the vCPU's thread has been on a CPU, in nanoseconds.
const RUN_TIME: &str =
    "for task in /proc/$vm/task/*; do grep -q vcpu0 $task/comm && cut -d' ' -f1 $task/schedstat; done";
const END: &str = "kill $vm; wait $vm";
const SOCKETS: &str = "ls -A /run/tally";

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let with = |name: &str, end: &str, commands: &str| {
        format!("{}; {commands}; {END}", started(name, &counting(end)))
    };
    // Long enough for several observations of a second each.
    let long = "count-user=0:0x4100c0,1500000000,0 halt";
    let timed = |attached: &str| {
        format!(
            "./tally run --name timed --kernel payload --append '{long}' >timed.said & vm=$!; {attached}
             until grep -qs '^count' timed.said; do sleep 0.05; done; {RUN_TIME}; cat timed.said; {END}; rm timed.said"
        )
    };
    let until_found = "until ./tally list | grep -q timed; do sleep 0.01; done";
    let ended = |options: &str, how: &str| format!("./tally run {options} >/dev/null 2>&1 {how}; {SOCKETS}");
    let user = "/scenario/restricted unprivileged /scenario/";
    Steps::new("operator")
        .file(program("rude"), "rude")
        .file(program("restricted"), "restricted")
        .step("nobody", "./tally list; ./tally list --json; ./tally stat")
        .step("list", &with("counts", "spin", "./tally list --json; ./tally list"))
        .step("json", &with("counts", "spin", "./tally stat counts --json --interval 0.2"))
        .step("idle", &with("counts", "halt", "./tally stat --json --interval 0.2"))
        .step("text", &with("counts", "spin", "./tally stat $vm --interval 0.2 --count 2"))
        .step(
            "live",
            &with("counts", "spin", "./typist 'expect:instructions:u' 'type:xq' -- ./tally stat counts --interval 0.2; echo $?"),
        )
        .step(
            "live-end",
            &format!(
                "{}; (./typist 'expect:vCPU 0' -- ./tally stat --interval 0.2; echo $?) & sleep 1; {END}; wait $!",
                started("short", &counting("spin"))
            ),
        )
        .step(
            "metrics",
            &format!(
                "{}; other=$vm; {}; ./tally stat --metrics 9100 & serving=$!; \
                 get() {{ wget -qO- http://127.0.0.1:9100/metrics; }}; until get >/dev/null 2>&1; do sleep 0.1; done; \
                 get; kill -STOP $other; sleep 1; get | grep -e ^tally_silent -e ^tally_stands; kill -CONT $other; \
                 kill $serving; {END}; kill $other; wait $other",
                started("one", &counting("halt")),
                started("two", &counting("halt")),
            ),
        )
        .step("metrics-taken", "nc -l -p 9100 127.0.0.1 & sleep 0.5; ./tally stat --metrics 9100; status=$?; kill $!; exit $status")
        .step("unknown", &with("counts", "halt", "./tally stat other; echo $?; ./tally stat 1; echo $?"))
        .step(
            "ambiguous",
            &format!(
                "{}; other=$vm; mv counts.said other.said; {}; ./tally stat counts; echo $?; {END}; kill $other; wait $other",
                started("counts", "count-user=0:0x4100c0,1000,1 halt"),
                started("counts", "count-user=0:0x4100c0,1000,1 halt"),
            ),
        )
        .step(
            "switched",
            &format!(
                "./tally run --name switched --kernel payload --append 'wrmsr={SELECT:#x},0:0x4300c0 count-user=0:0x4100c0,{ROUNDS},1 spin' >switched.said & vm=$!; \
                 until grep -qs '^count' switched.said; do sleep 0.05; done; \
                 ./tally policy switched --disable 0:0; for i in 1 2; do ./tally stat switched --json --interval 0.1; done; \
                 ./tally policy $vm --disable 0:1 --disable 0:6; echo $? >&2; ./tally policy $vm --enable 0:0; \
                 ./tally stat switched --json --interval 0.1; {END}"
            ),
        )
        .step("alone", &timed(""))
        .step("looked-at", &timed(&format!("{until_found}; ./tally stat timed --count 2 >/dev/null;")))
        .step(
            "rude",
            &timed(&format!(
                "{until_found}; mkfifo hold; ./rude /run/tally/$vm.sock <hold >told & exec 7>hold; \
                 until grep -qs . told; do sleep 0.05; done; cat told >&2; exec 7>&-; wait $!; \
                 until ./tally stat timed --json --interval 0.05 >/dev/null 2>&1; do sleep 0.05; done;"
            )),
        )
        .step(
            "ends",
            &[
                ended("--kernel payload --append exit=0", ""),
                ended("--kernel payload --append triple", ""),
                ended("-- true", ""),
                ended("--kernel payload --append spin", "& vm=$!; until test -S /run/tally/$vm.sock; do sleep 0.05; done; kill $vm; wait $vm"),
                format!("./typist 'expect:Hello' 'type:\\x01x' -- ./tally run --kernel payload --append 'hello spin' >/dev/null; {SOCKETS}"),
            ]
            .join("; "),
        )
        .step(
            "killed",
            &format!(
                "{}; kill -9 $vm; wait $vm; {SOCKETS} | wc -l; ./tally list --json; {SOCKETS} | wc -l",
                started("killed", "count-user=0:0x4100c0,1000,1 spin")
            ),
        )
        .step(
            "users",
            &format!(
                "chmod 666 /dev/kvm; sysctl -q kernel.perf_event_paranoid=1; mkdir /tmp/home; chown 65534:65534 /tmp/home; cd /tmp/home; \
                 {user}tally run --name theirs --kernel /scenario/payload --append 'count-user=0:0x4100c0,1000,1 spin' >said & vm=$!; \
                 /scenario/tally run --name ours --kernel /scenario/payload --append 'count-user=0:0x4100c0,1000,1 spin' >ours & ours=$!; \
                 until grep -qs '^count' said && grep -qs '^count' ours; do sleep 0.05; done; \
                 {user}tally list --json; /scenario/tally list --json; {END}; kill $ours; wait $ours; ls -A /tmp/tally-65534"
            ),
        )
        .run()
});

/// Returns the JSON documents that a step printed, one per line. Other lines are ignored.
fn documents(step: &str) -> Vec<Value> {
    let done = RESULTS.of(step);
    let documents =
        done.text().lines().filter_map(|line| serde_json::from_str(line).ok()).collect::<Vec<_>>();
    assert!(!documents.is_empty(), "{}{}", done.text(), done.err);
    documents
}

/// Returns the only vCPU of the only VM.
fn vcpu(document: &Value) -> &Value {
    assert_eq!(document["vms"].as_array().map(Vec::len), Some(1), "{document:#}");
    &document["vms"][0]["vcpus"][0]
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// Returns the standard error of a step. Checks that it has no internal error.
fn err(done: &StepOutput) -> &str {
    assert!(done.err.lines().all(|line| !line.contains("internal error")), "{}", done.err);
    &done.err
}

fn without_a_vm_list_is_empty_and_stat_fails() {
    let done = RESULTS.of("nobody");
    assert_eq!(done.text(), "process  name  vCPUs  memory  age  PMU  runs\n[]\n");
    assert_eq!((done.status, err(done)), (125, "tally: no VM of this user's runs here\n"));
}

fn a_running_vm_is_listed_with_its_properties() {
    let vm = &documents("list")[0][0];
    let known = json!({ "name": "counts", "runs": "payload", "cpus": 1, "memory": 512 << 20 });
    for (name, value) in known.as_object().unwrap() {
        assert_eq!(&vm[name], value, "{vm:#}");
    }
    assert_eq!(vm["pmu"], "AMD's PMU with PerfMonV2, 6 counters");
    let text = RESULTS.of("list").text();
    let last = text.lines().last().unwrap();
    assert!(last.trim_start().starts_with(&format!("{}  counts", vm["pid"])), "{text}");
}

fn stat_shows_a_counter_as_the_guest_sees_it() {
    let document = &documents("json")[0];
    let counters = &vcpu(document)["counters"];
    let first = &counters[0];
    assert_eq!(first["event"], "instructions:u", "{first:#}");
    assert_eq!((number(&first["value"]), number(&first["overflows"])), (INSTRUCTIONS - DISTANCE, 1));
    assert_eq!((&first["state"], &first["starvations"]), (&json!("counting"), &json!(0)));
    assert!(first["hardware"].is_u64() && first["enabled"] == first["running"], "{first:#}");
    let second = &counters[1];
    assert_eq!((&second["event"], number(&second["value"])), (&Value::Null, INSTRUCTIONS), "{second:#}");
    assert_eq!(second["state"], "unused");
}

fn stat_shows_the_hosts_counters_by_holder() {
    let document = &documents("json")[0];
    let hardware = &vcpu(document)["hardware"];
    let held = hardware["held"].as_array().unwrap().len();
    assert_eq!((number(&hardware["counters"]), number(&hardware["others"])), (6, 0), "{hardware:#}");
    assert!(held >= 1 && number(&hardware["free"]) == 6 - held as u64, "{hardware:#}");
}

fn stat_shows_a_vcpus_instructions_in_guest_and_host() {
    let busy = documents("json").remove(0);
    let interval = &vcpu(&busy)["interval"];
    let [guest, host] = ["guest", "host"].map(|side| number(&interval[side]["instructions"]));
    // The guest runs for most of the interval of 0.2 s, at one instruction per nanosecond.
    assert!((100_000_000..=200_000_000 * 11 / 10).contains(&guest), "{interval:#}");
    assert!(host > 0 && host < guest / 10, "{interval:#}");
    let idle = documents("idle").remove(0);
    let interval = &vcpu(&idle)["interval"];
    assert_eq!(interval["guest"]["instructions_counted"], 1.0, "{interval:#}");
    assert!(number(&interval["guest"]["instructions"]) < 10, "it is halted: {interval:#}");
}

fn stat_shows_tallys_and_kvms_exits_by_reason() {
    let document = &documents("json")[0];
    let vcpu = vcpu(document);
    // `count-user` reads a counter once.
    assert_eq!(vcpu["exits"]["pmu_reads"], 1, "{vcpu:#}");
    let (tallys, kvms) = (&vcpu["exits"], &vcpu["kvm"]);
    assert!(
        number(&kvms["exits"]) > number(&tallys["port_writes"]) && number(&tallys["signals"]) >= 1,
        "{vcpu:#}"
    );
    assert!(number(&vcpu["interval"]["exits"]["signals"]) >= 1, "each look is one: {vcpu:#}");
    assert!(vcpu["interval"]["pmu_share"].as_f64().is_some_and(|share| share < 0.01), "{vcpu:#}");
}

fn stat_prints_text_at_each_interval() {
    let done = RESULTS.of("text");
    let text = done.text();
    assert_eq!(err(done), "");
    assert_eq!(text.lines().filter(|line| line.starts_with("counts (process ")).count(), 2, "{text}");
    let row = text.lines().find(|line| line.contains("instructions:u")).expect("the counter");
    assert!(row.contains("1,999,001") && row.contains("100 %") && row.contains("counting on "), "{row}");
}

fn the_live_view_ends_with_a_key_and_restores_the_terminal() {
    let text = RESULTS.of("live").text();
    let (shown, after) = text.rsplit_once("\x1b[?1049l").expect("the screen is left");
    assert!(shown.contains("1,999,001") && after.trim() == "0", "{text:?}");
    let (before, drawn) = shown.split_once("\x1b[?1049h").expect("it was entered");
    assert!(before.trim().is_empty() && !drawn.replace("\r\n", "").contains('\n'), "{text:?}");
}

fn the_live_view_ends_with_the_vm() {
    let text = RESULTS.of("live-end").text();
    let (_, after) = text.rsplit_once("\x1b[?1049l").expect("the screen is left");
    let lines: Vec<&str> = after.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    assert!(lines[0].starts_with("tally: the VM ") && lines[0].ends_with(" has ended"), "{text:?}");
    assert_eq!(lines[1..], ["0"]);
}

fn one_address_has_the_metrics_of_all_vms() {
    let done = RESULTS.of("metrics");
    let text = done.text();
    // Each line without the process's number.
    let lines: Vec<String> = text
        .lines()
        .map(|line| line.split(',').filter(|part| !part.starts_with("pid=")).collect::<Vec<_>>().join(","))
        .collect();
    for name in ["one", "two"] {
        let overflows =
            format!("tally_pmu_overflows_total{{user=\"root\",name=\"{name}\",vcpu=\"0\",counter=\"0\"}} 1");
        assert!(lines.contains(&overflows), "{overflows}: {text}");
    }
    assert_eq!(text.matches("# TYPE tally_pmu_overflows counter").count(), 1, "{text}");
    let after = text.split_once("# EOF\n").unwrap().1;
    assert!(
        text.contains("tally_silent_machines 0\n") && after.contains("tally_silent_machines 1\n"),
        "{text}"
    );
    assert!(after.contains("name=\"two\"") && !after.contains("name=\"one\""), "{after}");
    let taken = RESULTS.of("metrics-taken");
    assert_eq!(taken.status, 125);
    assert_eq!(err(taken), "tally: --metrics 127.0.0.1:9100: Address already in use (os error 98)\n");
}

fn unknown_and_ambiguous_vm_names_are_refused_in_one_line() {
    let unknown = RESULTS.of("unknown");
    assert_eq!(unknown.text(), "125\n125\n");
    assert!(err(unknown).starts_with("tally: no VM `other` runs here; those that do: "), "{}", unknown.err);
    assert_eq!(unknown.err.lines().count(), 2);
    let ambiguous = RESULTS.of("ambiguous");
    assert_eq!(ambiguous.text(), "125\n");
    assert!(err(ambiguous).starts_with("tally: several VMs are called `counts`: "), "{}", ambiguous.err);
}

fn a_disabled_counter_does_not_move_until_it_is_enabled() {
    let documents = documents("switched");
    let counter = |number: usize| &vcpu(&documents[number])["counters"][0];
    let [first, second, after] = [0, 1, 2].map(counter);
    assert_eq!((&first["state"], &first["value"]), (&json!("disabled"), &second["value"]), "{first:#}");
    assert_eq!(after["state"], "counting");
    assert!(number(&after["value"]) > number(&second["value"]), "{after:#}");
    // There are six counters. The command for the seventh fails, and changes nothing.
    let refused = err(RESULTS.of("switched"));
    assert!(
        refused.contains("no vCPU 0 has a counter 6 that is Tally's") && refused.ends_with("\n125\n"),
        "{refused}"
    );
    assert_eq!(vcpu(&documents[2])["counters"][1]["state"], "unused");
}

/// Returns the time that the vCPU's thread ran, and the guest's output.
fn timed(step: &str) -> (u64, String) {
    let text = RESULTS.of(step).text();
    let line = text.lines().position(|line| line.parse::<u64>().is_ok()).expect("a time");
    let time = text.lines().nth(line).expect("it is there").parse().expect("it is a number");
    (time, text.lines().skip(line + 1).collect())
}

fn observing_changes_no_count_and_costs_less_than_a_thousandth() {
    let (alone, looked_at) = (timed("alone"), timed("looked-at"));
    assert_eq!(alone.1, format!("count 1500000000 {:016x}", 2 * 1_500_000_000_u64 + 1));
    assert_eq!(looked_at.1, alone.1);
    let more = looked_at.0.saturating_sub(alone.0);
    assert!(more * 1_000 <= alone.0, "{more} ns more than {} ns", alone.0);
}

fn misbehaving_clients_do_no_harm() {
    let rude = timed("rude");
    assert_eq!(rude.1, timed("alone").1, "the guest counts as ever, and who is polite is served again");
    let told = err(RESULTS.of("rude"));
    assert_eq!(told, "{\"error\":\"16 clients are connected already\"}\n");
}

fn the_socket_is_removed_however_a_vm_ends() {
    let done = RESULTS.of("ends");
    assert_eq!((done.text().as_str(), err(done)), ("", ""));
}

fn a_killed_vms_socket_is_removed_by_list() {
    assert_eq!(RESULTS.of("killed").text(), "1\n[]\n0\n");
}

fn users_see_their_own_vms_and_root_sees_all() {
    let documents = documents("users");
    let names = |number: usize| {
        let vms = documents[number].as_array().expect("a list").iter();
        let mut names: Vec<_> = vms.map(|vm| vm["name"].as_str().expect("a name")).collect();
        names.sort_unstable();
        names
    };
    assert_eq!((names(0), names(1)), (vec!["theirs"], vec!["ours", "theirs"]));
    let text = RESULTS.of("users").text();
    assert_eq!(text.lines().count(), 2, "the folder is empty at the end: {text}");
}
