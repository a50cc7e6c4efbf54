//! Choices among small lists of packages.

use super::*;

const URI: &str = "http://mirror.example/debian";

/// Returns a list with packages, each with its version and more fields.
fn list(packages: &[(&str, &str, &str)]) -> String {
    let stanza = |(name, version, fields): &(&str, &str, &str)| {
        format!(
            "Package: {name}\nVersion: {version}\nArchitecture: amd64\nFilename: pool/{name}.deb\nSize: 1\nSHA256: {}\n{fields}\n\n",
            "00".repeat(32)
        )
    };
    packages.iter().map(stanza).collect()
}

/// Returns the names of the packages that are chosen, with their versions.
fn chosen(packages: &[(&str, &str, &str)], names: &[&str]) -> Result<String, Unmet> {
    let packages = Index::new([(list(packages).as_str(), URI)]).resolve(names)?;
    let names: Vec<String> =
        packages.iter().map(|package| format!("{} {}", package.name, package.version)).collect();
    Ok(names.join(", "))
}

#[test]
fn dependencies_of_dependencies_are_chosen_once() {
    let packages = [
        ("perf", "1", "Depends: libc6 (>= 2), libelf1:any, perl"),
        ("libelf1", "1", "Pre-Depends: libc6"),
        ("libc6", "2", "Depends: libelf1"),
        ("perl", "5", "Recommends: more"),
        ("more", "1", ""),
    ];
    assert_eq!(chosen(&packages, &["perf"]).unwrap(), "perf 1, libc6 2, libelf1 1, perl 5");
}

#[test]
fn the_newest_version_of_all_archives_is_chosen() {
    let (main, security) = (list(&[("a", "1.10", "")]), list(&[("a", "1.10+deb12u1", ""), ("b", "1", "")]));
    let index = Index::new([(main.as_str(), URI), (security.as_str(), "http://security.example")]);
    let packages = index.resolve(&["a"]).unwrap();
    assert_eq!(packages[0].version, "1.10+deb12u1");
    assert_eq!(packages[0].uri, "http://security.example/pool/a.deb");
    let index = Index::new([(security.as_str(), URI), (main.as_str(), URI)]);
    assert_eq!(index.resolve(&["a"]).unwrap()[0].version, "1.10+deb12u1");
}

#[test]
fn of_alternatives_the_first_that_fits_is_chosen_unless_another_is_there() {
    let packages =
        [("a", "1", "Depends: none | b (>= 3) | c | d"), ("b", "2", ""), ("c", "1", ""), ("d", "1", "")];
    assert_eq!(chosen(&packages, &["a"]).unwrap(), "a 1, c 1");
    assert_eq!(chosen(&packages, &["a", "d"]).unwrap(), "a 1, d 1");
}

#[test]
fn a_virtual_package_is_provided_by_the_most_important_one() {
    let packages = [
        ("a", "1", "Depends: awk, mail (= 2)"),
        ("mawk", "1", "Provides: awk\nPriority: required"),
        ("gawk", "1", "Provides: awk\nPriority: optional"),
        ("exim", "1", "Provides: mail"),
        ("postfix", "1", "Provides: mail (= 2)"),
    ];
    assert_eq!(chosen(&packages, &["a"]).unwrap(), "a 1, mawk 1, postfix 1");
    assert_eq!(chosen(&packages, &["gawk", "a"]).unwrap(), "gawk 1, a 1, postfix 1");
    assert_eq!(chosen(&packages, &["awk"]).unwrap(), "mawk 1");
}

#[test]
fn what_is_not_there_is_named() {
    assert_eq!(chosen(&[], &["a"]), Err(Unmet::NoPackage("a".into())));
    let packages = [("a", "1", "Depends: b (>> 1) |\n c"), ("b", "1", "")];
    let missing = Unmet::Dependency { package: "a".into(), on: "b (>> 1) | c".into() };
    assert_eq!(chosen(&packages, &["a"]), Err(missing));
}
