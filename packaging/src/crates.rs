//! The crates that programs are linked with, from what cargo knows.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::build::project;

/// Targets of the programs.
const PLATFORMS: [&str; 2] = ["x86_64-unknown-linux-gnu", "riscv64gc-unknown-linux-gnu"];

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Crate {
    pub name: String,
    pub version: String,
    /// The licences of which one can be chosen, as an SPDX expression.
    pub licence: Option<String>,
    /// It is one of this project's.
    pub is_own: bool,
    /// Where its sources are.
    pub folder: PathBuf,
    /// Names and versions of those of the other crates that it needs.
    pub needs: BTreeSet<(String, String)>,
}

impl Crate {
    /// Returns its name and version.
    pub fn id(&self) -> (String, String) {
        (self.name.clone(), self.version.clone())
    }

    pub fn licence_texts(&self) -> Result<Vec<String>> {
        const NAMES: [&str; 7] =
            ["LICENSE", "LICENCE", "COPYING", "COPYRIGHT", "NOTICE", "THIRD-PARTY", "UNLICENSE"];
        let entries = fs::read_dir(&self.folder).with_context(|| self.folder.display().to_string())?;
        let mut files: Vec<PathBuf> =
            entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>()?;
        files.retain(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
            path.is_file() && NAMES.iter().any(|start| name.starts_with(start))
        });
        files.sort();
        let read = |path: &PathBuf| fs::read(path).with_context(|| path.display().to_string());
        files.iter().map(|path| Ok(String::from_utf8_lossy(&read(path)?).into_owned())).collect()
    }
}

/// Returns the crates that the programs of these packages are linked with, the packages themselves among them.
pub fn linked(packages: &[&str]) -> Result<Vec<Crate>> {
    let linked = names_of_linked(packages)?;
    let metadata = metadata()?;
    let by_id: BTreeMap<&str, &Value> = list(&metadata["packages"]).map(|of| (text(&of["id"]), of)).collect();
    let name =
        |id: &str| by_id.get(id).map(|of| (text(&of["name"]).to_owned(), text(&of["version"]).to_owned()));
    let describe = |node: &Value| {
        let (name_of, version) = name(text(&node["id"])).filter(|id| linked.contains(id))?;
        let about = by_id[text(&node["id"])];
        Some(Crate {
            name: name_of,
            version,
            licence: about["license"].as_str().map(|text| text.replace('/', " OR ")),
            is_own: about["source"].is_null(),
            folder: Path::new(text(&about["manifest_path"])).parent()?.to_owned(),
            needs: needs(node).filter_map(name).filter(|id| linked.contains(id)).collect(),
        })
    };
    let mut crates: Vec<Crate> = list(&metadata["resolve"]["nodes"]).filter_map(describe).collect();
    crates.sort();
    if crates.len() < linked.len() {
        bail!("cargo describes {} of {} crates", crates.len(), linked.len());
    }
    Ok(crates)
}

/// Returns names and versions of the linked crates. What only other programs of the workspace need is not among them:
/// `cargo metadata` does not tell these apart.
fn names_of_linked(packages: &[&str]) -> Result<BTreeSet<(String, String)>> {
    let mut linked = BTreeSet::new();
    for platform in PLATFORMS {
        let mut cargo = cargo();
        cargo.args(["tree", "--locked", "--edges", "normal,no-proc-macro", "--prefix", "none"]);
        cargo.args(["--format", "{p}", "--target", platform]);
        cargo.args(packages.iter().flat_map(|package| ["--package", package]));
        for line in output(cargo)?.lines() {
            let mut words = line.split(' ');
            if let (Some(name), Some(version)) = (words.next(), words.next()) {
                linked.insert((name.to_owned(), version.trim_start_matches('v').to_owned()));
            }
        }
    }
    Ok(linked)
}

/// Returns what cargo knows about all packages.
fn metadata() -> Result<Value> {
    let mut cargo = cargo();
    cargo.args(["metadata", "--format-version", "1", "--locked"]);
    cargo.args(PLATFORMS.iter().flat_map(|platform| ["--filter-platform", platform]));
    Ok(serde_json::from_str(&output(cargo)?)?)
}

fn cargo() -> Command {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(project());
    cargo
}

fn output(mut cargo: Command) -> Result<String> {
    let output = cargo.output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Returns the packages that a package is linked with, if their features are used: those that its build script and its
/// tests need are not among them.
fn needs(node: &Value) -> impl Iterator<Item = &str> {
    let is_linked = |of: &&Value| list(&of["dep_kinds"]).any(|kind| kind["kind"].is_null());
    list(&node["deps"]).filter(is_linked).map(|of| text(&of["pkg"]))
}

fn list(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
