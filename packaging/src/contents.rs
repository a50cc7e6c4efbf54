//! What a package has beside the programs: manual pages, completions, licences.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::build::project;
use crate::crates::{Crate, linked};
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

/// Adds the licences, and those of all that the programs of these packages are linked with.
pub fn add_licences(tree: &mut Tree, folder: &str, packages: &[&str]) -> Result<()> {
    for name in ["LICENSE-APACHE", "LICENSE-MIT"] {
        tree.copy(format!("{folder}{name}"), &project().join(name))?;
    }
    tree.file(format!("{folder}LICENSES-OF-OTHERS"), licences_of_others(&linked(packages)?)?);
    Ok(())
}

/// What is linked, and is no crate of a registry.
const LIBRARIES: &str = "\
The programs are linked with the crates below; with Rust's standard library (MIT OR Apache-2.0); with the GNU C Library
(LGPL-2.1-or-later); and with GCC's support library (GPL-3.0-or-later WITH GCC-exception-3.1).
";

/// Returns the texts of crates' licences, each once, below the names of those that have it.
fn licences_of_others(crates: &[Crate]) -> Result<String> {
    let mut by_text: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for of in crates.iter().filter(|of| !of.is_own) {
        let mut texts = of.licence_texts()?;
        if texts.is_empty() {
            texts.push("Their packages have no text.".to_owned());
        }
        for text in texts {
            let licence = of.licence.as_deref().unwrap_or("as its text says");
            by_text.entry(text).or_default().push(format!("{} {}: {licence}", of.name, of.version));
        }
    }
    let rule = "-".repeat(80);
    let part = |(text, names): (&String, &Vec<String>)| {
        format!("\n{rule}\n{}\n\n{}\n", names.join("\n"), text.trim_end())
    };
    Ok(LIBRARIES.to_owned() + &by_text.iter().map(part).collect::<String>())
}

fn run(program: &Path, arguments: &[&str]) -> Result<Vec<u8>> {
    let output = Command::new(program).args(arguments).output();
    let output = output.with_context(|| program.display().to_string())?;
    if !output.status.success() {
        bail!("{} {}: {}", program.display(), arguments.join(" "), String::from_utf8_lossy(&output.stderr));
    }
    Ok(output.stdout)
}
