//! A directory into which packages were unpacked, as the programs in them would see it if it were their root.
//!
//! Symbolic links are followed inside the directory: an absolute one begins at it, and `..` does not lead out of it. So
//! no file of this machine is taken for one of a package.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Maximum number of symbolic links in a path, as Linux has it (`path_resolution(7)`).
const MAX_LINKS: usize = 40;

/// Returns the path on this machine of a file or directory in `root`, or `None` if it does not exist.
pub fn resolve(root: &Path, path: &Path) -> Option<PathBuf> {
    let mut left: VecDeque<OsString> = VecDeque::new();
    prepend(&mut left, path);
    let (mut found, mut links) = (PathBuf::new(), 0);
    while let Some(name) = left.pop_front() {
        if name == ".." {
            found.pop();
            continue;
        }
        found.push(&name);
        let kind = fs::symlink_metadata(root.join(&found)).ok()?.file_type();
        if kind.is_symlink() {
            links += 1;
            if links > MAX_LINKS {
                return None;
            }
            let target = fs::read_link(root.join(&found)).ok()?;
            found.pop();
            if target.is_absolute() {
                found.clear();
            }
            prepend(&mut left, &target);
        } else if !kind.is_dir() && !left.is_empty() {
            return None;
        }
    }
    Some(root.join(found))
}

/// Puts the names of a path in front of those that are left.
fn prepend(left: &mut VecDeque<OsString>, path: &Path) {
    for component in path.components().rev() {
        match component {
            Component::Normal(name) => left.push_front(name.to_owned()),
            Component::ParentDir => left.push_front("..".into()),
            Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn links_are_followed_inside_the_root_only() {
        let folder = tempfile::tempdir().unwrap();
        let (root, outside) = (folder.path().join("root"), folder.path().join("secret"));
        fs::create_dir_all(root.join("usr/lib")).unwrap();
        fs::write(&outside, "").unwrap();
        fs::write(root.join("usr/lib/libc.so.6"), "").unwrap();
        symlink("usr/lib", root.join("lib")).unwrap();
        symlink("/lib/libc.so.6", root.join("absolute")).unwrap();
        symlink("../../../lib/libc.so.6", root.join("usr/lib/above")).unwrap();
        symlink(&outside, root.join("out")).unwrap();
        symlink("../secret", root.join("up")).unwrap();
        symlink("loop", root.join("loop")).unwrap();
        let library = Some(root.join("usr/lib/libc.so.6"));
        for path in ["lib/libc.so.6", "/usr/lib/libc.so.6", "absolute", "lib/above", "usr/../lib/./libc.so.6"]
        {
            assert_eq!(resolve(&root, Path::new(path)), library, "{path}");
        }
        for path in ["out", "up", "../secret", "loop", "none", "lib/libc.so.6/x"] {
            assert_eq!(resolve(&root, Path::new(path)), None, "{path}");
        }
    }
}
