//! Tests of shared folders and disks, with concurrent changes by the host, and with links and limits.
//!
//! Three guests run the scripts in `programs/files/`. Each test checks a part of their output.

use std::fs;
use std::process::Command;
use std::sync::LazyLock;

use guest_images::{Progress, run_tool};
use guest_tests::lab::{Results, StepOutput, Steps};
use guest_tests::suite::{Test, runs_second_tier};
use guest_tests::tests;
use guest_tests::{program, temporary};
use tally_lab::ensure;
use tally_lab::programs::{LOOP, LOOP_INSTRUCTIONS};

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        a_command_starts_in_the_same_folder_and_its_status_is_returned,
        a_program_in_a_shared_folder_is_counted_in_the_guest,
        perf_data_of_the_guest_is_read_on_the_host_with_symbols,
        guest_and_host_read_the_same_contents,
        a_read_only_share_cannot_be_changed,
        links_out_of_a_share_resolve_in_the_guest,
        a_folder_that_moves_out_of_the_share_gives_no_access_to_the_host,
        nested_shares_work_in_any_order,
        thousands_of_files_are_created_and_deleted_on_both_sides,
        a_file_size_limit_fails_a_write_and_not_the_guest,
        truncating_a_mapped_file_kills_only_its_program,
        a_share_that_the_host_removes_becomes_empty,
        disks_appear_in_the_order_of_their_options,
        data_written_to_a_disk_is_in_the_hosts_file,
        a_read_only_disk_refuses_writes,
        a_full_disk_is_an_error_in_the_guest,
        a_disk_in_use_is_refused,
        a_missing_root_device_is_an_error,
    ]
}

const RUN: &str = "/scenario/tally run";
/// Sizes of the two disks' images in bytes.
const SIZES: [u64; 2] = [8 << 20, 2 << 20];

/// Returns the number of files that a guest creates at once.
fn many() -> u32 {
    if runs_second_tier() { 10_000 } else { 2_000 }
}

/// Returns a command that waits until the guest's output, in the file `said`, has reached the part `word`.
fn until(word: &str) -> String {
    format!("until grep -q '== {word}' /scenario/said; do sleep 0.1; done")
}

/// Initial contents of the two disks.
static IMAGES: LazyLock<[Vec<u8>; 2]> =
    LazyLock::new(|| [image("first", SIZES[0]), image("second", SIZES[1])]);

/// Results of a guest with a read-only share, and of one with disks.
static READ: LazyLock<Results> = LazyLock::new(|| {
    let [first, second] = IMAGES.clone();
    let state = "(cd shared; find . | sort; find . -type f | sort | xargs sha256sum)";
    Steps::new("files::read")
        .configure_host(|scenario| {
            scenario
                .program(include_str!("../../programs/files/read.sh"), "shared/read.sh")
                .program(LOOP, "shared/deep/loop")
                .program(include_str!("../../programs/files/disks.sh"), "shared/disks.sh")
                .program(first, "first")
                .program(second, "second")
        })
        // The files `whose` on the host are the targets of links out of the share.
        .step(
            "prepare",
            "for place in . /etc; do echo of-the-host >$place/whose; done; mkdir -p shared/deep/empty shared/moved/in away; \
             echo inside >shared/moved/in/file; echo of-the-host >away/whose; tail -c 1000000 tally >shared/big; cd shared; \
             ln -s /scenario/whose absolute; ln -s ../whose upwards; ln -s ../../../../scenario/whose chain; \
             ln -s /etc/whose etc; ln -s .. folder; ln -s ../../whose moved/link",
        )
        .step("before", state)
        .step(
            "read",
            &format!(
                ": >said; (cd shared; exec {RUN} --share . -- sh read.sh) >said 2>&1 & {}; until grep -q '== end' said; do \
                 mv shared/moved/in away/in; sleep 0.1; mv away/in shared/moved/in; sleep 0.15; done; \
                 wait $!; status=$?; cat said; exit $status",
                until("walk")
            ),
        )
        .step("after", state)
        .step("sum", "sha256sum shared/big")
        .step("disks", &format!(
            "{RUN} --disk first --disk second:ro --share shared -- sh /scenario/shared/disks.sh >said 2>&1 & {}; \
             {RUN} --disk first -- true >busy 2>&1; echo $? >>busy; wait $!; status=$?; cat said; exit $status",
            until("busy")
        ))
        .step("busy", "cat busy")
        .step("no-root", "./tally run --disk second:ro --append root=/dev/sda1")
        .step("first", "cat first")
        .step("second", "cat second")
        .run()
});

