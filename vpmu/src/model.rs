//! What an access to a PMU register means, one file for each kind of PMU that a guest can be shown.

pub mod amd;
pub mod none;
