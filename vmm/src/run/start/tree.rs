//! A kernel in the tree in which it was built, which is not installed: `--kernel .` there.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use guest_images::modules::ORDER;

use crate::arch::host::IMAGE_IN_TREE;

/// Returns the file of a kernel that an option names, itself or by the tree in which it was built.
pub fn image(named: &Path) -> Result<PathBuf> {
    if !named.is_dir() {
        return Ok(named.to_owned());
    }
    let image = named.join(IMAGE_IN_TREE);
    if !image.is_file() {
        bail!(
            "--kernel {}: no {IMAGE_IN_TREE} in this folder: has a kernel been built there?",
            named.display()
        );
    }
    Ok(image)
}

/// Returns the tree in which a kernel is, if modules have been built there.
pub fn with_modules(image: &Path) -> Option<PathBuf> {
    let image = image.canonicalize().ok()?;
    let inside = Path::new(IMAGE_IN_TREE);
    let tree =
        image.ends_with(inside).then(|| image.ancestors().nth(inside.components().count())).flatten()?;
    tree.join(ORDER).is_file().then(|| tree.to_owned())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_tree_names_the_kernel_that_was_built_there() {
        let folder = tempfile::tempdir().unwrap();
        let tree = folder.path().canonicalize().unwrap();
        let said = image(&tree).unwrap_err().to_string();
        assert!(said.contains(IMAGE_IN_TREE) && said.contains("has a kernel been built there?"), "{said}");
        let built = tree.join(IMAGE_IN_TREE);
        fs::create_dir_all(built.parent().unwrap()).unwrap();
        fs::write(&built, "kernel").unwrap();
        assert_eq!((image(&tree).unwrap(), image(&built).unwrap()), (built.clone(), built.clone()));
        assert_eq!(with_modules(&built), None);
        fs::write(tree.join(ORDER), "").unwrap();
        assert_eq!(with_modules(&built), Some(tree.clone()));
        fs::write(tree.join("vmlinuz"), "kernel").unwrap();
        assert_eq!(with_modules(&tree.join("vmlinuz")), None, "it is not where the build puts it");
        assert_eq!(
            image(Path::new("none")).unwrap(),
            Path::new("none"),
            "reading it says that it is not there"
        );
    }
}
