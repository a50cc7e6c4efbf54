//! Images of containers, as `docker save`, `podman save` and `skopeo copy` write them: archives of docker's, and OCI
//! image layouts, each a folder or a tar archive. An image is unpacked once, into the cache, by the digest of its
//! configuration, and becomes the root of guests.
//!
//! Images are from anywhere, so nothing of one is believed: not a name, a link, a size or a digest. What is unpacked
//! belongs to the user who runs this program, has no bits for set-user-ID, and lies in a folder that nobody else can
//! enter. To whom it belongs in the image, and with which permissions, is written down beside it ([`Owners`]).

mod files;
mod layer;
mod manifest;
mod owners;

#[cfg(test)]
mod tests;

use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::cache::{Cache, Key, remove_folder};
use crate::error::{Error, Result};
use crate::progress::{Progress, printable};
use crate::release::Arch;
use files::Files;
use layer::Unpacking;
use manifest::Manifest;

pub use owners::{Owned, Owners};

const RECIPE: &str = "1";
/// Number of images that are kept.
const KEPT: usize = 16;
const ROOT: &str = "root";
const OWNERS: &str = "owners";
const CONFIG: &str = "config";
/// What the names of images' folders in the cache begin with.
const PREFIX: &[u8] = b"image-";

/// An unpacked image.
#[derive(Debug)]
pub struct Image {
    /// The folder with its files.
    pub root: PathBuf,
    /// To whom they belong.
    pub owners: Owners,
    /// How a command is run in it.
    pub config: Config,
}

/// How a command is run in an image, as far as it says so.
#[derive(Debug, Default, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub struct Config {
    /// The program that gets the command as its arguments, and its first ones.
    pub entrypoint: Option<Vec<String>>,
    /// The command, if none is given.
    pub cmd: Option<Vec<String>>,
    /// Variables of the environment, `NAME=VALUE`.
    pub env: Option<Vec<String>>,
    pub working_dir: Option<String>,
    /// A name or a number, and perhaps a group's after a colon.
    pub user: Option<String>,
}

/// The whole configuration of an image, as far as it is used.
#[derive(Debug, Deserialize)]
struct Configuration {
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    config: Option<Config>,
    #[serde(default)]
    rootfs: Layers,
}

/// The digests of the layers, decompressed, the lowest first.
#[derive(Debug, Default, Deserialize)]
struct Layers {
    #[serde(default)]
    diff_ids: Vec<String>,
}

/// Returns whether there is an image at a path: an archive, or the folder of an OCI layout.
pub fn is_image(path: &Path) -> bool {
    let is_layout = || path.join(manifest::OCI_LAYOUT).is_file() && path.join(manifest::OCI_INDEX).is_file();
    path.is_file() || is_layout() && !is_unpacked(path)
}

/// Returns whether a path is where an image's files are in a cache. Its name alone says nothing: anybody may have such
/// a folder.
fn is_unpacked(root: &Path) -> bool {
    is_named_as_one(root) && root.with_file_name(OWNERS).is_file()
}

fn is_named_as_one(root: &Path) -> bool {
    let folder = root.parent().and_then(Path::file_name).unwrap_or_default();
    root.ends_with(ROOT) && folder.as_encoded_bytes().starts_with(PREFIX)
}

/// Opens an image for an architecture, and unpacks it if it is not in the cache.
pub fn open(cache: &Cache, path: &Path, arch: Arch, progress: &mut Progress) -> Result<Image> {
    let at = |reason: String| Error::Image { path: path.to_owned(), reason: printable(&reason) };
    let archive = files::identity(path).map(|identity| {
        Key::new("archive").keep(KEPT).with(RECIPE).with(manifest::architecture(arch)).with(identity)
    });
    if let Some(image) = archive.as_ref().and_then(|archive| known(cache, archive)) {
        return Ok(image);
    }
    let mut files = Files::open(path, cache, progress).map_err(at)?;
    let manifest = Manifest::of(&mut files, arch).map_err(at)?;
    let bytes = files.document(&manifest.config).map_err(at)?;
    let configuration: Configuration =
        serde_json::from_slice(&bytes).map_err(|error| at(format!("its configuration: {error}")))?;
    let known = manifest::architecture(arch);
    if !configuration.architecture.is_empty() && configuration.architecture != known {
        return Err(at(format!("it is for {}, and this machine runs {known}", configuration.architecture)));
    }
    let key = key(&bytes);
    let mut entry = |progress: &mut Progress| {
        cache.entry(&key, progress, |progress, entry| {
            progress.step(format!("unpacking {}", path.display()));
            unpack(&mut files, &manifest, &configuration, entry, progress).map_err(at)?;
            write_config(entry, &bytes)
        })
    };
    let folder = entry(progress)?;
    let image = if let Ok(image) = unpacked(&folder, &bytes) {
        image
    } else {
        // A cache that was copied from another machine, for example.
        remove_folder(&folder)?;
        unpacked(&entry(progress)?, &bytes).map_err(at)?
    };
    if let Some(archive) = archive {
        cache.entry(&archive, progress, |_, entry| write_config(entry, &bytes))?;
    }
    Ok(image)
}

