//! Images of containers: a saved image, or its layers, whose digests no mutation would find.
//!
//! The first byte says which of them is behind it. Two layers are divided by the length of the first, in two bytes.

use std::fs;
use std::path::Path;

use guest_images::untrusted::{open_image, unpack_layers};

/// Runs the target.
pub fn run(data: &[u8]) {
    let Some((kind, data)) = data.split_first() else { return };
    let folder = tempfile::tempdir().expect("there is room");
    let (root, outside) = (folder.path().join("root"), folder.path().join("outside"));
    for folder in [&root, &outside] {
        fs::create_dir(folder).expect("there is room");
    }
    fs::write(outside.join("file"), "outside").expect("there is room");
    let said = if kind % 2 == 0 {
        let file = folder.path().join("image");
        fs::write(&file, data).expect("there is room");
        open_image(&file, &folder.path().join("cache")).map_err(|error| error.to_string())
    } else {
        let Some((length, layers)) = data.split_first_chunk() else { return };
        let (lower, upper) = layers.split_at(layers.len().min(u16::from_le_bytes(*length).into()));
        unpack_layers(&[lower, upper], &root)
    };
    if let Err(said) = said {
        assert!(!said.contains('\n'), "one line: {said}");
    }
    assert_eq!(names(&outside), 1, "nothing is written outside");
    assert_eq!(fs::read_to_string(outside.join("file")).expect("it is still there"), "outside");
    let expected = if kind % 2 == 0 { 3..=4 } else { 2..=2 };
    assert!(expected.contains(&names(folder.path())), "nothing is written beside it");
}

fn names(folder: &Path) -> usize {
    fs::read_dir(folder).expect("it can be read").count()
}
