//! A client that measures a guest's network from the host. The time that it prints is that of its connections alone.
//!
//! - `net-workload requests ADDRESS:PORT NUMBER`: fetches `/` from a web server so often, each time over a connection
//!   of its own.
//! - `net-workload receive ADDRESS:PORT`: fetches `/large`.
//! - `net-workload send ADDRESS:PORT BYTES`: sends so many bytes, and waits until the other end has read them.
//!
//! It prints seconds.

use std::env;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Instant;

fn main() -> io::Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let begun = Instant::now();
    match words[..] {
        ["requests", server, number] => {
            for _ in 0..number.parse().map_err(io::Error::other)? {
                fetch(server, "/")?;
            }
        }
        ["receive", server] => fetch(server, "/large")?,
        ["send", to, bytes] => send(to, bytes.parse().map_err(io::Error::other)?)?,
        _ => return Err(io::Error::other("requests, receive or send?")),
    }
    println!("{:.6}", begun.elapsed().as_secs_f64());
    Ok(())
}

/// Fetches a page. Fails if there is none.
fn fetch(server: &str, page: &str) -> io::Result<()> {
    let mut server = TcpStream::connect(server)?;
    server.write_all(format!("GET {page} HTTP/1.0\r\n\r\n").as_bytes())?;
    let mut begin = [0; 12];
    server.read_exact(&mut begin)?;
    if !begin.ends_with(b" 200") {
        return Err(io::Error::other("the server does not have it"));
    }
    let mut part = vec![0; 256 << 10];
    while server.read(&mut part)? > 0 {}
    Ok(())
}

fn send(to: &str, bytes: u64) -> io::Result<()> {
    let mut to = TcpStream::connect(to)?;
    io::copy(&mut io::repeat(b'x').take(bytes), &mut to)?;
    to.shutdown(Shutdown::Write)?;
    to.read_exact(&mut [0]).or_else(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => Ok(()),
        _ => Err(error),
    })
}
