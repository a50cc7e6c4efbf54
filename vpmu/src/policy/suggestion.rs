//! What somebody may have meant who wrote something else.

/// That of the words which is most like `text`, unless none is.
pub fn suggestion<'a>(text: &str, words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// One in so many letters may be wrong.
    const LETTERS: usize = 2;
    let text = text.to_lowercase();
    let distance = |word: &str| strsim::osa_distance(&text, &word.to_lowercase());
    let near = words.into_iter().map(|word| (distance(word), word));
    near.filter(|(distance, word)| distance * LETTERS <= word.len().max(text.len()))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, word)| word)
}
