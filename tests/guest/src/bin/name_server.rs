//! A name server that answers each question with the same address (RFC 1035): `name_server ADDRESS:PORT ANSWER`.

use std::env;
use std::io;
use std::net::{Ipv4Addr, UdpSocket};

/// Size of a message's header.
const HEADER: usize = 12;

fn main() -> io::Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let [at, answer] = &words[..] else { panic!("name_server ADDRESS:PORT ANSWER") };
    let answer: Ipv4Addr = answer.parse().expect("an address");
    let socket = UdpSocket::bind(at)?;
    let mut query = [0; 512];
    loop {
        let (length, client) = socket.recv_from(&mut query)?;
        if let Some(reply) = reply(&query[..length], answer) {
            socket.send_to(&reply, client)?;
        }
    }
}

/// Returns the reply to a query with one question. Only questions for IPv4 addresses have an answer.
fn reply(query: &[u8], answer: Ipv4Addr) -> Option<Vec<u8>> {
    const ANSWERED: [u8; 2] = [0x81, 0x80];
    const IPV4: [u8; 2] = [0, 1];
    let name = query.get(HEADER..)?.iter().position(|byte| *byte == 0)? + 1;
    let question = query.get(HEADER..HEADER + name + 4)?;
    let is_ipv4 = question[name..][..2] == IPV4;
    let mut reply = [&query[..2], &ANSWERED, &[0, 1, 0, u8::from(is_ipv4), 0, 0, 0, 0], question].concat();
    if is_ipv4 {
        // The question's name, type and class, a minute, and the address.
        reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
        reply.extend(answer.octets());
    }
    Some(reply)
}
