//! Tests of Linux guests: the distribution's unmodified kernels on the lab's simulated host, under its real KVM.
//!
//! Booting the host takes most of the time, so the steps of a group share a boot, and each test checks one or two
//! steps.

use std::sync::LazyLock;

use guest_images::cache::Cache;
use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_images::{Progress, Suite};
use guest_tests::lab::{Results, Steps, with_installed_kernel};
use guest_tests::suite::{Test, second_tier};
use guest_tests::temporary;
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [
        tests![
            a_commands_output_errors_and_status_are_passed_on_separately,
            a_commands_output_is_unchanged_byte_for_byte,
            arguments_reach_the_command_unchanged,
            a_missing_command_has_the_shells_status,
            perf_in_a_guest_without_a_pmu_reports_no_hardware_events,
            a_guest_that_ends_before_its_command_is_an_error,
            sigterm_ends_a_guest_whose_command_runs,
            a_command_ends_when_its_reader_closes_the_pipe,
            memory_may_be_128_mib,
            memory_may_extend_beyond_the_hole_below_4_gib,
            every_cpu_runs_programs,
            a_kernel_may_be_a_vmlinux_file,
            a_shell_on_the_console_takes_input_and_ctrl_c,
            oversized_and_truncated_inputs_are_refused_in_one_line,
        ],
        second_tier(tests![
            a_guest_counts_with_kvms_own_vpmu,
            perf_relates_its_time_to_the_tsc_without_kvms_clock,
            kernels_of_newer_releases_boot,
            a_kernel_without_its_modules_is_refused,
            a_kernel_is_found_in_the_tree_in_which_it_was_built_with_its_modules,
        ]),
    ]
    .concat()
}

/// Results of commands in the default guest.
static COMMANDS: LazyLock<Results> = LazyLock::new(|| {
    let run = "./tally run";
    let boot = format!("{run} --boot");
    Steps::new("linux::commands")
        .from_template()
        .step("streams", &format!("{run} -- sh -c 'echo out; echo err >&2; exit 3'"))
        .step("binary", &format!("{run} -- head -c 65536 /bin/busybox"))
        .step("same", "head -c 65536 /bin/busybox")
        .step("arguments", &format!("{run} -- printf '%s|' 'a b' '' '$HOME' '\"' 'x,y%' \"it's\""))
        .step("missing", &format!("{run} -- no-such-program"))
        .step("no-pmu", &format!("{boot} --pmu none -- perf stat -x, -e cycles,task-clock true"))
        .step("switched-off", &format!("{run} -- poweroff -f"))
        .step("reader-leaves", &format!("({run} -- yes; echo status $? >&2) | head -n 1"))
        .step("panic", &format!("{run} -- sh -c 'echo c >/proc/sysrq-trigger'"))
        .step(
            "terminated",
            &format!(
                "{run} -- sleep 1000 & sleep 3; read begun rest </proc/uptime; kill $!; wait $!; status=$?; \
                     read ended rest </proc/uptime; awk \"BEGIN {{ print ($ended - $begun < 1) }}\"; exit $status"
            ),
        )
        .second_tier(|steps| {
            steps
                .step("tsc", "./tally run --append no-kvmclock -- perf test -v tsc")
                .step("kvms-pmu", &format!("{boot} --pmu kvm -- perf stat -x, -e instructions:u /lib/tally/loop"))
        })
        .run()
});

/// Results of guests with different memory sizes, numbers of CPUs, kernel formats and consoles.
static MACHINES: LazyLock<Results> = LazyLock::new(|| {
    let vmlinux = temporary(&unpacked_kernel());
    let facts = "sh -c 'nproc; sed -n \"s/MemTotal: *\\([0-9]*\\) kB/\\1/p\" /proc/meminfo; dmesg -l err,warn | grep -ciE \"bug|oops|trace\"'";
    let all_cpus = "sh -c 'for cpu in 0 1 2 3; do taskset $((1 << cpu)) true || exit; done; nproc; \
                    cd /sys/devices/system/cpu/cpu3/topology; cat core_id physical_package_id'";
    Steps::new("linux::shapes")
        .configure_host(|scenario| scenario.memory_mib(7 << 10))
        .file(vmlinux.path(), "vmlinux")
        .step("small", &format!("./tally run --memory 128M -- {facts}"))
        .step("large", &format!("./tally run --cpus 4 --memory 5G -- {facts}"))
        .step("every-cpu", &format!("./tally run --cpus 4 -- {all_cpus}"))
        .step("vmlinux", "./tally run --kernel vmlinux -- uname -s")
        .step(
            "shell",
            "./typist 'expect:# ' 'type:echo st\"\"arted; cat\\r' \
             'expect:started' 'type:echoed\\r' 'expect:echoed\\r\\nechoed' 'type:\\x03' 'expect:# ' \
             'type:echo $((6 * 7)) $?\\r' 'expect:42 130' 'type:exit\\r' -- ./tally run",
        )
        .step(
            "shell-of-four",
            "./typist 'expect:# ' 'type:nproc\\r' 'expect:4' 'type:reboot -f\\r' -- ./tally run --cpus 4",
        )
        .step("too-long", "./tally run --append \"$(head -c 3000 /dev/zero | tr '\\0' x)\"")
        .step("initrd-too-large", "head -c 200000000 /dev/zero >big; ./tally run --memory 128M --initrd big")
        .step("truncated", "head -c 3000000 guest/kernel >half; ./tally run --kernel half")
        .run()
});

