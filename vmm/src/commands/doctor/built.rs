//! Facts about what Tally builds at its first use: the default guest and the lab.

use std::env;
use std::fs;
use std::path::Path;
use std::time::SystemTime;

use guest_images::Release;
use guest_images::cache::Cache;
use guest_images::versions::{self, CacheEntry};

use crate::host::fact::Fact;
use crate::host::lab;

/// Returns the facts about the default guest and the lab.
pub fn facts(cache: &Cache) -> Vec<Fact> {
    let mut facts = vec![guest(cache)];
    if lab::LAB_AVAILABLE {
        facts.push(lab(cache.root()));
    }
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
pub fn entries(folder: &Path, prefix: &str) -> Vec<CacheEntry> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok);
    entries
        .filter(|entry| is_entry(&entry.file_name().to_string_lossy(), prefix))
        .filter_map(|entry| CacheEntry::at(entry.path()))
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

/// Returns which version an entry has, and how old it is.
pub fn described(what: &str, built: &CacheEntry) -> String {
    let version = built.version.as_ref().map(|version| format!(" {version}")).unwrap_or_default();
    format!("{what}{version}, downloaded {}", ago(built.at))
}

/// Returns how long ago a time was.
fn ago(at: SystemTime) -> String {
    let hours = at.elapsed().map_or(0, |age| age.as_secs() / 3600);
    match (hours / 24, hours) {
        (0, 0) => "less than an hour ago".to_owned(),
        (0, 1) => "an hour ago".to_owned(),
        (0, hours) => format!("{hours} hours ago"),
        (1, _) => "a day ago".to_owned(),
        (days, _) => format!("{days} days ago"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

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

    #[test]
    fn ages_are_in_hours_and_days() {
        let ago = |hours| ago(SystemTime::now() - Duration::from_hours(hours));
        assert_eq!([ago(0), ago(1), ago(23)], ["less than an hour ago", "an hour ago", "23 hours ago"]);
        assert_eq!([ago(24), ago(49)], ["a day ago", "2 days ago"]);
    }
}
