//! Misbehaving clients of a VM's control socket. `rude SOCKET` connects a client that sends nothing, one that sends
//! garbage, one that stops in the middle of a request, one that sends requests and never reads the replies, and more
//! clients than a VM accepts. It prints the reply to one client too many, and keeps the others connected until its
//! standard input ends.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

/// Number of further connections: more than a VM accepts.
const TOO_MANY: usize = 20;

fn main() -> io::Result<()> {
    let socket = std::env::args_os().nth(1).expect("a socket");
    let connect = || UnixStream::connect(&socket);
    let _silent = connect()?;
    connect()?.write_all(b"GET / HTTP/1.1\r\n\r\n\xff\x00{{{{")?;
    let mut broken_off = connect()?;
    broken_off.write_all(b"{\"switch\":[{\"vcpu\":")?;
    let mut never_reads = connect()?;
    never_reads.set_nonblocking(true)?;
    // Until the socket's buffers are full.
    while never_reads.write_all(b"\"look\"\n").is_ok() {}
    let _too_many = (0..TOO_MANY).map(|_| connect()).collect::<io::Result<Vec<_>>>()?;
    let mut reply = String::new();
    BufReader::new(connect()?).read_line(&mut reply)?;
    print!("{reply}");
    io::copy(&mut io::stdin(), &mut io::sink()).map(drop)
}
