//! `--metrics`: a small HTTP server that serves metrics in OpenMetrics' format, to Prometheus and its like: those of a
//! VM (`tally run`), or those of all running VMs (`tally stat`).
//!
//! Clients cannot take much of the host or of the guest: a few connections are served at a time, each with a deadline,
//! and the others wait. An answer is cached for a while before the vCPUs leave the guest for a new one.

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use log::info;
use rustix::io::Errno;

use crate::cli::address::Address;
use crate::protocol::deadline::{Deadlined, Timed};
use crate::protocol::exposition::{AllMetrics, CONTENT_TYPE, Labels, VmMetrics};
use crate::protocol::socket_dir::connect_at_once;
use crate::protocol::status::{Report, Summary};
use crate::sandbox::{Access, Confinement, Reach, Thread};

/// Maximum size of a request with its headers; real ones have some hundred bytes.
const MAX_REQUEST: usize = 8 << 10;
const MAX_HEADERS: usize = 64;
/// Timeout for a whole request, and for a whole answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Number of connections that are served at a time.
const THREADS: usize = 4;
/// Time for which an answer is cached.
const CACHE_FOR: Duration = Duration::from_millis(100);

/// The server cannot listen on its address.
#[derive(Debug, thiserror::Error)]
#[error("--metrics {address}: {error}")]
pub struct MetricsError {
    address: String,
    error: io::Error,
}

/// The server, listening.
#[derive(Debug)]
pub struct Metrics {
    listener: Listener,
    timeout: Duration,
}

#[derive(Debug)]
enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

/// Removes a unix socket from the file system when it is dropped.
#[derive(Debug)]
pub struct Socket(Option<PathBuf>);

impl Socket {
    /// Returns what removing the socket needs.
    pub fn reach(&self) -> Option<Reach> {
        let folder = self.0.as_ref()?.parent().filter(|folder| !folder.as_os_str().is_empty());
        Reach::to(folder.unwrap_or(Path::new(".")), Access::Remove).ok()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if let Some(path) = &self.0 {
            // Somebody else may have removed it.
            let _ = fs::remove_file(path);
        }
    }
}

impl Metrics {
    /// Listens on an address.
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
        Self { listener, timeout: TIMEOUT }
    }

    /// Starts the threads that serve a machine's metrics until the process ends, and are confined. The facts are the
    /// labels of `tally_machine_info`.
    pub fn serve_machine(
        self,
        facts: Labels,
        report: impl Fn() -> Report + Send + Sync + 'static,
    ) -> io::Result<()> {
        let machines = move || {
            let machine = VmMetrics { labels: Labels::new(), facts: facts.clone(), report: report() };
            AllMetrics { answering: vec![machine], silent: None }
        };
        let confinement = Confinement::new(Thread::Metrics, Vec::new());
        self.serve(machines, move || confinement.enter())
    }

    /// Starts the threads that serve the metrics of machines until the process ends. Each begins with a call of
    /// `enter`.
    pub fn serve(
        self,
        machines: impl Fn() -> AllMetrics + Send + Sync + 'static,
        enter: impl Fn() + Send + Sync + 'static,
    ) -> io::Result<()> {
        let cache = Cache::default();
        let answer = move || cache.get(Instant::now, || machines().write());
        let serving = Arc::new((self.listener, answer, enter));
        for _ in 0..THREADS {
            let serving = Arc::clone(&serving);
            thread::Builder::new().name("metrics".to_owned()).spawn(move || {
                let (listener, answer, enter) = &*serving;
                enter();
                loop {
                    let served = listener.accept().and_then(|stream| serve(stream, self.timeout, answer));
                    if served.is_err_and(|error| !is_the_clients(&error)) {
                        // A lack of file descriptors, say, may pass.
                        thread::sleep(TIMEOUT);
                    }
                }
            })?;
        }
        Ok(())
    }
}

/// Returns the labels of the metric `tally_machine_info`.
pub fn facts(about: &Summary) -> Labels {
    vec![
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("name", about.name.clone()),
        ("pid", about.pid.to_string()),
        ("pmu", about.pmu.clone()),
    ]
}

/// The last answer, and the time at which it was made.
#[derive(Debug, Default)]
struct Cache(Mutex<Option<(Instant, String)>>);

impl Cache {
    /// Returns the cached answer, or makes a new one if that is too old by this clock. Requests that arrive while an
    /// answer is being made wait and get it.
    fn get<E>(
        &self,
        clock: impl Fn() -> Instant,
        make: impl FnOnce() -> Result<String, E>,
    ) -> Result<String, E> {
        let mut cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((made, answer)) = &*cache
            && clock().saturating_duration_since(*made) < CACHE_FOR
        {
            return Ok(answer.clone());
        }
        let answer = make()?;
        *cache = Some((clock(), answer.clone()));
        Ok(answer)
    }
}

/// Removes a socket on which nobody listens.
fn remove_stale(path: &Path) -> io::Result<()> {
    let is_socket = fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    if is_socket && connect_at_once(path).is_err_and(|error| error == Errno::CONNREFUSED) {
        fs::remove_file(path)?;
    }
    Ok(())
}

/// Returns true for an error that the client has caused.
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
    timeout: Duration,
    metrics: impl Fn() -> Result<String, std::fmt::Error>,
) -> io::Result<()> {
    let mut stream = Deadlined::new(stream, Instant::now() + timeout);
    let mut request = Vec::new();
    let answer = loop {
        let mut chunk = [0; 1024];
        let count = stream.read(&mut chunk)?;
        if count == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        request.extend_from_slice(&chunk[..count]);
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
        Answer::BadRequest => ("400 Bad Request", "that is no request\n".to_owned()),
    };
    let kind = if status.starts_with("200") { CONTENT_TYPE } else { "text/plain" };
    let length = body.len();
    // The time that the vCPUs have taken does not count.
    stream.allow(timeout);
    write!(
        stream,
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
}

/// Kind of answer to a request.
#[derive(Debug, PartialEq, Eq)]
enum Answer {
    Metrics,
    NotFound,
    NotAllowed,
    BadRequest,
}

/// Returns the kind of answer, once enough of the request has arrived.
fn answer(request: &[u8]) -> Option<Answer> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut parsed = httparse::Request::new(&mut headers);
    match parsed.parse(request) {
        Ok(status) if status.is_partial() => (request.len() > MAX_REQUEST).then_some(Answer::BadRequest),
        Ok(_) => {
            let path = parsed.path.and_then(|path| path.split('?').next());
            Some(match (parsed.method, path) {
                (Some("GET"), Some("/metrics")) => Answer::Metrics,
                (Some("GET"), _) => Answer::NotFound,
                _ => Answer::NotAllowed,
            })
        }
        Err(_) => Some(Answer::BadRequest),
    }
}

#[cfg(test)]
mod tests;
