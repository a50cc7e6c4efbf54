//! Hosts with processors of AMD's and Intel's.

pub mod calls;
pub mod help;
pub mod host;
