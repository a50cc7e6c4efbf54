//! How a command reaches the default guest: on the kernel's command line, as `tally.run=ARGUMENT,ARGUMENT,...`.
//!
//! The kernel splits its command line at blanks and knows quotes, so every byte outside a small alphabet is written
//! as `%XX`. A comma separates arguments, of which any may be empty. The guest's init undoes it (`guest/decode.sh`).

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;

/// The bytes that stand for themselves.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_./:=+@-".contains(&byte)
}

/// The value of `tally.run=` for a command and its arguments.
pub fn encode(arguments: &[impl AsRef<OsStr>]) -> String {
    let encoded: Vec<String> =
        arguments.iter().map(|argument| encode_argument(argument.as_ref().as_bytes())).collect();
    encoded.join(",")
}

fn encode_argument(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len()), |mut text, &byte| {
        if is_plain(byte) {
            text.push(char::from(byte));
        } else {
            write!(text, "%{byte:02X}").expect("writing to a string cannot fail");
        }
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt;
    use std::process::Command;

    /// What the init's decoder makes of an encoded command, by this machine's `sh`.
    fn decode(encoded: &str) -> Vec<OsString> {
        let decoder = include_str!("../guest/decode.sh");
        let script = format!("{decoder}\neval \"set -- $(decode \"$1\")\"; printf '%s\\0' \"$@\"");
        let output = Command::new("sh").args(["-c", &script, "sh", encoded]).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut arguments: Vec<OsString> =
            output.stdout.split(|&byte| byte == 0).map(|bytes| OsString::from_vec(bytes.to_vec())).collect();
        arguments.pop();
        arguments
    }

    fn survives(arguments: &[&[u8]]) {
        let arguments: Vec<OsString> =
            arguments.iter().map(|bytes| OsString::from_vec(bytes.to_vec())).collect();
        assert_eq!(decode(&encode(&arguments)), arguments);
    }

    #[test]
    fn plain_arguments_stay_readable() {
        assert_eq!(encode(&["perf", "stat", "-e", "cycles:u"]), "perf,stat,-e,cycles:u");
    }

    #[test]
    fn what_the_kernel_would_interpret_is_hidden() {
        assert_eq!(encode(&["a b", "\"", "x,y", ""]), "a%20b,%22,x%2Cy,");
    }

    #[test]
    fn the_guest_reads_back_what_was_written() {
        survives(&[b"perf", b"stat", b"--", b"true"]);
        survives(&[b"sh", b"-c", b"echo 'it''s' \"$HOME\" `x` \\n; exit 3"]);
        survives(&[b"", b"a", b"", b""]);
        survives(&[b""]);
        survives(&[b"new\nline\n", b"\n", b"tab\t%41 100% %%", b"*?[a]~#!"]);
        survives(&["grüße, 世界".as_bytes(), b"-n", b"-e"]);
    }

    #[test]
    fn every_byte_an_argument_can_hold_survives() {
        let all: Vec<u8> = (1..=255).collect();
        survives(&[&all]);
    }
}
