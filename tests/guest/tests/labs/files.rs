//! What a guest is given of the host's files: shared folders and disks, while the guest and the host do their worst.
//!
//! Few guests do many things: `programs/files/` has what they run, and each test looks at a part of what one said.

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
        a_command_starts_in_the_hosts_folder_and_has_its_status,
        a_program_of_the_hosts_is_counted_in_the_guest,
        what_was_sampled_in_the_guest_is_read_on_the_host_with_its_symbols,
        files_are_the_same_on_both_sides,
        what_is_shared_to_be_read_stays_as_it_is,
        links_lead_to_the_guests_own_files,
        a_folder_that_is_moved_out_and_in_leads_nowhere_else,
        a_share_in_a_share_is_seen_in_whichever_order_they_are_given,
        thousands_of_files_are_there_and_gone_on_both_sides,
        a_limit_on_files_ends_a_write_and_not_the_guest,
        a_mapped_file_that_the_host_shortens_ends_its_program_only,
        a_shared_folder_that_the_host_removes_is_empty_from_then_on,
        disks_come_in_the_order_that_they_are_given_in,
        what_is_written_to_a_disk_is_on_the_host,
        a_disk_to_be_read_refuses_to_be_written,
        a_full_disk_is_told_to_the_program_that_fills_it,
        a_disk_in_use_is_refused,
        a_root_that_is_not_there_is_an_error,
    ]
}

/// The kernel's self-tests of its ciphers take half of its boot.
const RUN: &str = "/scenario/tally run --append cryptomgr.notests";
/// Of the first disk's image and the second's, in bytes.
const SIZES: [u64; 2] = [8 << 20, 2 << 20];

/// How many files a guest makes at once.
fn many() -> u32 {
    if runs_second_tier() { 10_000 } else { 2_000 }
}

/// A command that waits until the guest has said `word` in the file `said`.
fn until(word: &str) -> String {
    format!("until grep -q '== {word}' /scenario/said; do sleep 0.1; done")
}

/// What the two disks are at first.
static IMAGES: LazyLock<[Vec<u8>; 2]> =
    LazyLock::new(|| [image("first", SIZES[0]), image("second", SIZES[1])]);

/// A guest that may read a folder, and one with disks.
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
        // What a link out of the share would lead to.
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
        .step("no-root", "./tally run --disk second:ro --append 'cryptomgr.notests root=/dev/sda1'")
        .step("first", "cat first")
        .step("second", "cat second")
        .run()
});

/// A guest that may write to folders.
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

/// An image of that size with a file system that has the file `name`, with that name in it.
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

/// A program of e2fsprogs, which is not in every user's path.
fn tool(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin");
    command
}

/// What the guest of a step said behind `== PART`, up to the next part.
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

/// What a command on the host said.
fn host(results: &'static LazyLock<Results>, step: &str) -> String {
    results.of(step).text()
}

fn a_command_starts_in_the_hosts_folder_and_has_its_status() {
    assert_eq!(read("folder"), "/scenario/shared/deep\n");
    assert_eq!(written("folder"), "/scenario/work\n");
    assert_eq!((READ.of("read").status, WRITTEN.of("write").status), (3, 42));
}

fn a_program_of_the_hosts_is_counted_in_the_guest() {
    assert_eq!(read("count"), format!("{LOOP_INSTRUCTIONS}\n"));
}

fn what_was_sampled_in_the_guest_is_read_on_the_host_with_its_symbols() {
    assert_eq!(host(&WRITTEN, "perf").trim(), "200 _start (/scenario/work/loop)");
}

fn files_are_the_same_on_both_sides() {
    assert_eq!(read("sum").replace("../", "shared/"), host(&READ, "sum"));
    assert_eq!(written("sum").replace("random", "work/random"), host(&WRITTEN, "sum"));
}

fn what_is_shared_to_be_read_stays_as_it_is() {
    assert_eq!(read("mount"), "tally0 /scenario/shared virtiofs ro,nosuid,nodev,relatime 0 0\n");
    let changes = read("changes");
    assert_eq!(
        changes.lines().filter(|line| line.ends_with(": Read-only file system")).count(),
        11,
        "{changes}"
    );
    assert_eq!(changes.lines().count(), 11, "{changes}");
    assert_eq!(host(&READ, "before"), host(&READ, "after"));
}

