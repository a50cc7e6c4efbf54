//! Facts about what Tally builds at its first use: the default guest and the lab.

use std::env;
use std::fs;
use std::path::Path;

use guest_images::cache::Cache;

use crate::fact::Fact;
use crate::lab;

/// Returns the facts about the cache, the default guest and the lab.
pub fn facts() -> Vec<Fact> {
    const GUEST: [&str; 2] = ["kernel-", "guest-initrd-"];
    const LAB: [&str; 2] = ["lab-cpu-", "lab-host-"];
    let cache = match Cache::open() {
        Ok(cache) => cache,
        Err(error) => return vec![Fact::note("cache", format!("what is built cannot be kept: {error}"))],
    };
    let guest = match env::var("TALLY_GUEST") {
        Ok(folder) if !folder.is_empty() => {
            Fact::note("guest", format!("the default guest is that of TALLY_GUEST, in {folder}"))
        }
        _ if has_all(cache.root(), &GUEST) => {
            Fact::note("guest", format!("the default guest is built, in {}", cache.root().display()))
        }
        _ => Fact::note(
            "guest",
            "the default guest is not built yet, which the first `tally run -- true` does",
        ),
    };
    let lab = lab::LAB_AVAILABLE.then(|| {
        if has_all(cache.root(), &LAB) {
            Fact::note("lab", "the lab is built")
        } else {
            Fact::note("lab", "the lab is not built, which takes minutes, once: `tally lab build`")
        }
    });
    [Some(guest), lab].into_iter().flatten().collect()
}

/// Returns true if a directory has complete entries with all of these prefixes.
fn has_all(folder: &Path, prefixes: &[&str]) -> bool {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    let names: Vec<String> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    prefixes.iter().all(|prefix| names.iter().any(|name| is_entry(name, prefix)))
}

/// Returns true for a complete entry: its name ends in the hash of what it was built from.
fn is_entry(name: &str, prefix: &str) -> bool {
    name.starts_with(prefix)
        && name
            .rsplit('-')
            .next()
            .is_some_and(|hash| hash.len() == 16 && hash.bytes().all(|b| b.is_ascii_hexdigit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_complete_entries_count_as_built() {
        assert!(is_entry("lab-cpu-13882cbe278501a3", "lab-cpu-"));
        assert!(is_entry("kernel-bookworm-13882cbe278501a3", "kernel-"));
        assert!(!is_entry("lab-cpu-tree", "lab-cpu-"));
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("lab-cpu-13882cbe278501a3")).unwrap();
        assert!(has_all(folder.path(), &["lab-cpu-"]));
        assert!(!has_all(folder.path(), &["lab-cpu-", "lab-host-"]));
    }
}
