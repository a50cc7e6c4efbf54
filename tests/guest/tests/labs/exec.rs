//! Tests of `tally-lab exec`: a script's output, status and files are returned, and an error says where the script
//! failed.

use std::fs::{self, File};
use std::process::{Command, Output};
use std::time::Duration;

use guest_images::{Arch, Progress, Release};
use guest_tests::suite::{Test, second_tier};
use guest_tests::{program, tests};
use tally_lab::{Error, Scenario, cross, default_host};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [
        tests![
            a_scripts_output_status_and_files_are_returned,
            two_runs_are_the_same_to_the_last_instruction_of_the_kernel,
            the_host_has_several_processors_and_kvm,
            a_hanging_script_is_killed_and_its_processes_are_listed,
            a_crashed_hosts_last_console_output_is_shown,
            a_missing_script_is_named,
            invalid_options_are_refused,
            a_killed_lab_leaves_no_qemu_process_behind,
            options_of_another_architecture_are_refused,
        ],
        second_tier(tests![
            a_halted_host_is_diagnosed_from_outside,
            a_riscv_host_runs_scripts,
            a_riscv_host_has_the_default_guest,
            a_program_of_this_project_runs_on_the_riscv_host,
            the_virtual_pmus_own_tests_pass_on_the_riscv_host,
        ]),
    ]
    .concat()
}

fn run(scenario: &Scenario) -> tally_lab::Result<tally_lab::Outcome> {
    scenario.run(&mut Progress::stderr("tally-lab"))
}

fn tally_lab(arguments: &[&str]) -> Output {
    Command::new(program("tally-lab")).args(arguments).output().expect("tally-lab runs")
}

fn a_scripts_output_status_and_files_are_returned() {
    let folder = tempfile::tempdir().unwrap();
    let given = folder.path().join("given");
    let bytes: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    fs::write(&given, &bytes).unwrap();
    let kept = folder.path().join("kept");
    let script = "cat data/given; echo \"$1|$2\" >&2; mkdir $OUT/sub; cp data/given $OUT/sub/copy; exit 42";
    let scenario =
        Scenario::new(script).file(&given, "data/given").arguments(["it's", "a  b"]).keep_output_in(&kept);
    let outcome = run(&scenario).unwrap();
    assert_eq!(outcome.status, 42);
    assert!(outcome.stdout == bytes, "{} bytes of {}", outcome.stdout.len(), bytes.len());
    assert_eq!(outcome.stderr, b"it's|a  b\n");
    assert!(fs::read(kept.join("sub/copy")).unwrap() == bytes);
}

fn two_runs_are_the_same_to_the_last_instruction_of_the_kernel() {
    let script = "perf stat -a -x, -e instructions:k,instructions:u sh -c 'ls -lR /sys/devices; head -c 300000 /dev/zero'
                  cat /proc/uptime /proc/interrupts";
    let scenario = Scenario::new(script).processors(2);
    let (first, second) = (run(&scenario).unwrap(), run(&scenario).unwrap());
    assert_eq!(String::from_utf8_lossy(&first.stderr), String::from_utf8_lossy(&second.stderr));
    assert!(first.stdout == second.stdout, "they printed something else");
}

fn the_host_has_several_processors_and_kvm() {
    let script = "nproc; test -w /dev/kvm && echo kvm; kill -9 $$";
    let outcome = run(&Scenario::new(script).processors(2)).unwrap();
    assert_eq!((outcome.text().as_str(), outcome.status), ("2\nkvm\n", 137));
}

fn a_hanging_script_is_killed_and_its_processes_are_listed() {
    let scenario = Scenario::new("echo begun; sleep 1000 & yes >/dev/null").limit(Duration::from_secs(5));
    let Err(error) = run(&scenario) else { panic!("it ended") };
    let text = error.to_string();
    for part in ["after 5 s", "sleep 1000", "hrtimer_nanosleep", " yes: R"] {
        assert!(text.contains(part), "{text}");
    }
}

fn a_halted_host_is_diagnosed_from_outside() {
    let scenario = Scenario::new("halt -f").limit(Duration::from_secs(5));
    let Err(error) = run(&scenario) else { panic!("it ended") };
    let text = error.to_string();
    assert!(text.contains("does not answer") && text.contains("halt"), "{text}");
}

fn a_crashed_hosts_last_console_output_is_shown() {
    let Err(error) = run(&Scenario::new("echo c >/proc/sysrq-trigger")) else { panic!("it lived") };
    assert!(matches!(error, Error::HostDied { .. }), "{error}");
    assert!(error.to_string().contains("sysrq_trigger"), "{error}");
}

fn a_missing_script_is_named() {
    let output = tally_lab(&["exec", "/no/such/script"]);
    assert_eq!(output.status.code(), Some(125));
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text, "tally-lab: cannot read /no/such/script: No such file or directory (os error 2)\n");
}

