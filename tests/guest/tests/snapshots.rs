//! Snapshots of bare-metal guests on this machine's own KVM. A guest takes milliseconds.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use guest_tests::{bare_metal, has_kvm, program, stderr};
use tempfile::TempDir;

/// What a VM says whose memory is gone.
const LOST: &str = "tally: the file of the guest's saved memory was truncated while the guest ran";

/// A snapshot of a guest.
struct Saved {
    folder: TempDir,
}

fn tally(arguments: &[&str]) -> Output {
    Command::new(program("tally")).args(arguments).stdin(Stdio::null()).output().expect("tally runs")
}

impl Saved {
    /// Saves a guest that does what `words` say, behind "hello".
    fn of(words: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = bare_metal(&format!("hello {words}"));
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("tally runs");
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "Hello from the guest\n");
        let saved = Self { folder };
        let output = saved.save(&child, "--stop");
        assert!(output.status.success(), "{}", stderr(&output));
        child.wait().unwrap();
        saved
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("saved")
    }

    /// Saves a running VM into a folder that does not exist yet.
    fn save(&self, child: &Child, option: &str) -> Output {
        let path = if self.path().exists() { self.folder.path().join("again") } else { self.path() };
        let mut arguments = vec!["snapshot".to_owned(), child.id().to_string(), path.display().to_string()];
        arguments.extend((!option.is_empty()).then(|| option.to_owned()));
        tally(&arguments.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Continues the guest, until its VM can be found.
    fn restore(&self) -> Child {
        let mut command = Command::new(program("tally"));
        command.args(["run", "--restore"]).arg(self.path()).stdin(Stdio::null());
        let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("tally runs");
        let process = child.id().to_string();
        while !tally(&["stat", &process, "--count", "1", "--interval", "0.01"]).status.success() {
            assert!(!tally(&["list"]).stdout.is_empty());
        }
        child
    }

    fn truncate(&self) {
        File::options().write(true).open(self.path().join("memory")).unwrap().set_len(0).unwrap();
    }
}

/// Returns the status and the last line of a VM that has ended.
fn ended(mut child: Child) -> (Option<i32>, String) {
    let status = child.wait().unwrap();
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    (status.code(), said.lines().last().unwrap_or_default().to_owned())
}

#[test]
fn a_guest_whose_saved_memory_is_truncated_ends_with_a_line() {
    if !has_kvm() {
        return;
    }
    let saved = Saved::of("spin");
    let child = saved.restore();
    saved.truncate();
    assert_eq!(ended(child), (Some(125), LOST.to_owned()));
}

#[test]
fn a_thread_that_finds_the_saved_memory_truncated_ends_the_vm_with_a_line() {
    if !has_kvm() {
        return;
    }
    // The guest itself sleeps; saving it reads its memory.
    let saved = Saved::of("halt");
    let child = saved.restore();
    saved.truncate();
    let output = saved.save(&child, "");
    assert!(!output.status.success());
    assert_eq!(ended(child), (Some(125), LOST.to_owned()));
}
