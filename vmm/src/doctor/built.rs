//! Facts about what Tally builds at its first use: the default guest and the lab.

use std::env;
use std::fs;
use std::path::Path;

use guest_images::Release;
use guest_images::cache::Cache;
use guest_images::versions::{self, Built};

use super::updates::{self, ago, described};
use crate::fact::Fact;
use crate::lab;

/// Returns the facts about the cache, the default guest and the lab. Fetches the package lists first if `fetch`.
pub fn facts(fetch: bool) -> Vec<Fact> {
    let cache = match Cache::open() {
        Ok(cache) => cache,
        Err(error) => return vec![Fact::note("cache", format!("what is built cannot be kept: {error}"))],
    };
    let mut facts = vec![guest(&cache)];
    if lab::LAB_AVAILABLE {
        facts.push(lab(cache.root()));
    }
    facts.extend(updates::facts(&cache, fetch));
    facts
}

fn guest(cache: &Cache) -> Fact {
    let about = "guest";
    if let Ok(folder) = env::var("TALLY_GUEST")
        && !folder.is_empty()
    {
        return Fact::note(about, format!("the default guest is that of TALLY_GUEST, in {folder}"));
    }
    match versions::built_kernel(cache, Release::default()) {
        Some(kernel) if !entries(cache.root(), "guest-initrd-").is_empty() => Fact::note(
            about,
            format!(
                "the default guest is built, in {}: {}",
                cache.root().display(),
                described("Linux", &kernel)
            ),
        ),
        _ => {
            Fact::note(about, "the default guest is not built yet, which the first `tally run -- true` does")
        }
    }
}

fn lab(cache: &Path) -> Fact {
    let newest = |kind: &str| entries(cache, kind).into_iter().max_by_key(|entry| entry.at);
    match (newest("lab-cpu-"), newest("lab-host-")) {
        (Some(cpu), Some(_)) => Fact::note("lab", format!("the lab is built, {}", ago(cpu.at))),
        _ => Fact::note("lab", "the lab is not built, which takes minutes, once: `tally lab build`"),
    }
}

/// Returns the complete entries in a directory whose names start with a prefix.
pub fn entries(folder: &Path, prefix: &str) -> Vec<Built> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    entries
        .filter(|entry| is_entry(&entry.file_name().to_string_lossy(), prefix))
        .filter_map(|entry| Built::at(entry.path()))
        .collect()
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
        let says = || lab(folder.path()).says;
        assert!(says().starts_with("the lab is not built"));
        fs::create_dir(folder.path().join("lab-host-bookworm-13882cbe278501a3")).unwrap();
        assert_eq!(says(), "the lab is built, less than an hour ago");
    }
}
