//! Checks of the sources that rustfmt and clippy leave alone: how imports are grouped, that lines of comments have at
//! most 120 characters, that one place prints, and that the project does not grow to more files than people can list.

use std::fs;
use std::path::{Path, PathBuf};

fn files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("the project can be read") {
        let path = entry.expect("it can be read").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if !path.is_dir() {
            found.push(path);
        } else if name != "target" && !name.starts_with('.') {
            files(&path, found);
        }
    }
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    files(directory, found);
    found.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
}

#[test]
fn the_project_has_at_most_1000_files() {
    let mut found = Vec::new();
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."), &mut found);
    assert!(found.len() <= 1000, "{} files", found.len());
}

/// Returns the blocks of consecutive imports at the left margin, up to the first item of another kind.
fn blocks(text: &str) -> Vec<Vec<&str>> {
    let mut blocks = vec![Vec::new()];
    let others = ["//", "#", "mod ", "pub ", "extern ", "}", " "];
    for line in text.lines() {
        if line.starts_with("use ") {
            blocks.last_mut().expect("there is one").push(line);
        } else if line.is_empty() {
            blocks.push(Vec::new());
        } else if !others.iter().any(|other| line.starts_with(other)) {
            break;
        }
    }
    blocks.retain(|block| !block.is_empty());
    blocks
}

#[test]
fn imports_of_the_standard_library_come_first_in_a_group_of_their_own() {
    let is_standard = |line: &&str| ["use std::", "use core::"].iter().any(|start| line.starts_with(start));
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut found = Vec::new();
    sources(&project, &mut found);
    assert!(found.len() > 300, "{}", found.len());
    for path in found {
        let text = fs::read_to_string(&path).expect("it is text");
        for (number, block) in blocks(&text).iter().enumerate() {
            let standard = block.iter().filter(|line| is_standard(line)).count();
            let is_grouped = standard == 0 || standard == block.len() && number == 0;
            assert!(is_grouped, "{}: {block:#?}", path.display());
        }
    }
}

#[test]
fn comments_have_at_most_120_characters_but_for_tables() {
    let mut found = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."), &mut found);
    for path in found {
        let text = fs::read_to_string(&path).expect("it is text");
        for (number, line) in text.lines().enumerate() {
            let is_comment = line.trim_start().starts_with("//");
            let is_table = line.trim_start_matches([' ', '/', '!']).starts_with('|');
            let fits = line.chars().count() <= 120;
            assert!(!is_comment || is_table || fits, "{}:{}: {line}", path.display(), number + 1);
        }
    }
}

/// Files that name a standard stream, and why. All other text of Tally's goes through the first of them, which replaces
/// control characters.
const STREAMS: [(&str, &str); 11] = [
    ("vmm/src/host/printer.rs", "prints"),
    ("vmm/src/run/assembled.rs", "the guest's console is a stream of its own"),
    ("vmm/src/run/streams/choose.rs", "the streams of the guest's command are its own"),
    ("vmm/src/run/flamegraph/destination.rs", "finds a stream that the user has named for the picture"),
    ("vmm/src/run/inherited.rs", "closes all other descriptors"),
    ("vmm/src/run/lost_memory.rs", "a signal handler cannot allocate; its line quotes nobody"),
    ("vmm/src/sandbox/violation.rs", "a signal handler cannot allocate; its line quotes nobody"),
    ("vmm/src/commands/live.rs", "asks whether it is a terminal"),
    ("vmm/src/host/terminal.rs", "asks for the terminal's size"),
    ("guest-images/src/progress.rs", "shows the steps of a build, and replaces control characters"),
    ("vpmu/perf/src/broker/server.rs", "closes them"),
];

/// How a source can get at a standard stream.
const NAMES: [&str; 11] = [
    "print!(",
    "println!(",
    "eprint!(",
    "eprintln!(",
    "dbg!(",
    "stdout()",
    "stderr()",
    "STDOUT_FILENO",
    "STDERR_FILENO",
    "dup2_std",
    "/dev/tty",
];

#[test]
fn what_others_say_is_printed_in_one_place() {
    let project = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut printing = Vec::new();
    for folder in
        ["vmm/src", "vmm/machine/src", "devices/src", "guest-images/src", "vpmu/src", "vpmu/perf/src"]
    {
        let mut found = Vec::new();
        sources(&project.join(folder), &mut found);
        for path in found {
            let text = fs::read_to_string(&path).expect("it is text");
            // The tests of a file are at its end, or files of their own.
            let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
            let is_code = |line: &&str| !line.trim_start().starts_with("//");
            let names_one =
                code.lines().filter(is_code).any(|line| NAMES.iter().any(|name| has_word(line, name)));
            let path = path.strip_prefix(&project).expect("it is there");
            let is_test =
                path.components().any(|part| part.as_os_str() == "tests") || path.ends_with("tests.rs");
            if names_one && !is_test {
                printing.push(path.display().to_string());
            }
        }
    }
    printing.sort();
    let mut allowed = STREAMS.map(|(file, _)| file);
    allowed.sort_unstable();
    assert_eq!(printing, allowed, "use crate::host::printer, or say here why not");
}

/// Returns whether a line has this word, and not only as the end of a longer one.
fn has_word(line: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    line.match_indices(word).any(|(at, _)| !line[..at].ends_with(is_part))
}
