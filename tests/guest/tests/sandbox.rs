//! The sandbox of `tally run`, with bare-metal guests on this machine's own KVM. A guest takes milliseconds.

use std::collections::BTreeSet;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use guest_images::child::inherit;
use guest_tests::terminal::{Mode, Session};
use guest_tests::{bare_metal, has_kvm, program, stderr, stdout};
use tempfile::TempDir;

const TIMEOUT: Duration = Duration::from_secs(20);
/// The threads of a VM with a disk, a share, a network, an event log and metrics. The main thread has the program's
/// name.
const THREADS: [&str; 9] =
    ["control", "disk0", "log", "metrics", "net", "share0", "signals", "tally", "vcpu0"];
/// Bits of capabilities, by `linux/capability.h`: `CHOWN` to `FSETID`, which are five; `SYS_ADMIN` and `PERFMON`.
const FILES: u64 = 0b1_1111;
const PERF: u64 = 1 << 21 | 1 << 38;
/// Name of the process that opens perf events.
const BROKER: &str = "events";

/// A guest in an endless loop, with all devices.
struct Vm {
    child: Child,
    folder: TempDir,
}

/// Returns a PATH with a program in place of passt that says which files it has, and ends: the guest has no driver that
/// would notice.
fn without_network(folder: &Path) -> OsString {
    let passt = folder.join("passt");
    fs::write(&passt, "#!/bin/sh\nfor file in /proc/$$/fd/*; do readlink $file; done >${0%/*}/files; true\n")
        .unwrap();
    fs::set_permissions(&passt, fs::Permissions::from_mode(0o755)).unwrap();
    let others = env::var_os("PATH").unwrap_or_default();
    env::join_paths([folder.to_owned()].into_iter().chain(env::split_paths(&others))).unwrap()
}

impl Vm {
    fn start(sandbox: &str) -> Self {
        Self::start_as(sandbox, |_| {})
    }

    fn start_as(sandbox: &str, change: impl FnOnce(&mut Command)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        fs::write(path("disk"), [0; 512]).unwrap();
        fs::create_dir(path("share")).unwrap();
        let (disk, share, metrics) = (path("disk"), path("share"), format!("unix:{}", path("metrics")));
        let mut command = bare_metal("hello spin");
        command.args(["--disk", &disk, "--share", &share, "--pmu-log", &path("log"), "--metrics", &metrics]);
        command.args(["--sandbox", sandbox, "--net", "user"]).env("PATH", without_network(folder.path()));
        change(&mut command);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("tally runs");
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "Hello from the guest\n");
        Self { child, folder }
    }

    /// Returns a line of each thread's status, with the thread's name. Threads that KVM has made are left out.
    fn status(&self, what: &str) -> Vec<(String, String)> {
        let threads = fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        threads
            .map(|thread| {
                let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
                (value(&status, "Name"), value(&status, what))
            })
            .filter(|(name, _)| !name.starts_with("kvm-"))
            .collect()
    }

    /// Returns the process that opens perf events for this VM: its id and its status.
    fn broker(&self) -> (u32, String) {
        let processes = fs::read_dir("/proc").unwrap().filter_map(|entry| {
            let id = entry.ok()?.file_name().to_str()?.parse().ok()?;
            Some((id, fs::read_to_string(format!("/proc/{id}/status")).ok()?))
        });
        let own = self.child.id().to_string();
        let is_ours = |status: &str| value(status, "PPid") == own && value(status, "Name") == BROKER;
        let mut found = processes.filter(|(_, status)| is_ours(status));
        found.next().expect("there is such a process")
    }

    /// Waits until this line is the same in the status of all threads.
    fn wait_for(&self, what: &str, expected: &str) {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let status = self.status(what);
            let names: BTreeSet<&str> = status.iter().map(|(name, _)| name.as_str()).collect();
            if names.into_iter().eq(THREADS) && status.iter().all(|(_, value)| value == expected) {
                return;
            }
            assert!(Instant::now() < deadline, "{what} is not {expected}: {status:?}");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Returns the value of a line of a thread's status.
fn value(status: &str, key: &str) -> String {
    let mut values = status.lines().filter_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    values.next().unwrap().trim().to_owned()
}

impl Drop for Vm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn is_root() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        eprintln!("skipped: needs root");
    }
    is_root
}

