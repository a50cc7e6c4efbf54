//! Suggestions for misspelled words: "did you mean ...?"

/// Returns the word that is most similar to `text`, unless none is similar enough.
pub fn suggestion<'a>(text: &str, words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// Minimum number of letters for each edit.
    const LETTERS_PER_EDIT: usize = 2;
    let text = text.to_lowercase();
    let distance = |word: &str| strsim::osa_distance(&text, &word.to_lowercase());
    let near = words.into_iter().map(|word| (distance(word), word));
    near.filter(|(distance, word)| distance * LETTERS_PER_EDIT <= word.len().max(text.len()))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, word)| word)
}
