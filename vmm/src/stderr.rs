//! Messages to the user on standard error, one line at a time.

use std::fmt::Display;
use std::io::{self, Write};

use crate::terminal;

/// Prints a line with one write, so that no other output falls into it. Errors are ignored: a closed standard error
/// must not end the process.
pub fn say(text: &impl Display) {
    let _ = io::stderr().write_all(format!("tally: {text}{}", terminal::line_end()).as_bytes());
}
