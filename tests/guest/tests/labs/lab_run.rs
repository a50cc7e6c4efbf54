//! Tests of `tally lab run`, which accepts the command line of `tally run`. Its input, folders, disks and files are on
//! this machine.

use std::fs::{self, File, Permissions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_tests::lab::core;
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use guest_tests::{program, stderr, stdout};
use rustix::process::{Pid, Signal, kill_process};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    [
        tests![
            folders_disks_and_files_are_copied_to_the_lab_and_back,
            an_endless_input_does_not_keep_the_command_running,
            a_silent_input_does_not_keep_the_command_running,
            unsuitable_files_are_refused_in_one_line_before_the_boot,
            a_signal_ends_the_lab_and_leaves_no_files,
        ],
        second_tier(tests![an_option_runs_guests_of_another_architecture,]),
    ]
    .concat()
}

/// Returns a `tally lab run` command that runs a script in the guest's shell, with `folder` as its working directory.
/// SIGINT ends it, also if a shell runs the tests in the background, and they ignore SIGINT.
fn lab_run(folder: &Path, options: &[&str], script: &str) -> Command {
    let mut command = Command::new("env");
    command.arg("--default-signal=INT").arg(program("tally"));
    // The lab's own options must come first.
    command.current_dir(folder).args(["lab", "run"]).args(options);
    command.args(["--boot", "--", "sh", "-c", script]).stdin(Stdio::null());
    command
}

fn output(command: &mut Command) -> Output {
    command.output().expect("tally lab runs")
}

/// Returns what `tally log --show` prints for an event log.
fn shown_log(path: &Path) -> String {
    let output = output(Command::new(program("tally")).args(["log", "--show"]).arg(path));
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""));
    stdout(&output)
}

fn an_option_runs_guests_of_another_architecture() {
    let _core = core();
    let place = tempfile::tempdir().unwrap();
    let here = place.path().to_str().unwrap();
    let script = "uname -m; perf stat -x, -o counted -e instructions:u /lib/tally/loop; exit 7";
    let options = ["--arch", "riscv64", "--share", &format!("{here}:rw")];
    let output = output(&mut lab_run(place.path(), &options, script));
    let result = (output.status.code(), stdout(&output), stderr(&output));
    assert_eq!((result.0, &*result.1), (Some(7), "riscv64\n"), "{}", result.2);
    let counted = fs::read_to_string(place.path().join("counted")).unwrap();
    let expected = format!("{LOOP_INSTRUCTIONS},,instructions:u,");
    assert!(counted.lines().any(|line| line.starts_with(&expected)), "{counted}");
}

fn folders_disks_and_files_are_copied_to_the_lab_and_back() {
    const IMAGE_SIZE: u64 = 8 << 20;
    let _core = core();
    let place = tempfile::tempdir().unwrap();
    let path = |name: &str| place.path().join(name);
    let here = path("shared/here");
    fs::create_dir_all(here.join("sub")).unwrap();
    fs::create_dir(path("read")).unwrap();
    fs::write(here.join("old"), "old").unwrap();
    fs::write(here.join("sub/gone"), "gone").unwrap();
    fs::write(path("read/kept"), "kept").unwrap();
    fs::write(path("input"), "from a file").unwrap();
    fs::write(path("log"), "of another run").unwrap();
    File::create(path("disk")).unwrap().set_len(IMAGE_SIZE).unwrap();
    fs::write(path("fixed"), [b'f'; 4096]).unwrap();
    let script = "pwd; cat old ../../read/kept; echo; cat; echo; head -c 4 /dev/vdb; echo
        echo x 2>/dev/null >../../read/kept || echo refused
        echo new >old; rm -r sub; echo '#!/bin/sh' >new; chmod 750 new; ln -s new link
        echo written | dd of=/dev/vda bs=4096 seek=1000 conv=notrunc,fsync 2>/dev/null
        dd if=/dev/urandom of=/dev/null bs=64k count=8 2>/dev/null
        exit 3";
    let mut command = lab_run(
        &here,
        &[
            "--share=..:rw",
            "--share",
            "../../read",
            "--disk",
            "../../disk",
            "--disk=../../fixed:ro",
            "--flamegraph",
            "../../out.svg",
            "--pmu-log=../../log",
        ],
        script,
    );
    let output = output(command.stdin(File::open(path("input")).unwrap()));

    let here = here.canonicalize().unwrap();
    let expected = format!("{}\noldkept\nfrom a file\nffff\nrefused\n", here.display());
    assert_eq!((output.status.code(), stdout(&output)), (Some(3), expected), "{}", stderr(&output));
    let names = |folder: &Path| {
        let mut names: Vec<_> =
            fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&here), ["link", "new", "old"]);
    assert_eq!(fs::read_to_string(here.join("old")).unwrap(), "new\n");
    assert_eq!(fs::metadata(here.join("new")).unwrap().mode() & 0o777, 0o750);
    assert_eq!(fs::read_link(here.join("link")).unwrap(), Path::new("new"));
    assert_eq!(fs::read_to_string(path("read/kept")).unwrap(), "kept");

    let mut disk = File::open(path("disk")).unwrap();
    let found = disk.metadata().unwrap();
    assert_eq!(found.len(), IMAGE_SIZE);
    assert!(found.blocks() < 64, "its holes are holes: {} blocks", found.blocks());
    let mut written = [0; 8];
    disk.seek(SeekFrom::Start(4096 * 1000)).unwrap();
    disk.read_exact(&mut written).unwrap();
    assert_eq!(&written, b"written\n");
    assert_eq!(fs::read(path("fixed")).unwrap(), [b'f'; 4096]);

    let picture = fs::read_to_string(path("out.svg")).unwrap();
    assert!(picture.starts_with("<?xml") && picture.contains("</svg>"), "{} bytes", picture.len());
    let log = shown_log(&path("log"));
    assert!(log.contains("RDPMC"), "{log}");
}

