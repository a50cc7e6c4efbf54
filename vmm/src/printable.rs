//! Makes other processes' text safe to print: it cannot draw on the user's terminal, and has an end.

/// Maximum length of a name, a reason or a line, in characters.
const MAX_CHARS: usize = 1000;

/// Replaces control characters, and cuts off what is longer than any name, reason or line is.
pub fn short(text: &str) -> String {
    text.chars().take(MAX_CHARS).map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_any_length_and_with_any_characters_can_be_shown() {
        assert_eq!(short("a\x1b[2J\u{9b}\n\u{7f}b"), "a?[2J???b");
        assert_eq!(short(&"\u{fc}".repeat(70_000)), "\u{fc}".repeat(MAX_CHARS));
        assert_eq!(short(""), "");
    }
}
