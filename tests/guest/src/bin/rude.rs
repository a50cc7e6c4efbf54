//! Clients of a VM's socket that nobody would want: `rude SOCKET` has one that says nothing, one that stops in the middle of a
//! word, one that talks garbage, one that asks again and again and never reads, and more than there is room for. Prints what the
//! one that came too late was told, and then keeps the others there until its standard input ends.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;

/// More than a VM has room for.
const CROWD: usize = 20;

fn main() -> io::Result<()> {
    let socket = std::env::args_os().nth(1).expect("a socket");
    let connect = || UnixStream::connect(&socket);
    let _silent = connect()?;
    connect()?.write_all(b"GET / HTTP/1.1\r\n\r\n\xff\x00{{{{")?;
    let mut broken_off = connect()?;
    broken_off.write_all(b"{\"switch\":[{\"vcpu\":")?;
    let mut deaf = connect()?;
    deaf.set_nonblocking(true)?;
    // Until the VM, or what is between it and us, has no more room for what is not read.
    while deaf.write_all(b"\"look\"\n").is_ok() {}
    let _crowd = (0..CROWD).map(|_| connect()).collect::<io::Result<Vec<_>>>()?;
    let mut told = String::new();
    BufReader::new(connect()?).read_line(&mut told)?;
    print!("{told}");
    io::copy(&mut io::stdin(), &mut io::sink()).map(drop)
}