/// A process that is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn an_endless_input_does_not_keep_the_command_running() {
    let _core = core();
    let place = tempfile::tempdir().unwrap();
    let mut yes = Running(Command::new("yes").stdout(Stdio::piped()).spawn().expect("yes runs"));
    let endless = yes.0.stdout.take().expect("it is a pipe");
    let output = output(lab_run(place.path(), &["--pmu-log", "log"], "head -n 1").stdin(endless));
    assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(0), "y\n"), "{}", stderr(&output));
    let log = shown_log(&place.path().join("log"));
    assert!(log.contains("RDPMC became RDMSR"), "{log}");
}

fn a_silent_input_does_not_keep_the_command_running() {
    let _core = core();
    let place = tempfile::tempdir().unwrap();
    let (silent, mut writer) = std::io::pipe().unwrap();
    let output = output(lab_run(place.path(), &[], "[ -p /dev/stdin ] && echo a pipe").stdin(silent));
    assert_eq!(
        (output.status.code(), stdout(&output).as_str()),
        (Some(0), "a pipe\n"),
        "{}",
        stderr(&output)
    );
    assert!(writer.write_all(b"x").is_err(), "its reader has gone");
}

fn unsuitable_files_are_refused_in_one_line_before_the_boot() {
    let place = tempfile::tempdir().unwrap();
    File::create(place.path().join("large")).unwrap().set_len(257 << 20).unwrap();
    fs::create_dir(place.path().join("folder")).unwrap();
    File::create(place.path().join("folder/large")).unwrap().set_len(257 << 20).unwrap();
    for (options, words) in [
        (["--share", "none"], "--share none: No such file or directory"),
        (["--share", "large"], "--share large: not a folder"),
        (["--share", "/usr:rw"], "--share /usr: the simulated host has a /usr/bin of its own"),
        (["--share", "folder:rw"], "/folder: the files for the simulated host are larger than 256 MiB"),
        (["--disk", "none:ro"], "--disk none: No such file or directory"),
        (["--disk", "folder"], "--disk folder: only regular files"),
        (["--disk", "large"], "--disk large: the files for the simulated host are larger than 256 MiB"),
        (["--flamegraph", "none/out.svg"], "--flamegraph none/out.svg: No such file or directory"),
        (["--pmu-log", "folder"], "--pmu-log folder: is a directory"),
    ] {
        let output = output(&mut lab_run(place.path(), &options, "true"));
        let message = stderr(&output);
        assert_eq!(output.status.code(), Some(125), "{options:?}: {message}");
        assert!(message.starts_with("tally-lab: --") && message.contains(words), "{message}");
        assert_eq!(message.lines().count(), 1, "{message}");
    }
}

fn a_signal_ends_the_lab_and_leaves_no_files() {
    let _core = core();
    let place = tempfile::tempdir().unwrap();
    let (scratch, shared) = (place.path().join("tmp"), place.path().join("shared"));
    for folder in [&scratch, &shared] {
        fs::create_dir(folder).unwrap();
        fs::set_permissions(folder, Permissions::from_mode(0o755)).unwrap();
    }
    for signal in [Signal::INT, Signal::TERM] {
        let options = ["--share", "shared:rw", "--pmu-log", "log"];
        let mut command = lab_run(place.path(), &options, "echo x >shared/x; while :; do :; done");
        let mut lab = Running(command.env("TMPDIR", &scratch).spawn().expect("tally lab runs"));
        let pid = lab.0.id();
        let children = format!("/proc/{pid}/task/{pid}/children");
        let machine = wait_for(|| {
            let found = fs::read_to_string(&children).ok()?;
            let machine = format!("/proc/{}/stat", found.split_whitespace().next()?);
            fs::read_to_string(&machine).is_ok_and(|stat| stat.contains("qemu")).then_some(machine)
        });
        // The process is a child that has not been waited for, so its id is not reused.
        kill_process(Pid::from_child(&lab.0), signal).expect("the child is there");
        assert_eq!(lab.0.wait().unwrap().signal(), Some(signal.as_raw()));
        let is_gone = || {
            let stat = fs::read_to_string(&machine).unwrap_or_default();
            (!stat.contains("qemu") || stat.contains(") Z ")).then_some(())
        };
        wait_for(is_gone);
        assert_eq!(fs::read_dir(&scratch).unwrap().count(), 0, "nothing is left in the temporary folder");
        assert_eq!(fs::read_dir(&shared).unwrap().count(), 0);
        assert!(!place.path().join("log").exists());
    }
}

/// Polls until `look` returns a value. Panics after a minute.
fn wait_for<T>(look: impl Fn() -> Option<T>) -> T {
    for _ in 0..3000 {
        if let Some(found) = look() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("it does not come")
}
