//! What becomes of what mirrors and proxies send, without a network, and of images: for the fuzz targets. Nothing else
//! imports this.

use std::io::Read;
use std::path::Path;
use std::time::SystemTime;

use archive_keys::Keys;

use crate::cache::Cache;
use crate::container;
use crate::cpio::Archive;
use crate::error::Result;
use crate::http;
use crate::image::Unpacked;
use crate::packages::untrusted::{self, Index, ReleaseFile};
use crate::progress::Progress;
use crate::release::{Arch, Suite};

/// Reads a server's answer. Returns at most `limit` bytes of its body.
pub fn body(answer: &[u8], asked: u64, limit: u64) -> Option<Vec<u8>> {
    let response = http::read_response(answer, asked).ok()?;
    let mut body = Vec::new();
    response.body.take(limit).read_to_end(&mut body).ok()?;
    Some(body)
}

/// Returns true if Debian has signed a text.
pub fn is_signed(text: &str) -> bool {
    Keys::of_debian().verify(text, SystemTime::now()).is_ok()
}

/// Reads an index and a list of packages, and resolves the dependencies of the packages in it. Returns how many were
/// chosen.
pub fn resolve(list: &str, names: &[&str]) -> usize {
    let _ = ReleaseFile::parse(list);
    Index::new([(list, "http://mirror.example/debian")]).resolve(names).map_or(0, |packages| packages.len())
}

/// Opens an image of a container, with this folder as the cache.
pub fn open_image(image: &Path, cache: &Path) -> Result<()> {
    container::open(&Cache::at(cache)?, image, Arch::default(), &mut Progress::silent()).map(drop)
}

/// Unpacks layers of an image into a folder.
pub fn unpack_layers(layers: &[&[u8]], root: &Path) -> std::result::Result<(), String> {
    container::unpack_layers(layers, root)
}

/// Unpacks a package into a directory, and makes an image of it.
pub fn unpack(package: &Path, root: &Path) -> Result<Vec<u8>> {
    untrusted::unpack(package, root)?;
    let (files, mut image) = (Unpacked::new(root, Suite::Bookworm), Archive::new());
    files.add_programs(&mut image, &["usr/bin/perf"])?;
    files.add_busybox(&mut image)?;
    Ok(image.finish())
}
