//! What the user is told on standard error: one line at a time.

use std::fmt::Display;
use std::io::{self, Write};

use crate::terminal;

/// Says a line on standard error, at once, so that no other output falls into it. Nothing is to end because nobody reads it.
pub fn say(text: &impl Display) {
    let _ = io::stderr().write_all(format!("tally: {text}{}", terminal::line_end()).as_bytes());
}
