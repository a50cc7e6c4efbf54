//! Tests with guests that have no operating system, on this machine's own KVM. They are fast, and also run on a KVM
//! without hardware virtualisation, which cannot run Linux guests.

use std::io::Write;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use guest_tests::terminal::{Mode, Session};
use guest_tests::{bare_metal, has_kvm, stderr, stdout, temporary};

const FAILURE: Option<i32> = Some(125);
const TIMEOUT: Duration = Duration::from_secs(20);

/// Runs a guest and returns its standard output, exit status and standard error.
fn run(words: &str, options: &[&str]) -> (String, Option<i32>, String) {
    let output = bare_metal(words).args(options).output().expect("tally runs");
    (stdout(&output), output.status.code(), stderr(&output))
}

#[test]
fn a_number_written_to_the_debug_port_becomes_the_status() {
    if !has_kvm() {
        return;
    }
    assert_eq!(run("hello", &[]), ("Hello from the guest\n".into(), Some(1), String::new()));
    assert_eq!(run("exit=5", &[]).1, Some(11));
    assert_eq!(run("exit=255", &[]).1, Some(255));
    assert_eq!(run("out=0xf4,3,4", &[]).1, Some(7), "a wide write reaches the port too");
}

#[test]
fn a_multiboot_kernel_finds_its_command_line_modules_and_memory() {
    if !has_kvm() {
        return;
    }
    let module = temporary(&[1, 2, 3, 4]);
    let path = module.path().display().to_string();
    let (out, status, err) =
        run("machine", &["--initrd", &format!("{path} one,{path} two"), "--memory", "5G"]);
    assert_eq!(status, Some(1), "{err}");
    assert!(out.contains("magic 2badb002\n"), "{out}");
    assert!(out.contains(" machine\n"), "{out}");
    for module in ["one", "two"] {
        assert!(out.contains(&format!("{path} {module}: 4 bytes, sum 10\n")), "{out}");
    }
    assert!(out.contains("memory 0000000000100000 00000000bff00000 1\n"), "RAM ends below the hole: {out}");
    assert!(out.contains("memory 0000000100000000 0000000080000000 1\n"), "and goes on above 4 GiB: {out}");
}

#[test]
fn fw_cfg_reports_the_number_of_cpus() {
    if !has_kvm() {
        return;
    }
    let (out, ..) = run("out=0x510,5,2 in=0x511,1 in=0x511,1", &["--cpus", "4"]);
    assert_eq!(out, "in 0511 04\nin 0511 00\n");
}

#[test]
fn unassigned_ports_and_addresses_read_as_all_ones() {
    if !has_kvm() {
        return;
    }
    assert_eq!(
        run("in=0x999,1 in=0x999,2 in=0x999,4 out=0x999,1,4", &[]).0,
        "in 0999 ff\nin 0999 ffff\nin 0999 ffffffff\n"
    );
    assert_eq!(run("poke=0xd0000000,1 peek=0xd0000000", &[]).0, "peek d0000000 ffffffff\n");
}

#[test]
fn every_processor_starts_and_timer_interrupts_arrive() {
    if !has_kvm() {
        return;
    }
    assert_eq!(run("smp=4", &["--cpus", "4"]).0, "processors 4\n");
    assert_eq!(run("timer=100", &[]).0, "timer 100\n");
}

#[test]
fn without_a_pmu_its_registers_fault_and_cpuid_reports_none() {
    if !has_kvm() {
        return;
    }
    let words = "rdmsr=0xc0010000 rdmsr=0xc0010007 wrmsr=0xc0010200,0:0x430076 rdmsr=0xc0000300 rdmsr=0xc1 \
                 wrmsr=0x38f,0:1 rdpmc=0 cpuid=0xa,0 cpuid=0x80000022,0";
    let (out, status, _) = run(words, &[]);
    assert_eq!(status, Some(1));
    assert_eq!(
        out,
        "rdmsr c0010000 fault\nrdmsr c0010007 fault\nwrmsr c0010200 fault\nrdmsr c0000300 fault\nrdmsr 000000c1 fault\n\
         wrmsr 0000038f fault\nrdpmc 00000000 fault\n\
         cpuid 0000000a 00000000 00000000 00000000 00000000\ncpuid 80000022 00000000 00000000 00000000 00000000\n"
    );
}