fn invalid_options_are_refused() {
    for arguments in [
        &["exec", "--smp", "0", "x"][..],
        &["exec", "--memory", "1M", "x"],
        &["exec", "--host-suite", "woody", "x"],
    ] {
        let output = tally_lab(arguments);
        assert_eq!(output.status.code(), Some(125), "{arguments:?}");
        assert!(!output.stderr.is_empty());
    }
}

fn a_killed_lab_leaves_no_qemu_process_behind() {
    let folder = tempfile::tempdir().unwrap();
    let script = folder.path().join("script");
    fs::write(&script, "sleep 1000").unwrap();
    run(&Scenario::new("true")).unwrap();
    let mut lab =
        Command::new(program("tally-lab")).arg("exec").arg(&script).spawn().expect("tally-lab runs");
    let children = format!("/proc/{0}/task/{0}/children", lab.id());
    let machine = loop {
        let found = fs::read_to_string(&children).unwrap();
        if let Some(child) = found.split_whitespace().next() {
            break format!("/proc/{child}/stat");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    lab.kill().unwrap();
    lab.wait().unwrap();
    let alive =
        || fs::read_to_string(&machine).is_ok_and(|stat| stat.contains("qemu") && !stat.contains(") Z "));
    let gone = (0..250).any(|_| {
        std::thread::sleep(Duration::from_millis(20));
        !alive()
    });
    assert!(gone, "the machine is still there");
}

fn riscv() -> Release {
    default_host(Arch::Riscv64)
}

fn a_riscv_host_runs_scripts() {
    let folder = tempfile::tempdir().unwrap();
    let script = "uname -m; cat given; ls /dev/kvm >&2; echo left >$OUT/left; exit 42";
    let scenario =
        Scenario::new(script).host(riscv()).program(*b"given\n", "given").keep_output_in(folder.path());
    let outcome = run(&scenario).unwrap();
    assert_eq!((outcome.status, &*outcome.text()), (42, "riscv64\ngiven\n"));
    assert_eq!(outcome.stderr, b"/dev/kvm\n");
    assert_eq!(fs::read(folder.path().join("left")).unwrap(), b"left\n");
}

fn options_of_another_architecture_are_refused() {
    for option in ["--perfmon-v2", "--host-suite=bookworm", "--guest-suite=bookworm"] {
        let output = tally_lab(&["exec", "--arch", "riscv64", option, "/dev/null"]);
        let expected = format!("tally-lab: {option} is not available on riscv64 hosts\n");
        assert_eq!(String::from_utf8_lossy(&output.stderr), expected);
        assert_eq!(output.status.code(), Some(125));
    }
    let output = tally_lab(&["exec", "--arch", "m68k", "/dev/null"]);
    assert!(String::from_utf8_lossy(&output.stderr).contains("x86_64 or riscv64"));
    assert_eq!(output.status.code(), Some(125));
}

fn a_riscv_host_has_the_default_guest() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("script");
    let script = "cd $TALLY_GUEST
        sha256sum <kernel; sha256sum <initrd
        head -c 52 kernel | tail -c 4";
    fs::write(&path, script).unwrap();
    let output = tally_lab(&["exec", "--arch", "riscv64", "--with-guest", path.to_str().unwrap()]);
    let guest = tally_lab::guest(Release::of(Arch::Riscv64), &mut Progress::stderr("tally-lab")).unwrap();
    let expected = [guest.kernel, guest.initrd].map(|file| {
        let output = Command::new("sha256sum").stdin(File::open(file).unwrap()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    });
    // Behind the sums is what a RISC-V kernel has at this offset.
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected.concat() + "RISC");
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

fn a_program_of_this_project_runs_on_the_riscv_host() {
    let program = cross::program("guest-agent", &mut Progress::stderr("tally-lab")).unwrap();
    let outcome = run(&Scenario::new("./program").host(riscv()).file(program, "program")).unwrap();
    assert_eq!(outcome.stderr, b"agent: only init starts this, as the guest's first process\n");
    assert_eq!(outcome.status, 1);
}

/// The unit tests of `vpmu` cover code that is the same on all architectures. This test runs them on RISC-V as well.
fn the_virtual_pmus_own_tests_pass_on_the_riscv_host() {
    let tests = cross::unit_tests("vpmu", &mut Progress::stderr("tally-lab")).unwrap();
    let scenario = Scenario::new("PROPTEST_CASES=4 ./tests --test-threads 1")
        .host(riscv())
        .file(tests, "tests")
        .limit(Duration::from_mins(15));
    let outcome = run(&scenario).unwrap();
    let text = outcome.text();
    assert!(outcome.status == 0 && text.contains("; 0 failed;"), "{text}");
}
