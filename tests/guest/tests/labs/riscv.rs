//! Tests of guests on a RISC-V host: they boot, and count the same as the host and as guests with KVM's own vPMU.
//!
//! The tests of this file share one boot of the simulated host. Features of Linux' perf events are tested in
//! `features`.

mod booting;
mod ending;
mod older_host;
mod refusals;
mod silicon;
mod snapshots;

use std::sync::LazyLock;

use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_images::payloads::riscv64::{LOOP, LOOP_BRANCHES, LOOP_START};
use guest_images::{Arch, Progress, Suite};
use guest_tests::lab::{Results, Steps, with_installed_kernel};
use guest_tests::perf::{Count, STAT, Value, counts};
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use tally_lab::passt;

/// The tests of this module and those below it.
pub fn tests() -> Vec<Test> {
    let below =
        [booting::tests, ending::tests, older_host::tests, refusals::tests, silicon::tests, snapshots::tests];
    below.into_iter().flat_map(|tests| tests()).chain(own()).collect()
}

/// The tests of this file.
fn own() -> Vec<Test> {
    [
        tests![
            guest_and_host_count_and_sample_the_same,
            changes_to_the_kernel_are_logged,
            the_base_pmu_counts_but_does_not_sample,
            without_a_pmu_nothing_is_counted,
            shared_folders_and_the_commands_status_work,
            a_guest_has_a_network,
            the_host_counts_guest_and_vmm_apart,
        ],
        second_tier(tests![
            the_newest_kernel_counts_and_samples_the_same,
            two_vcpus_count_at_the_same_time,
            kvms_own_pmu_counts_the_same,
            cycles_of_the_kernel_are_counted_like_its_instructions,
        ]),
    ]
    .concat()
}

/// Sampling period.
const PERIOD: u64 = 19_998;
// The loop has two instructions, so with an even period all samples are at the same one.
const _: () = assert!(PERIOD.is_multiple_of(2));

/// Returns a script that counts the program `$1` with events of all kinds, and samples it.
fn measure() -> String {
    format!(
        "{STAT} -e instructions:u,cycles:u,branches:u,r2:u,r15:u $1 2>&1
        perf record -q -e instructions:u -c {PERIOD} -o /tmp/data $1
        perf script -i /tmp/data -F ip | sort | uniq -c"
    )
}

/// Checks the output of [`measure`].
fn measured(text: &str) {
    let values: Vec<u64> = counts(text).iter().map(Count::exact).collect();
    let (all, branches) = (LOOP_INSTRUCTIONS, LOOP_BRANCHES);
    assert_eq!(values, [all, all, branches, all, branches], "{text}");
    let samples = [&*(all / PERIOD).to_string(), &*format!("{LOOP_START:x}")];
    let last = text.lines().last().map(|line| line.split_whitespace().collect::<Vec<_>>());
    assert_eq!(last.as_deref(), Some(&samples[..]), "{text}");
}

/// Returns a script that counts the program `$1` on two CPUs at the same time, and samples it on both.
fn on_two_cpus() -> String {
    format!(
        "nproc
        for cpu in 1 2; do taskset $cpu {STAT} -e instructions:u $1 2>/tmp/counted$cpu & done
        wait
        cat /tmp/counted*
        for cpu in 1 2; do
            taskset $cpu perf record -q --sample-cpu -e instructions:u -c {PERIOD} -o /tmp/data$cpu $1 &
        done
        wait
        for cpu in 1 2; do perf script -i /tmp/data$cpu -F cpu,ip | sort | uniq -c; done"
    )
}

/// Returns a script that counts time and instructions in all modes while tasks are switched often.
fn time() -> String {
    let switches = "i=0; while [ $i -lt 200 ]; do echo $i | cat; i=$((i+1)); done";
    format!("{STAT} -e instructions,cycles sh -c '{switches}' 2>&1 >/dev/null")
}

