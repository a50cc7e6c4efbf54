//! Which frames of a guest are carried to a process that opens sockets of the host for them. Such a process connects to
//! whatever address a frame names, and the host is behind some: its loopback addresses, where programs listen that are
//! for this host alone, and its others.
//!
//! Only what names a destination is looked at, which is the header of IP itself: each fragment has one, and IPv6's
//! extension headers come behind it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Addresses that begin with the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    first: IpAddr,
    length: u32,
}

impl Block {
    /// The addresses that have the first `length` bits of this one.
    pub const fn new(first: IpAddr, length: u32) -> Self {
        Self { first, length }
    }

    const fn v4(first: u32, length: u32) -> Self {
        Self::new(IpAddr::V4(Ipv4Addr::from_bits(first)), length)
    }

    const fn v6(first: u128, length: u32) -> Self {
        Self::new(IpAddr::V6(Ipv6Addr::from_bits(first)), length)
    }

    fn has(&self, address: IpAddr) -> bool {
        let equal_bits = match (self.first, address) {
            (IpAddr::V4(first), IpAddr::V4(address)) => (first.to_bits() ^ address.to_bits()).leading_zeros(),
            (IpAddr::V6(first), IpAddr::V6(address)) => (first.to_bits() ^ address.to_bits()).leading_zeros(),
            _ => return false,
        };
        equal_bits >= self.length
    }
}

/// Addresses by which Linux reaches loopback addresses. It takes a connection to the unspecified address as one to this
/// host (`ip(7)`), and by the addresses that have one of IPv4 in them it may use that.
const LOOPBACK: [Block; 4] = [
    Block::v4(0, 8),
    Block::v4(127 << 24, 8),
    // The unspecified address, ::1, and addresses that are compatible with IPv4's (RFC 4291, section 2.5.5.1).
    Block::v6(0, 96),
    // Addresses that are mapped from IPv4's (section 2.5.5.2).
    Block::v6(0xffff << 32, 96),
];

/// IPv6 addresses from which a translator or a tunnel of the host takes an address of IPv4, and the number of bits
/// behind that: NAT64 (RFC 6052), its older form (RFC 2765), 6to4 (RFC 3056).
const TRANSLATED: [(Block, u32); 3] = [
    (Block::v6(0x0064_ff9b << 96, 96), 0),
    (Block::v6(0xffff << 48, 96), 0),
    (Block::v6(0x2002 << 112, 16), 80),
];

/// What is closed to a guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Filter {
    /// Nothing.
    #[default]
    Open,
    /// The host's loopback addresses.
    WithoutLoopback,
    /// Also these addresses of the host, and groups, of which it may be a member. The other process's own services,
    /// which give the guest its address, stay open.
    WithoutHost(Vec<Block>),
}

impl Filter {
    /// Returns true if a frame may be carried. Unless everything is open, only frames of ARP and IP are.
    pub fn passes(&self, frame: &[u8]) -> bool {
        match (self, payload(frame)) {
            (Self::Open, _) | (_, Payload::Arp) => true,
            (_, Payload::Other) => false,
            (Self::WithoutLoopback, Payload::Ip(packet)) => !is_loopback(&packet),
            (Self::WithoutHost(host), Payload::Ip(packet)) => {
                let is_host = |address| host.iter().any(|block| block.has(address)) || is_group(address);
                !is_loopback(&packet) && (packet.asks_for_address() || !packet.destinations().any(is_host))
            }
        }
    }
}

fn is_loopback(packet: &Packet<'_>) -> bool {
    packet.destinations().any(|address| LOOPBACK.iter().any(|block| block.has(address)))
}

fn is_group(address: IpAddr) -> bool {
    address.is_multicast() || address == Ipv4Addr::BROADCAST
}

/// What an Ethernet frame has in it.
enum Payload<'a> {
    Arp,
    Ip(Packet<'a>),
    /// Another protocol, or less than the header of IP.
    Other,
}