/// Results of guests with the kernels of newer releases.
static KERNELS: LazyLock<Results> = LazyLock::new(|| {
    let steps = with_installed_kernel(Steps::new("linux::kernels"), "trixie", Suite::Trixie);
    with_installed_kernel(steps, "sid", Suite::Sid)
        .step("trixie", "./tally run --kernel trixie/boot/vmlinuz -- uname -r")
        .step("sid", "./tally run --kernel sid/boot/vmlinuz -- uname -r")
        .step("bare", "cp trixie/boot/vmlinuz alone; ./tally run --kernel alone -- uname -r")
        .step(
            "tree",
            "mkdir -p tree/arch/x86/boot && cp sid/boot/vmlinuz tree/arch/x86/boot/bzImage && cp -r sid/lib tree/drivers && \
             rm -r sid/lib && cd tree && find drivers -name '*.ko' | sed 's/ko$/o/' >modules.order && \
             ../tally run --kernel . --share . -- sh -c 'uname -r; ls arch'",
        )
        .step("no-tree", "mkdir empty; ./tally run --kernel empty -- true")
        .run()
});

/// Returns the default guest's kernel as a vmlinux file. It is the payload of the bzImage (x86 boot protocol, fields
/// `payload_offset` and `payload_length`), decompressed from blocks of LZ4's legacy format.
fn unpacked_kernel() -> Vec<u8> {
    const BLOCK: usize = 8 << 20;
    let cache = Cache::open().expect("there is a cache");
    let kernel =
        guest_images::kernel(&cache, Suite::default(), &mut Progress::stderr("lab")).expect("a kernel");
    let image = std::fs::read(kernel.image).expect("the kernel can be read");
    let field = |at: usize| u32::from_le_bytes(image[at..at + 4].try_into().expect("four bytes")) as usize;
    let start = (usize::from(image[0x1f1]) + 1) * 512 + field(0x248);
    let mut packed = &image[start + 4..start + field(0x24c) - 4];
    let mut unpacked = Vec::new();
    while let Some((length, rest)) = packed.split_at_checked(4) {
        let length = u32::from_le_bytes(length.try_into().expect("four bytes")) as usize;
        let (block, rest) = rest.split_at(length);
        unpacked.extend(lz4_flex::block::decompress(block, BLOCK).expect("a block of LZ4"));
        packed = rest;
    }
    assert!(unpacked.starts_with(b"\x7fELF"));
    unpacked
}

fn a_commands_output_errors_and_status_are_passed_on_separately() {
    let done = COMMANDS.of("streams");
    assert_eq!((done.text().as_str(), done.err.as_str(), done.status), ("out\n", "err\n", 3));
}

fn a_commands_output_is_unchanged_byte_for_byte() {
    let (sent, same) = (COMMANDS.of("binary"), COMMANDS.of("same"));
    assert_eq!(sent.out.len(), 65536);
    assert!(sent.out == same.out);
}

fn arguments_reach_the_command_unchanged() {
    assert_eq!(COMMANDS.of("arguments").text(), "a b||$HOME|\"|x,y%|it's|");
}

fn a_missing_command_has_the_shells_status() {
    let done = COMMANDS.of("missing");
    assert_eq!(done.status, 127);
    assert!(done.err.contains("no-such-program"), "{}", done.err);
}

fn perf_in_a_guest_without_a_pmu_reports_no_hardware_events() {
    let done = COMMANDS.of("no-pmu");
    assert_eq!(done.status, 0, "{}", done.err);
    assert!(done.err.contains("<not supported>,,cycles"), "{}", done.err);
    assert!(done.err.contains(",msec,task-clock"), "software events count all the same: {}", done.err);
}

fn perf_relates_its_time_to_the_tsc_without_kvms_clock() {
    let done = COMMANDS.of("tsc");
    let text = done.text() + &done.err;
    for subtest in [1, 2] {
        assert!(text.contains(&format!("Convert perf time to TSC subtest {subtest}: Ok")), "{text}");
    }
}

