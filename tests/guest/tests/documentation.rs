//! Checks of the documentation: every link has a target, and no line is longer than 120 characters.

use std::collections::BTreeSet;
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
