//! What a package has beside the programs: manual pages, completions, licences.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::build::project;
use crate::tree::{Tree, gzip};

/// Shells, and where Debian has their completions.
const SHELLS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/tally"),
    ("fish", "share/fish/vendor_completions.d/tally.fish"),
    ("zsh", "share/zsh/vendor-completions/_tally"),
];

/// Adds manual pages and completions below a folder, as `tally` prints them.
pub fn add_manuals(tree: &mut Tree, below: &str, tally: &Path) -> Result<()> {
    let folder = tempfile::tempdir()?;
    run(tally, &["man", &folder.path().display().to_string()])?;
    let mut pages: Vec<PathBuf> =
        fs::read_dir(folder.path())?.map(|page| Ok(page?.path())).collect::<std::io::Result<_>>()?;
    pages.sort();
    for page in pages {
        let name = page.file_name().context("a page has a name")?.to_string_lossy();
        tree.file(format!("{below}share/man/man1/{name}.gz"), gzip(&fs::read(&page)?)?);
    }
    for (shell, path) in SHELLS {
        tree.file(format!("{below}{path}"), run(tally, &["completions", shell])?);
    }
    Ok(())
}

/// Adds the licences.
pub fn add_licences(tree: &mut Tree, folder: &str) -> Result<()> {
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        tree.copy(format!("{folder}{name}"), &project().join(name))?;
    }
    Ok(())
}

fn run(program: &Path, arguments: &[&str]) -> Result<Vec<u8>> {
    let output = Command::new(program).args(arguments).output();
    let output = output.with_context(|| program.display().to_string())?;
    if !output.status.success() {
        bail!("{} {}: {}", program.display(), arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    Ok(output.stdout)
}
