//! The command's terminal.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Result;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::rc::Rc;

use guest_agent::protocol::Size;

use crate::sys;

/// The terminfo database, with a directory per first letter.
const TERMINFO: &str = "/lib/terminfo";
/// The terminal type that every guest supports.
const DEFAULT_TYPE: &str = "linux";

/// A pseudoterminal.
pub struct Terminal {
    /// The master, non-blocking.
    pub master: Rc<File>,
    /// The slave. While it is open, reads from the master do not fail when the command closes the terminal.
    pub slave: File,
}

impl Terminal {
    /// Creates a pseudoterminal of this size, or with an unknown size.
    pub fn new(size: Option<Size>) -> Result<Self> {
        let flags = libc::O_NOCTTY | libc::O_NONBLOCK;
        let master = File::options().read(true).write(true).custom_flags(flags).open("/dev/ptmx")?;
        let slave = sys::open_slave(&master)?;
        if let Some(size) = size {
            sys::set_size(&master, size)?;
        }
        Ok(Self { master: Rc::new(master), slave })
    }
}

/// Returns the value for `TERM`: the type of the host's terminal, if the guest's terminfo database contains it.
pub fn kind(wanted: Option<&OsStr>) -> OsString {
    wanted
        .filter(|name| is_known(Path::new(TERMINFO), name))
        .unwrap_or_else(|| OsStr::new(DEFAULT_TYPE))
        .to_owned()
}

fn is_known(database: &Path, name: &OsStr) -> bool {
    match name.as_bytes() {
        [] => false,
        bytes if bytes.contains(&b'/') => false,
        bytes => database.join(OsStr::from_bytes(&bytes[..1])).join(name).is_file(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_terminal_type_is_replaced_by_the_default() {
        assert_eq!(kind(None), DEFAULT_TYPE);
        assert_eq!(kind(Some(OsStr::new("no-such-terminal"))), DEFAULT_TYPE);
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert!(!is_known(here, OsStr::new("../Cargo.toml")) && !is_known(here, OsStr::new("")));
    }
}
