//! File descriptors that this process has from the one that started it. A run keeps none but the standard streams,
//! which would otherwise be open to a guest that takes over a thread, and to passt.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::RawFd;

use anyhow::{Context, Result};

const STANDARD_ERROR: RawFd = libc::STDERR_FILENO;
/// Where the descriptors of this process are.
const FOLDER: &str = "/proc/self/fd";

/// Closes all descriptors but the standard streams. Those that an argument names as `/dev/fd/N` (a shell does for
/// `<(COMMAND)`) stay open for this process alone, as it opens them by that name.
///
/// Must be called before the program has opened anything.
pub fn close(arguments: &[OsString]) -> Result<()> {
    let named: Vec<RawFd> = arguments.iter().flat_map(|argument| named(argument)).collect();
    for descriptor in open()? {
        if named.contains(&descriptor) {
            // SAFETY: sets a flag of a descriptor; if there is none any more, it fails.
            unsafe { libc::fcntl(descriptor, libc::F_SETFD, libc::FD_CLOEXEC) };
        } else {
            // SAFETY: nothing of this program owns the descriptor, as it has opened nothing yet. That by which the
            // folder was read is closed already.
            unsafe { libc::close(descriptor) };
        }
    }
    Ok(())
}

/// Returns the descriptors above the standard streams.
fn open() -> Result<Vec<RawFd>> {
    let names = fs::read_dir(FOLDER).with_context(|| format!("cannot read {FOLDER}"))?;
    let numbers = names.filter_map(|name| name.ok()?.file_name().to_str()?.parse().ok());
    Ok(numbers.filter(|number| *number > STANDARD_ERROR).collect())
}

/// Returns the descriptors that an argument names, wherever in it.
fn named(argument: &OsStr) -> Vec<RawFd> {
    let argument = argument.to_string_lossy();
    let after = ["/dev/fd/", "/proc/self/fd/"].into_iter().flat_map(|folder| argument.split(folder).skip(1));
    let number =
        |text: &str| text[..text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len())].parse().ok();
    after.filter_map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_argument_names_descriptors_by_their_paths_only() {
        for (argument, expected) in [
            ("/dev/fd/63", &[63][..]),
            ("--kernel=/dev/fd/63", &[63]),
            ("/proc/self/fd/7:ro", &[7]),
            ("/dev/fd/3,/dev/fd/4", &[3, 4]),
            ("63", &[]),
            ("/dev/fd/", &[]),
            ("/dev/fd/x3", &[]),
            ("/dev/fd/99999999999", &[]),
        ] {
            assert_eq!(named(OsStr::new(argument)), expected, "{argument}");
        }
    }
}
