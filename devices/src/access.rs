//! What a guest may do with a file or a folder of the host.

/// Guest access to a file or directory of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// The guest can only read.
    ReadOnly,
    /// The guest can read and write.
    ReadWrite,
}
