//! Tests of users' mistakes: each gives one line of error message and status 125, and leaves no files behind.

use std::process::{Command, Stdio};

use guest_images::payloads::riscv64;
use guest_tests::{has_kvm, payload, program, stderr, stdout, temporary};

/// Runs `tally` with invalid arguments, and checks that it fails with a one-line message that contains `words`.
fn refused(arguments: &[&str], words: &[&str]) {
    let output =
        Command::new(program("tally")).args(arguments).stdin(Stdio::null()).output().expect("tally runs");
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(125), "{arguments:?}: {message}");
    assert_eq!(stdout(&output), "", "{arguments:?}");
    assert_eq!(message.lines().count(), 1, "{arguments:?}: {message}");
    assert!(message.starts_with("tally: "), "{message}");
    assert!(!message.trim_end().contains(char::is_control), "{message:?}");
    for word in words {
        assert!(message.contains(word), "{arguments:?}: `{word}` is not in: {message}");
    }
}

/// Returns the CRC-32 of some bytes.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 })
    })
}

#[test]
fn what_a_hostile_snapshot_says_cannot_draw_on_the_terminal() {
    let folder = tempfile::tempdir().expect("there is room");
    // The parser's error quotes the name.
    let state = br#"{"\u001b[2J\u009b1m\ntally: all is well":1}"#;
    let about = format!(
        "{{\"tally-snapshot\":1,\"state\":{{\"bytes\":{},\"crc32\":{}}},\"memory\":{{\"bytes\":0,\"crc32\":0}}}}\n",
        state.len(),
        crc32(state),
    );
    std::fs::write(folder.path().join("state"), [about.as_bytes(), state].concat())
        .expect("it can be written");
    std::fs::write(folder.path().join("memory"), "").expect("it can be written");
    refused(
        &["run", "--restore", folder.path().to_str().expect("it is text")],
        &["?[2J?1m tally: all is well"],
    );
    refused(&["run", "--restore", "/no\x1b[2J/such/folder"], &["/no?[2J/such/folder"]);
    refused(&["log", "--show", "/no\x1b[2J/such/log"], &["/no?[2J/such/log"]);
}

#[test]
fn unknown_options_and_commands_are_named() {
    refused(&["run", "--bogus"], &["--bogus"]);
    refused(&["frobnicate"], &["frobnicate"]);
    refused(&["run", "--pmu", "foo"], &["foo", "none", "kvm"]);
}

#[test]
fn invalid_policies_are_reported_with_line_and_suggestion() {
    let policy = |content: &str, words: &[&str]| {
        let file = temporary(content.as_bytes());
        let path = file.path().to_str().unwrap();
        refused(&["run", "--pmu-policy", path, "--kernel", payload()], &[&[path][..], words].concat());
    };
    policy("tires = \"standard\"\n", &["line 1", "unknown key `tires`: did you mean `tier`?"]);
    policy("\nallow = [\n\"instrutions\"]\n", &["line 3", "`instrutions`: did you mean `instructions`?"]);
    policy("tier = standard\n", &["line 1"]);
    policy("min-period = \"long\"\n", &["min-period is a number of counts, from 1 on"]);
    let run = |options: &[&str], words: &[&str]| refused(&[&["run"], options].concat(), words);
    run(&["--pmu-policy", "/does/not/exist"], &["/does/not/exist: No such file"]);
    for pmu in ["kvm", "none"] {
        run(&["--pmu", pmu, "--pmu-policy", "/dev/null"], &["--pmu-policy is for Tally's own PMUs", pmu]);
    }
    run(&["--on-starvation", "stpo"], &["stpo", "report, scale, stop"]);
}