#[test]
fn every_thread_is_confined_and_keeps_only_the_capabilities_that_it_needs() {
    if !has_kvm() || !is_root() {
        return;
    }
    let vm = Vm::start("on");
    vm.wait_for("Seccomp", "2");
    vm.wait_for("NoNewPrivs", "1");
    let bits = |set: &str| u64::from_str_radix(set, 16).unwrap();
    for (thread, kept) in vm.status("CapPrm") {
        let needed = match thread.as_str() {
            "tally" | "share0" | "log" => FILES,
            _ => 0,
        };
        assert_eq!(bits(&kept), needed, "{thread}");
    }
    let (_, status) = vm.broker();
    assert_eq!(bits(&value(&status, "CapPrm")), PERF);
    assert_eq!(["Seccomp", "NoNewPrivs", "Threads"].map(|key| value(&status, key)), ["2", "1", "1"]);
}

#[test]
fn the_guest_does_not_run_before_the_main_thread_and_the_vcpus_are_confined() {
    if !has_kvm() {
        return;
    }
    for _ in 0..10 {
        let vm = Vm::start("on");
        let status = vm.status("Seccomp");
        let confined = |thread: &str| status.contains(&(thread.to_owned(), "2".to_owned()));
        assert!(confined("tally") && confined("vcpu0"), "{status:?}");
    }
}

#[test]
fn what_tally_inherits_is_closed_and_passt_has_nothing_of_it() {
    if !has_kvm() {
        return;
    }
    let inherited = tempfile::NamedTempFile::new().unwrap();
    let path = inherited.path().display().to_string();
    let vm = Vm::start_as("on", |command| inherit(command, vec![inherited.as_file().as_raw_fd()]));
    let files = fs::read_dir(format!("/proc/{}/fd", vm.child.id())).unwrap();
    let mut files = files.map(|file| fs::read_link(file.unwrap().path()).unwrap().display().to_string());
    assert!(files.all(|file| file != path));
    let of_passt = fs::read_to_string(vm.folder.path().join("files")).unwrap();
    let kinds = of_passt.lines().map(|file| file.split(':').next().unwrap()).collect::<BTreeSet<_>>();
    assert!(!of_passt.contains(&path), "{of_passt}");
    let script = vm.folder.path().join("passt").display().to_string();
    let expected =
        ["/dev/null", "pipe", "socket", &script, &vm.folder.path().join("files").display().to_string()];
    assert!(kinds.iter().all(|kind| expected.contains(kind)), "{of_passt}");
}

