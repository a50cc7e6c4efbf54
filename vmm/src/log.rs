//! What the operator is told while a guest runs: in the log, if there is one, and on standard error what matters without one.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// The log, shared by all threads.
#[derive(Clone)]
pub struct Log {
    file: Option<Arc<Mutex<File>>>,
    verbose: bool,
}

impl Log {
    /// A log into this file, which is made anew; notes go to standard error too if `verbose`.
    pub fn new(file: Option<&Path>, verbose: bool) -> io::Result<Self> {
        let file = file.map(File::create).transpose()?.map(|file| Arc::new(Mutex::new(file)));
        Ok(Self { file, verbose })
    }

    /// Something to look up later.
    pub fn note(&self, text: impl Display) {
        if self.verbose {
            say(&text);
        }
        self.write(&text);
    }

    /// Something to know now.
    pub fn warn(&self, text: impl Display) {
        say(&text);
        self.write(&text);
    }

    fn write(&self, text: &impl Display) {
        let Some(file) = &self.file else { return };
        let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = writeln!(file, "{text}") {
            say(&format_args!("the log cannot be written: {error}"));
        }
    }
}

/// A guest is not to end because nobody reads standard error.
fn say(text: &impl Display) {
    let _ = writeln!(io::stderr(), "tally: {text}");
}
