//! Tests of invalid kernels and options on a RISC-V host, and of hosts that lack something. Each gives a one-line
//! message.

use std::sync::LazyLock;

use guest_tests::lab::{Results, Steps};
use guest_tests::suite::Test;
use guest_tests::tests;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        files_that_are_no_kernels_for_this_host_are_named,
        options_that_this_host_does_not_support_are_refused,
        too_little_memory_is_refused_before_the_boot,
        doctor_reports_a_working_host,
        without_dev_kvm_the_message_says_how_to_load_kvm,
        a_processor_without_the_hypervisor_extension_is_reported_with_and_without_kvm,
        without_sscofpmf_guests_have_no_pmu,
        missing_permission_for_kvm_is_reported_with_a_fix,
    ]
}

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let on = |host: &str, commands: &str| format!("{HOSTS}\n{host} sh -c '{commands}'");
    let run = |options: &str| format!("./tally run {options} -- true");
    let without_kvm = "mv /dev/kvm kvm; {}; status=$?; mv kvm /dev/kvm; exit $status";
    let without_kvm = |commands: &str| without_kvm.replace("{}", commands);
    Steps::on_riscv("riscv::refusals")
        .step("files", FILES)
        .step("memory-2", &run("--memory 2M"))
        .step("memory-64", &run("--memory 64M"))
        .step("pmu", &run("--pmu amd"))
        .step("counters", &run("--pmu riscv --counters 30"))
        .step("counters-of-base", &run("--pmu riscv-base --counters 3"))
        .step("doctor", "./tally doctor")
        .step("no-kvm", &without_kvm(&run("")))
        .step("no-kvm-doctor", &without_kvm("./tally doctor"))
        .step("no-h", &on(NO_H, &run("")))
        .step("no-h-nor-kvm", &without_kvm(&on(NO_H, &run(""))))
        .step("no-h-nor-kvm-doctor", &without_kvm(&on(NO_H, "./tally doctor")))
        .step("no-modes", &on(NO_SSCOFPMF, &run("--pmu riscv")))
        .step("no-modes-base", &on(NO_SSCOFPMF, &run("--pmu riscv-base")))
        .step("no-modes-auto", &on(NO_SSCOFPMF, "./tally run -- perf stat -x, -e instructions true"))
        .step("forbidden", &as_nobody("run -- true"))
        .step("forbidden-doctor", &as_nobody("doctor"))
        .run()
});

/// Shell function `with SCRIPT COMMAND...`: runs a command with a changed `/proc/cpuinfo`. SCRIPT is a `sed` script
/// that changes the real one.
const HOSTS: &str = "
    with() {
        sed \"$1\" /proc/cpuinfo >cpuinfo
        shift
        mount --bind cpuinfo /proc/cpuinfo
        \"$@\"
        status=$?
        umount /proc/cpuinfo
        return $status
    }";
/// Removes the hypervisor extension, the letter `h`, from the ISA string.
const NO_H: &str = r"with 's/\(rv64[a-z]*\)h/\1/'";
const NO_SSCOFPMF: &str = "with s/_sscofpmf//";

/// Runs `tally` as an ordinary user.
fn as_nobody(arguments: &str) -> String {
    format!(
        "grep -q ^nobody: /etc/passwd || echo nobody:x:65534:65534::/:/bin/sh >>/etc/passwd
        chmod 600 /dev/kvm
        su -s /bin/sh nobody -c './tally {arguments}'"
    )
}

/// Creates files that are no kernels for this host, and tries to boot each.
const FILES: &str = r"
    zeroes() { head -c $1 /dev/zero; }
    elf() { printf '\177ELF\2\1\1'; zeroes 9; printf '\2\0'; printf $1; zeroes 4096; }
    zeroes 4096 >empty
    (zeroes 514; printf HdrS; zeroes 4096) >bzimage
    (zeroes 56; printf 'ARM\144'; zeroes 4096) >image
    elf '\76\0' >vmlinux
    elf '\267\0' >vmlinux-aarch64
    gzip -c image >image.gz
    (zeroes 48; printf 'RISCV\0\0\0RSC\5'; zeroes 8132) >driverless
    for file in empty bzimage image image.gz vmlinux vmlinux-aarch64 driverless tally; do
        ./tally run --kernel $file 2>&1
        echo status $?
    done";

/// Checks that a step was refused with a one-line message that begins with `words`.
fn refused(step: &str, words: &str) {
    let done = RESULTS.of(step);
    assert_eq!((done.status, done.text().as_str(), done.err.lines().count()), (125, "", 1), "{}", done.err);
    assert!(done.err.starts_with(&format!("tally: {words}")), "{step}: {}", done.err);
}

/// Returns the lines of `tally doctor` about these topics, in their order.
fn doctor_lines(step: &str, about: &[&str]) -> Vec<String> {
    let done = RESULTS.of(step);
    assert_eq!(done.err, "", "{step}");
    let is_about =
        |line: &&str| line.get(4..).is_some_and(|line| about.contains(&line.split(' ').next().unwrap_or("")));
    done.text().lines().filter(is_about).map(str::to_owned).collect()
}

