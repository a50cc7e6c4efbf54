//! The command `tally`.
fn main() {}
