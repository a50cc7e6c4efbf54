//! What an image consists of: `manifest.json` in archives of docker's, `index.json` in OCI image layouts (image-spec,
//! `image-layout.md`). Newer archives of docker's are both.

use serde::Deserialize;

use super::files::{Blob, Files};
use crate::release::Arch;

pub const OCI_LAYOUT: &str = "oci-layout";
pub const OCI_INDEX: &str = "index.json";
const DOCKER: &str = "manifest.json";
/// Indexes in indexes: one for each platform is usual.
const DEPTH: usize = 4;
/// The most layers of an image; docker has 127.
const LAYERS: usize = 1024;

type Result<T> = std::result::Result<T, String>;

/// The files that an image consists of.
#[derive(Debug, PartialEq, Eq)]
pub struct Manifest {
    pub config: Blob,
    /// The lowest first.
    pub layers: Vec<Blob>,
}

/// An image in docker's manifest.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct DockerImage {
    config: String,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    layers: Vec<String>,
}

/// An index or a manifest of OCI's.
#[derive(Debug, Deserialize)]
struct OciDocument {
    #[serde(default)]
    manifests: Vec<Descriptor>,
    config: Option<Descriptor>,
    #[serde(default)]
    layers: Vec<Descriptor>,
}

#[derive(Debug, Clone, Deserialize)]
struct Descriptor {
    digest: String,
    platform: Option<Platform>,
    #[serde(default)]
    annotations: std::collections::BTreeMap<String, String>,
}

#[derive(Debug, Clone, Deserialize)]
struct Platform {
    architecture: String,
    #[serde(default)]
    os: String,
}

/// Returns the name that images have for an architecture.
pub fn architecture(arch: Arch) -> &'static str {
    match arch {
        Arch::X86_64 => "amd64",
        Arch::Riscv64 => "riscv64",
    }
}

impl Manifest {
    /// Finds the one image in these files that is for this architecture.
    pub fn of(files: &mut Files, arch: Arch) -> Result<Self> {
        let manifest = if files.has(DOCKER) {
            Self::of_docker(files)?
        } else if files.has(OCI_INDEX) {
            let index = Blob { name: OCI_INDEX.to_owned(), digest: None };
            Self::of_oci(files, &index, arch, DEPTH)?
        } else {
            return Err(format!("it is no image of a container: it has neither {DOCKER} nor {OCI_INDEX}"));
        };
        if manifest.layers.len() > LAYERS {
            return Err(format!("it has more than {LAYERS} layers"));
        }
        Ok(manifest)
    }

    fn of_docker(files: &mut Files) -> Result<Self> {
        let document = files.document(&Blob { name: DOCKER.to_owned(), digest: None })?;
        let images: Vec<DockerImage> =
            serde_json::from_slice(&document).map_err(|error| format!("{DOCKER}: {error}"))?;
        let [image] = &images[..] else {
            let names = images.iter().flat_map(|image| image.repo_tags.iter().flatten()).map(String::as_str);
            return Err(several(images.len(), names));
        };
        // A layer's digest is in the configuration. The configuration's is its name.
        let name = image.config.rsplit('/').next().unwrap_or_default();
        let name = name.strip_suffix(".json").unwrap_or(name);
        let is_digest = name.len() == 64 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
        let digest = is_digest.then(|| name.to_ascii_lowercase());
        let layer = |name: &String| Blob { name: name.clone(), digest: None };
        Ok(Self {
            config: Blob { name: image.config.clone(), digest },
            layers: image.layers.iter().map(layer).collect(),
        })
    }

    fn of_oci(files: &mut Files, blob: &Blob, arch: Arch, depth: usize) -> Result<Self> {
        let name = &blob.name;
        let document: OciDocument =
            serde_json::from_slice(&files.document(blob)?).map_err(|error| format!("{name}: {error}"))?;
        if let Some(config) = document.config {
            let layers = document.layers.iter().map(Descriptor::blob).collect::<Result<_>>()?;
            return Ok(Self { config: config.blob()?, layers });
        }
        let of_arch = |descriptor: &&Descriptor| {
            descriptor.platform.as_ref().is_none_or(|platform| {
                platform.architecture == architecture(arch) && matches!(&*platform.os, "" | "linux")
            })
        };
        let fitting: Vec<Descriptor> = document.manifests.iter().filter(of_arch).cloned().collect();
        match &fitting[..] {
            [] => Err(format!("{name} has no image for linux/{}", architecture(arch))),
            [one] if depth > 0 => Self::of_oci(files, &one.blob()?, arch, depth - 1),
            [_] => Err(format!("{name}: too many indexes in each other")),
            several_images => {
                let key = "org.opencontainers.image.ref.name";
                let names =
                    several_images.iter().filter_map(|one| one.annotations.get(key)).map(String::as_str);
                Err(several(several_images.len(), names))
            }
        }
    }
}

impl Descriptor {
    /// Returns the file with what this describes.
    fn blob(&self) -> Result<Blob> {
        let hex = self.digest.strip_prefix("sha256:").filter(|hex| {
            hex.len() == 64 && hex.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
        });
        let hex = hex.ok_or_else(|| format!("{:?} is no SHA-256 digest", self.digest))?;
        Ok(Blob { name: format!("blobs/sha256/{hex}"), digest: Some(self.digest.clone()) })
    }
}

fn several<'a>(count: usize, names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 5;
    let names: Vec<&str> = names.take(SHOWN).collect();
    let names = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
    format!("it has {count} images{names}: save one")
}
