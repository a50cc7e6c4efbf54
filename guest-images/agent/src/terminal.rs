//! The terminal that the command sees.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Result;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::rc::Rc;

use guest_agent::protocol::Size;

use crate::sys;

/// Where the descriptions of terminals are, by first letter and name.
const DESCRIPTIONS: &str = "/lib/terminfo";
/// The kind of terminal that every guest knows.
const COMMON_KIND: &str = "linux";

/// A pseudoterminal.
pub struct Terminal {
    /// Our side of it, which makes nobody wait.
    pub master: Rc<File>,
    /// The command's. While it is open, our side lives on when the command closes it.
    pub slave: File,
}

impl Terminal {
    /// A terminal of this size, or one that does not say how large it is.
    pub fn new(size: Option<Size>) -> Result<Self> {
        let flags = libc::O_NOCTTY | libc::O_NONBLOCK;
        let master = File::options().read(true).write(true).custom_flags(flags).open("/dev/ptmx")?;
        let slave = sys::other_side(&master)?;
        if let Some(size) = size {
            sys::set_size(&master, size)?;
        }
        Ok(Self { master: Rc::new(master), slave })
    }
}

/// The value of `TERM`: the kind of the host's terminal, if programs in the guest can look it up.
pub fn kind(wanted: Option<&OsStr>) -> OsString {
    wanted
        .filter(|name| is_known(Path::new(DESCRIPTIONS), name))
        .unwrap_or_else(|| OsStr::new(COMMON_KIND))
        .to_owned()
}

fn is_known(descriptions: &Path, name: &OsStr) -> bool {
    match name.as_bytes() {
        [] => false,
        bytes if bytes.contains(&b'/') => false,
        bytes => descriptions.join(OsStr::from_bytes(&bytes[..1])).join(name).is_file(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_that_the_guest_does_not_know_becomes_a_common_one() {
        assert_eq!(kind(None), COMMON_KIND);
        assert_eq!(kind(Some(OsStr::new("no-such-terminal"))), COMMON_KIND);
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(!is_known(here, OsStr::new("../Cargo.toml")) && !is_known(here, OsStr::new("")));
    }
}