fn links_lead_to_the_guests_own_files() {
    let lines: Vec<&str> = read("links").lines().collect();
    let (found, missing): (Vec<&str>, Vec<&str>) =
        lines.iter().partition(|line| !line.ends_with(": No such file or directory"));
    assert_eq!(found, ["of-the-guest", "shared"]);
    assert_eq!(missing.len(), 5, "{lines:?}");
}

fn a_folder_that_is_moved_out_and_in_leads_nowhere_else() {
    let lines: Vec<&str> = read("walk").lines().collect();
    let (last, others) = lines.split_last().expect("it says something");
    assert_eq!(*last, "inside: yes, gone: yes");
    assert!(others.iter().all(|line| *line == "inside"), "{lines:?}");
}

fn a_share_in_a_share_is_seen_in_whichever_order_they_are_given() {
    let nested = written("nested");
    assert!(nested.starts_with("beside\n") && nested.ends_with("\nmade\n"), "{nested}");
    assert!(nested.contains("../outer/new: Read-only file system"), "{nested}");
    assert_eq!(host(&WRITTEN, "made"), "made\nbeside\ninner\n");
}

fn thousands_of_files_are_there_and_gone_on_both_sides() {
    let all = format!("{}\n", many());
    assert_eq!((written("many"), written("host counts")), (&*all, "0\n"));
    assert_eq!(host(&WRITTEN, "counted"), all + "0\n");
}

fn a_limit_on_files_ends_a_write_and_not_the_guest() {
    assert!(written("too large").contains("File too large"), "{}", written("too large"));
}

fn a_mapped_file_that_the_host_shortens_ends_its_program_only() {
    assert!(written("mapped").contains("mapped "), "{}", written("mapped"));
    assert!(written("mapped").contains("status 135\n"), "{}", written("mapped"));
}

fn a_shared_folder_that_the_host_removes_is_empty_from_then_on() {
    let doomed = written("doomed");
    assert!(doomed.contains("file\n"), "it was there: {doomed}");
    assert!(doomed.contains("'../doomed/file': No such file or directory"), "{doomed}");
    assert!(doomed.contains("can't create ../doomed/new: nonexistent directory"), "{doomed}");
    assert!(doomed.ends_with("\nlisted 0\n"), "{doomed}");
}

fn disks_come_in_the_order_that_they_are_given_in() {
    assert_eq!(disks("disks"), format!("{}\n{}\nfirst\nsecond\n", SIZES[0] / 512, SIZES[1] / 512));
}

fn what_is_written_to_a_disk_is_on_the_host() {
    let image = temporary(&READ.of("first").out);
    let path = image.path().to_str().expect("temporary paths are plain text");
    run_tool(tool("e2fsck").args(["-fn", path]), "e2fsprogs").expect("the file system is whole");
    let random = tool("debugfs").args(["-R", "cat random", path]).output().expect("debugfs runs").stdout;
    assert_eq!(random.len(), 1_000_000);
    let sum = run_tool(tool("sha256sum").arg(temporary(&random).path()), "coreutils").expect("a sum");
    assert_eq!(sum.split(' ').next(), disks("sum").split(' ').next());
}

fn a_disk_to_be_read_refuses_to_be_written() {
    let refusals = disks("read-only");
    assert!(refusals.contains("'/dev/vdb': Operation not permitted"), "{refusals}");
    assert!(refusals.contains("/second/new: Read-only file system"), "{refusals}");
    assert!(refusals.ends_with("\nvdb /second ext4 ro\n"), "{refusals}");
    assert!(READ.of("second").out == IMAGES[1], "it is as it was");
}

fn a_full_disk_is_told_to_the_program_that_fills_it() {
    assert!(disks("full").contains("No space left on device"), "{}", disks("full"));
    assert_eq!(READ.of("disks").status, 1, "the program's status");
}

fn a_disk_in_use_is_refused() {
    assert_eq!(host(&READ, "busy"), "tally: --disk first: in use by another guest\n125\n");
}

fn a_root_that_is_not_there_is_an_error() {
    let done = READ.of("no-root");
    assert_eq!(done.status, 125);
    assert!(
        done.text().contains("tally: root=/dev/sda1: no such disk (the first is /dev/vda)"),
        "{}",
        done.text()
    );
}
