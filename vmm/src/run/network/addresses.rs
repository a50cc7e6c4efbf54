//! The addresses at which this host's kernel takes packets for itself, as its routing tables say: those of network
//! devices, broadcast addresses, and what was routed to the host in another way.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use anyhow::{Context, Result};
use devices::net::Block;

const V4: &str = "/proc/self/net/fib_trie";
const V6: &str = "/proc/self/net/ipv6_route";
/// Is there whatever the kernel has of IP.
const DEVICES: &str = "/proc/self/net/dev";

/// Returns the addresses that this host has now.
pub fn of_this_host() -> Result<Vec<Block>> {
    let mut all = v4(&table(V4)?);
    all.extend(v6(&table(V6)?));
    Ok(all)
}

/// Returns a routing table, which is empty if the kernel does not have this version of IP.
fn table(path: &str) -> Result<String> {
    match fs::read_to_string(path) {
        // Without /proc, the host would seem to have no address.
        Err(error) if error.kind() == ErrorKind::NotFound && Path::new(DEVICES).exists() => Ok(String::new()),
        result => result.with_context(|| format!("cannot read this host's addresses from {path}")),
    }
}

/// Returns the addresses in `fib_trie`: below each `|--` and an address there are the routes to it, as their prefix's
/// length, their scope and their type.
fn v4(table: &str) -> Vec<Block> {
    let mut address = None;
    let mut found = Vec::new();
    for line in table.lines() {
        let line = line.trim();
        if let Some(text) = line.strip_prefix("|-- ") {
            address = text.parse::<Ipv4Addr>().ok();
            continue;
        }
        let mut words = line.split_whitespace();
        let length = words.next().and_then(|word| word.strip_prefix('/')?.parse().ok());
        let is_host = matches!(words.nth(1), Some("LOCAL" | "BROADCAST"));
        if let (Some(address), Some(length), true) = (address, length, is_host) {
            found.push(Block::new(address.into(), length));
        }
    }
    found
}

/// Returns the addresses in `ipv6_route`: a line has the destination and its prefix's length first, and the route's
/// flags second to last, in hexadecimal digits.
fn v6(table: &str) -> Vec<Block> {
    /// `RTF_LOCAL` and `RTF_ANYCAST` (`linux/ipv6_route.h`).
    const HOST: u32 = 0x8000_0000 | 0x0010_0000;
    let block = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [destination, length, .., flags, _device] = words[..] else { return None };
        let destination = Ipv6Addr::from_bits(u128::from_str_radix(destination, 16).ok()?);
        let length = u32::from_str_radix(length, 16).ok()?;
        let flags = u32::from_str_radix(flags, 16).ok()?;
        (flags & HOST != 0).then(|| Block::new(IpAddr::from(destination), length))
    };
    // All ones are what the kernel has instead of no route.
    table.lines().filter_map(block).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hosts_addresses_are_found_and_those_of_others_are_not() {
        let table = "\
Main:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 universe UNICAST
     +-- 192.0.2.0/24 2 0 2
        +-- 192.0.2.0/30 2 0 2
           |-- 192.0.2.0
              /24 link UNICAST
           |-- 192.0.2.2
              /32 host LOCAL
        |-- 192.0.2.255
           /32 link BROADCAST
Local:
     |-- 10.1.0.0
        /24 link UNICAST
        /16 host LOCAL
";
        let block = |text: &str, length| Block::new(text.parse().unwrap(), length);
        let expected = [block("192.0.2.2", 32), block("192.0.2.255", 32), block("10.1.0.0", 16)];
        assert_eq!(v4(table), expected);
        let zeros = "0".repeat(32);
        let line = |destination: &str, length: &str, flags: &str| {
            format!("{destination} {length} {zeros} 00 {zeros} 00000000 00000002 00000000 {flags}     eth0\n")
        };
        let table = [
            line("fd000000000000000000000000000000", "40", "00000001"),
            line("fd000000000000000000000000000002", "80", "80200001"),
            line("fd000000000000000000000000000000", "80", "00100001"),
            line("ff000000000000000000000000000000", "08", "00000001"),
            line(&zeros, "00", "00200200"),
        ];
        assert_eq!(v6(&table.concat()), [block("fd00::2", 128), block("fd00::", 128)]);
        assert_eq!((v4("\n|--\n/\n /8"), v6("\nx\n")), (Vec::new(), Vec::new()));
    }

    #[test]
    fn this_host_has_a_loopback_address() {
        let loopback = Block::new(Ipv4Addr::LOCALHOST.into(), 32);
        assert!(of_this_host().unwrap().contains(&loopback));
    }
}
