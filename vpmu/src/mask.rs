//! Counter masks: sets of counters, one bit for each.

/// Returns the mask of the first `counters` counters.
pub fn first(counters: usize) -> u64 {
    (1 << counters) - 1
}

/// Returns the numbers of a mask's counters, in ascending order.
pub fn members(set: u64) -> impl Iterator<Item = usize> {
    let mut left = set;
    std::iter::from_fn(move || {
        let next = left.trailing_zeros() as usize;
        left &= left.checked_sub(1)?;
        Some(next)
    })
}

/// Returns the mask of these counters.
pub fn of(counters: impl Iterator<Item = usize>) -> u64 {
    counters.fold(0, |set, counter| set | 1 << counter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_has_its_members_in_their_order() {
        assert_eq!(members(0).count(), 0);
        assert_eq!(members(1 << 63 | 0b101).collect::<Vec<_>>(), [0, 2, 63]);
        assert_eq!(of(members(1 << 63 | 0b101)), 1 << 63 | 0b101);
        assert_eq!(members(first(6)).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5]);
    }
}
