//! The order of versions (Debian Policy, section 5.6.12).

use std::cmp::Ordering;

/// Compares two versions: epoch, upstream version, revision.
pub fn compare(one: &str, other: &str) -> Ordering {
    let ((epoch, upstream, revision), (other_epoch, other_upstream, other_revision)) =
        (parts(one), parts(other));
    epoch
        .cmp(&other_epoch)
        .then_with(|| compare_part(upstream, other_upstream))
        .then_with(|| compare_part(revision, other_revision))
}

fn parts(version: &str) -> (u64, &str, &str) {
    let (epoch, rest) = match version.split_once(':') {
        Some((epoch, rest)) => (epoch.parse().unwrap_or_default(), rest),
        None => (0, version),
    };
    let (upstream, revision) = rest.rsplit_once('-').unwrap_or((rest, "0"));
    (epoch, upstream, revision)
}

/// Compares texts and numbers in turn.
fn compare_part(mut one: &str, mut other: &str) -> Ordering {
    while !one.is_empty() || !other.is_empty() {
        let (text, other_text) =
            (take(&mut one, |byte| !byte.is_ascii_digit()), take(&mut other, |byte| !byte.is_ascii_digit()));
        let order = compare_texts(text, other_text);
        if order.is_ne() {
            return order;
        }
        let (number, other_number) =
            (take(&mut one, |byte| byte.is_ascii_digit()), take(&mut other, |byte| byte.is_ascii_digit()));
        let (number, other_number) = (number.trim_start_matches('0'), other_number.trim_start_matches('0'));
        let order = number.len().cmp(&other_number.len()).then_with(|| number.cmp(other_number));
        if order.is_ne() {
            return order;
        }
    }
    Ordering::Equal
}

/// Takes the bytes off the start of a text for which `is_wanted`.
fn take<'a>(text: &mut &'a str, is_wanted: impl Fn(u8) -> bool) -> &'a str {
    let end = text.bytes().position(|byte| !is_wanted(byte)).unwrap_or(text.len());
    let (taken, rest) = text.split_at(end);
    *text = rest;
    taken
}

/// Compares texts without digits: `~` comes before the end, which comes before letters, before everything else.
fn compare_texts(one: &str, other: &str) -> Ordering {
    let weight = |byte: Option<u8>| match byte {
        Some(b'~') => -1,
        None => 0,
        Some(byte) if byte.is_ascii_alphabetic() => i32::from(byte),
        Some(byte) => i32::from(byte) + 256,
    };
    let length = one.len().max(other.len());
    let at = |text: &str, index| weight(text.as_bytes().get(index).copied());
    (0..length)
        .map(|index| at(one, index).cmp(&at(other, index)))
        .find(|order| order.is_ne())
        .unwrap_or(Ordering::Equal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn versions_are_in_debians_order() {
        // Each is newer than the one before.
        let ordered = [
            "0~~",
            "0~~a",
            "0~",
            "0",
            "0a",
            "0+",
            "0.1",
            "1.0~rc1-1",
            "1.0-0.1",
            "1.0-1~deb12u1",
            "1.0-1",
            "1.0-1+b1",
            "1.0-1+deb12u1",
            "1.0a-1",
            "1.0+dfsg-1",
            "1.0.1-1",
            "1.2",
            "1.10",
            "6.1.99-1",
            "6.1.176-1~deb12u1",
            "6.1.176-1",
            "6.1.192-2",
            "99999999999999999999999",
            "1:0.1",
        ];
        let sorted = {
            let mut versions = ordered;
            versions.reverse();
            versions.sort_by(|one, other| compare(one, other));
            versions
        };
        let wrong: Vec<_> = ordered.windows(2).filter(|pair| compare(pair[0], pair[1]).is_ge()).collect();
        assert_eq!(wrong, [[""; 2]; 0]);
        assert_eq!(sorted, ordered);
    }

    #[test]
    fn zeros_in_front_and_a_revision_of_zero_make_no_difference() {
        for (one, other) in [("1.0", "1.0-0"), ("1.01", "1.1"), ("0:1", "1"), ("1.0-0", "1.0-00")] {
            assert_eq!(compare(one, other), Ordering::Equal, "{one} {other}");
        }
    }

    proptest! {
        #[test]
        fn any_three_versions_have_an_order(versions in prop::array::uniform3("[0-9a-c.+~:-]{0,6}")) {
            let [one, two, three] = &versions;
            prop_assert_eq!(compare(one, two), compare(two, one).reverse());
            prop_assert_eq!(compare(one, one), Ordering::Equal);
            if compare(one, two).is_le() && compare(two, three).is_le() {
                prop_assert!(compare(one, three).is_le());
            }
        }
    }
}
