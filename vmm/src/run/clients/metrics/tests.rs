//! The server as its clients see it.

use std::os::unix::net::UnixStream;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

use super::*;

/// Sends these bytes, closes the client's side, and returns the answer.
fn exchange(address: &Path, request: &[u8]) -> String {
    let mut stream = UnixStream::connect(address).unwrap();
    stream.write_all(request).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    // A client that has sent more than the server reads may get an error after the answer.
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8(answer).unwrap()
}

fn nothing() -> Report {
    Report { stands_still: false, vcpus: Vec::new() }
}

#[test]
fn a_request_for_metrics_gets_them_and_others_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let (metrics, socket) = Metrics::listen(&Address::Unix(path.clone())).unwrap();
    metrics.serve_machine(vec![("name", "x".to_owned())], nothing).unwrap();
    let told = exchange(&path, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let (head, body) = told.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n") && head.contains(CONTENT_TYPE), "{head}");
    assert!(
        head.contains(&format!("Content-Length: {}\r\n", body.len())) && body.ends_with("# EOF\n"),
        "{told}"
    );
    let long = [b"GET / HTTP/1.1\r\nX: ".as_slice(), &[b'x'; 2 * MAX_REQUEST]].concat();
    for (request, status) in [
        (b"GET / HTTP/1.1\r\n\r\n".as_slice(), "404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
        (b"\0\0\0\0\r\n\r\n", "400"),
        (&long, "400"),
    ] {
        let told = exchange(&path, request);
        assert!(told.starts_with(&format!("HTTP/1.1 {status} ")), "{told}");
    }
    assert_eq!(exchange(&path, b"GET"), "", "half a request gets no answer");
    drop(socket);
    assert!(!path.exists());
}

#[test]
fn a_silent_connection_does_not_delay_others() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let (mut metrics, _socket) = Metrics::listen(&Address::Unix(path.clone())).unwrap();
    metrics.timeout = Duration::from_hours(1);
    metrics.serve_machine(Vec::new(), nothing).unwrap();
    let silent: Vec<UnixStream> = (1..THREADS).map(|_| UnixStream::connect(&path).unwrap()).collect();
    assert!(exchange(&path, b"GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200 "));
    drop(silent);
}

#[test]
fn a_silent_connection_is_closed() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let served = serve(ours, Duration::from_millis(50), || panic!("nobody has asked"));
    assert_eq!(served.unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(theirs.read(&mut [0]).unwrap(), 0);
}

#[test]
fn an_answer_is_cached_until_it_is_old() {
    let (cache, begun, asked) = (Cache::default(), Instant::now(), std::cell::Cell::new(0));
    let at = |milliseconds| {
        cache
            .get(
                || begun + Duration::from_millis(milliseconds),
                || {
                    asked.set(asked.get() + 1);
                    Ok::<_, std::fmt::Error>(asked.get().to_string())
                },
            )
            .unwrap()
    };
    assert_eq!([0, 50, 99, 100, 150, 199, 200].map(at), ["1", "1", "1", "2", "2", "2", "3"]);
}

#[test]
fn a_socket_that_is_left_over_is_replaced_and_nothing_else_is() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let address = Address::Unix(path.clone());
    let first = Metrics::listen(&address).unwrap();
    let error = Metrics::listen(&address).unwrap_err().to_string();
    assert!(error.starts_with("--metrics unix:/") && error.contains("in use"), "{error}");
    drop(first);
    fs::write(&path, "mine").unwrap();
    assert!(Metrics::listen(&address).is_err());
    assert_eq!(fs::read(&path).unwrap(), b"mine");
}

#[test]
fn a_socket_whose_owner_accepts_no_connection_is_in_use() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let busy = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&busy, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&busy, 0).unwrap();
    // The only connection for which there is room.
    let _waiting = UnixStream::connect(&path).unwrap();
    let error = Metrics::listen(&Address::Unix(path)).unwrap_err().to_string();
    assert!(error.contains("in use"), "{error}");
}