/// Returns a script that counts the program `$1` in all modes, because the base PMU cannot select modes, and tries to
/// sample it.
fn at_base() -> String {
    format!(
        "{STAT} -e instructions,cycles $1 2>&1
        perf record -e cycles:u -o /tmp/data $1 2>&1
        echo status $?"
    )
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let run = |options: &str, script: &str| format!("./tally run {options} -- sh {script} /lib/tally/loop");
    let stat = format!("{STAT} -e instructions:u,cycles:u $1");
    let on_each_cpu = format!("for cpu in 1 2; do taskset $cpu {STAT} -e instructions:u $1 2>&1; done");
    let steps = Steps::on_riscv("riscv")
        .in_guest("measure", measure().into_bytes())
        .in_guest("on-two-cpus", on_two_cpus().into_bytes())
        .in_guest("at-base", at_base().into_bytes())
        .in_guest("stat", stat.into_bytes())
        .in_guest("time", time().into_bytes())
        .in_guest("on-each-cpu", on_each_cpu.into_bytes())
        .configure_host(|scenario| scenario.program(LOOP, "loop").program(measure(), "measure"))
        .step("host", "sh ./measure ./loop")
        .step("guest", &run("-v", "measure"))
        .step("base", &run("--pmu riscv-base", "at-base"))
        .step("none", &run("--pmu none --cpus 2", "on-each-cpu"))
        .step("files", FILES)
        .configure_host(|scenario| {
            let tun = passt::driver(Arch::Riscv64, "tun", &mut Progress::stderr("lab"));
            scenario.program(tun.expect("it is found"), "tun.ko")
        })
        .step("network", NETWORK)
        .step("attribution", ATTRIBUTION);
    steps
        .second_tier(|steps| {
            with_installed_kernel(steps, "newest", Suite::Sid)
                .step("newest", &run("-v --kernel newest/boot/vmlinuz", "measure"))
                .step("two", &run("--cpus 2", "on-two-cpus"))
                .step("time", &run("", "time"))
                .step("kvm", &run("--pmu kvm", "stat"))
        })
        .run()
});

const FILES: &str = "
    mkdir share
    echo given >share/in
    ./tally run --share share:rw -- sh -c \"cd $PWD/share; cat in; echo made >out; exit 7\"
    echo $?
    cat share/out";

/// On a tap device.
const NETWORK: &str = "
    insmod tun.ko; tunctl -t tap0 >/dev/null
    ip address add 10.0.0.1/24 dev tap0; ip link set tap0 up
    printf 'start 10.0.0.20\\nend 10.0.0.20\\ninterface tap0\\nlease_file leases\\npidfile pid\\n' >udhcpd.conf
    touch leases; udhcpd $PWD/udhcpd.conf
    head -c 300000 tally >sent; md5sum <sent; httpd -p 10.0.0.1:80
    ./tally run --net tap=tap0 -- sh -c '\
        ip -4 -o address show eth0 | cut -d \" \" -f 7; wget -q -O - http://10.0.0.1/sent | md5sum'";

/// Counts the instructions of a vCPU's thread in guest mode and in host mode while the guest runs its loop. To Linux'
/// driver, guest modes must be selected with a bit of `config1` that `perf` has no name for.
const ATTRIBUTION: &str = "
    for events in instructions/config1=1/uG instructions:uH; do
        rm -f in; mkfifo in
        ./tally run -- sh -c 'read go; /lib/tally/loop; echo done; read go' <in >said & tally=$!
        exec 3>in
        until comm=$(grep -ls '^vcpu0' /proc/$tally/task/*/comm); do sleep 0.1; done
        vcpu=${comm%/comm}
        sleep 3
        perf stat -x'|' -e $events -t ${vcpu##*/} -o counted & perf=$!
        sleep 0.5
        echo >&3
        until grep -q done said; do sleep 0.1; done
        kill -INT $perf
        wait $perf
        grep instructions counted
        echo >&3
        exec 3>&-
        wait $tally
    done";

fn guest_and_host_count_and_sample_the_same() {
    for place in ["host", "guest"] {
        let done = RESULTS.of(place);
        assert_eq!(done.status, 0, "{place}: {}", done.err);
        measured(&done.text());
    }
}

fn changes_to_the_kernel_are_logged() {
    let messages = &RESULTS.of("guest").err;
    assert!(messages.contains("the guest sees RISC-V's PMU, cycle, instret and "), "{messages}");
    assert!(messages.contains("31 counters are read by the code at"), "{messages}");
    assert_eq!(messages.matches("the overflows are read into ").count(), 1, "{messages}");
    // One id is an argument: the kernel probes for the extension with it.
    let changed = messages.matches("the SBI PMU extension's id in ").count();
    assert_eq!(changed, 1 + calls_with_shared_page(messages), "{messages}");
    assert!(messages.contains("riscv-pmu-sbi: SBI PMU extension is available"), "{messages}");
    assert!(!messages.contains("starved"), "{messages}");
}

