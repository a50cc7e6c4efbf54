//! Facts about newer versions of what the default guest and the lab are built from. They are looked up in the package
//! lists as they were last fetched, so that doctor needs no network; `--update` fetches them first. And until when the
//! keys in this program verify such lists.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use guest_images::cache::Cache;
use guest_images::date;
use guest_images::packages::{self, Repository};
use guest_images::versions::{self, Listed};
use guest_images::{Progress, Release, Result};

use super::built::{ago, entries};
use crate::host::fact::Fact;
use crate::host::lab;

const ABOUT: &str = "updates";

/// Returns the facts about what is built. Fetches the package lists first if `fetch`.
pub fn facts(cache: &Cache, fetch: bool) -> Vec<Fact> {
    let release = Release::default();
    let mut facts = vec![keys(SystemTime::now())];
    if fetch && let Err(error) = Repository::update_lists(cache, release, &mut Progress::stderr("tally")) {
        facts.push(Fact::note(ABOUT, format!("the package lists cannot be fetched: {error}")));
    }
    if let Some(built) = versions::built_kernel(cache, release) {
        let command = format!("`rm -r {}` and `tally run -- true`", built.path.display());
        let listed = versions::listed_kernel(cache, release);
        facts.push(fact("Linux", built.version.as_deref(), listed, &command));
    }
    if lab::LAB_AVAILABLE && !entries(cache.root(), LAB_CPU).is_empty() {
        let command = format!("`rm -r {}/{LAB_CPU}*` and `tally lab build`", cache.root().display());
        let listed = versions::listed_source(cache, release, "qemu");
        facts.push(fact("QEMU", version_of_source(&tree(cache)).as_deref(), listed, &command));
    }
    facts
}

/// Returns the fact about Debian's keys in this program.
fn keys(now: SystemTime) -> Fact {
    let (first, last) = packages::keys_expire();
    let (from, to) = (date::day(first), date::day(last));
    let says = if now < last {
        format!("Debian's keys in this program, which verify packages, expire from {from} to {to}")
    } else {
        format!("the last of Debian's keys in this program has expired on {to}: a newer Tally has newer ones")
    };
    Fact::note("keys", says)
}

/// Prefix of the names of the lab CPU's entries and of its source tree.
const LAB_CPU: &str = "lab-cpu-";

/// Returns the directory of the source that the lab CPU was compiled from.
fn tree(cache: &Cache) -> PathBuf {
    cache.root().join("lab-cpu-tree/source")
}

/// Returns the version of an unpacked source package, without its epoch. The changelog begins with `NAME (VERSION)`.
fn version_of_source(source: &Path) -> Option<String> {
    let changelog = fs::read_to_string(source.join("debian/changelog")).ok()?;
    let (version, _) = changelog.lines().next()?.split_once('(')?.1.split_once(')')?;
    Some(version.split_once(':').map_or(version, |(_, rest)| rest).to_owned())
}

/// Compares what is built with the package lists. The command builds the newer one.
fn fact(what: &str, built: Option<&str>, listed: Result<Option<Listed>>, command: &str) -> Fact {
    const FETCH: &str = "`tally doctor --update`";
    let says = match (built, listed) {
        (_, Err(error)) => format!("newer {what}: the package lists cannot be read: {error}"),
        (_, Ok(None)) => format!("newer {what}: no package lists are here; {FETCH} fetches them"),
        (None, Ok(Some(Listed { version, fetched }))) => format!(
            "{what} {version} is in the package lists, fetched {}; which one is built was not recorded: {command}",
            ago(fetched)
        ),
        (Some(built), Ok(Some(Listed { version, fetched }))) if versions::is_newer(&version, built) => {
            format!(
                "{what} {version} is newer than {built}, by the package lists, fetched {}: {command}",
                ago(fetched)
            )
        }
        (Some(built), Ok(Some(Listed { fetched, .. }))) => format!(
            "no {what} is newer than {built}, by the package lists, fetched {}; {FETCH} fetches them anew",
            ago(fetched)
        ),
    };
    Fact::note(ABOUT, says)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn listed(version: &str) -> Listed {
        Listed { version: version.into(), fetched: SystemTime::now() - Duration::from_hours(50) }
    }

    #[test]
    fn it_is_said_when_the_keys_expire() {
        let now = SystemTime::now();
        let says = keys(now).says;
        let expected =
            "Debian's keys in this program, which verify packages, expire from 2031-01-19 to 2035-03-28";
        assert_eq!(says, expected);
        let says = keys(now + Duration::from_hours(20 * 366 * 24)).says;
        assert!(says.contains("has expired on 2035-03-28: a newer Tally"), "{says}");
    }

    #[test]
    fn a_newer_kernel_is_shown_with_the_commands_that_build_it() {
        let fact = fact(
            "Linux",
            Some("6.1.99-1"),
            Ok(Some(listed("6.1.192-2"))),
            "`rm -r x` and `tally run -- true`",
        );
        let start = "Linux 6.1.192-2 is newer than 6.1.99-1, by the package lists, fetched 2 days ago: ";
        assert!(fact.says.starts_with(start), "{fact}");
        assert_eq!(fact.json()["commands"], serde_json::json!(["rm -r x", "tally run -- true"]));
    }

    #[test]
    fn without_a_newer_one_the_command_that_fetches_the_lists_is_shown() {
        for listed in [Some(listed("6.1.192-2")), Some(listed("6.1.176-1")), None] {
            let fact = fact("Linux", Some("6.1.192-2"), Ok(listed), "`rm -r x`");
            assert_eq!(fact.json()["commands"], serde_json::json!(["tally doctor --update"]), "{fact}");
        }
        let unknown = fact("Linux", None, Ok(Some(listed("6.1.192-2"))), "`rm -r x`");
        assert!(unknown.says.contains("was not recorded: `rm -r x`"), "{unknown}");
    }

    #[test]
    fn the_version_of_a_source_tree_is_that_of_its_changelog() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(version_of_source(folder.path()), None);
        fs::create_dir(folder.path().join("debian")).unwrap();
        let text = "qemu (1:7.2+dfsg-7+deb12u18) bookworm; urgency=medium\n\n  * A change.\n";
        fs::write(folder.path().join("debian/changelog"), text).unwrap();
        assert_eq!(version_of_source(folder.path()).as_deref(), Some("7.2+dfsg-7+deb12u18"));
    }
}