/// Returns the entry's key of an image with this configuration.
fn key(configuration: &[u8]) -> Key {
    Key::new("image").keep(KEPT).with(RECIPE).with(Sha256::digest(configuration))
}

fn write_config(entry: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(entry.join(CONFIG), bytes).map_err(Error::io("write", entry.join(CONFIG)))
}

/// Returns the image of an archive that does not have to be decompressed: what is in it is known, and unpacked.
fn known(cache: &Cache, archive: &Key) -> Option<Image> {
    let bytes = fs::read(cache.find(archive)?.join(CONFIG)).ok()?;
    unpacked(&cache.find(&key(&bytes))?, &bytes).ok()
}

/// Returns the image with this configuration that was unpacked into an entry of the cache. The error is for the user.
fn unpacked(folder: &Path, configuration: &[u8]) -> std::result::Result<Image, String> {
    let root = folder.join(ROOT);
    // The folder's name has a part of the digest only.
    if fs::read(folder.join(CONFIG)).ok().as_deref() != Some(configuration) {
        return Err(format!("{} is another image's", folder.display()));
    }
    // The cache keeps those that were used last.
    let _ = File::open(folder).and_then(|folder| folder.set_modified(SystemTime::now()));
    let owners = Owners::read(&folder.join(OWNERS), &root)?;
    let configuration: Configuration =
        serde_json::from_slice(configuration).map_err(|error| error.to_string())?;
    Ok(Image { root, owners, config: configuration.config.unwrap_or_default() })
}

/// What a guest needs whose root is an image.
#[derive(Debug)]
pub struct Held {
    /// To whom the image's files belong.
    pub owners: Owners,
    /// As long as this is open, the image stays in the cache.
    pub folder: File,
}

/// Keeps the image in the cache whose files are in a folder, if there is one. The error is for the user.
pub fn hold(root: &Path) -> Option<std::result::Result<Held, String>> {
    if is_unpacked(root) {
        let held = Cache::hold(root.parent().unwrap_or(root)).map_err(|error| error.to_string());
        return Some(held.and_then(|folder| {
            Ok(Held { owners: Owners::read(&root.with_file_name(OWNERS), root)?, folder })
        }));
    }
    let is_gone = is_named_as_one(root) && !root.exists();
    is_gone.then(|| Err("the image is not in the cache any more: run it once".to_owned()))
}

/// Unpacks all layers. The error is for the user.
fn unpack(
    files: &mut Files,
    manifest: &Manifest,
    configuration: &Configuration,
    entry: &Path,
    progress: &mut Progress,
) -> std::result::Result<(), String> {
    let digests = &configuration.rootfs.diff_ids;
    if digests.len() != manifest.layers.len() {
        return Err(format!(
            "it has {} layers, and its configuration has {}",
            manifest.layers.len(),
            digests.len()
        ));
    }
    let root = entry.join(ROOT);
    DirBuilder::new().mode(0o700).create(&root).map_err(|error| error.to_string())?;
    let mut unpacking = Unpacking::into(&root)?;
    for (number, (layer, digest)) in manifest.layers.iter().zip(digests).enumerate() {
        let in_layer = |reason: String| format!("layer {}: {reason}", number + 1);
        progress.parts(number as u64, digests.len() as u64);
        let mut packed = files.open_blob(layer).map_err(in_layer)?;
        let mut layer = files::decompressed(&mut packed)
            .map(files::Hashed::new)
            .map_err(|error| in_layer(error.to_string()))?;
        unpacking.apply(&mut layer).map_err(in_layer)?;
        layer.finish(digest).map_err(in_layer)?;
        packed.finish().map_err(in_layer)?;
    }
    let directory = configuration.config.as_ref().and_then(|config| config.working_dir.as_deref());
    unpacking.make_directory(directory.unwrap_or_default())?;
    if let Some(left_out) = unpacking.left_out() {
        progress.remark(&left_out);
    }
    unpacking.finish(&entry.join(OWNERS))
}

/// Unpacks layers into an empty folder, whatever they are. For the fuzz targets.
pub(crate) fn unpack_layers(layers: &[&[u8]], root: &Path) -> std::result::Result<(), String> {
    let mut unpacking = Unpacking::into(root)?;
    layers.iter().try_for_each(|layer| unpacking.apply(&mut &layer[..])).map_err(|reason| printable(&reason))
}
