//! Which proxy a request uses, by the variables that curl and wget read too.

use super::{Result, Url};

/// The proxy, and the hosts that are reached without it.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Proxies {
    proxy: Option<String>,
    without: Vec<String>,
}

impl Proxies {
    /// Reads the variables. A web server passes the header `Proxy:` of anybody's request to a CGI program as
    /// `HTTP_PROXY`, so that variable counts only where there is no such request.
    pub fn from(variable: impl Fn(&str) -> Option<String>) -> Self {
        let upper = || if variable("REQUEST_METHOD").is_none() { variable("HTTP_PROXY") } else { None };
        let all = || variable("all_proxy").or_else(|| variable("ALL_PROXY"));
        let without = variable("no_proxy").or_else(|| variable("NO_PROXY")).unwrap_or_default();
        let without = without.split([',', ' ']).filter(|host| !host.is_empty());
        Self {
            proxy: variable("http_proxy").or_else(upper).or_else(all),
            without: without.map(str::to_ascii_lowercase).collect(),
        }
    }

    /// Returns the address of the proxy for a request.
    pub fn of(&self, url: &Url) -> Result<Option<Url>> {
        let Some(proxy) = &self.proxy else { return Ok(None) };
        if self.without.iter().any(|pattern| is_match(pattern, url)) {
            return Ok(None);
        }
        let address = if proxy.contains("://") { proxy.clone() } else { format!("http://{proxy}") };
        Url::parse(&address).map(Some)
    }
}

/// Returns true if an entry of `no_proxy` names this host or the domain that it is in.
fn is_match(pattern: &str, url: &Url) -> bool {
    let (host, port) = (url.host.to_ascii_lowercase(), url.port.to_string());
    let pattern = match pattern.rsplit_once(':') {
        Some((name, of)) if !name.contains(':') || name.ends_with(']') => {
            if of != port {
                return false;
            }
            name
        }
        _ => pattern,
    };
    let name = pattern.trim_matches(['[', ']']).trim_start_matches("*.").trim_start_matches('.');
    name == "*"
        || host == name
        || host.strip_suffix(name).is_some_and(|rest| rest.ends_with('.') && !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proxies(variables: &[(&str, &str)]) -> Proxies {
        Proxies::from(|name| {
            variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned())
        })
    }

    fn chosen(variables: &[(&str, &str)], url: &str) -> Option<String> {
        proxies(variables).of(&Url::parse(url).unwrap()).unwrap().map(|proxy| proxy.authority())
    }

    #[test]
    fn the_usual_variables_name_the_proxy() {
        let url = "http://mirror.example/debian";
        assert_eq!(chosen(&[], url), None);
        for name in ["http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"] {
            assert_eq!(
                chosen(&[(name, "http://proxy.example:3128/")], url).as_deref(),
                Some("proxy.example:3128")
            );
        }
        let both = [("all_proxy", "all.example"), ("http_proxy", "proxy.example:3128")];
        assert_eq!(chosen(&both, url).as_deref(), Some("proxy.example:3128"));
        let socks = proxies(&[("all_proxy", "socks5://proxy.example")]);
        let said = socks.of(&Url::parse(url).unwrap()).unwrap_err().to_string();
        assert!(said.contains("socks5://proxy.example"), "{said}");
    }

    #[test]
    fn a_request_to_a_web_server_cannot_name_the_proxy() {
        let variables = [("REQUEST_METHOD", "GET"), ("HTTP_PROXY", "evil.example")];
        assert_eq!(chosen(&variables, "http://mirror.example"), None);
    }

    #[test]
    fn hosts_in_no_proxy_are_reached_directly() {
        let is_direct = |without: &str, url: &str| {
            chosen(&[("http_proxy", "proxy.example"), ("no_proxy", without)], url).is_none()
        };
        let url = "http://deb.mirror.example:8080/debian";
        for without in
            ["*", "mirror.example", ".mirror.example, x", "x,*.example", "deb.mirror.example:8080", "Example"]
        {
            assert!(is_direct(without, url), "{without}");
        }
        for without in ["", "b.mirror.example", "deb.mirror.example:80", "mirror", ","] {
            assert!(!is_direct(without, url), "{without}");
        }
        assert!(is_direct("::1,127.0.0.1", "http://[::1]/x") && is_direct("127.0.0.1", "http://127.0.0.1/x"));
    }
}