/// Returns what is in a frame, behind any number of VLAN tags (IEEE 802.1Q, 802.1ad, and what came before it).
fn payload(frame: &[u8]) -> Payload<'_> {
    const ADDRESSES: usize = 12;
    const TAG: usize = 4;
    let mut rest = frame.get(ADDRESSES..).unwrap_or_default();
    loop {
        let Some((kind, content)) = rest.split_first_chunk() else { return Payload::Other };
        match u16::from_be_bytes(*kind) {
            0x8100 | 0x88a8 | 0x9100 => rest = rest.get(TAG..).unwrap_or_default(),
            0x0806 => return Payload::Arp,
            0x0800 => return Packet::v4(content).map_or(Payload::Other, Payload::Ip),
            0x86dd => return Packet::v6(content).map_or(Payload::Other, Payload::Ip),
            _ => return Payload::Other,
        }
    }
}

/// A packet of IP.
struct Packet<'a> {
    destination: IpAddr,
    /// The protocol in it: for IPv6, what its own header says, which may be an extension header. None in a fragment.
    protocol: Option<u8>,
    content: &'a [u8],
}

/// Protocols in packets of IP.
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

impl<'a> Packet<'a> {
    /// Returns a packet of IPv4 (RFC 791, section 3.1), or `None` if it is shorter than its header.
    fn v4(bytes: &'a [u8]) -> Option<Self> {
        /// More fragments, and the offset.
        const FRAGMENT: u16 = 0x3fff;
        let header: &[u8; 20] = bytes.first_chunk()?;
        let destination = Ipv4Addr::new(header[16], header[17], header[18], header[19]);
        let is_whole = u16::from_be_bytes([header[6], header[7]]) & FRAGMENT == 0;
        let length = usize::from(header[0] & 0xf) * 4;
        let content = bytes.get(length..).filter(|_| length >= header.len())?;
        Some(Self { destination: destination.into(), protocol: is_whole.then_some(header[9]), content })
    }

    /// Returns a packet of IPv6 (RFC 8200, section 3), or `None` if it is shorter than its header.
    fn v6(bytes: &'a [u8]) -> Option<Self> {
        let (header, content) = bytes.split_first_chunk::<40>()?;
        let destination: &[u8; 16] = header.last_chunk()?;
        Some(Self { destination: Ipv6Addr::from(*destination).into(), protocol: Some(header[6]), content })
    }

    /// Returns the addresses that the packet may get to: the one it has, and that of IPv4 which is in it.
    fn destinations(&self) -> impl Iterator<Item = IpAddr> {
        let destination = self.destination;
        let within = TRANSLATED.into_iter().filter_map(move |(block, bits_behind)| match destination {
            IpAddr::V6(address) if block.has(destination) => {
                let bits = address.to_bits() >> bits_behind & u128::from(u32::MAX);
                Some(Ipv4Addr::from_bits(u32::try_from(bits).expect("it has 32 bits")).into())
            }
            _ => None,
        });
        std::iter::once(destination).chain(within)
    }

