//! `--metrics`: a small HTTP server that tells in OpenMetrics' format how the machine does, for Prometheus and its like.
//!
//! Nobody outside can take much of the host, or of the guest: a few connections are served at once, each for a limited time,
//! and the others wait; and an answer is given again for a while before the vCPUs are called out of the guest for a new one.

mod exposition;

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use log::info;

use crate::deadline::{Deadlined, Timed};
use exposition::{CONTENT_TYPE, Machine};
use tally_machine::Vcpus;

/// A request with all its headers; real ones have some hundred bytes.
const MOST_BYTES: usize = 8 << 10;
const MOST_HEADERS: usize = 64;
/// So long a whole one may take, and so may a whole answer.
const PATIENCE: Duration = Duration::from_secs(2);
/// More connections wait.
const MOST_AT_ONCE: usize = 4;
/// So long an answer is given again.
const LASTS: Duration = Duration::from_millis(100);

/// Where the server is asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A socket in the file system.
    Unix(PathBuf),
    /// A host and a port.
    Tcp(String),
}

/// No address.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("it is unix:PATH, HOST:PORT or PORT")]
pub struct NoAddress;

/// A server that cannot be.
#[derive(Debug, thiserror::Error)]
#[error("--metrics {address}: {error}")]
pub struct MetricsError {
    address: String,
    error: io::Error,
}

impl FromStr for Address {
    type Err = NoAddress;

    fn from_str(text: &str) -> Result<Self, NoAddress> {
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() { Err(NoAddress) } else { Ok(Self::Unix(path.into())) };
        }
        let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
        let port: u16 = port.parse().map_err(|_| NoAddress)?;
        // Who names no host means this one, and nobody outside.
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

/// The server, which listens.
#[derive(Debug)]
pub struct Metrics {
    listener: Listener,
    patience: Duration,
}

#[derive(Debug)]
enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// Removes the socket from the file system when the machine has come to its end.
#[derive(Debug)]
pub struct Socket(Option<PathBuf>);

impl Drop for Socket {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // Somebody may have been faster.
            let _ = fs::remove_file(path);
        }
    }
}

impl Metrics {
    /// Begins to listen.
    pub fn listen(address: &Address) -> Result<(Self, Socket), MetricsError> {
        let failed = |error| MetricsError { address: address.to_string(), error };
        match address {
            Address::Unix(path) => {
                remove_stale(path).map_err(failed)?;
                let listener = UnixListener::bind(path).map_err(failed)?;
                info!("metrics: {address}");
                Ok((Self::new(Listener::Unix(listener)), Socket(Some(path.clone()))))
            }
            Address::Tcp(name) => {
                let addresses: Vec<SocketAddr> = name.to_socket_addrs().map_err(failed)?.collect();
                let listener = TcpListener::bind(&addresses[..]).map_err(failed)?;
                let at = listener.local_addr().map_err(failed)?;
                info!("metrics: http://{at}/metrics");
                Ok((Self::new(Listener::Tcp(listener)), Socket(None)))
            }
        }
    }

    fn new(listener: Listener) -> Self {
        Self { listener, patience: PATIENCE }
    }

