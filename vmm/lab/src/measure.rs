//! What things cost on simulated hosts: the figures of the documentation, the benchmark, and profiles.

pub mod bench;
pub mod figures;
pub mod profile;
pub mod published;
