//! The only place that prints. What Tally prints may quote others: VMs of other users, snapshots, event logs, guests'
//! kernels and agents. None of that draws on the terminal: control characters are replaced here, wherever a text comes
//! from.
//!
//! The streams of a guest's command and its console are not Tally's own text, and reach the terminal as they are
//! ([`crate::run`]). A test on the sources (`tests/guest/tests/sources.rs`) lists them.

use std::fmt::Display;
use std::io::{self, Stdout, Write};

use crate::host::terminal;
use crate::protocol::printable::replaced;

/// Maximum length of a line on standard error, in characters.
const MAX_LINE: usize = 16 << 10;

/// Prints a line on standard error, with one write, so that no other output falls into it. Errors are ignored: a closed
/// standard error must not end the process.
pub fn say(text: &impl Display) {
    let _ = io::stderr().write_all(said(&text.to_string(), terminal::line_end()).as_bytes());
}

/// Prints a line on standard error, and these lines below it.
pub fn say_with_lines(text: &impl Display, lines: &str) {
    let end = terminal::line_end();
    let lines = lines.lines().map(|line| one_line(line) + end).collect::<String>();
    let _ = io::stderr().write_all((said(&text.to_string(), end) + &lines).as_bytes());
}

fn said(text: &str, line_end: &str) -> String {
    format!("tally: {}{line_end}", one_line(text))
}

/// Replaces what could draw on the terminal, and what would begin a line that looks like another message.
fn one_line(text: &str) -> String {
    let shown = |c| if c == '\n' { ' ' } else { replaced(c) };
    text.chars().take(MAX_LINE).map(|c| if c == '\t' { c } else { shown(c) }).collect()
}

/// Standard output. Lines are printed when they are complete; bytes that are no text are replaced.
pub struct Printer {
    to: Stdout,
    /// The beginning of a line.
    waiting: Vec<u8>,
}

/// Returns standard output.
pub fn out() -> Printer {
    Printer { to: io::stdout(), waiting: Vec::new() }
}

impl Printer {
    fn print(&mut self, len: usize) -> io::Result<()> {
        let bytes: Vec<u8> = self.waiting.drain(..len).collect();
        self.to.write_all(printed(&bytes).as_bytes())
    }
}

/// Returns a text as it is printed.
fn printed(bytes: &[u8]) -> String {
    let shown = |c| if matches!(c, '\n' | '\t') { c } else { replaced(c) };
    String::from_utf8_lossy(bytes).chars().map(shown).collect()
}

impl Write for Printer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.waiting.extend(bytes);
        if let Some(end) = self.waiting.iter().rposition(|byte| *byte == b'\n') {
            self.print(end + 1)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.print(self.waiting.len())?;
        self.to.flush()
    }
}

impl Drop for Printer {
    fn drop(&mut self) {
        // Whoever wants to know of an error has flushed.
        let _ = self.flush();
    }
}

/// The terminal's alternate screen. Dropping this restores the primary screen.
pub struct Screen(());

impl Screen {
    /// Switches to the alternate screen.
    pub fn enter() -> io::Result<Self> {
        control("\x1b[?1049h\x1b[?25l")?;
        Ok(Self(()))
    }

    /// Draws as much of these lines as there is room for.
    pub fn draw(lines: &[String]) -> io::Result<()> {
        let (rows, columns) =
            terminal::size().map_or((24, 80), |size| (size.rows.into(), size.columns.into()));
        control(&drawing(lines, rows, columns))
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // An error means that the terminal is gone.
        let _ = control("\x1b[?25h\x1b[?1049l");
    }
}

/// Returns what draws these lines on a screen of this size.
fn drawing(lines: &[String], rows: usize, columns: usize) -> String {
    let cut = |line: &String| line.chars().take(columns).map(replaced).collect::<String>();
    // Clears the rest of each line, and the lines below.
    let shown = lines.iter().take(rows).map(|line| cut(line) + "\x1b[K");
    format!("\x1b[H{}\x1b[J", shown.collect::<Vec<_>>().join("\r\n"))
}

/// Writes control sequences of our own.
fn control(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\x1b[2Jb\u{9b}1m\ntally: all is well\rc\u{202e}";

    #[test]
    fn a_message_is_one_line_whatever_it_quotes() {
        assert_eq!(said(HOSTILE, "\n"), "tally: a?[2Jb?1m tally: all is well?c?\n");
        assert_eq!(said(&"x".repeat(1 << 20), "\r\n").len(), "tally: \r\n".len() + MAX_LINE);
    }

    #[test]
    fn what_is_printed_cannot_draw_on_the_terminal() {
        assert_eq!(printed(HOSTILE.as_bytes()), "a?[2Jb?1m\ntally: all is well?c?");
        assert_eq!(printed(b"a\tb\xff\xc2\n"), "a\tb\u{fffd}\u{fffd}\n");
    }

    #[test]
    fn what_is_drawn_cannot_leave_its_line() {
        let lines = ["a\x1b[2Jb\r\n".to_owned(), "long".to_owned(), "below the screen".to_owned()];
        assert_eq!(drawing(&lines, 2, 3), "\x1b[Ha?[\x1b[K\r\nlon\x1b[K\x1b[J");
    }
}