#[test]
fn reset_and_power_off_end_with_status_0() {
    if !has_kvm() {
        return;
    }
    assert_eq!(run("reset", &[]), (String::new(), Some(0), String::new()));
    assert_eq!(run("out=0x602,1,1", &[]).1, Some(0), "by ACPI's register");
    assert_eq!(run("out=0x600,0x34,1", &[]).1, Some(0), "ACPI's power-off");
}

#[test]
fn a_crashed_guest_is_reported_with_its_vcpu_rip_and_reason() {
    if !has_kvm() {
        return;
    }
    let (_, status, err) = run("triple", &[]);
    assert_eq!(status, FAILURE);
    assert!(err.starts_with("tally: vCPU 0 at RIP 0x") && err.ends_with(": triple fault\n"), "{err}");
    let (_, status, err) = run("jump=0xd0000000", &[]);
    assert_eq!(status, FAILURE);
    assert!(err.starts_with("tally: vCPU 0 at RIP 0xd0000000: KVM internal error 1: "), "{err}");
}

#[test]
fn the_command_status_port_is_ignored_without_a_command() {
    if !has_kvm() {
        return;
    }
    assert_eq!(run("out=0x608,7,1 hello", &[]).1, Some(1));
}

#[test]
fn sigterm_ends_a_guest_in_an_endless_loop() {
    if !has_kvm() {
        return;
    }
    let mut child = bare_metal("spin").spawn().expect("tally runs");
    std::thread::sleep(Duration::from_millis(300));
    terminate(&mut child);
}

