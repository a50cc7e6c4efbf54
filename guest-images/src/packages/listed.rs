//! Size and SHA-256 by which a signed index lists a file.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use sha2::{Digest, Sha256};

/// A file that a signed index names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Listed {
    pub size: u64,
    pub sha256: [u8; 32],
}

impl Listed {
    /// Returns true if this is the file.
    pub(super) fn is(&self, path: &Path) -> bool {
        fs::metadata(path).is_ok_and(|file| file.len() == self.size)
            && File::open(path).and_then(hash).is_ok_and(|hash| hash == self.sha256)
    }

    /// Returns its SHA-256 as text.
    pub(super) fn hex(&self) -> String {
        to_hex(&self.sha256)
    }
}

/// Reads a SHA-256 in hexadecimal digits.
pub fn from_hex(text: &str) -> Option<[u8; 32]> {
    let byte = |at| u8::from_str_radix(text.get(at..at + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..text.len()).step_by(2).map(byte).collect();
    bytes?.try_into().ok()
}

/// Returns a SHA-256 in hexadecimal digits.
pub fn to_hex(sha256: &[u8; 32]) -> String {
    sha256.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string cannot fail");
        text
    })
}

/// Returns the SHA-256 of everything that can be read.
pub fn hash(mut from: impl Read) -> io::Result<[u8; 32]> {
    struct Hash(Sha256);
    impl Write for Hash {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.update(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut hash = Hash(Sha256::new());
    io::copy(&mut from, &mut hash)?;
    Ok(hash.0.finalize().into())
}
