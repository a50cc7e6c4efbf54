//! Addresses that start with `http://`.

use super::{Failure, Result};

/// The address of a file or a proxy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    /// User and password, with a colon in between.
    pub user: Option<String>,
    /// The host's name or IP address.
    pub host: String,
    pub port: u16,
    /// The path, with the query.
    pub path: String,
}

impl Url {
    /// Parses an address. It has no spaces and control characters, with which a request could be changed.
    pub fn parse(text: &str) -> Result<Self> {
        Self::parts(text).ok_or_else(|| Failure::NotHttpAddress(text.to_owned()))
    }

    fn parts(text: &str) -> Option<Self> {
        let scheme = text.get(..7).filter(|scheme| scheme.eq_ignore_ascii_case("http://"))?;
        if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            return None;
        }
        let rest = &text[scheme.len()..];
        let (authority, path) = rest.find(['/', '?']).map_or((rest, "/"), |at| rest.split_at(at));
        let (user, place) = match authority.rsplit_once('@') {
            Some((user, place)) => (Some(decode(user)), place),
            None => (None, authority),
        };
        // An IPv6 address is in brackets.
        let (host, port) = match place.strip_prefix('[').and_then(|place| place.split_once(']')) {
            Some((host, "")) => (host, 80),
            Some((host, port)) => (host, port.strip_prefix(':')?.parse().ok()?),
            None => match place.split_once(':') {
                Some((host, port)) => (host, port.parse().ok()?),
                None => (place, 80),
            },
        };
        let path = path.split('#').next().unwrap_or(path);
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        (!host.is_empty()).then(|| Self { user, host: host.to_owned(), port, path })
    }

    /// Returns the address to which a redirect leads.
    pub fn join(&self, to: &str) -> Result<Self> {
        if to.contains("://") {
            return Self::parse(to);
        }
        let path = match to.strip_prefix("//") {
            Some(rest) => return Self::parse(&format!("http://{rest}")),
            None if to.starts_with('/') => to.to_owned(),
            None => format!("{}/{to}", self.path.rsplit_once('/').map_or("", |(folder, _)| folder)),
        };
        Self::parse(&format!("http://{}{path}", self.authority()))
            .map(|url| Self { user: self.user.clone(), ..url })
    }

    /// Returns host and port as in an address.
    pub fn authority(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        if self.port == 80 { host } else { format!("{host}:{}", self.port) }
    }

    /// Returns the address without user and password.
    pub fn without_user(&self) -> String {
        format!("http://{}{}", self.authority(), self.path)
    }
}

/// Decodes `%XX` (RFC 3986, section 2.1).
fn decode(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let [first, after @ ..] = rest {
        let code =
            after.get(..2).and_then(|code| u8::from_str_radix(std::str::from_utf8(code).ok()?, 16).ok());
        match code {
            Some(code) if *first == b'%' => {
                bytes.push(code);
                rest = &after[2..];
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_has_its_parts() {
        let url = Url::parse("HTTP://me:s%40crd@mirror.example:8080/debian/x?y#z").unwrap();
        assert_eq!((url.host.as_str(), url.port, url.path.as_str()), ("mirror.example", 8080, "/debian/x?y"));
        assert_eq!(url.user.as_deref(), Some("me:s@crd"));
        assert_eq!(url.without_user(), "http://mirror.example:8080/debian/x?y");
        let url = Url::parse("http://[::1]").unwrap();
        assert_eq!((url.host.as_str(), url.port, url.path.as_str()), ("::1", 80, "/"));
        assert_eq!(url.authority(), "[::1]");
    }

    #[test]
    fn other_addresses_are_named() {
        for text in
            ["https://mirror.example", "mirror.example", "http://", "http://a b/", "http://a/\r\nX: y", "ftp"]
        {
            let said = Url::parse(text).unwrap_err().to_string();
            assert!(said.contains(text) && said.contains("http://"), "{said}");
        }
    }

    #[test]
    fn redirects_are_relative_or_absolute() {
        let url = Url::parse("http://me@a.example:81/x/y").unwrap();
        let to = |to: &str| url.join(to).unwrap().without_user();
        assert_eq!(to("/z"), "http://a.example:81/z");
        assert_eq!(to("z"), "http://a.example:81/x/z");
        assert_eq!(to("//b.example/z"), "http://b.example/z");
        assert_eq!(to("http://b.example/z"), "http://b.example/z");
        assert_eq!(url.join("http://b.example/z").unwrap().user, None, "no other host gets the password");
        assert!(url.join("https://b.example/z").is_err());
    }
}