#[test]
fn a_guest_continues_when_its_output_file_reaches_the_size_limit() {
    if !has_kvm() {
        return;
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    let guest = bare_metal(&"machine ".repeat(50));
    // `ulimit -f` counts units of 512 bytes.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 2; exec \"$@\" >\"$0\""]).arg(file.path());
    let status = limited.arg(guest.get_program()).args(guest.get_args()).stdin(Stdio::null()).status();
    assert_eq!(status.expect("a shell runs").code(), Some(1), "its own status");
    assert_eq!(file.as_file().metadata().unwrap().len(), 1024);
}

#[test]
fn sigterm_ends_a_guest_whose_output_nobody_reads() {
    if !has_kvm() {
        return;
    }
    // The guest prints more than a pipe holds.
    let mut command = bare_metal(&"machine ".repeat(500));
    let mut child = command.stdout(Stdio::piped()).spawn().expect("tally runs");
    std::thread::sleep(Duration::from_secs(1));
    assert!(child.try_wait().unwrap().is_none(), "it prints less than a pipe holds");
    terminate(&mut child);
}

#[test]
fn sigterm_ends_a_guest_with_input_whose_output_nobody_reads() {
    if !has_kvm() {
        return;
    }
    let mut command = bare_metal(&"machine ".repeat(500));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("tally runs");
    std::thread::sleep(Duration::from_secs(1));
    child.stdin.as_mut().expect("a pipe").write_all(b"a").expect("a pipe takes a byte");
    std::thread::sleep(Duration::from_millis(200));
    terminate(&mut child);
}

#[test]
fn counter_signals_from_other_processes_do_no_harm() {
    if !has_kvm() {
        return;
    }
    let mut session = start_on_terminal("hello halt");
    session.expect("Hello from the guest", TIMEOUT).unwrap();
    for signal in [libc::SIGIO, libc::SIGRTMIN()] {
        let sent = Command::new("kill").arg(format!("-{signal}")).arg(session.id().to_string()).status();
        assert!(sent.expect("kill runs").success());
    }
    std::thread::sleep(Duration::from_millis(200));
    session.type_in(b"\x01x").unwrap();
    assert_eq!(session.wait(TIMEOUT).unwrap().code(), Some(0));
}

#[test]
fn ctrl_a_x_works_however_much_was_typed_to_a_guest_that_does_not_read() {
    if !has_kvm() {
        return;
    }
    let mut session = start_on_terminal("hello halt");
    session.expect("Hello from the guest", TIMEOUT).unwrap();
    session.type_in(&[b'k'; 3000]).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    session.type_in(&[b'k'; 2000]).unwrap();
    session.type_in(b"\x01x").unwrap();
    assert_eq!(session.wait(TIMEOUT).unwrap().code(), Some(0));
}

#[test]
fn cpus_are_cores_of_one_package() {
    if !has_kvm() {
        return;
    }
    let (out, ..) = run("cpuid=0xb,0 cpuid=0xb,1", &["--cpus", "4"]);
    assert_eq!(
        out,
        "cpuid 0000000b 00000000 00000001 00000100 00000000\ncpuid 0000000b 00000002 00000004 00000201 00000000\n"
    );
}

/// Sends SIGTERM, and checks that the process ends in time with status 0.
fn terminate(child: &mut Child) {
    let killed = Command::new("kill").arg(child.id().to_string()).status().expect("kill runs");
    assert!(killed.success());
    let deadline = Instant::now() + TIMEOUT;
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            assert_eq!(status.code(), Some(0));
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().expect("a child can be killed");
    panic!("SIGTERM did not end it");
}

#[test]
fn typed_keys_reach_the_guest_including_ctrl_c() {
    if !has_kvm() {
        return;
    }
    let mut session = start_on_terminal("hello echo-irq");
    session.expect("Hello from the guest", TIMEOUT).unwrap();
    assert_eq!(session.mode(), Mode::Raw);
    session.type_in(b"typed \x03 and \x01\x01 too").unwrap();
    session.expect("typed \x03 and \x01 too", TIMEOUT).unwrap();
    session.type_in(b"\x01x").unwrap();
    assert_eq!(session.wait(TIMEOUT).unwrap().code(), Some(0));
    assert_eq!(session.mode(), Mode::Cooked);
}

#[test]
fn a_page_of_pasted_text_arrives_whole() {
    if !has_kvm() {
        return;
    }
    let mut session = start_on_terminal("hello echo-irq");
    session.expect("Hello from the guest", TIMEOUT).unwrap();
    let page: String = (0..100).map(|line| format!("line {line} of the page\r")).collect::<Vec<_>>().concat();
    session.type_in(page.as_bytes()).unwrap();
    session.expect(&page, TIMEOUT).unwrap();
    session.type_in(b"\x01x").unwrap();
    session.wait(TIMEOUT).unwrap();
}

#[test]
fn the_terminal_mode_is_restored_however_the_vm_ends() {
    if !has_kvm() {
        return;
    }
    for words in ["hello echo exit=3", "hello echo triple", "hello echo reset"] {
        let mut session = start_on_terminal(words);
        session.expect("Hello from the guest", TIMEOUT).unwrap();
        assert_eq!(session.mode(), Mode::Raw);
        session.type_in(b"q").unwrap();
        session.wait(TIMEOUT).unwrap_or_else(|error| panic!("{words}: {error}"));
        assert_eq!(session.mode(), Mode::Cooked, "{words}");
    }
    for signal in ["TERM", "HUP", "INT", "QUIT", "ALRM", "USR1", "SEGV", "ABRT"] {
        let mut session = start_on_terminal("hello spin");
        session.expect("Hello from the guest", TIMEOUT).unwrap();
        let killed = Command::new("kill").args(["-s", signal, &session.id().to_string()]).status();
        assert!(killed.expect("kill runs").success());
        session.wait(TIMEOUT).unwrap_or_else(|error| panic!("SIG{signal}: {error}"));
        assert_eq!(session.mode(), Mode::Cooked, "SIG{signal}");
    }
}

/// Starts a guest on a pseudo-terminal.
fn start_on_terminal(words: &str) -> Session {
    let mut command = Command::new(guest_tests::program("tally"));
    command.args(["run", "--kernel", guest_tests::payload(), "--append", words]);
    Session::start(command).expect("tally runs on a terminal")
}
