//! Draws [`Stacks`] as a flame graph.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use inferno::flamegraph::color::MultiPalette;
use inferno::flamegraph::{self, Options, Palette};

use super::destination::Destination;
use super::stacks::Stacks;

/// Number of letters that fit above a picture.
const MAX_TITLE: usize = 110;

/// A picture that is going to be drawn. Nothing is written before.
pub struct Picture {
    path: PathBuf,
    destination: Destination,
}

impl Picture {
    /// Prepares a picture in this file.
    pub fn new(path: &Path) -> Result<Self> {
        let destination = Destination::new(path).with_context(|| option(path))?;
        Ok(Self { path: path.to_owned(), destination })
    }

    /// Returns the directory that is written to, if the picture becomes a file.
    pub fn folder(&self) -> Option<&Path> {
        self.destination.folder()
    }

    /// Returns how it was asked for.
    pub fn option(&self) -> String {
        option(&self.path)
    }

    /// Draws the picture. A file that is `private` can be read by its owner only.
    pub fn draw(self, private: bool, text: &str, stacks: Stacks) -> Result<()> {
        let mut options = Options::default();
        options.title = title(text);
        options.subtitle = Some(format!("{} samples", stacks.count()));
        // This palette has a colour of its own for the kernel's frames, and `hash` gives a function the same colour in
        // each picture.
        options.colors = Palette::Multi(MultiPalette::Java);
        options.hash = true;
        let lines: Vec<String> =
            stacks.counts.into_iter().map(|(stack, count)| format!("{stack} {count}")).collect();
        self.destination
            .write(private, |to| flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), to))
            .with_context(|| option(&self.path))
    }
}

fn option(path: &Path) -> String {
    format!("--flamegraph {}", path.display())
}

/// Returns a text as a title, cut to the room that there is for it.
fn title(text: &str) -> String {
    let mut title = text.replace(char::is_control, " ");
    if let Some((end, _)) = title.char_indices().nth(MAX_TITLE) {
        title.truncate(end);
        title.push('\u{2026}');
    }
    title
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_command_is_cut_to_fit_above_the_picture() {
        assert_eq!(title("a; b\nc"), "a; b c");
        assert_eq!(title(&"\u{e4}".repeat(500)), "\u{e4}".repeat(MAX_TITLE) + "\u{2026}");
    }
}
