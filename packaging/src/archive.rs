//! The release archives: one for each architecture, with one static program, and beside them their checksums and a bill
//! of materials.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use guest_images::Arch;
use sha2::{Digest, Sha256};

use crate::bom;
use crate::build::{Commit, Programs, project};
use crate::contents::{add_licences, add_manuals};
use crate::tree::Tree;

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Writes the archives of these programs. Those of this machine's architecture, which print the manual pages, come
/// first. Returns the paths of all files.
pub fn write(programs: &[(Arch, &Programs)], commit: &Commit, folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files = vec![(format!("tally-{VERSION}.spdx.json"), bom::spdx(commit)?.into_bytes())];
    let (_, here) = programs.first().context("there are programs")?;
    let mut in_all = Tree::default();
    add_manuals(&mut in_all, "", &here.join("tally"))?;
    add_licences(&mut in_all, "", &["tally"])?;
    for page in ["README.md", "CHANGELOG.md", "SECURITY.md"] {
        in_all.copy(page, &project().join(page))?;
    }
    for (arch, built) in programs {
        let mut tree = in_all.clone();
        tree.program("tally", &built.join("tally"))?;
        let name = format!("tally-{VERSION}-{arch}-linux");
        files.push((format!("{name}.tar.gz"), tree.archive(&format!("{name}/"), commit.time)?));
    }
    let sums: String = files.iter().map(|(name, content)| sum_line(content, name)).collect();
    files.push(("SHA256SUMS".to_owned(), sums.into_bytes()));
    let write = |(name, content): &(String, Vec<u8>)| {
        let path = folder.join(name);
        fs::write(&path, content).with_context(|| path.display().to_string())?;
        Ok(path)
    };
    files.iter().map(write).collect()
}

/// Returns a file's checksum and name, as `sha256sum` prints them.
pub fn sum_line(content: &[u8], name: &str) -> String {
    let mut line = String::new();
    for byte in Sha256::digest(content) {
        write!(line, "{byte:02x}").expect("writing to a string cannot fail");
    }
    line + "  " + name + "\n"
}
