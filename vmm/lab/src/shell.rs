//! Words for a shell.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

/// Returns an argument quoted for a shell.
pub fn quoted(argument: &OsStr) -> Vec<u8> {
    let mut text = vec![b'\''];
    for &byte in argument.as_bytes() {
        if byte == b'\'' { text.extend_from_slice(b"'\\''") } else { text.push(byte) }
    }
    text.push(b'\'');
    text
}
