//! Checks of the sources' form that rustfmt leaves alone on a stable toolchain: how imports are grouped, and
//! that lines of comments have at most 120 characters.

use std::fs;
use std::path::{Path, PathBuf};

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("the project can be read") {
        let path = entry.expect("it can be read").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
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
