//! Makes other processes' text safe to print: it cannot draw on the user's terminal, and has an end.

/// Maximum length of a name, a reason or a line, in characters.
const MAX_CHARS: usize = 1000;

/// Replaces control characters, and cuts off what is longer than any name, reason or line is.
pub fn short(text: &str) -> String {
    shorter(text, MAX_CHARS)
}

/// Replaces control characters, and cuts off what is longer than this many characters.
pub fn shorter(text: &str, max_chars: usize) -> String {
    text.chars().take(max_chars).map(replaced).collect()
}

/// Returns what is shown in place of a character.
pub fn replaced(c: char) -> char {
    // Those that reverse a line's direction make it look like another one.
    let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if c.is_control() || turns { '?' } else { c }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_any_length_and_with_any_characters_can_be_shown() {
        assert_eq!(short("a\x1b[2J\u{9b}\n\u{7f}b"), "a?[2J???b");
        assert_eq!(short(&"\u{fc}".repeat(70_000)), "\u{fc}".repeat(MAX_CHARS));
        assert_eq!(short(""), "");
        assert_eq!(short("a\u{202e}b"), "a?b", "it would show the rest from right to left");
    }
}
