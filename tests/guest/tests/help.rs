//! Tests of the programs' help texts, shell completions and manual pages.

use std::fs;
use std::process::Command;

use guest_tests::{program, stderr, stdout};

/// Maximum number of lines of a help text.
const MAX_LINES: usize = 24;
/// Maximum number of lines for `tally run`, which has more options.
const MAX_LINES_OF_RUN: usize = 50;
const WIDTH: usize = 80;

const TALLY: &[&str] = &[
    "",
    "run",
    "list",
    "stat",
    "record",
    "top",
    "symbols",
    "snapshot",
    "policy",
    "doctor",
    "check",
    "log",
    "completions",
    "man",
    "help lab",
    "help bench",
];
const LAB: &[&str] =
    &["", "build", "exec", "run", "count", "self-test", "demo", "lint", "figures", "bench", "profile"];

/// Runs a program that must succeed without error output, and returns its standard output.
fn output_of(name: &str, arguments: &[&str]) -> String {
    let output = Command::new(program(name)).args(arguments).output().expect("it runs");
    assert_eq!((output.status.code(), stderr(&output).as_str()), (Some(0), ""), "{name} {arguments:?}");
    stdout(&output)
}

/// Returns the help text of a command. Checks that `-h` and `--help` print the same.
fn help(name: &str, command: &str) -> String {
    let words: Vec<&str> = command.split_whitespace().collect();
    if words.first() == Some(&"help") {
        return output_of(name, &words);
    }
    let [short, long] = ["-h", "--help"].map(|flag| output_of(name, &[&words[..], &[flag]].concat()));
    assert_eq!(short, long, "{name} {command}");
    long
}

#[test]
fn every_help_fits_a_screen_and_ends_with_an_example() {
    for (name, commands) in [("tally", TALLY), ("tally-lab", LAB)] {
        for &command in commands {
            let help = help(name, command);
            let most = if (name, command) == ("tally", "run") { MAX_LINES_OF_RUN } else { MAX_LINES };
            assert!(help.lines().count() <= most, "{name} {command}: {} lines", help.lines().count());
            for line in help.lines() {
                assert!(line.chars().count() <= WIDTH, "{name} {command}: {line}");
            }
            let last = help.lines().last().expect("it says something");
            assert!(
                last.starts_with(&format!("  {name} ")),
                "{name} {command} ends without an example: {last}"
            );
        }
    }
}

#[test]
fn every_command_is_covered_by_these_tests() {
    for (name, commands) in [("tally", TALLY), ("tally-lab", LAB)] {
        let help = help(name, "");
        let listed =
            help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
        // Lines with a larger indentation continue the line above.
        let listed = listed.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
        for command in listed.filter_map(|line| line.split_whitespace().next()).filter(|name| *name != "help")
        {
            assert!(commands.iter().any(|covered| covered.ends_with(command)), "{name} {command}");
        }
    }
}

#[test]
fn bash_completes_commands_options_and_values() {
    let completions = output_of("tally", &["completions", "bash"]);
    let completed = |words: &[&str]| {
        let script = format!(
            "{completions}\nCOMP_WORDS=({}); COMP_CWORD={}; _tally tally \"${{COMP_WORDS[-1]}}\" \"${{COMP_WORDS[-2]}}\"\n\
             printf '%s\\n' \"${{COMPREPLY[@]}}\"",
            words.join(" "),
            words.len() - 1
        );
        let output = Command::new("bash").args(["--norc", "-c", &script]).output().expect("bash runs");
        assert_eq!(stderr(&output), "");
        stdout(&output).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(completed(&["tally", "do"]), ["doctor"]);
    assert_eq!(completed(&["tally", "run", "--pmu-"]), ["--pmu-log", "--pmu-log-size", "--pmu-policy"]);
    assert_eq!(completed(&["tally", "run", "--pmu", "amd"]), ["amd", "amd-legacy"]);
}

#[test]
fn there_are_completions_for_other_shells_too() {
    for (shell, words) in [("zsh", "#compdef tally"), ("fish", "complete -c tally ")] {
        let completions = output_of("tally", &["completions", shell]);
        assert!(completions.contains(words) && completions.contains("pmu-log"), "{shell}: {completions}");
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let folder = tempfile::tempdir().expect("temporary folders can be made");
    let pages = folder.path().join("man1");
    assert_eq!(output_of("tally", &["man", pages.to_str().expect("it is text")]), "");
    let page =
        |name: &str| fs::read_to_string(pages.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    for command in TALLY.iter().map(|command| command.trim_start_matches("help ")) {
        let name = if command.is_empty() { "tally".to_owned() } else { format!("tally-{command}") };
        let page = page(&format!("{name}.1"));
        assert!(page.contains(&format!(".TH {name} 1")), "{page}");
        assert!(page.contains("Example"), "{name}");
    }
    assert_eq!(fs::read_dir(&pages).expect("it was made").count(), TALLY.len());
    assert!(page("tally-run.1").contains("\\fB\\-\\-pmu\\-log\\fR"));
    assert_eq!(output_of("tally", &["man"]), page("tally.1"));
}
