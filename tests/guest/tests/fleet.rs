//! The units for systemd in `packaging/`: systemd accepts them, and they leave a service no more than they say.

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// Highest exposure that `systemd-analyze security` may see, in tenths: it calls 5 and less "OK".
const MAX_EXPOSURE: &str = "--threshold=50";

/// Copies the units. What they execute is not installed here, so another program takes its place.
fn units() -> TempDir {
    let copies = tempfile::tempdir().unwrap();
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
    for unit in fs::read_dir(units).unwrap() {
        let unit = unit.unwrap();
        let text = fs::read_to_string(unit.path()).unwrap().replace("/usr/bin/tally", "/bin/true");
        // An instance, in place of the template.
        let name = unit.file_name().into_string().unwrap().replace('@', "@web");
        fs::write(copies.path().join(name), text).unwrap();
    }
    copies
}

/// Runs `systemd-analyze` on a unit. Returns what it says if it is not content, or nothing if it is not installed.
fn analyze(arguments: &[&str], unit: &Path) -> Option<String> {
    let Ok(output) = Command::new("systemd-analyze").args(arguments).arg(unit).output() else {
        println!("skipped: there is no systemd-analyze");
        return None;
    };
    let said = [output.stdout, output.stderr].concat();
    (!output.status.success()).then(|| String::from_utf8_lossy(&said).into_owned())
}

#[test]
fn systemd_accepts_the_units_and_finds_them_confined() {
    let units = units();
    let mut number = 0;
    for unit in fs::read_dir(units.path()).unwrap() {
        let unit = unit.unwrap().path();
        assert_eq!(analyze(&["verify", "--man=no"], &unit), None, "{}", unit.display());
        assert_eq!(analyze(&["security", "--offline=yes", MAX_EXPOSURE], &unit), None, "{}", unit.display());
        number += 1;
    }
    assert_eq!(number, 2);
}
