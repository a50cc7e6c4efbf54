//! A client for plain HTTP/1.1, directly or by a proxy.
//!
//! What it fetches needs no encryption: indexes are signed, and they name the hashes of everything else.

mod body;
mod failure;
mod proxy;
mod url;

use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::process::{Command, Stdio};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;

use body::Body;
pub use failure::Failure;
use proxy::Proxies;
pub use url::Url;

/// Time for a connection, and for each read from it.
const TIMEOUT: Duration = Duration::from_secs(30);
const MAX_REDIRECTS: usize = 5;
const MAX_HEADERS: usize = 100;
/// Maximum size of a response's headers.
const MAX_HEAD: usize = 64 << 10;

type Result<T> = std::result::Result<T, Failure>;

/// Fetches files by HTTP.
pub struct Client {
    proxies: Proxies,
}

/// A response, whose body has not been read yet.
pub struct Response<R = TcpStream> {
    /// The first byte of the file that the body has.
    pub from: u64,
    /// The size of the body, if the server says it.
    pub length: Option<u64>,
    pub body: Body<R>,
}

/// The beginning of a response.
struct Head {
    status: u16,
    length: Option<u64>,
    is_chunked: bool,
    location: Option<String>,
    content_range: Option<String>,
    is_html: bool,
}

impl Client {
    /// Creates a client that uses the proxies in the usual variables.
    pub fn from_environment() -> Self {
        Self::with(|name| env::var(name).ok())
    }

    /// Creates a client that uses the proxies in these variables.
    pub fn with(variable: impl Fn(&str) -> Option<String>) -> Self {
        Self { proxies: Proxies::from(|name| variable(name).filter(|value| !value.is_empty())) }
    }

    /// Requests a file from its byte `from` on. The server may send it from the beginning all the same.
    pub fn get(&self, url: &Url, from: u64) -> Result<Response> {
        let mut url = url.clone();
        for _ in 0..=MAX_REDIRECTS {
            let mut stream = BufReader::new(self.request(&url, from)?);
            let head = Head::read(&mut stream)?;
            match head.status {
                200 | 206 => return head.into_response(stream, from),
                // The file is shorter than what is here.
                416 if from > 0 => return self.get(&url, 0),
                301 | 302 | 303 | 307 | 308 => {
                    let to = head.location.ok_or(Failure::NotHttp)?;
                    url = url.join(&to)?;
                }
                404 | 410 => return Err(Failure::NotFound),
                status => return Err(Failure::Status { status, is_html: head.is_html }),
            }
        }
        Err(Failure::Redirects(MAX_REDIRECTS))
    }

    fn request(&self, url: &Url, from: u64) -> Result<TcpStream> {
        let proxy = self.proxies.of(url)?;
        let mut stream = connect(proxy.as_ref().unwrap_or(url))?;
        let target = if proxy.is_some() { url.without_user() } else { url.path.clone() };
        let mut lines = vec![
            format!("GET {target} HTTP/1.1"),
            format!("Host: {}", url.authority()),
            "User-Agent: tally".to_owned(),
            "Connection: close".to_owned(),
        ];
        let of_proxy = proxy.as_ref().and_then(|proxy| proxy.user.as_ref());
        for (header, user) in [("Authorization", url.user.as_ref()), ("Proxy-Authorization", of_proxy)] {
            lines.extend(user.map(|user| format!("{header}: Basic {}", BASE64_STANDARD.encode(user))));
        }
        if from > 0 {
            lines.push(format!("Range: bytes={from}-"));
        }
        let request = lines.join("\r\n") + "\r\n\r\n";
        stream.write_all(request.as_bytes()).map_err(Failure::Broken)?;
        Ok(stream)
    }
}

impl Head {
    fn read(stream: &mut impl BufRead) -> Result<Self> {
        let mut text = Vec::new();
        while !text.ends_with(b"\r\n\r\n") {
            let space = (MAX_HEAD - text.len()) as u64;
            let mut line = stream.take(space);
            if line.read_until(b'\n', &mut text).map_err(Failure::Broken)? == 0 {
                return Err(Failure::NotHttp);
            }
        }
        Self::parse(&text).ok_or(Failure::NotHttp)
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut response = httparse::Response::new(&mut headers);
        if !response.parse(text).ok()?.is_complete() {
            return None;
        }
        let status = response.code?;
        let value = |name: &str| {
            let header = headers.iter().find(|header| header.name.eq_ignore_ascii_case(name))?;
            Some(String::from_utf8_lossy(header.value).trim().to_owned())
        };
        Some(Self {
            status,
            length: value("content-length").and_then(|length| length.parse().ok()),
            is_chunked: value("transfer-encoding")
                .is_some_and(|coding| coding.eq_ignore_ascii_case("chunked")),
            location: value("location"),
            content_range: value("content-range"),
            is_html: value("content-type").is_some_and(|kind| kind.starts_with("text/html")),
        })
    }

    fn into_response<R: Read>(self, stream: BufReader<R>, asked: u64) -> Result<Response<R>> {
        let from = if self.status == 206 { asked } else { 0 };
        if self.status == 206 {
            let range = self.content_range.as_deref().and_then(|range| range.strip_prefix("bytes "));
            if range.and_then(|range| range.split_once('-')?.0.parse().ok()) != Some(asked) {
                return Err(Failure::NotHttp);
            }
        }
        let body = Body::new(stream, if self.is_chunked { None } else { self.length }, self.is_chunked);
        Ok(Response { from, length: if self.is_chunked { None } else { self.length }, body })
    }
}

/// Reads what a server has sent in answer to a request from the byte `asked` on, or from the beginning.
pub fn read_response<R: Read>(from: R, asked: u64) -> Result<Response<R>> {
    let mut stream = BufReader::new(from);
    Head::read(&mut stream)?.into_response(stream, asked)
}

/// Connects to the host of an address, by the first of its IP addresses that answers.
fn connect(to: &Url) -> Result<TcpStream> {
    let unreachable = |source| Failure::Unreachable { host: to.host.clone(), source };
    let mut outcome = Err(std::io::Error::other("its name has no address"));
    for address in addresses(&to.host, to.port).map_err(unreachable)? {
        outcome = TcpStream::connect_timeout(&address, TIMEOUT);
        if outcome.is_ok() {
            break;
        }
    }
    let stream = outcome.map_err(unreachable)?;
    stream.set_read_timeout(Some(TIMEOUT)).map_err(Failure::Broken)?;
    stream.set_write_timeout(Some(TIMEOUT)).map_err(Failure::Broken)?;
    Ok(stream)
}

/// Looks up a host by the machine's own `getent`. A static C library cannot load the modules that the machine's
/// nsswitch.conf may name, but it can look up hosts where there is no such program.
fn addresses(host: &str, port: u16) -> std::io::Result<Vec<SocketAddr>> {
    if let Ok(address) = host.parse::<IpAddr>() {
        return Ok(vec![SocketAddr::new(address, port)]);
    }
    let mut getent = Command::new("getent");
    getent.args(["ahosts", host]).stdin(Stdio::null()).stderr(Stdio::null());
    let Ok(output) = getent.output() else { return Ok((host, port).to_socket_addrs()?.collect()) };
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter(|line| line.contains("STREAM"));
    let addresses = lines.filter_map(|line| line.split_whitespace().next()?.parse().ok());
    Ok(addresses.map(|address| SocketAddr::new(address, port)).collect())
}
