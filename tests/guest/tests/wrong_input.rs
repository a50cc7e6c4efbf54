//! What users get wrong: each mistake gives one clear line and the status 125, and nothing half-done.

use std::process::{Command, Stdio};

use guest_tests::{has_kvm, payload, program, stderr, stdout, temporary};

/// Runs `tally` with a mistake in its arguments, and checks that it says so in one line with these words.
fn refused(arguments: &[&str], words: &[&str]) {
    let output =
        Command::new(program("tally")).args(arguments).stdin(Stdio::null()).output().expect("tally runs");
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(125), "{arguments:?}: {message}");
    assert_eq!(stdout(&output), "", "{arguments:?}");
    assert_eq!(message.lines().count(), 1, "{arguments:?}: {message}");
    assert!(message.starts_with("tally: "), "{message}");
    for word in words {
        assert!(message.contains(word), "{arguments:?}: `{word}` is not in: {message}");
    }
}

#[test]
fn unknown_options_and_commands_are_named() {
    refused(&["run", "--bogus"], &["--bogus"]);
    refused(&["frobnicate"], &["frobnicate"]);
    refused(&["run", "--pmu", "foo"], &["foo", "none", "kvm"]);
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
fn memory_that_no_guest_or_no_host_can_have_is_refused() {
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
    refused(&["run", "--kernel", "/does/not/exist"], &["/does/not/exist"]);
    refused(&["run", "--kernel", payload(), "--", "true"], &[payload(), "COMMAND"]);
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
fn modules_that_are_missing_are_named() {
    if !has_kvm() {
        return;
    }
    refused(&["run", "--kernel", payload(), "--initrd", "/does/not/exist"], &["/does/not/exist"]);
}

#[test]
fn a_dev_kvm_that_is_not_ours_to_open_is_explained() {
    // Root may open anything, so this needs somebody else to be.
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } != 0 || !has_kvm() {
        eprintln!("skipped: only root can become a user without permissions");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("tally");
    std::fs::copy(program("tally"), &copy).unwrap();
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
fn a_machine_without_kvm_is_told_what_to_do() {
    // A mount namespace of its own whose /dev is empty.
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