#[test]
fn invalid_requests_to_a_vm_are_refused() {
    refused(&["stat", "no-such-vm-runs-here"], &["no VM "]);
    refused(&["stat", "--interval", "0"], &["--interval", "0.01 to 60 seconds"]);
    refused(&["stat", "--count", "0"], &["--count", "0"]);
    refused(&["stat", "--json", "--count", "2"], &["--json", "--count"]);
    refused(&["policy", "no-such-vm-runs-here", "--disable", "0:0"], &["no VM "]);
    refused(&["policy", "1", "--disable", "0"], &["--disable", "vCPU", "0:3"]);
    refused(&["policy", "1", "teir=standard"], &["`teir`", "did you mean `tier`?"]);
    refused(&["policy", "1", "tier"], &["`tier` is no KEY=VALUE", "min-period"]);
    refused(&["log"], &["PID|NAME"]);
    refused(&["log", "no-such-vm-runs-here", "a note"], &["no VM "]);
}

#[test]
fn too_few_and_too_many_cpus_are_refused() {
    if !has_kvm() {
        return;
    }
    refused(&["run", "--kernel", payload(), "--cpus", "0"], &["--cpus 0", "1 to "]);
    refused(&["run", "--kernel", payload(), "--cpus", "100000"], &["--cpus 100000", "1 to "]);
    refused(&["run", "--kernel", payload(), "--cpus", "-1"], &["-1", "--cpus"]);
}

#[test]
fn too_little_and_too_much_memory_are_refused() {
    if !has_kvm() {
        return;
    }
    refused(&["run", "--kernel", payload(), "--memory", "0"], &["--memory 0"]);
    refused(&["run", "--kernel", payload(), "--memory", "1M"], &["--memory 1M"]);
    refused(&["run", "--kernel", payload(), "--memory", "1000000G"], &["--memory 1000000G", "MiB"]);
    refused(&["run", "--kernel", payload(), "--memory", "lots"], &["lots", "--memory"]);
}

#[test]
fn files_that_are_no_kernels_are_named() {
    if !has_kvm() {
        return;
    }
    let text = temporary(b"This is no kernel.\n");
    let path = text.path().to_str().unwrap();
    refused(&["run", "--kernel", path], &[path, "not a kernel"]);
    let riscv = temporary(riscv64::DEBUG_EXIT);
    let path = riscv.path().to_str().unwrap();
    refused(&["run", "--kernel", path], &[path, "built for RISC-V, this host is x86-64"]);
    refused(&["run", "--kernel", "/does/not/exist"], &["/does/not/exist"]);
    refused(&["run", "--kernel", payload(), "--", "true"], &[payload(), "COMMAND"]);
}

#[test]
fn folders_that_cannot_be_shared_are_named() {
    if !has_kvm() {
        return;
    }
    let run = |options: &[&str], words: &[&str]| {
        refused(&[&["run", "--kernel", payload()], options].concat(), words);
    };
    run(&["--share", payload()], &["--share", payload(), "not a directory"]);
    run(&["--share", "/does/not/exist:rw"], &["--share /does/not/exist:", "no such directory"]);
    run(&["--share", ""], &["--share", "no such directory"]);
    run(&["--share", "/proc/self"], &["--share /proc/self", "process table"]);
    run(&["--share", "/usr"], &["--share /usr", "the guest has a /usr of its own"]);
    run(&["--share", "/usr/share/.."], &["the guest has a /usr of its own"]);
    run(&["--share", "/"], &["--share /:", "the guest has a / of its own"]);
    run(&["--share", "/var", "--share", "/usr/../var:rw"], &["--share /var: given twice"]);
    run(&["--share", "/var"].repeat(8), &["--share", "a guest can have 7 of them"]);
}