    /// Returns true for what the other process answers by itself and never passes on: DHCP of either version, and
    /// requests and advertisements of neighbours and routers (RFC 4861).
    fn asks_for_address(&self) -> bool {
        const DHCP_SERVERS: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 1, 2);
        let port = || self.content.get(2..4).map(|port| u16::from_be_bytes([port[0], port[1]]));
        match (self.destination, self.protocol) {
            (IpAddr::V4(address), Some(UDP)) => address == Ipv4Addr::BROADCAST && port() == Some(67),
            (IpAddr::V6(address), Some(UDP)) => address == DHCP_SERVERS && port() == Some(547),
            (IpAddr::V6(_), Some(ICMPV6)) => matches!(self.content.first(), Some(133..=136)),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Protocols and extension headers in packets of IP: what sockets are opened for, and what may stand before.
    const PROTOCOLS: [u8; 10] = [1, 6, 17, 58, 0, 43, 44, 50, 60, 135];
    const TAGS: [u16; 3] = [0x8100, 0x88a8, 0x9100];

    /// Returns a frame to this address, behind these tags, and with whatever `rest` makes of its headers.
    fn frame(destination: IpAddr, protocol: u8, tags: &[u16], rest: &[u8]) -> Vec<u8> {
        let mut frame = [[0x02; 6], [0x52; 6]].concat();
        for tag in tags {
            frame.extend([tag.to_be_bytes(), [rest.len().to_le_bytes()[0], 7]].concat());
        }
        match destination {
            IpAddr::V4(address) => {
                // The flags and the offset of a fragment are whatever comes.
                let fragment = rest.first_chunk().copied().unwrap_or([0, 0]);
                frame.extend([
                    0x08,
                    0x00,
                    0x45,
                    0,
                    0,
                    20,
                    0,
                    0,
                    fragment[0],
                    fragment[1],
                    64,
                    protocol,
                    0,
                    0,
                ]);
                frame.extend([10, 0, 0, 2]);
                frame.extend(address.octets());
            }
            IpAddr::V6(address) => {
                frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, protocol, 64]);
                frame.extend([0xfd; 16]);
                frame.extend(address.octets());
            }
        }
        [&frame, rest].concat()
    }

    fn v4(text: &str) -> Ipv4Addr {
        text.parse().unwrap()
    }

    /// Returns any address that Linux takes for a loopback one, in any of its forms.
    fn loopback() -> impl Strategy<Value = IpAddr> {
        let own = (prop_oneof![Just(0_u32), Just(127)], 0..1_u32 << 24);
        let own = own.prop_map(|(first, low)| Ipv4Addr::from_bits(first << 24 | low));
        let low = any::<u32>().prop_map(u128::from);
        prop_oneof![
            own.clone().prop_map(IpAddr::from),
            low.clone().prop_map(|low| Ipv6Addr::from_bits(low).into()),
            low.prop_map(|low| Ipv6Addr::from_bits(0xffff << 32 | low).into()),
            (own, 0..3_usize, any::<u128>()).prop_map(|(own, form, other)| translated(own, form, other)),
        ]
    }

    /// Returns an IPv6 address with one of IPv4 in it.
    fn translated(own: Ipv4Addr, form: usize, other: u128) -> IpAddr {
        let own = u128::from(own.to_bits());
        let bits = match form {
            0 => 0x0064_ff9b_u128 << 96 | own,
            1 => 0xffff_u128 << 48 | own,
            _ => 0x2002_u128 << 112 | own << 80 | other & ((1 << 80) - 1),
        };
        Ipv6Addr::from_bits(bits).into()
    }

    fn tags() -> impl Strategy<Value = Vec<u16>> {
        proptest::collection::vec(proptest::sample::select(&TAGS[..]), 0..4)
    }

    fn protocol() -> impl Strategy<Value = u8> {
        prop_oneof![proptest::sample::select(&PROTOCOLS[..]), any::<u8>()]
    }

    fn rest() -> impl Strategy<Value = Vec<u8>> {
        proptest::collection::vec(any::<u8>(), 0..80)
    }

    proptest! {
        #[test]
        fn no_frame_reaches_a_loopback_address(
            to in loopback(), protocol in protocol(), tags in tags(), rest in rest(),
        ) {
            let frame = frame(to, protocol, &tags, &rest);
            prop_assert!(!Filter::WithoutLoopback.passes(&frame), "{to}");
            prop_assert!(!Filter::WithoutHost(Vec::new()).passes(&frame), "{to}");
            prop_assert!(Filter::Open.passes(&frame));
        }

        #[test]
        fn frames_to_any_other_address_pass(
            first in 1..=255_u32, v4 in 0..1_u32 << 24, high in 1..=u128::from(u16::MAX), v6 in 0..1_u128 << 112,
            protocol in protocol(), tags in tags(), rest in rest(),
        ) {
            prop_assume!(first != 127 && high != 0x2002 && high != 0x64);
            let (v4, v6) = (Ipv4Addr::from_bits(first << 24 | v4), Ipv6Addr::from_bits(high << 112 | v6));
            for to in [IpAddr::from(v4), v6.into()] {
                prop_assert!(Filter::WithoutLoopback.passes(&frame(to, protocol, &tags, &rest)), "{to}");
            }
        }

        #[test]
        fn an_address_within_another_is_closed_if_it_is_itself(form in 0..3_usize, other in any::<u128>()) {
            let filter = Filter::WithoutHost(vec![Block::new(v4("192.0.2.2").into(), 32)]);
            for (text, passes) in [("192.0.2.2", false), ("192.0.2.3", true)] {
                let frame = frame(translated(v4(text), form, other), 6, &[], &[]);
                prop_assert_eq!(filter.passes(&frame), passes, "{}", text);
                prop_assert!(Filter::WithoutLoopback.passes(&frame));
            }
        }

        #[test]
        fn no_bytes_are_too_few_or_too_strange(bytes in rest(), cut in 0..80_usize) {
            for filter in [Filter::Open, Filter::WithoutLoopback, Filter::WithoutHost(Vec::new())] {
                filter.passes(&bytes);
                let tagged = frame(Ipv6Addr::LOCALHOST.into(), 6, &TAGS, &bytes);
                prop_assert_eq!(filter.passes(&tagged[..cut.min(tagged.len())]), filter == Filter::Open);
            }
        }
    }

    #[test]
    fn what_is_neither_arp_nor_ip_is_not_carried() {
        let arp = [&[0; 12][..], &[0x08, 0x06], &[0; 28]].concat();
        assert!(Filter::WithoutLoopback.passes(&arp));
        // A length, with a SNAP header of IPv4 behind it (IEEE 802).
        let to = frame(v4("10.0.0.1").into(), 6, &[], &[]);
        let snap = [&to[..12], &[0, 28, 0xaa, 0xaa, 3, 0, 0, 0], &to[12..]].concat();
        assert!(Filter::WithoutLoopback.passes(&to));
        assert!(!Filter::WithoutLoopback.passes(&snap));
    }

    #[test]
    fn without_the_host_its_addresses_and_groups_are_closed_and_others_are_not() {
        let block = |text: &str, length| Block::new(text.parse().unwrap(), length);
        let host = vec![block("192.0.2.2", 32), block("10.1.0.0", 16), block("fd00::2", 128)];
        let filter = Filter::WithoutHost(host);
        for (to, passes) in [
            ("192.0.2.2", false),
            ("192.0.2.1", true),
            ("10.1.2.3", false),
            ("10.2.2.3", true),
            ("fd00::2", false),
            ("fd00::3", true),
            ("224.0.0.1", false),
            ("255.255.255.255", false),
            ("ff02::1", false),
        ] {
            for protocol in [1, 6, 17, 58] {
                let frame = frame(to.parse().unwrap(), protocol, &[], &[]);
                assert_eq!(filter.passes(&frame), passes, "{to}, protocol {protocol}");
            }
        }
    }

    #[test]
    fn without_the_host_a_guest_still_asks_for_an_address_and_its_neighbours() {
        let filter = Filter::WithoutHost(vec![Block::new("fe80::2".parse().unwrap(), 128)]);
        let udp = |port: u16| [&[0, 0], &port.to_be_bytes()[..], &[0; 8]].concat();
        let passes = |to: &str, protocol, content: &[u8]| {
            let mut frame = frame(to.parse().unwrap(), protocol, &[], content);
            if to.contains('.') {
                // Not a fragment.
                frame[20..22].fill(0);
            }
            filter.passes(&frame)
        };
        assert!(passes("255.255.255.255", 17, &udp(67)) && !passes("255.255.255.255", 17, &udp(53)));
        assert!(passes("ff02::1:2", 17, &udp(547)) && !passes("ff02::1:2", 17, &udp(53)));
        assert!(!passes("ff02::1", 17, &udp(547)) && !passes("fe80::2", 17, &udp(547)));
        for (to, kind, is_open) in [("ff02::2", 133, true), ("fe80::2", 135, true), ("ff02::1", 128, false)] {
            assert_eq!(passes(to, 58, &[kind, 0, 0, 0]), is_open, "{to} {kind}");
        }
    }
}
