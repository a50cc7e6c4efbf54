//! Encodes a command for the default guest's kernel command line, as `tally.run=ARGUMENT,ARGUMENT,...`.
//!
//! The kernel splits its command line at spaces and interprets quotes, so every byte outside of a small set is encoded
//! as `%XX`. Commas separate arguments, which may be empty. The guest's init script decodes the command
//! (`guest/decode.sh`).

use std::ffi::OsStr;
use std::fmt::Write;
use std::os::unix::ffi::OsStrExt;

/// Returns true for bytes that are not encoded.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"_./:=+@-".contains(&byte)
}

/// Returns the value of `tally.run=` for a command and its arguments.
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

    /// Decodes a command with the init script's decoder and this machine's `sh`.
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

    fn check_round_trip(arguments: &[&[u8]]) {
        let arguments: Vec<OsString> =
            arguments.iter().map(|bytes| OsString::from_vec(bytes.to_vec())).collect();
        assert_eq!(decode(&encode(&arguments)), arguments);
    }

    #[test]
    fn plain_arguments_stay_readable() {
        assert_eq!(encode(&["perf", "stat", "-e", "cycles:u"]), "perf,stat,-e,cycles:u");
    }

    #[test]
    fn special_characters_are_encoded() {
        assert_eq!(encode(&["a b", "\"", "x,y", ""]), "a%20b,%22,x%2Cy,");
    }

    #[test]
    fn the_guest_s_decoder_restores_the_arguments() {
        check_round_trip(&[b"perf", b"stat", b"--", b"true"]);
        check_round_trip(&[b"sh", b"-c", b"echo 'it''s' \"$HOME\" `x` \\n; exit 3"]);
        check_round_trip(&[b"", b"a", b"", b""]);
        check_round_trip(&[b""]);
        check_round_trip(&[b"new\nline\n", b"\n", b"tab\t%41 100% %%", b"*?[a]~#!"]);
        check_round_trip(&["grüße, 世界".as_bytes(), b"-n", b"-e"]);
    }

    #[test]
    fn every_byte_that_an_argument_can_contain_is_restored() {
        let all: Vec<u8> = (1..=255).collect();
        check_round_trip(&[&all]);
    }
}
