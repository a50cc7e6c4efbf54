//! Indexes: who has signed them, and when.

use std::time::SystemTime;

use super::*;

/// Replaces a text in the index of a mirror's suite, without a new signature.
fn change(setup: &Setup, from: &str, to: &str) {
    let index = setup.key.sign(&format!("Codename: bookworm\nDate: {from}\n"));
    setup.mirror.put(INDEX, Answer::File(index.replace(from, to).into_bytes()));
}

#[test]
fn a_package_of_a_signed_mirror_is_fetched_once_and_unpacked() {
    let setup = Setup::new();
    setup.install().unwrap();
    assert!(fs::read_to_string(setup.root().join("usr/share/hello")).unwrap().ends_with("\n99999"));
    assert_eq!(setup.arriving(), [0; 0]);
    let list = "dists/bookworm/main/binary-amd64/Packages.xz";
    let expected = [INDEX, list, DEB].map(|path| format!("GET /debian/{path} HTTP/1.1"));
    assert_eq!(setup.mirror.requests(), expected);
    let repository = setup.repository();
    let packages = repository.resolve(&["hello"]).unwrap();
    repository.unpack(&packages, &setup.root(), &mut Progress::silent()).unwrap();
    assert_eq!(setup.mirror.requests(), [""; 0], "what is here is not fetched again");
    // A changed file in the cache is.
    fs::write(setup.cached(), "other").unwrap();
    repository.unpack(&packages, &setup.root(), &mut Progress::silent()).unwrap();
    assert_eq!(setup.mirror.requests().len(), 1);
}

#[test]
fn an_index_with_a_wrong_signature_is_refused() {
    let setup = Setup::new();
    change(&setup, "Sat, 11 Jul 2026 10:16:37 UTC", "Sat, 18 Jul 2026 10:16:37 UTC");
    let said = setup.refusal();
    assert!(said.contains("dists/bookworm/InRelease is not used: the signature by key "), "{said}");
    assert!(said.contains(" is wrong. ") && said.contains("TALLY_MIRROR"), "{said}");
    assert!(setup.repository().lists.updated().is_none());
}

#[test]
fn an_index_that_somebody_else_has_signed_is_refused() {
    let setup = Setup::new();
    let (said, other) = (setup.repository_with(None, &TestKey::new()), &mut Progress::silent());
    let said = said.update(other).unwrap_err().to_string();
    assert!(said.contains("it is signed by keys that this program does not have ("), "{said}");
}

#[test]
fn an_index_signed_by_a_key_that_has_expired_is_refused() {
    const DAY: Duration = Duration::from_hours(24);
    let mut setup = Setup::new();
    setup.key = TestKey::lasting(3 * DAY, Some(4 * DAY));
    setup.publish("");
    setup.install().unwrap();
    setup.key = TestKey::lasting(3 * DAY, Some(2 * DAY));
    setup.publish("");
    let (said, day) = (setup.refusal(), crate::date::day(SystemTime::now() - DAY));
    assert!(said.contains("InRelease is not used: the key "), "{said}");
    assert!(said.contains(&format!(" has expired on {day}. ")), "{said}");
}

#[test]
fn an_index_older_than_the_one_that_is_here_is_refused() {
    let setup = Setup::new();
    setup.publish("Date: Sat, 18 Jul 2026 10:16:37 UTC\n");
    setup.install().unwrap();
    setup.publish("Date: Sat, 11 Jul 2026 10:16:37 UTC\n");
    let said = setup.refusal();
    assert!(said.contains("the index is of 2026-07-11, older than the one of 2026-07-18 in "), "{said}");
    let here = setup.folder.path().join("indexes/bookworm/bookworm");
    assert!(said.contains(here.file_name().unwrap().to_str().unwrap()), "{said}");
    assert!(fs::read_to_string(here.join("InRelease")).unwrap().contains("18 Jul"));
    setup.publish("Date: Sun, 19 Jul 2026 10:16:37 UTC\n");
    setup.install().unwrap();
}

#[test]
fn an_index_that_is_no_longer_valid_is_refused() {
    let setup = Setup::new();
    setup.publish("Valid-Until: Sun, 12 Jul 2020 10:16:37 UTC\n");
    let said = setup.refusal();
    assert!(said.contains("InRelease is not used: the index was valid until 2020-07-12 only. "), "{said}");
    let accepting = setup.repository_of(None, &setup.key, Expiry::Accepted);
    accepting.update(&mut Progress::silent()).expect("this machine's administrator accepts it");
    setup.publish("Valid-Until: Fri, 12 Jul 2999 10:16:37 UTC\n");
    setup.install().unwrap();
}