    /// Serves from now on, with these facts about the machine, until the process ends.
    pub fn serve(self, facts: Vec<(&'static str, String)>, vcpus: Arc<Vcpus>) -> io::Result<()> {
        let kept = Kept::default();
        let answer = move || {
            kept.get(Instant::now, || {
                let stands_still = !vcpus.pause.because_of().is_empty();
                exposition::write(Machine { facts: facts.clone(), stands_still, vcpus: vcpus.report() })
            })
        };
        let serving = Arc::new((self.listener, answer));
        for _ in 0..MOST_AT_ONCE {
            let serving = Arc::clone(&serving);
            thread::Builder::new().name("metrics".to_owned()).spawn(move || {
                let (listener, answer) = &*serving;
                loop {
                    let served = listener.accept().and_then(|stream| serve(stream, self.patience, answer));
                    if served.is_err_and(|error| !is_the_clients(&error)) {
                        // Out of files, say: that may pass.
                        thread::sleep(PATIENCE);
                    }
                }
            })?;
        }
        Ok(())
    }
}

/// The last answer, and since when there is that.
#[derive(Debug, Default)]
struct Kept(Mutex<Option<(Instant, String)>>);

impl Kept {
    /// It, or a new one if it is too old by this clock. Who asks while one is made gets that.
    fn get<E>(
        &self,
        clock: impl Fn() -> Instant,
        make: impl FnOnce() -> Result<String, E>,
    ) -> Result<String, E> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((made, answer)) = &*kept
            && clock().saturating_duration_since(*made) < LASTS
        {
            return Ok(answer.clone());
        }
        let answer = make()?;
        *kept = Some((clock(), answer.clone()));
        Ok(answer)
    }
}

/// A socket that nobody listens on any more is in the way.
fn remove_stale(path: &Path) -> io::Result<()> {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    if is_socket && UnixStream::connect(path).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    {
        fs::remove_file(path)?;
    }
    Ok(())
}

fn is_the_clients(error: &io::Error) -> bool {
    use ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, TimedOut, UnexpectedEof, WouldBlock};
    matches!(
        error.kind(),
        BrokenPipe | ConnectionAborted | ConnectionReset | TimedOut | UnexpectedEof | WouldBlock
    )
}

impl Listener {
    fn accept(&self) -> io::Result<Box<dyn Timed>> {
        Ok(match self {
            Self::Unix(listener) => Box::new(listener.accept()?.0),
            Self::Tcp(listener) => Box::new(listener.accept()?.0),
        })
    }
}

/// Reads a request and answers it.
fn serve(
    stream: impl Timed,
    patience: Duration,
    metrics: impl Fn() -> Result<String, std::fmt::Error>,
) -> io::Result<()> {
    let mut stream = Deadlined::new(stream, Instant::now() + patience);
    let mut request = Vec::new();
    let answer = loop {
        let mut piece = [0; 1024];
        let count = stream.read(&mut piece)?;
        if count == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        request.extend_from_slice(&piece[..count]);
        if let Some(answer) = answer(&request) {
            break answer;
        }
    };
    let (status, body) = match answer {
        Answer::Metrics => {
            metrics().map_or(("500 Internal Server Error", String::new()), |text| ("200 OK", text))
        }
        Answer::NotFound => ("404 Not Found", "the metrics are at /metrics\n".to_owned()),
        Answer::NotAllowed => ("405 Method Not Allowed", "GET is all there is\n".to_owned()),
        Answer::Bad => ("400 Bad Request", "that is no request\n".to_owned()),
    };
    let kind = if status.starts_with("200") { CONTENT_TYPE } else { "text/plain" };
    let length = body.len();
    // However long the vCPUs have taken.
    stream.allow(patience);
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

/// What a request gets.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Metrics,
    NotFound,
    NotAllowed,
    Bad,
}

/// What a request gets, once enough of it is there.
fn answer(request: &[u8]) -> Option<Answer> {
    let mut headers = [httparse::EMPTY_HEADER; MOST_HEADERS];
    let mut parsed = httparse::Request::new(&mut headers);
    match parsed.parse(request) {
        Ok(status) if status.is_partial() => (request.len() > MOST_BYTES).then_some(Answer::Bad),
        Ok(_) => {
            let path = parsed.path.and_then(|path| path.split('?').next());
            Some(match (parsed.method, path) {
                (Some("GET"), Some("/metrics")) => Answer::Metrics,
                (Some("GET"), _) => Answer::NotFound,
                _ => Answer::NotAllowed,
            })
        }
        Err(_) => Some(Answer::Bad),
    }
}

#[cfg(test)]
mod tests;
