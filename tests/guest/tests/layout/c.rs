//! Reads which functions and variables of the payloads' C files are used in which others.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::Taken;

/// Returns what each C file of a folder takes from the others.
pub fn taken(folder: &Path) -> Taken {
    let files: BTreeMap<String, String> = fs::read_dir(folder)
        .expect("there are payloads")
        .map(|entry| entry.expect("it can be read").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "c"))
        .map(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            (name, code(&fs::read_to_string(&path).expect("it is text")))
        })
        .collect();
    let owners: BTreeMap<&str, &str> = files
        .iter()
        .flat_map(|(file, text)| text.lines().filter_map(defined).map(move |name| (name, file.as_str())))
        .collect();
    let mut taken = Taken::new();
    for (file, text) in &files {
        let used = taken.entry(file.clone()).or_default();
        for word in text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
            if let Some(owner) = owners.get(word).filter(|owner| *owner != file) {
                used.entry((*owner).to_owned()).or_default().insert(word.to_owned());
            }
        }
    }
    taken
}

/// Returns the name of what a line at the left margin defines for other files, if it does.
fn defined(line: &str) -> Option<&str> {
    let is_local = ["static ", "typedef ", "extern ", "#", "}", " ", "\t", "struct {", "enum "];
    if line.is_empty() || is_local.iter().any(|start| line.starts_with(start)) || line.ends_with(");") {
        return None;
    }
    // A type has a brace behind its name.
    let (before, _) = line.split_once(['(', '=', ';', '[', '{'])?;
    let before = before.trim_end();
    if line[before.len()..].trim_start().starts_with('{') {
        return None;
    }
    // A definition has a type before its name.
    before.split_once([' ', '*'])?;
    before.rsplit([' ', '*']).next().filter(|name| !name.is_empty())
}

/// Returns a text without its comments and what is between quotes.
fn code(text: &str) -> String {
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.map(|line| line.split('"').step_by(2).collect::<Vec<_>>().join(" ") + "\n").collect()
}