/// Results of a guest with writable shares.
static WRITTEN: LazyLock<Results> = LazyLock::new(|| {
    let mapped = fs::read(program("mapped")).expect("it was built");
    Steps::new("files::written")
        .configure_host(|scenario| {
            scenario
                .program(include_str!("../../programs/files/write.sh"), "work/write.sh")
                .program(LOOP, "work/loop")
                .program(mapped, "work/mapped")
        })
        .step(
            "write",
            &format!(
                ": >said; mkdir -p outer/inner doomed; echo beside >outer/beside; echo file >doomed/file; cd work; cp loop victim; \
                 (ulimit -f 8192; exec {RUN} --share ../outer/inner:rw --share ../outer --share .:rw --share ../doomed:rw \
                 -- sh write.sh {}) >../said 2>&1 & \
                 {}; ls many | wc -l >/scenario/counted; touch counted; {}; until grep -q '^mapped' ../said; do sleep 0.1; done; \
                 : >victim; {}; until grep -q '^file' ../said; do sleep 0.1; done; rm -r ../doomed; touch deleted; \
                 wait $!; status=$?; cat ../said; exit $status",
                many(),
                until("host counts"),
                until("mapped"),
                until("doomed")
            ),
        )
        .step("counted", "cat counted; ls work/many | wc -l")
        .step("sum", "sha256sum work/random")
        .step("made", "cat outer/inner/made; ls outer")
        .step("perf", "cd work; perf script -i perf.data -F ip,sym,dso | awk '{ print $2, $3 }' | sort | uniq -c")
        .run()
});

/// Creates a disk image with a file system. Its only file is called `name` and contains the image's name.
fn image(name: &str, size: u64) -> Vec<u8> {
    ensure(&["e2fsprogs"], &mut Progress::stderr("lab")).unwrap_or_else(|error| panic!("{error}"));
    let folder = tempfile::tempdir().expect("temporary folders can be made");
    let (root, path) = (folder.path().join("root"), folder.path().join("image"));
    fs::create_dir(&root)
        .and_then(|()| fs::write(root.join("name"), format!("{name}\n")))
        .expect("files can be written");
    let mut mkfs = tool("mkfs.ext4");
    mkfs.args(["-q", "-O", "^has_journal", "-d"]).arg(&root).arg(&path).arg(format!("{}k", size >> 10));
    run_tool(&mut mkfs, "e2fsprogs").unwrap_or_else(|error| panic!("{error}"));
    fs::read(&path).expect("it was made")
}

/// Returns a command for a program of e2fsprogs, which is not in every user's path.
fn tool(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin");
    command
}

/// Returns what the guest of a step printed after `== PART`, up to the next part.
fn part<'a>(done: &'a StepOutput, part: &str) -> &'a str {
    let text = std::str::from_utf8(&done.out).expect("the guest says text");
    let begin = format!("== {part}\n");
    let (_, rest) = text.split_once(&begin).unwrap_or_else(|| panic!("no `{part}` in: {text}{}", done.err));
    rest.split_once("== ").map_or(rest, |(part, _)| part)
}

fn read(name: &str) -> &'static str {
    part(READ.of("read"), name)
}

fn written(name: &str) -> &'static str {
    part(WRITTEN.of("write"), name)
}

fn disks(name: &str) -> &'static str {
    part(READ.of("disks"), name)
}

/// Returns what a command on the host printed.
fn host(results: &'static LazyLock<Results>, step: &str) -> String {
    results.of(step).text()
}

fn a_command_starts_in_the_same_folder_and_its_status_is_returned() {
    assert_eq!(read("folder"), "/scenario/shared/deep\n");
    assert_eq!(written("folder"), "/scenario/work\n");
    assert_eq!((READ.of("read").status, WRITTEN.of("write").status), (3, 42));
}

fn a_program_in_a_shared_folder_is_counted_in_the_guest() {
    assert_eq!(read("count"), format!("{LOOP_INSTRUCTIONS}\n"));
}

fn perf_data_of_the_guest_is_read_on_the_host_with_symbols() {
    assert_eq!(host(&WRITTEN, "perf").trim(), "200 _start (/scenario/work/loop)");
}

fn guest_and_host_read_the_same_contents() {
    assert_eq!(read("sum").replace("../", "shared/"), host(&READ, "sum"));
    assert_eq!(written("sum").replace("random", "work/random"), host(&WRITTEN, "sum"));
}