#[test]
fn the_index_of_another_release_is_refused() {
    let setup = Setup::new();
    let index = setup.key.sign("Codename: trixie\nDate: Sat, 11 Jul 2026 10:16:37 UTC\nSHA256:\n");
    setup.mirror.put(INDEX, Answer::File(index.into_bytes()));
    let said = setup.refusal();
    assert!(said.contains("the index is that of trixie, not of bookworm. "), "{said}");
    setup.mirror.put(INDEX, Answer::File(setup.key.sign("Something: else\n").into_bytes()));
    assert!(setup.refusal().contains("the index is not an index of packages. "));
}

#[test]
fn a_page_in_place_of_an_index_is_refused() {
    let setup = Setup::new();
    for page in [&b"<html>Please log in</html>"[..], b"", b"\xff\xfe"] {
        setup.mirror.put(INDEX, Answer::File(page.to_vec()));
        let said = setup.refusal();
        assert!(said.contains("it is not a signed text. A proxy may have answered"), "{said}");
    }
}

#[test]
fn security_updates_come_from_their_own_archive() {
    let (setup, security) = (Setup::new(), Mirror::start());
    security.publish("bookworm-security", &setup.key, &[("patch", &setup.deb)], "");
    let repository = setup.repository_with(Some(&security), &setup.key);
    repository.update(&mut Progress::silent()).unwrap();
    assert_eq!(repository.resolve(&["hello", "patch"]).unwrap().len(), 2);
}

#[test]
fn a_mirror_without_security_updates_is_used_without_them() {
    let (setup, security) = (Setup::new(), Mirror::start());
    let repository = setup.repository_with(Some(&security), &setup.key);
    repository.update(&mut Progress::silent()).unwrap();
    assert_eq!(repository.resolve(&["hello"]).unwrap().len(), 1);
    // A mirror that is being updated has another list than the index says.
    security.publish("bookworm-security", &setup.key, &[("patch", &setup.deb)], "");
    security.put("dists/bookworm-security/main/binary-amd64/Packages.xz", Answer::File(b"older".to_vec()));
    repository.update(&mut Progress::silent()).unwrap();
    assert!(repository.resolve(&["patch"]).is_err());
    // Nobody can bring an older one in between.
    let publish = |date: &str| {
        let date = format!("Date: {date} 10:16:37 UTC\n");
        security.publish("bookworm-security", &setup.key, &[("patch", &setup.deb)], &date);
        repository.update(&mut Progress::silent())
    };
    let said = publish("Fri, 10 Jul 2026").unwrap_err().to_string();
    assert!(said.contains("is of 2026-07-10, older than the one of 2026-07-11"), "{said}");
    publish("Sun, 12 Jul 2026").unwrap();
    assert_eq!(repository.resolve(&["patch"]).unwrap().len(), 1);
}

#[test]
fn security_updates_that_cannot_be_verified_are_not_passed_over() {
    let (setup, security) = (Setup::new(), Mirror::start());
    security.publish("bookworm-security", &TestKey::new(), &[("patch", &setup.deb)], "");
    let repository = setup.repository_with(Some(&security), &setup.key);
    let said = repository.update(&mut Progress::silent()).unwrap_err().to_string();
    assert!(said.contains("bookworm-security/InRelease is not used: "), "{said}");
}

#[test]
fn while_a_mirror_is_being_updated_the_list_is_found_by_its_hash() {
    let setup = Setup::new();
    setup.publish("Acquire-By-Hash: yes\n");
    setup.install().unwrap();
    let hash = setup.repository().lists.read(List::Packages).unwrap().is_some();
    assert!(hash, "the plain name is good enough where there is no other");
    let list = "dists/bookworm/main/binary-amd64/Packages.xz";
    let path = setup.folder.path().join("indexes/bookworm/bookworm/Packages.xz");
    let packed = fs::read(&path).unwrap();
    let digest = listed::to_hex(&listed::hash(&*packed).unwrap());
    fs::remove_file(path).unwrap();
    setup.mirror.put(list, Answer::File(b"newer".to_vec()));
    assert!(setup.refusal().contains("bytes instead of"));
    setup
        .mirror
        .put(&format!("dists/bookworm/main/binary-amd64/by-hash/SHA256/{digest}"), Answer::File(packed));
    setup.install().unwrap();
}

#[test]
fn debians_own_keys_are_in_the_program() {
    let (first, last) = keys_expire();
    assert_eq!((crate::date::day(first), crate::date::day(last)), ("2031-01-19".into(), "2035-03-28".into()));
}
