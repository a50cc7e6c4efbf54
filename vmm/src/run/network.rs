//! `tally run --net`: the guest's network device. Its frames are carried by passt, which opens sockets of the host as
//! its user may (`user`), or by a tap device that belongs to the user (`tap=NAME`).
//!
//! passt is a process of its own. It ends when its socket is closed, so it does not outlive this process.

mod addresses;

use std::ffi::OsString;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, bail};
use devices::net::{Backend, Filter, Offer, Stream, Tap};
use devices::virtio::{Mac, Net};
use guest_agent::protocol;
use guest_images::child::inherit;
use guest_images::distribution;
use log::info;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::cli::network::{HostReach, Network, Protocol, Published};

/// Where passt answers the guest's requests for names. It asks the host's own name server, which may be on a loopback
/// address.
const NAME_SERVER: Ipv4Addr = Ipv4Addr::new(169, 254, 1, 1);
/// The address of a guest that is alone on its network: locally administered.
const ALONE: Mac = Mac(*b"\x02tally");

/// Maximum number of queue pairs.
const MAX_PAIRS: u32 = 8;

/// Opens a network for a guest with this number of vCPUs. Returns its device, and what the guest's agent has to know.
pub fn open(network: &Network, cpus: u32, published: &[Published]) -> Result<(Net, protocol::Network)> {
    let offer = offer(network, cpus)?;
    let (mac, backends, name_server) = match network {
        Network::User(host) => {
            let filter = filter(*host).with_context(|| format!("--net {network}"))?;
            let passt = Stream::new(start_passt(*host, published)?, filter);
            (ALONE, vec![boxed(passt)], Some(NAME_SERVER))
        }
        Network::Tap(name) => {
            let queues = Tap::open(name, offer).with_context(|| format!("--net {network}"))?;
            let mac = random_mac().context("cannot draw a random address")?;
            (mac, queues.into_iter().map(boxed).collect(), None)
        }
    };
    let about = protocol::Network { address: mac.0, name_server };
    Ok((Net::new(mac, offer, backends), about))
}

fn boxed(backend: impl Backend + 'static) -> Box<dyn Backend> {
    Box::new(backend)
}

/// Does the same for a guest that becomes a template of those with such a network: nothing is plugged in.
pub fn unplugged(network: &Network, cpus: u32) -> Result<(Net, protocol::Network)> {
    let about = protocol::Network { address: ALONE.0, name_server: None };
    Ok((Net::unplugged(ALONE, offer(network, cpus)?), about))
}

/// Returns what the guest is offered. Guests that are offered the same can have the same template.
pub fn offer(network: &Network, cpus: u32) -> Result<Offer> {
    let pairs = u16::try_from(cpus.clamp(1, MAX_PAIRS)).expect("it is small");
    match network {
        Network::User(_) => Ok(Stream::OFFER),
        Network::Tap(name) => Tap::offer_of(name, pairs).with_context(|| format!("--net {network}")),
    }
}

/// Draws an address for a guest that is not alone on its network: locally administered, and no group's.
fn random_mac() -> io::Result<Mac> {
    let mut address = [0; 6];
    // As few bytes as these come at once.
    getrandom(&mut address, GetRandomFlags::empty())?;
    address[0] = address[0] & !1 | 2;
    Ok(Mac(address))
}

/// Returns which of the guest's frames passt sees. It would connect to any address of this host, its loopback addresses
/// included.
fn filter(host: HostReach) -> Result<Filter> {
    Ok(match host {
        HostReach::WithoutLoopback => Filter::WithoutLoopback,
        HostReach::WithLoopback => Filter::Open,
        HostReach::Closed => Filter::WithoutHost(addresses::of_this_host()?),
    })
}

/// Returns the option of passt that publishes a port.
fn option(published: &Published) -> [String; 2] {
    let Published { protocol, address, host, guest } = published;
    let option = match protocol {
        Protocol::Tcp => "--tcp-ports",
        Protocol::Udp => "--udp-ports",
    };
    [option.into(), format!("{address}/{host}:{guest}")]
}

/// Starts passt, and waits until it is ready. Returns its socket.
fn start_passt(host: HostReach, published: &[Published]) -> Result<OwnedFd> {
    let (ours, theirs) = UnixStream::pair().context("cannot make a socket")?;
    let mut passt = Command::new("passt");
    passt.args(["--quiet", "--fd", &theirs.as_raw_fd().to_string()]);
    passt.args(["--dns-forward", &NAME_SERVER.to_string()]);
    if host != HostReach::WithLoopback {
        passt.arg("--no-map-gw");
    }
    passt.args(published.iter().flat_map(option)).stdin(Stdio::null());
    inherit(&mut passt, vec![theirs.as_raw_fd()]);
    // It leaves a process in the background when it is ready.
    match passt.output() {
        Ok(Output { status, .. }) if status.success() => {
            info!("passt carries the guest's network: {}", words(&passt));
            Ok(ours.into())
        }
        Ok(Output { stderr, .. }) => bail!("--net user: passt: {}", last_line(&stderr)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            bail!("--net user needs passt, which is not installed: {}", distribution::advice(&["passt"]))
        }
        Err(error) => Err(error).context("--net user: cannot start passt"),
    }
}

fn words(command: &Command) -> String {
    let words: Vec<_> = command.get_args().map(OsString::from).collect();
    words.join(" ".as_ref()).display().to_string()
}

/// Returns the last line of what passt said, which is why it ended. It says elsewhere that it has no system log.
fn last_line(said: &[u8]) -> String {
    let said = String::from_utf8_lossy(said);
    let mut lines =
        said.lines().rev().filter(|line| !line.trim().is_empty() && !line.ends_with(" to syslog"));
    lines.next().unwrap_or("it has ended without a word").trim().trim_end_matches(", exiting").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_published_on_this_host_alone_unless_an_address_is_given() {
        let option = |text: &str| text.parse::<Published>().map(|published| option(&published).join(" "));
        assert_eq!(option("8080:80").unwrap(), "--tcp-ports 127.0.0.1/8080:80");
        assert_eq!(option("0.0.0.0:8080:80/tcp").unwrap(), "--tcp-ports 0.0.0.0/8080:80");
        assert_eq!(option("[::1]:53:5353/udp").unwrap(), "--udp-ports ::1/53:5353");
        let again = |text: &str| option(&text.parse::<Published>().unwrap().to_string());
        assert_eq!(again("[::1]:53:5353/udp"), option("[::1]:53:5353/udp"), "as a snapshot keeps it");
        for text in
            ["80", "80:", ":80", "0:80", "80:65536", "host:80:80", "80:80/sctp", "80:80/tcp/tcp", "-1:80"]
        {
            assert!(option(text).is_err(), "{text}");
        }
    }

    #[test]
    fn addresses_of_guests_on_one_network_differ_and_are_no_vendors() {
        let addresses: Vec<Mac> = (0..8).map(|_| random_mac().unwrap()).collect();
        assert!(addresses.iter().all(|mac| mac.0[0] & 3 == 2));
        assert!(addresses[1..].iter().all(|mac| *mac != addresses[0]));
    }

    #[test]
    fn what_passt_says_last_is_why_it_has_ended() {
        let said = b"Don't run as root. Changing to nobody...\nNo routable interface\nFailed to send 38 bytes to syslog\n";
        assert_eq!(last_line(said), "No routable interface");
    }
}