fn the_newest_kernel_counts_and_samples_the_same() {
    let done = RESULTS.of("newest");
    assert!(done.err.contains("] Linux version 7."), "{}", done.err);
    calls_with_shared_page(&done.err);
    measured(&done.text());
}

/// The number of changed calls that use a shared page. It differs between builds of a kernel, but the driver of Linux
/// 6.12 already has 15 of them.
fn calls_with_shared_page(messages: &str) -> usize {
    let (before, _) = messages.split_once(" of the calls go through the code here").expect(messages);
    let number = before.rsplit(' ').next().unwrap().parse().expect(messages);
    assert!(number >= 15, "{messages}");
    number
}

fn two_vcpus_count_at_the_same_time() {
    let done = RESULTS.of("two");
    let text = done.text();
    assert_eq!(text.lines().next(), Some("2"), "{}", done.err);
    let values: Vec<u64> = counts(&text).iter().map(Count::exact).collect();
    assert_eq!(values, [LOOP_INSTRUCTIONS; 2], "{text}");
    let (number, place) = ((LOOP_INSTRUCTIONS / PERIOD).to_string(), format!("{LOOP_START:x}"));
    let samples: Vec<Vec<&str>> =
        text.lines().rev().take(2).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(samples, [[&*number, "[001]", &*place], [&*number, "[000]", &*place]], "{text}");
}

fn the_base_pmu_counts_but_does_not_sample() {
    let done = RESULTS.of("base");
    let text = done.text();
    let values: Vec<u64> = counts(&text).iter().map(Count::exact).collect();
    let [instructions, cycles] = values[..] else { panic!("{text}{}", done.err) };
    // The counts include all modes, because this PMU cannot select modes.
    for value in [instructions, cycles] {
        assert!((LOOP_INSTRUCTIONS..LOOP_INSTRUCTIONS / 20 * 21).contains(&value), "{text}");
    }
    let last = text.lines().last();
    assert!(text.contains("Error:") && last.is_some_and(|line| line != "status 0"), "{text}");
}

fn kvms_own_pmu_counts_the_same() {
    let done = RESULTS.of("kvm");
    let values: Vec<u64> = counts(&done.err).iter().map(Count::exact).collect();
    assert_eq!(values, [LOOP_INSTRUCTIONS; 2], "{}", done.err);
}

/// The simulated processor needs a cycle for each instruction. Cycles of the kernel need not be exact.
fn cycles_of_the_kernel_are_counted_like_its_instructions() {
    let done = RESULTS.of("time");
    let values: Vec<u64> = counts(&done.text()).iter().map(Count::exact).collect();
    let [instructions, cycles] = values[..] else { panic!("{}{}", done.text(), done.err) };
    assert!(instructions > 10 * LOOP_INSTRUCTIONS, "{instructions}");
    assert!(instructions.abs_diff(cycles) < instructions / 10_000, "{instructions} and {cycles}");
}

fn without_a_pmu_nothing_is_counted() {
    let done = RESULTS.of("none");
    let counted = counts(&done.text());
    assert_eq!(counted.len(), 2, "{}{}", done.text(), done.err);
    assert!(counted.iter().all(|count| count.value == Value::NotSupported), "{}", done.text());
}

fn shared_folders_and_the_commands_status_work() {
    let done = RESULTS.of("files");
    assert_eq!(done.text(), "given\n7\nmade\n", "{}", done.err);
}

fn a_guest_has_a_network() {
    let done = RESULTS.of("network");
    let text = done.text();
    let [sent, address, received] = text.lines().collect::<Vec<_>>()[..] else {
        panic!("{text}{}", done.err)
    };
    assert_eq!((address, received), ("10.0.0.20/24", sent), "{}", done.err);
}

fn the_host_counts_guest_and_vmm_apart() {
    let done = RESULTS.of("attribution");
    let values: Vec<u64> = counts(&done.text()).iter().map(Count::exact).collect();
    let [guest, host] = values[..] else { panic!("{}{}", done.text(), done.err) };
    // The count includes the shell that starts the loop.
    assert!((LOOP_INSTRUCTIONS..LOOP_INSTRUCTIONS / 100 * 101).contains(&guest), "{guest}");
    assert!(host < LOOP_INSTRUCTIONS / 100, "{host}");
}
