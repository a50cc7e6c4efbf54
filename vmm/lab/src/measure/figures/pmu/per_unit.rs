//! The cost of a unit of work.

use std::fmt;

/// A number per unit of work, exact to a half.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct PerUnit {
    pub(super) halves: i64,
}

impl PerUnit {
    pub fn whole(number: i64) -> Self {
        Self { halves: number * 2 }
    }
}

impl std::ops::Sub for PerUnit {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self { halves: self.halves - other.halves }
    }
}

impl fmt::Display for PerUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let half = if self.halves % 2 == 0 { "" } else { ".5" };
        write!(f, "{}{half}", self.halves / 2)
    }
}
