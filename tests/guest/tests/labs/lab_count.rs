//! Tests of `tally lab count`: the counts of a program of this machine, and their comparison with a baseline. A count
//! boots a simulated host, which takes five seconds of a core.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use guest_images::cache::Cache;
use guest_images::{Progress, Release, Suite, kernel};
use guest_tests::lab::core;
use guest_tests::suite::{Test, second_tier};
use guest_tests::tests;
use guest_tests::{program, stderr, stdout};
use tally_lab::programs::KNOWN;
use tempfile::TempDir;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    let first = tests![
        the_recipe_for_ci_counts_exactly_and_finds_growth,
        what_cannot_be_counted_is_refused_in_one_line_before_the_boot,
    ];
    let second = second_tier(tests![
        a_program_with_libraries_counts_the_same_in_each_run,
        a_program_counts_the_same_in_a_guest_with_a_kernel_of_ones_own,
        a_program_that_fails_has_no_counts,
    ]);
    [first, second].concat()
}

/// The recipe, and the start of those of its commands that count.
const RECIPE: &str = include_str!("../../../../docs/ci.md");
const COUNTING: &str = "tally lab count ";

/// Instructions of the program whose place the recipe names.
const INSTRUCTIONS: u64 = 20_000_004;

/// Creates a folder with the recipe's program.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let release = folder.path().join("target/release");
    fs::create_dir_all(&release).unwrap();
    let (_, content) = KNOWN.iter().find(|(name, _)| *name == "loop").expect("it is known");
    fs::write(release.join("bench"), content).unwrap();
    folder
}

/// Runs a command of a shell that finds the programs of this project.
fn run(folder: &Path, command: &str) -> Output {
    let programs = program("tally").parent().unwrap().to_owned();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    Command::new("sh").args(["-c", command]).current_dir(folder).env("PATH", path).output().unwrap()
}

/// Returns what a command says, but for the steps that are due when something of the lab is not in the cache.
fn said(output: &Output) -> String {
    let text = stderr(output);
    text.split_inclusive('\n').filter(|line| !line.ends_with(", which may take minutes\n")).collect()
}

/// Returns what a count prints, which must be printed alone.
fn counted(folder: &Path, arguments: &str) -> String {
    let output = run(folder, &format!("{COUNTING}{arguments}"));
    assert_eq!((output.status.code(), &*said(&output)), (Some(0), ""));
    stdout(&output)
}

fn the_recipe_for_ci_counts_exactly_and_finds_growth() {
    let _core = core();
    let folder = folder();
    let path = folder.path().join("counts.json");
    let with = |option: &str| -> Vec<&str> {
        let commands = RECIPE.lines().filter_map(|line| Some(&line[line.find(COUNTING)?..]));
        commands.filter(|command| command.contains(option)).collect()
    };
    let (stores, compares) = (with("--json"), with("--baseline"));
    assert!(stores.len() == 1 && compares.len() == 4, "{stores:?} {compares:?}");
    assert!(compares.iter().all(|command| *command == compares[0]), "{compares:?}");

    let first = run(folder.path(), stores[0]);
    assert_eq!((first.status.code(), said(&first), stdout(&first)), (Some(0), String::new(), String::new()));
    let counts = fs::read_to_string(&path).unwrap();
    let exact = format!("\"count\": {INSTRUCTIONS}\n");
    assert!(counts.contains(&exact), "{counts}");

    let same = run(folder.path(), compares[0]);
    assert_eq!((same.status.code(), &*said(&same)), (Some(0), ""));
    assert!(stdout(&same).lines().skip(1).all(|line| line.contains("  none  ")), "{}", stdout(&same));

    fs::write(&path, counts.replace(&exact, &format!("\"count\": {}\n", INSTRUCTIONS / 2))).unwrap();
    let grown = run(folder.path(), compares[0]);
    assert_eq!(grown.status.code(), Some(1), "{}", said(&grown));
    let marked: Vec<String> =
        stdout(&grown).lines().filter(|line| line.ends_with("has grown")).map(str::to_owned).collect();
    assert!(matches!(&marked[..], [line] if line.contains("+100.00 %  instructions:u")), "{marked:?}");
}

fn what_cannot_be_counted_is_refused_in_one_line_before_the_boot() {
    let folder = folder();
    fs::write(folder.path().join("script"), "#!/bin/sh\n").unwrap();
    fs::write(folder.path().join("old.json"), "{}").unwrap();
    let cases = [
        ("nowhere", "cannot count nowhere: there is no such program on this machine"),
        ("./script", "cannot count ./script: it is no ELF program; count a script's interpreter"),
        (
            "--host riscv64 target/release/bench",
            "cannot count target/release/bench: it is not for riscv64 hosts",
        ),
        ("--with gone target/release/bench", "cannot read gone: "),
        ("--baseline old.json target/release/bench", "old.json is no output of `tally-lab count --json`: "),
        ("--baseline gone.json target/release/bench", "cannot read gone.json: "),
        ("--kernel gone target/release/bench", "cannot read gone: "),
    ];
    for (arguments, expected) in cases {
        let output = run(folder.path(), &format!("{COUNTING}{arguments}"));
        assert_eq!((output.status.code(), &*stdout(&output)), (Some(125), ""), "{arguments}");
        let line = said(&output);
        assert!(line.starts_with(&format!("tally-lab: {expected}")), "{line}");
        assert_eq!(line.lines().count(), 1, "{line}");
    }
}

fn a_program_with_libraries_counts_the_same_in_each_run() {
    let _core = core();
    let folder = folder();
    fs::write(folder.path().join("text"), "one\ntwo\n").unwrap();
    let arguments = "--with text --json wc -l text";
    let [first, second] = [(); 2].map(|()| run(folder.path(), &format!("{COUNTING}{arguments}")));
    assert_eq!((first.status.code(), &*said(&first)), (Some(0), "2 text\n"));
    assert_eq!(stdout(&first), stdout(&second));
    assert!(stdout(&first).contains("instructions:k"), "{}", stdout(&first));
}

fn a_program_counts_the_same_in_a_guest_with_a_kernel_of_ones_own() {
    let _core = core();
    let folder = folder();
    let release = Release::from(Suite::default());
    let kernel = kernel(&Cache::open().unwrap(), release, &mut Progress::stderr("lab")).unwrap();
    fs::copy(kernel.image, folder.path().join("vmlinuz")).unwrap();
    let text = counted(folder.path(), "--kernel vmlinuz -e instructions:u target/release/bench");
    assert_eq!(text, "          20,000,004  instructions:u\n");
}

fn a_program_that_fails_has_no_counts() {
    let _core = core();
    let folder = folder();
    let cases = [("false", "ended with status 1"), ("sh -c 'kill -9 $$'", "was ended by a signal (Killed)")];
    for (command, how) in cases {
        let output = run(folder.path(), &format!("{COUNTING}{command}"));
        assert_eq!((output.status.code(), &*stdout(&output)), (Some(125), ""), "{command}");
        let line = format!("tally-lab: the program {how}: nothing was counted\n");
        assert!(said(&output).ends_with(&line), "{}", said(&output));
    }
}