fn files_that_are_no_kernels_for_this_host_are_named() {
    let text = RESULTS.of("files").text();
    let expected = [
        "empty: not a kernel: no Linux Image, packed or not",
        "bzimage: built for x86-64, this host is RISC-V",
        "image: built for aarch64, this host is RISC-V",
        "image.gz: built for aarch64, this host is RISC-V",
        "vmlinux: built for x86-64, this host is RISC-V",
        "vmlinux-aarch64: built for aarch64, this host is RISC-V",
        "driverless: there is no SBI PMU driver in this kernel (CONFIG_RISCV_PMU_SBI): --pmu kvm and --pmu none do without",
        "tally: an ELF file, where the kernel's build makes an Image of it, not a kernel",
    ];
    let expected = expected.map(|line| format!("tally: {line}\nstatus 125\n")).concat();
    assert_eq!(text, expected);
}

fn options_that_this_host_does_not_support_are_refused() {
    refused(
        "pmu",
        "invalid value 'amd' for '--pmu <PMU>' [possible values: auto, riscv, riscv-base, kvm, none]",
    );
    refused("counters", "--counters 30: this host has ");
    refused("counters-of-base", "--counters 3: --pmu riscv-base has cycle and instret only");
}

fn too_little_memory_is_refused_before_the_boot() {
    refused("memory-2", "/scenario/guest/kernel: the kernel does not fit: it needs --memory ");
    refused("memory-64", "/scenario/guest/kernel: too little memory for Linux to begin: ");
    let message = &RESULTS.of("memory-64").err;
    assert!(message.ends_with("M or more, the guest has 64M\n"), "{message}");
}

fn doctor_reports_a_working_host() {
    let done = RESULTS.of("doctor");
    let text = done.text();
    assert_eq!((done.status, done.err.as_str()), (0, ""), "{text}");
    let lines = doctor_lines("doctor", &["kvm", "guests", "pmu", "verdict"]);
    let [kvm, guests, pmu, verdict] = &lines[..] else { panic!("{text}") };
    assert!(kvm.starts_with("ok  kvm         /dev/kvm can be used (kvm, "), "{kvm}");
    assert_eq!(guests, "ok  guests      Linux runs here as it is");
    assert!(pmu.starts_with("ok  pmu         guests see RISC-V's PMU, cycle, instret and "), "{pmu}");
    assert_eq!(verdict, "ok  verdict     Linux guests with a PMU run here: `tally run -- perf stat true`");
    assert!(
        text.contains("ok  capability  KVM_CAP_IRQCHIP is there, for interrupt controllers (AIA)"),
        "{text}"
    );
    // On RISC-V the watchdog holds no counter, and the lab does not run on such machines.
    assert_eq!(doctor_lines("doctor", &["watchdog", "rdpmc", "lab"]), Vec::<String>::new());
}

fn without_dev_kvm_the_message_says_how_to_load_kvm() {
    refused("no-kvm", "no /dev/kvm: this host has no KVM, or its module is not loaded (`modprobe kvm`)\n");
    let lines = doctor_lines("no-kvm-doctor", &["kvm", "guests", "verdict"]);
    let [kvm, guests, verdict] = &lines[..] else { panic!("{lines:#?}") };
    assert!(
        kvm.starts_with("BAD kvm         no /dev/kvm, though this kernel has KVM: make it, `sudo mknod"),
        "{kvm}"
    );
    assert_eq!(
        guests,
        "BAD guests      /dev/kvm cannot be used here (No such file or directory (os error 2))"
    );
    assert_eq!(verdict, "BAD verdict     no guests run here");
}

fn a_processor_without_the_hypervisor_extension_is_reported_with_and_without_kvm() {
    const WHY: &str = "this machine's processor has no hypervisor extension (H) and cannot run guests";
    for step in ["no-h", "no-h-nor-kvm"] {
        refused(step, &format!("{WHY}\n"));
    }
    let lines = doctor_lines("no-h-nor-kvm-doctor", &["processor", "kvm", "guests", "verdict"]);
    let [processor, rest @ ..] = &lines[..] else { panic!("{lines:#?}") };
    assert!(processor.starts_with("BAD processor   rv64imafdc_"), "{processor}");
    assert!(processor.ends_with(", without the hypervisor extension (H): no guest runs here"), "{processor}");
    let expected = [
        format!("BAD kvm         {WHY}"),
        format!("BAD guests      {WHY}"),
        "BAD verdict     no guests run here".to_owned(),
    ];
    assert_eq!(rest, expected);
}

fn without_sscofpmf_guests_have_no_pmu() {
    const WHY: &str = "this host's PMU cannot tell guests from the host, as its processor has no Sscofpmf";
    for step in ["no-modes", "no-modes-base"] {
        refused(step, &format!("{WHY}; run without a PMU: --pmu none\n"));
    }
    let done = RESULTS.of("no-modes-auto");
    let lines: Vec<&str> = done.err.lines().collect();
    let [notice, counted] = lines[..] else { panic!("{}", done.err) };
    assert_eq!(notice, format!("tally: {WHY}; the guest sees no PMU"));
    assert!(done.status == 0 && counted.starts_with("<not supported>,,instructions,"), "{counted}");
}

fn missing_permission_for_kvm_is_reported_with_a_fix() {
    refused(
        "forbidden",
        "/dev/kvm: permission denied: join the group that owns it (`sudo usermod -aG kvm $USER`",
    );
    let lines = doctor_lines("forbidden-doctor", &["kvm", "verdict"]);
    let [kvm, verdict] = &lines[..] else { panic!("{lines:#?}") };
    assert!(
        kvm.starts_with(
            "BAD kvm         /dev/kvm: permission denied, for it is root's alone (mode 600): `sudo chgrp kvm"
        ),
        "{kvm}"
    );
    assert_eq!(verdict, "BAD verdict     no guests run here");
}
