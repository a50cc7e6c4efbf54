//! Why a file could not be fetched.

use std::io;

/// The reason why a file could not be fetched.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("no connection to {host}: {source}")]
    Unreachable {
        host: String,
        /// The error of the last attempt.
        source: io::Error,
    },
    #[error("the connection broke: {0}")]
    Broken(io::Error),
    #[error("the server has no such file")]
    NotFound,
    #[error("the server answered with status {status}{}", if *.is_html { " and a web page, as a proxy does" } else { "" })]
    Status {
        status: u16,
        /// The body is a web page.
        is_html: bool,
    },
    #[error("the server has redirected more than {0} times")]
    Redirects(usize),
    #[error("the server sends more than {0} bytes")]
    TooLarge(u64),
    #[error("the server sends {sent} bytes instead of {expected}, so it is another file or a proxy's page")]
    OtherSize {
        /// The size that the server says.
        sent: u64,
        /// The size in the signed index.
        expected: u64,
    },
    #[error("the server's answer is not HTTP")]
    NotHttp,
    #[error(
        "`{0}` is not an address that starts with http:// (packages are verified by signatures, not by TLS)"
    )]
    NotHttpAddress(String),
}

impl Failure {
    /// Returns true if it is for want of a network that something could not be fetched.
    pub fn is_of_network(&self) -> bool {
        matches!(self, Self::Unreachable { .. } | Self::Broken(_))
    }

    /// Returns true if the next attempt may get the rest of the file.
    pub fn is_interruption(&self) -> bool {
        matches!(self, Self::Broken(_))
    }
}
