//! Decompresses what distributions compress: packages, package lists, kernel modules.

use std::io::{self, BufRead, Read};

/// Returns a reader of the decompressed content of a file with this name.
pub fn reader<'a>(name: &str, file: impl BufRead + 'a) -> io::Result<Box<dyn Read + 'a>> {
    Ok(match name.rsplit_once('.').map_or("", |(_, extension)| extension) {
        "gz" => Box::new(flate2::bufread::MultiGzDecoder::new(file)),
        "xz" => Box::new(lzma_rust2::XzReader::new(file, true)),
        "zst" => Box::new(ruzstd::decoding::StreamingDecoder::new(file).map_err(io::Error::other)?),
        _ => Box::new(file),
    })
}
