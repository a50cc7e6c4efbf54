//! The network of a guest, as `--net` and `--publish` take it.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::num::NonZero;
use std::str::FromStr;

/// What `--net` takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Network {
    /// passt.
    User(HostReach),
    /// A tap device of this name.
    Tap(String),
}

/// What a guest can reach of this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostReach {
    /// What does not listen on loopback addresses alone.
    WithoutLoopback,
    /// That, and what does, at the address of the guest's gateway.
    WithLoopback,
    /// Nothing.
    Closed,
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "user" => Ok(Self::User(HostReach::WithoutLoopback)),
            "user,host-loopback" => Ok(Self::User(HostReach::WithLoopback)),
            "user,host=no" => Ok(Self::User(HostReach::Closed)),
            _ => match text.strip_prefix("tap=") {
                Some(name) if !name.is_empty() => Ok(Self::Tap(name.to_owned())),
                _ => Err("user, user,host-loopback, user,host=no or tap=NAME".into()),
            },
        }
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::User(HostReach::WithoutLoopback) => f.write_str("user"),
            Self::User(HostReach::WithLoopback) => f.write_str("user,host-loopback"),
            Self::User(HostReach::Closed) => f.write_str("user,host=no"),
            Self::Tap(name) => write!(f, "tap={name}"),
        }
    }
}

/// A port of the guest that the host has, too: what `--publish` takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// The protocol.
    pub protocol: Protocol,
    /// The address of this host.
    pub address: IpAddr,
    /// The host's port.
    pub host: NonZero<u16>,
    /// The guest's.
    pub guest: NonZero<u16>,
}

/// The protocol of a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl FromStr for Published {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        const FORM: &str = "[ADDRESS:]HOST:GUEST[/udp], with ports from 1 to 65535";
        let (ports, protocol) = match text.rsplit_once('/') {
            None => (text, Protocol::Tcp),
            Some((ports, "tcp")) => (ports, Protocol::Tcp),
            Some((ports, "udp")) => (ports, Protocol::Udp),
            Some(_) => return Err(FORM),
        };
        let (host, guest) = ports.rsplit_once(':').ok_or(FORM)?;
        let (address, host) = match host.rsplit_once(':') {
            Some((address, host)) => {
                let address =
                    address.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).unwrap_or(address);
                (address.parse().map_err(|_| FORM)?, host)
            }
            None => (Ipv4Addr::LOCALHOST.into(), host),
        };
        let port = |text: &str| text.parse().map_err(|_| FORM);
        Ok(Self { protocol, address, host: port(host)?, guest: port(guest)? })
    }
}

impl fmt::Display for Published {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { protocol, address, host, guest } = self;
        let protocol = match protocol {
            Protocol::Tcp => "tcp",
            Protocol::Udp => "udp",
        };
        write!(f, "{address}:{host}:{guest}/{protocol}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_named_as_it_is_given() {
        for text in ["user", "user,host-loopback", "user,host=no", "tap=tap0"] {
            assert_eq!(text.parse::<Network>().unwrap().to_string(), text);
        }
        for text in ["", "tap", "tap=", "User", "user,", "user,host=yes"] {
            assert!(text.parse::<Network>().is_err(), "{text}");
        }
    }
}
