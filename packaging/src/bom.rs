//! The bill of materials: the crates that `tally` is made from, in SPDX 2.3's JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::build::{Commit, project};
use crate::tree::iso_time;

/// Returns the document.
pub fn spdx(commit: &Commit) -> Result<String> {
    let metadata = metadata()?;
    let nodes = members(&metadata["resolve"]["nodes"], "id");
    let packages = members(&metadata["packages"], "id");
    let root = packages
        .iter()
        .find(|(_, package)| package["name"] == "tally")
        .map(|(id, _)| *id)
        .context("the workspace has no package `tally`")?;
    let mut used = BTreeSet::new();
    let mut rest = vec![root];
    while let Some(id) = rest.pop() {
        if used.insert(id) {
            rest.extend(dependencies(nodes.get(id).context("each package has a node")?));
        }
    }
    let id = |package: &Value| {
        let name = format!("{}-{}", text(&package["name"]), text(&package["version"]));
        format!("SPDXRef-{}", name.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-"))
    };
    let describe = |of: &&str| {
        let package = packages[of];
        let (name, version) = (text(&package["name"]), text(&package["version"]));
        json!({
            "SPDXID": id(package),
            "name": name,
            "versionInfo": version,
            "downloadLocation": "NOASSERTION",
            "filesAnalyzed": false,
            "licenseConcluded": "NOASSERTION",
            "licenseDeclared": package["license"].as_str().map_or("NOASSERTION".into(), |text| text.replace('/', " OR ")),
            "copyrightText": "NOASSERTION",
            "externalRefs": [{
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": format!("pkg:cargo/{name}@{version}"),
            }],
        })
    };
    let mut relationships = vec![json!({
        "spdxElementId": "SPDXRef-DOCUMENT",
        "relationshipType": "DESCRIBES",
        "relatedSpdxElement": id(packages[root]),
    })];
    for of in &used {
        for on in dependencies(nodes[of]) {
            relationships.push(json!({
                "spdxElementId": id(packages[of]),
                "relationshipType": "DEPENDS_ON",
                "relatedSpdxElement": id(packages[on]),
            }));
        }
    }
    let version = text(&packages[root]["version"]);
    let document = json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": format!("tally-{version}"),
        "documentNamespace": format!("urn:tally:{version}:{}", commit.hash),
        "creationInfo": { "created": iso_time(commit.time), "creators": ["Tool: cargo dist"] },
        "packages": used.iter().map(describe).collect::<Vec<_>>(),
        "relationships": relationships,
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

/// Returns what cargo knows about the packages.
fn metadata() -> Result<Value> {
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(project()).args(["metadata", "--format-version", "1", "--locked"]);
    for platform in ["x86_64-unknown-linux-gnu", "riscv64gc-unknown-linux-gnu"] {
        cargo.args(["--filter-platform", platform]);
    }
    let output = cargo.output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// Returns the members of a list by one of their fields.
fn members<'a>(list: &'a Value, by: &str) -> BTreeMap<&'a str, &'a Value> {
    list.as_array().into_iter().flatten().map(|member| (text(&member[by]), member)).collect()
}

/// Returns the packages that a package is linked with: those that its build script and its tests need are not among them.
fn dependencies(node: &Value) -> impl Iterator<Item = &str> {
    let is_linked =
        |of: &&Value| of["dep_kinds"].as_array().into_iter().flatten().any(|kind| kind["kind"].is_null());
    node["deps"].as_array().into_iter().flatten().filter(is_linked).map(|of| text(&of["pkg"]))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