fn a_read_only_share_cannot_be_changed() {
    assert_eq!(read("mount"), "tally0 /scenario/shared virtiofs ro,nosuid,nodev,relatime 0 0\n");
    for (part, others) in [("changes", &[][..]), ("insisting", &["served"])] {
        let (refused, said): (Vec<&str>, Vec<&str>) =
            read(part).lines().partition(|line| line.ends_with(": Read-only file system"));
        assert_eq!((refused.len(), &said[..]), (11, others), "{part}: {refused:?}");
    }
    assert_eq!(host(&READ, "before"), host(&READ, "after"));
}

fn links_out_of_a_share_resolve_in_the_guest() {
    let lines: Vec<&str> = read("links").lines().collect();
    let (found, missing): (Vec<&str>, Vec<&str>) =
        lines.iter().partition(|line| !line.ends_with(": No such file or directory"));
    assert_eq!(found, ["of-the-guest", "shared"]);
    assert_eq!(missing.len(), 5, "{lines:?}");
}

fn a_folder_that_moves_out_of_the_share_gives_no_access_to_the_host() {
    let lines: Vec<&str> = read("walk").lines().collect();
    let (last, others) = lines.split_last().expect("it says something");
    assert_eq!(*last, "inside: yes, gone: yes");
    assert!(others.iter().all(|line| *line == "inside"), "{lines:?}");
}

fn nested_shares_work_in_any_order() {
    let nested = written("nested");
    assert!(nested.starts_with("beside\n") && nested.ends_with("\nmade\n"), "{nested}");
    assert!(nested.contains("../outer/new: Read-only file system"), "{nested}");
    assert_eq!(host(&WRITTEN, "made"), "made\nbeside\ninner\n");
}

fn thousands_of_files_are_created_and_deleted_on_both_sides() {
    let all = format!("{}\n", many());
    assert_eq!((written("many"), written("host counts")), (&*all, "0\n"));
    assert_eq!(host(&WRITTEN, "counted"), all + "0\n");
}

fn a_file_size_limit_fails_a_write_and_not_the_guest() {
    assert!(written("too large").contains("File too large"), "{}", written("too large"));
}

fn truncating_a_mapped_file_kills_only_its_program() {
    assert!(written("mapped").contains("mapped "), "{}", written("mapped"));
    assert!(written("mapped").contains("status 135\n"), "{}", written("mapped"));
}

fn a_share_that_the_host_removes_becomes_empty() {
    let doomed = written("doomed");
    assert!(doomed.contains("file\n"), "it was there: {doomed}");
    assert!(doomed.contains("'../doomed/file': No such file or directory"), "{doomed}");
    assert!(doomed.contains("can't create ../doomed/new: nonexistent directory"), "{doomed}");
    assert!(doomed.ends_with("\nlisted 0\n"), "{doomed}");
}

fn disks_appear_in_the_order_of_their_options() {
    assert_eq!(disks("disks"), format!("{}\n{}\nfirst\nsecond\n", SIZES[0] / 512, SIZES[1] / 512));
}

fn data_written_to_a_disk_is_in_the_hosts_file() {
    let image = temporary(&READ.of("first").out);
    let path = image.path().to_str().expect("temporary paths are plain text");
    run_tool(tool("e2fsck").args(["-fn", path]), "e2fsprogs").expect("the file system is whole");
    let random = tool("debugfs").args(["-R", "cat random", path]).output().expect("debugfs runs").stdout;
    assert_eq!(random.len(), 1_000_000);
    let sum = run_tool(tool("sha256sum").arg(temporary(&random).path()), "coreutils").expect("a sum");
    assert_eq!(sum.split(' ').next(), disks("sum").split(' ').next());
}

fn a_read_only_disk_refuses_writes() {
    let refusals = disks("read-only");
    assert!(refusals.contains("'/dev/vdb': Operation not permitted"), "{refusals}");
    assert!(refusals.contains("/second/new: Read-only file system"), "{refusals}");
    assert!(refusals.ends_with("\nvdb /second ext4 ro\n"), "{refusals}");
    assert!(READ.of("second").out == IMAGES[1], "it is as it was");
}

fn a_full_disk_is_an_error_in_the_guest() {
    assert!(disks("full").contains("No space left on device"), "{}", disks("full"));
    assert_eq!(READ.of("disks").status, 1, "the program's status");
}

fn a_disk_in_use_is_refused() {
    assert_eq!(host(&READ, "busy"), "tally: --disk first: in use by another guest\n125\n");
}

fn a_missing_root_device_is_an_error() {
    let done = READ.of("no-root");
    assert_eq!(done.status, 125);
    assert!(
        done.text().contains("tally: root=/dev/sda1: no such disk (the first is /dev/vda)"),
        "{}",
        done.text()
    );
}
