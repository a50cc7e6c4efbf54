//! Checks of the documentation: every link has a target, every time is said with how and when it was measured, and no
//! line is longer than 120 characters.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

const WIDTH: usize = 120;
/// Maximum size of the README: a screen and a half.
const README_BYTES: usize = 6 << 10;

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the project is there")
}

fn pages() -> Vec<PathBuf> {
    let mut pages: Vec<_> = [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "vmm/lab/README.md",
        "vmm/lab/cpu/README.md",
        "vmm/lab/cpu/bochs/README.md",
    ]
    .map(|page| project().join(page))
    .into();
    let docs = fs::read_dir(project().join("docs")).expect("there is documentation");
    pages.extend(
        docs.map(|entry| entry.expect("it can be read").path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "md")),
    );
    pages
}

fn read(page: &Path) -> String {
    fs::read_to_string(page).unwrap_or_else(|error| panic!("{}: {error}", page.display()))
}

/// Returns the lines outside code blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let fence = line.starts_with("```");
        is_code ^= fence;
        !is_code && !fence
    })
}

/// Returns the targets of a page's links.
fn links(text: &str) -> Vec<String> {
    let of_line = |line: &str| -> Vec<String> {
        let targets = line.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
        targets.map(|(target, _)| target.to_owned()).collect()
    };
    prose(text).flat_map(of_line).collect()
}

/// Returns the anchors of a page's headings, as GitHub derives them.
fn anchors(text: &str) -> BTreeSet<String> {
    let anchor = |heading: &str| -> String {
        let heading = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    prose(text).filter(|line| line.starts_with('#')).map(anchor).collect()
}

#[test]
fn every_link_has_a_target() {
    for page in pages() {
        for link in links(&read(&page)) {
            if link.starts_with("https://") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target =
                if file.is_empty() { page.clone() } else { page.parent().expect("a folder").join(file) };
            assert!(target.exists(), "{}: {link}: there is no such file", page.display());
            if !anchor.is_empty() {
                assert!(
                    anchors(&read(&target)).contains(anchor),
                    "{}: {link}: no such heading",
                    page.display()
                );
            }
        }
    }
}

/// Pages whose times are not measured: they say how long Tally waits or takes at most, by design, or what was so in a
/// version.
const NOT_MEASURED: [&str; 4] = ["operations.md", "pmu.md", "usage.md", "CHANGELOG.md"];
/// Numbers that are written out.
const NUMBERS: [&str; 6] = ["two", "three", "four", "five", "ten", "twenty"];
/// Units of time that a reader waits.
const UNITS: [&str; 7] = ["s", "ms", "second", "seconds", "min", "minutes", "hours"];

/// Returns whether a line says how long something takes.
fn has_time(line: &str) -> bool {
    let is_word = |c: char| c.is_alphanumeric() || ['.', '\''].contains(&c);
    let words: Vec<&str> = line.split(|c| !is_word(c)).filter(|word| !word.is_empty()).collect();
    let is_number = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_digit()) || NUMBERS.contains(&word.to_lowercase().as_str())
    };
    words.windows(2).any(|pair| is_number(pair[0]) && UNITS.contains(&pair[1].trim_end_matches('.')))
}

/// Returns whether a line has the date and the commit of what was measured.
fn has_origin(line: &str) -> bool {
    let is_date = |word: &str| {
        let parts: Vec<usize> = word.split('-').map(str::len).collect();
        parts == [4, 2, 2] && word.chars().all(|c| c == '-' || c.is_ascii_digit())
    };
    let words: Vec<&str> = line.split([' ', ',', '(', ')', '.', ':', ';']).collect();
    words.iter().any(|word| is_date(word)) && line.contains("commit ")
}

/// Returns the sections of a page: each heading with what follows it, code blocks included.
fn sections(text: &str) -> Vec<String> {
    let mut sections = vec![String::new()];
    let mut is_code = false;
    for line in text.lines() {
        is_code ^= line.starts_with("```");
        if line.starts_with('#') && !is_code {
            sections.push(String::new());
        }
        let last = sections.last_mut().expect("there is always one");
        last.push_str(line);
        last.push('\n');
    }
    sections
}

#[test]
fn a_time_is_known_by_its_number_and_unit() {
    for line in
        ["it takes 18 min 40 s", "| a boot | 0.5 s |", "ten minutes, twenty the first time", "in 3 seconds."]
    {
        assert!(has_time(line), "{line}");
    }
    for line in [
        "takes minutes",
        "six events",
        "version 2 starts",
        "2 GiB",
        "Debian 13's",
        "a minute each",
        "--minutes 240 share",
    ] {
        assert!(!has_time(line), "{line}");
    }
    assert!(has_origin("tally-lab figures boot  # 2026-11-26, commit dc0634a"));
    assert!(!has_origin("2026-11-26") && !has_origin("commit dc0634a") && !has_origin("commit 20-1-1"));
}

#[test]
fn every_time_is_said_with_how_and_when_it_was_measured() {
    let mut unsaid = String::new();
    for page in pages().iter().filter(|page| !NOT_MEASURED.iter().any(|other| page.ends_with(other))) {
        for section in sections(&read(page)) {
            if section.lines().any(has_origin) && section.contains('`') {
                continue;
            }
            // A time may also be a link to where this is said.
            for line in section.lines().filter(|line| has_time(line) && !line.contains(".md#")) {
                writeln!(unsaid, "{}: {line}", page.display()).expect("a string takes all");
            }
        }
    }
    assert!(unsaid.is_empty(), "by which command, when, of which commit?\n{unsaid}");
}

#[test]
fn lines_have_at_most_120_characters() {
    for page in pages() {
        for line in prose(&read(&page)).filter(|line| !line.starts_with(['|', '<'])) {
            assert!(line.chars().count() <= WIDTH, "{}: {line}", page.display());
        }
    }
}

#[test]
fn the_readme_is_at_most_a_screen_and_a_half() {
    let length = read(&project().join("README.md")).len();
    assert!(length <= README_BYTES, "{length} bytes");
}
