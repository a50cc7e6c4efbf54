//! Code of Tally's in a kernel's image.

/// Addresses of what was changed to add the code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Added {
    /// Address of the first entry of the kernel's table that leads to the code.
    pub table: u64,
    pub code: u64,
}
