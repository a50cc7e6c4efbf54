//! The format of package lists: stanzas of fields (deb822(5)).

#[derive(Clone, Copy)]
pub struct Stanza<'a> {
    text: &'a str,
}

impl<'a> Stanza<'a> {
    /// Uses a text as one stanza.
    pub fn of(text: &'a str) -> Self {
        Self { text }
    }

    /// Returns the stanzas of a list.
    pub fn all(text: &'a str) -> impl Iterator<Item = Self> {
        text.split("\n\n").filter(|text| !text.trim().is_empty()).map(Self::of)
    }

    /// Returns the fields, with their names.
    pub fn fields(self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let mut rest = self.text;
        std::iter::from_fn(move || {
            loop {
                if rest.is_empty() {
                    return None;
                }
                let field = next_field(&mut rest);
                if field.starts_with('#') {
                    continue;
                }
                if let Some((name, value)) = field.split_once(':') {
                    return Some((name, value.trim_matches([' ', '\t', '\n'])));
                }
            }
        })
    }

    /// Returns the value of a field, with its continuation lines.
    pub fn field(self, name: &str) -> Option<&'a str> {
        self.fields().find(|(other, _)| other.eq_ignore_ascii_case(name)).map(|(_, value)| value)
    }
}

/// Takes the first field off a text. It ends before a line that does not begin with a space.
fn next_field<'a>(text: &mut &'a str) -> &'a str {
    let bytes = text.as_bytes();
    let mut end = 0;
    loop {
        end = match text[end..].find('\n') {
            Some(at) => end + at + 1,
            None => text.len(),
        };
        if !matches!(bytes.get(end), Some(b' ' | b'\t')) {
            let (field, rest) = text.split_at(end);
            *text = rest;
            return field;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_has_its_continuation_lines() {
        let text = "Package: a\n# a comment\nDepends: b,\n c\nSize:1\n\nPackage: d\nFiles:\n 1 x\n 2 y\n";
        let stanzas: Vec<Stanza> = Stanza::all(text).collect();
        assert_eq!(stanzas.len(), 2);
        assert_eq!(stanzas[0].field("depends"), Some("b,\n c"));
        assert_eq!(stanzas[0].field("Size"), Some("1"));
        assert_eq!(stanzas[1].field("Files"), Some("1 x\n 2 y"));
        assert_eq!(stanzas[1].field("Size"), None);
    }
}