fn a_guest_counts_with_kvms_own_vpmu() {
    let done = COMMANDS.of("kvms-pmu");
    assert!(done.err.starts_with(&format!("{LOOP_INSTRUCTIONS},,instructions:u,")), "{}", done.err);
}

fn a_guest_that_ends_before_its_command_is_an_error() {
    let done = COMMANDS.of("switched-off");
    assert_eq!(done.status, 125);
    assert!(
        done.err.starts_with("tally: the guest switched itself off before its command ended\n"),
        "{}",
        done.err
    );
    let done = COMMANDS.of("panic");
    assert_eq!(done.status, 125);
    assert!(done.err.starts_with("tally: the guest reset before its command ended\n"), "{}", done.err);
    assert!(done.err.contains("Kernel panic"), "its last words are shown: {}", done.err);
}

fn sigterm_ends_a_guest_whose_command_runs() {
    let done = COMMANDS.of("terminated");
    assert_eq!(done.status, 128 + 15);
    assert_eq!(done.text(), "1\n", "it was gone within a second");
}

fn a_command_ends_when_its_reader_closes_the_pipe() {
    let done = COMMANDS.of("reader-leaves");
    assert_eq!((done.text().as_str(), done.err.as_str()), ("y\n", "status 141\n"));
}

/// Returns the number of CPUs, the memory in KiB, and the number of the kernel's error messages, as a guest printed
/// them.
fn facts(name: &str) -> Vec<u64> {
    let done = MACHINES.of(name);
    let facts: Vec<u64> = done.text().lines().map(|line| line.parse().expect("numbers")).collect();
    assert_eq!(facts.len(), 3, "{}{}", done.text(), done.err);
    facts
}

fn memory_may_be_128_mib() {
    let facts = facts("small");
    assert_eq!((facts[0], facts[2]), (1, 0));
    assert!((80 << 10..128 << 10).contains(&facts[1]), "{} KiB", facts[1]);
}

fn memory_may_extend_beyond_the_hole_below_4_gib() {
    let facts = facts("large");
    assert_eq!((facts[0], facts[2]), (4, 0));
    assert!((4_800 << 10..5_120 << 10).contains(&facts[1]), "{} KiB", facts[1]);
}

fn every_cpu_runs_programs() {
    assert_eq!(MACHINES.of("every-cpu").text(), "4\n3\n0\n", "{}", MACHINES.of("every-cpu").err);
}

fn a_kernel_may_be_a_vmlinux_file() {
    assert_eq!(MACHINES.of("vmlinux").text(), "Linux\n", "{}", MACHINES.of("vmlinux").err);
}

fn a_shell_on_the_console_takes_input_and_ctrl_c() {
    let done = MACHINES.of("shell");
    assert_eq!(done.status, 0, "{}{}", done.text(), done.err);
    let done = MACHINES.of("shell-of-four");
    assert_eq!(done.status, 0, "{}{}", done.text(), done.err);
}

fn oversized_and_truncated_inputs_are_refused_in_one_line() {
    for (step, words) in [
        ("too-long", ["command line of 3", "at most 2047"]),
        ("initrd-too-large", ["big: the initrd does not fit", "128M"]),
        ("truncated", ["half: truncated", "3000000"]),
    ] {
        let done = MACHINES.of(step);
        assert_eq!((done.status, done.err.lines().count()), (125, 1), "{step}: {}", done.err);
        for word in words {
            assert!(done.err.contains(word), "{step}: {}", done.err);
        }
    }
}

fn kernels_of_newer_releases_boot() {
    assert!(KERNELS.of("trixie").text().starts_with("6.12."), "{}", KERNELS.of("trixie").err);
    let newest = KERNELS.of("sid");
    let major: u32 = newest.text().split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0);
    assert!(major >= 7, "{}{}", newest.text(), newest.err);
}

fn a_kernel_is_found_in_the_tree_in_which_it_was_built_with_its_modules() {
    let done = KERNELS.of("tree");
    let newest = KERNELS.of("sid").text();
    assert_eq!((done.status, done.text()), (0, format!("{newest}x86\n")), "{}", done.err);
    let empty = KERNELS.of("no-tree");
    assert_eq!((empty.status, empty.err.lines().count()), (125, 1), "{}", empty.err);
    assert!(empty.err.contains("--kernel empty: no arch/x86/boot/bzImage in this folder"), "{}", empty.err);
}

fn a_kernel_without_its_modules_is_refused() {
    let done = KERNELS.of("bare");
    assert_eq!(done.status, 125, "{}{}", done.text(), done.err);
    assert!(done.err.contains("this kernel has no virtio console"), "{}", done.err);
}
