//! The command `tally-lab`.
fn main() {}
