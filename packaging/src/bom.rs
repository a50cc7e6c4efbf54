//! The bill of materials: the crates that `tally` is made from, in SPDX 2.3's JSON.

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::build::Commit;
use crate::crates::{Crate, linked};
use crate::tree::iso_time;

/// Returns the document.
pub fn spdx(commit: &Commit) -> Result<String> {
    let crates = linked(&["tally"])?;
    let root = crates.iter().find(|of| of.name == "tally").context("the workspace has no package `tally`")?;
    let mut relationships = vec![relationship("SPDXRef-DOCUMENT", "DESCRIBES", &reference(root.id()))];
    for of in &crates {
        let depends_on =
            |on: &(String, String)| relationship(&reference(of.id()), "DEPENDS_ON", &reference(on.clone()));
        relationships.extend(of.needs.iter().map(depends_on));
    }
    let document = json!({
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": "SPDXRef-DOCUMENT",
        "name": format!("tally-{}", root.version),
        "documentNamespace": format!("urn:tally:{}:{}", root.version, commit.hash),
        "creationInfo": { "created": iso_time(commit.time), "creators": ["Tool: cargo dist"] },
        "packages": crates.iter().map(package).collect::<Vec<_>>(),
        "relationships": relationships,
    });
    Ok(serde_json::to_string_pretty(&document)? + "\n")
}

/// Describes a crate.
fn package(of: &Crate) -> Value {
    json!({
        "SPDXID": reference(of.id()),
        "name": of.name,
        "versionInfo": of.version,
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": false,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": of.licence.as_deref().unwrap_or("NOASSERTION"),
        "copyrightText": "NOASSERTION",
        "externalRefs": [{
            "referenceCategory": "PACKAGE-MANAGER",
            "referenceType": "purl",
            "referenceLocator": format!("pkg:cargo/{}@{}", of.name, of.version),
        }],
    })
}

fn relationship(of: &str, kind: &str, to: &str) -> Value {
    json!({ "spdxElementId": of, "relationshipType": kind, "relatedSpdxElement": to })
}

/// Returns what the document calls a crate.
fn reference((name, version): (String, String)) -> String {
    let id = format!("{name}-{version}");
    format!("SPDXRef-{}", id.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-"))
}
