//! What mirrors and proxies send: answers by HTTP, signed indexes, lists of packages, packages and their programs.
//!
//! The first byte says which of them is behind it.

use std::fs;
use std::path::Path;

use guest_images::untrusted::{body, is_signed, resolve, unpack};

/// Bound on a body.
const LIMIT: u64 = 1 << 20;

/// Runs the target.
pub fn run(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    let text = String::from_utf8_lossy(data);
    match kind % 5 {
        0 => {
            let body = body(data, 0, LIMIT).unwrap_or_default();
            assert!(body.len() <= data.len(), "a body is what was sent");
        }
        1 => drop(body(data, data.len() as u64, LIMIT)),
        2 => assert!(!is_signed(&text), "Debian has signed nothing of this"),
        3 => {
            let chosen = resolve(&text, &["a", "b"]);
            assert!(chosen <= data.len(), "no package is chosen twice");
        }
        _ => package(data),
    }
}

/// Unpacks a package beside a directory into which nothing may get.
fn package(data: &[u8]) {
    let folder = tempfile::tempdir().expect("there is room");
    let (file, root, outside) =
        (folder.path().join("x.deb"), folder.path().join("root"), folder.path().join("outside"));
    fs::write(&file, data).expect("there is room");
    fs::create_dir(&outside).expect("there is room");
    let _ = unpack(&file, &root);
    let names = |path: &Path| fs::read_dir(path).expect("it can be read").count();
    assert_eq!((names(&outside), names(folder.path()) <= 3), (0, true), "nothing is written outside");
}