#[test]
fn the_process_that_opens_perf_events_has_none_of_the_vms_files_and_ends_with_it() {
    if !has_kvm() || !is_root() {
        return;
    }
    let vm = Vm::start("on");
    let (id, _) = vm.broker();
    let files = fs::read_dir(format!("/proc/{id}/fd")).unwrap();
    let files = files.map(|file| fs::read_link(file.unwrap().path()).unwrap().display().to_string());
    let others: Vec<String> =
        files.filter(|file| file != "/dev/null" && !file.starts_with("socket:")).collect();
    assert!(others.is_empty(), "{others:?}");
    let maps = fs::read_to_string(format!("/proc/{id}/smaps")).unwrap();
    assert!(!maps.contains("Size:             524288 kB"), "the guest's memory");
    // What a terminal or a service manager sends to all processes is for the first one.
    let process = rustix::process::Pid::from_raw(i32::try_from(id).unwrap()).unwrap();
    for signal in [rustix::process::Signal::INT, rustix::process::Signal::TERM, rustix::process::Signal::HUP]
    {
        rustix::process::kill_process(process, signal).unwrap();
    }
    assert_eq!(vm.broker().0, id);
    drop(vm);
    let deadline = Instant::now() + TIMEOUT;
    let runs = || {
        let status = fs::read_to_string(format!("/proc/{id}/status"));
        status
            .is_ok_and(|status| value(&status, "Name") == BROKER && !value(&status, "State").starts_with('Z'))
    };
    while runs() {
        assert!(Instant::now() < deadline, "it goes on without its VM");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn no_thread_of_a_vm_opens_a_perf_event_itself() {
    if !has_kvm() || !is_root() {
        return;
    }
    for thread in ["vcpu0", "control", "tally"] {
        let mut vm = Vm::start("on");
        vm.wait_for("Seccomp", "2");
        intrude(vm.child.id(), &[thread, &libc::SYS_perf_event_open.to_string()]);
        let mut said = String::new();
        vm.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let call = "the sandbox forbids the system call perf_event_open";
        assert_eq!(said, format!("tally: thread {thread}: {call}\n"));
    }
}

#[test]
fn a_system_call_that_a_thread_does_not_need_ends_the_vm() {
    if !has_kvm() || !is_root() {
        return;
    }
    for thread in THREADS {
        let mut vm = Vm::start("on");
        vm.wait_for("Seccomp", "2");
        intrude(vm.child.id(), &[thread, &libc::SYS_execve.to_string()]);
        let mut said = String::new();
        vm.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(said, format!("tally: thread {thread}: the sandbox forbids the system call execve\n"));
        assert_eq!(vm.child.wait().unwrap().code(), Some(125), "{thread}");
    }
}

/// Makes a thread do something that it never does by itself. Returns what `intrude` prints.
fn intrude(process: u32, what: &[&str]) -> String {
    let output = Command::new(program("intrude")).arg(process.to_string()).args(what).output().unwrap();
    assert!(output.status.success(), "{what:?}: {}", stderr(&output));
    stdout(&output)
}

#[test]
fn on_a_terminal_too_it_ends_the_vm_and_the_terminal_is_restored() {
    if !has_kvm() || !is_root() {
        return;
    }
    let mut guest = Session::start(bare_metal("hello spin")).unwrap();
    guest.expect("Hello from the guest", TIMEOUT).unwrap();
    assert_eq!(guest.mode(), Mode::Raw);
    intrude(guest.id(), &["vcpu0", &libc::SYS_execve.to_string()]);
    assert_eq!(guest.wait(TIMEOUT).unwrap().code(), Some(125));
    let seen = guest.seen();
    assert!(seen.contains("tally: thread vcpu0: the sandbox forbids the system call execve"), "{seen}");
    assert_eq!(guest.mode(), Mode::Cooked);
}

#[test]
fn threads_that_open_files_open_none_but_the_guests() {
    const OPENED: &str = "opened\n";
    if !has_kvm() || !is_root() {
        return;
    }
    let output = bare_metal("hello").output().unwrap();
    if stderr(&output).contains("paths are not restricted") {
        eprintln!("skipped: this kernel has no Landlock");
        return;
    }
    for (sandbox, others) in [("on", "Permission denied (os error 13)\n"), ("log", OPENED)] {
        let vm = Vm::start(sandbox);
        vm.wait_for("Seccomp", "2");
        let shared = vm.folder.path().join("share").display().to_string();
        for (thread, path, expected) in [
            ("tally", "/etc/passwd", others),
            ("share0", "/etc/passwd", others),
            ("log", "/etc/passwd", others),
            ("tally", &shared, others),
            ("share0", &shared, OPENED),
        ] {
            let said = intrude(vm.child.id(), &[thread, "open", path]);
            assert_eq!(said, expected, "--sandbox {sandbox}: {thread} opens {path}");
        }
    }
}

#[test]
fn log_only_watches_and_off_restricts_nothing() {
    if !has_kvm() {
        return;
    }
    for (mode, seccomp, privileges) in [("log", "2", "1"), ("off", "0", "0")] {
        let vm = Vm::start(mode);
        vm.wait_for("Seccomp", seccomp);
        vm.wait_for("NoNewPrivs", privileges);
        let own = fs::read_to_string("/proc/self/status").unwrap();
        let own = own.lines().find_map(|line| line.strip_prefix("CapPrm:")).unwrap().trim();
        vm.wait_for("CapPrm", own);
    }
}

#[test]
fn a_core_dump_does_not_have_the_guests_memory() {
    if !has_kvm() {
        return;
    }
    let vm = Vm::start("on");
    let maps = fs::read_to_string(format!("/proc/{}/smaps", vm.child.id())).unwrap();
    let size = maps.find("Size:             524288 kB").expect("the guest has 512 MiB");
    let flags = maps[size..].lines().find_map(|line| line.strip_prefix("VmFlags:")).unwrap();
    assert!(flags.split_whitespace().any(|flag| flag == "dd"), "{flags}");
}

#[test]
fn a_kernel_without_landlock_is_told_of_and_one_without_seccomp_is_refused() {
    if !has_kvm() {
        return;
    }
    let restricted = |how: &str| {
        let mut guest = bare_metal("hello");
        guest.args(["--sandbox", "on"]);
        let mut command = Command::new(program("restricted"));
        let output = command.arg(how).arg(guest.get_program()).args(guest.get_args()).output().unwrap();
        (output.status.code(), stdout(&output), stderr(&output))
    };
    let line = "tally: sandbox: this kernel has no Landlock, which is in Linux 5.13 and later, so that paths are not \
        restricted\n";
    assert_eq!(restricted("no-landlock"), (Some(1), "Hello from the guest\n".into(), line.into()));
    let (status, out, err) = restricted("no-seccomp");
    assert_eq!((status, out.as_str(), err.lines().count()), (Some(125), "", 1), "{err}");
    assert!(err.starts_with("tally: --sandbox: system calls cannot be restricted: "), "{err}");
    assert!(err.ends_with("; without it: --sandbox off\n"), "{err}");
}
