//! The address of a server, as `--metrics` takes it.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::str::FromStr;

/// Address of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A socket in the file system.
    Unix(PathBuf),
    /// A host and a port.
    Tcp(String),
}

/// A text that is no address.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("it is unix:PATH, HOST:PORT or PORT")]
pub struct NoAddress;

impl FromStr for Address {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<Self, NoAddress> {
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err(NoAddress) } else { Ok(Self::Unix(path.into())) };
        }
        let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
        let port: u16 = port.parse().map_err(|_| NoAddress)?;
        // Without a host, only this host can connect.
        let host = if host.is_empty() { Ipv4Addr::LOCALHOST.to_string() } else { host.to_owned() };
        Ok(Self::Tcp(format!("{host}:{port}")))
    }
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "{address}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_of_this_host_unless_one_is_named() {
        let tcp = |text: &str| Ok(Address::Tcp(text.to_owned()));
        assert_eq!("9100".parse(), tcp("127.0.0.1:9100"));
        assert_eq!(":9100".parse(), tcp("127.0.0.1:9100"));
        assert_eq!("0.0.0.0:9100".parse(), tcp("0.0.0.0:9100"));
        assert_eq!("[::1]:9100".parse(), tcp("[::1]:9100"));
        assert_eq!("unix:/run/x".parse(), Ok(Address::Unix("/run/x".into())));
        for wrong in ["", "unix:", "host", "host:", "1:2:x", "99999"] {
            assert_eq!(wrong.parse::<Address>(), Err(NoAddress), "{wrong}");
        }
    }
}