#[test]
fn files_that_are_no_disks_are_named() {
    if !has_kvm() {
        return;
    }
    let disk = |content: &[u8], words: &[&str]| {
        let file = temporary(content);
        let path = file.path().to_str().unwrap();
        refused(&["run", "--kernel", payload(), "--disk", path], &[&["--disk", path][..], words].concat());
        assert_eq!(std::fs::read(path).unwrap(), content, "it is as it was");
    };
    disk(b"", &["0 bytes are no disk"]);
    disk(&[0; 513], &["513 bytes", "multiple of 512"]);
    disk(&[b"QFI\xfb\0\0\0\x03", &[0; 504][..]].concat(), &["a qcow2 image", "qemu-img convert -O raw"]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let disk = |disk: &str, words: &[&str]| refused(&["run", "--kernel", payload(), "--disk", disk], words);
    disk(path, &["--disk", path, "neither a file nor a block device"]);
    disk(&format!("{path}/none"), &["--disk", "/none: ", "No such file"]);
    assert_eq!(folder.path().read_dir().unwrap().count(), 0, "no disk was made");
}

#[test]
fn a_flame_graph_that_cannot_be_written_is_refused_before_the_boot() {
    if !has_kvm() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    refused(&["run", "--flamegraph", &format!("{path}/x.svg")], &["COMMAND"]);
    let picture = |path: &str, words: &[&str]| {
        refused(&["run", "--kernel", payload(), "--flamegraph", path, "--", "true"], words);
    };
    picture(&format!("{path}/none/x.svg"), &["--flamegraph", "/none/x.svg", "No such file"]);
    picture(path, &["--flamegraph", path, "is a directory"]);
    // The bare-metal program runs no command.
    picture(&format!("{path}/x.svg"), &["COMMAND"]);
    assert_eq!(folder.path().read_dir().unwrap().count(), 0, "nothing half-done is left");
}

#[test]
fn linux_on_a_kvm_that_cannot_run_it_is_refused_at_once() {
    if !has_kvm() || guest_images::host::obstacle().is_none() {
        eprintln!("skipped: only for machines with a KVM that cannot run Linux");
        return;
    }
    let cache = guest_images::cache::Cache::open().unwrap();
    let suite = guest_images::Suite::default();
    let kernel = guest_images::kernel(&cache, suite, &mut guest_images::Progress::silent()).unwrap().image;
    let words = ["no hardware virtualisation", "tally lab run"];
    refused(&["run", "--kernel", kernel.to_str().unwrap(), "--initrd", "/dev/null", "--", "true"], &words);
}

#[test]
fn missing_modules_are_named() {
    if !has_kvm() {
        return;
    }
    refused(&["run", "--kernel", payload(), "--initrd", "/does/not/exist"], &["/does/not/exist"]);
}

#[test]
fn missing_permission_for_dev_kvm_is_explained() {
    // Root may open every file, so the test runs `tally` as another user.
    if !rustix::process::geteuid().is_root() || !has_kvm() {
        eprintln!("skipped: only root can become a user without permissions");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("tally");
    // `cp` copies the program, not this process: a child that another test starts at the same time would inherit a file
    // descriptor that is open for writing, and then exec of the copy fails with ETXTBSY.
    assert!(Command::new("cp").arg(program("tally")).arg(&copy).status().expect("cp runs").success());
    std::fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
        .arg(&copy)
        .args(["run", "--kernel", payload()])
        .output()
        .expect("setpriv runs");
    assert_eq!(output.status.code(), Some(125));
    assert!(stderr(&output).contains("/dev/kvm: permission denied"), "{}", stderr(&output));
}

#[test]
fn a_missing_dev_kvm_is_reported_with_an_alternative() {
    // Runs `tally` in a mount namespace whose /dev is empty.
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", "mount -t tmpfs none /dev && exec \"$@\"", "sh"])
        .arg(program("tally"))
        .args(["run", "--kernel", payload()])
        .output()
        .expect("unshare runs");
    let message = stderr(&output);
    if message.starts_with("unshare:") || message.starts_with("mount:") {
        eprintln!("skipped: no mount namespaces here: {message}");
        return;
    }
    assert_eq!(output.status.code(), Some(125), "{message}");
    assert!(message.contains("no /dev/kvm") && message.contains("tally lab run"), "{message}");
}

#[test]
fn a_reader_that_has_read_enough_is_no_mistake() {
    for arguments in [&["list"][..], &["list", "--json"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output =
            Command::new(program("tally")).args(arguments).stdout(writer).output().expect("tally runs");
        assert_eq!((output.status.code(), stderr(&output)), (Some(0), String::new()), "{arguments:?}");
    }
}
