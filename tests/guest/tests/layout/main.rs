//! Checks how the sources are laid out: within each folder of each crate, what imports what has an order, so that no
//! import runs upwards and no files import each other in a circle.
//!
//! A file is a module. Modules of the same folder are its rooms: with all that is in them, they must be without a
//! circle. A module may take the items of those that it is in, which is Rust's usual idiom, but what is deep in a crate
//! takes nothing that is its root's own.

mod c;
mod rust;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// What one file or room takes from others: the names by which it does so, with the file that has them.
type Taken = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Returns the first circle of rooms, each with the next one and what it takes from there.
fn circle(taken: &Taken) -> Option<String> {
    fn search<'a>(
        room: &'a str,
        taken: &'a Taken,
        way: &mut Vec<&'a str>,
        done: &mut BTreeSet<&'a str>,
    ) -> Option<Vec<&'a str>> {
        if let Some(at) = way.iter().position(|before| *before == room) {
            return Some(way[at..].to_vec());
        }
        if !done.insert(room) {
            return None;
        }
        way.push(room);
        let found = taken.get(room).into_iter().flat_map(BTreeMap::keys);
        let found = found.filter(|other| *other != room).find_map(|other| search(other, taken, way, done));
        way.pop();
        found
    }
    let mut done = BTreeSet::new();
    let found = taken.keys().find_map(|room| search(room, taken, &mut Vec::new(), &mut done))?;
    let next = found.iter().cycle().skip(1);
    Some(found.iter().zip(next).fold(String::from("a circle:"), |mut text, (room, next)| {
        let names: Vec<&str> = taken[*room][*next].iter().map(String::as_str).collect();
        write!(text, "\n  {room} takes from {next}: {}", names.join(", ")).expect("it is a string");
        text
    }))
}

fn project() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the project is there")
}

/// Returns the crates of the project: the folders with a manifest and sources.
fn crates(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("the project can be read") {
        let path = entry.expect("it can be read").path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() && name != "target" && name != "corpus" && !name.starts_with('.') {
            crates(&path, found);
        }
    }
    if folder.join("Cargo.toml").is_file() && folder.join("src").is_dir() {
        found.push(folder.to_owned());
    }
}

#[test]
fn no_files_import_each_other_in_a_circle_and_no_import_runs_upwards() {
    let mut all = Vec::new();
    crates(&project(), &mut all);
    assert!(all.len() > 12, "{all:?}");
    let mut files = 0;
    let faults: Vec<String> = all
        .iter()
        .flat_map(|folder| rust::roots(folder))
        .flat_map(|root| {
            let tree = rust::Tree::read(&root, &project());
            files += tree.len();
            tree.faults()
        })
        .collect();
    assert!(files > 500, "{files}");
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn no_files_in_c_call_each_other_in_a_circle() {
    let folder = project().join("guest-images/payloads");
    let taken = c::taken(&folder);
    assert!(taken.len() > 5, "{taken:?}");
    assert_eq!(circle(&taken), None, "{}", circle(&taken).unwrap_or_default());
}

/// Writes files and returns what is wrong with the crate that they are.
fn faults(files: &[(&str, &str)]) -> Vec<String> {
    let folder = tempfile::tempdir().expect("there is room");
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::create_dir_all(path.parent().expect("it has one")).expect("it is a folder of this test");
        std::fs::write(path, text).expect("it is a folder of this test");
    }
    rust::Tree::read(&folder.path().join("lib.rs"), folder.path()).faults()
}

#[test]
fn a_circle_is_found_through_re_exports_and_within_folders() {
    let found = faults(&[
        ("lib.rs", "mod a; mod b; pub use a::Thing; pub use other::Name;"),
        ("a.rs", "mod deep; pub use other::Crate; pub struct Thing; // use crate::c::Nothing"),
        ("a/deep.rs", "use super::{Crate, Thing}; use crate::Name; use crate::b::{self, Other as _};"),
        ("b.rs", "use crate::Thing; pub struct Other; #[cfg(test)] mod tests { use crate::a::deep; }"),
    ]);
    assert_eq!(found, ["a circle:\n  a.rs takes from b.rs: Other, b\n  b.rs takes from a.rs: Thing"]);
}

#[test]
fn what_is_deep_in_a_crate_may_take_its_parents_items_but_not_the_roots() {
    let found = faults(&[
        ("lib.rs", "mod a; pub fn top() {}"),
        ("a.rs", "mod deep; fn own() {}"),
        ("a/deep.rs", "mod deeper; fn f() { super::own(); debug!(\"{}\", crate::top()); }"),
        ("a/deep/deeper.rs", "use crate::a::own;"),
    ]);
    assert_eq!(found, ["upwards: a/deep.rs takes from lib.rs: top"]);
}
