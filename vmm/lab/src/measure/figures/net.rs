//! What a guest's network costs: requests to a small web server in it, and transfers in both directions. A client on
//! the simulated host is the other end; Tally and the peer run there, with the same kernel and initrd.
//!
//! The host has one CPU, so the times include all work: the client's, passt's, and that of the devices' threads.

use std::fmt::Write;
use std::path::Path;

use guest_images::{Progress, Suite};

use crate::error::Result;
use crate::scenario::Scenario;
use crate::scenario::passt;
use crate::scenario::peer::{self, MachineType, Net};

/// Number of requests.
const REQUESTS: u32 = 100;
/// Size of a transfer.
const MIB: u32 = 50;

/// Costs with one monitor and one kind of network.
#[derive(Debug)]
pub struct Measured {
    /// Name of the monitor, and of its network.
    pub name: String,
    /// Requests that are answered in a second.
    pub requests_per_second: f64,
    /// Exits for each.
    pub exits_per_request: f64,
    /// From the guest, and to the guest.
    pub transfers: [Transfer; 2],
}

/// A transfer in one direction.
#[derive(Debug, Clone, Copy)]
pub struct Transfer {
    /// Millions of bytes in a second.
    pub megabytes_per_second: f64,
    /// Exits for each MiB.
    pub exits_per_mib: f64,
}

/// Measures `tally` and the peer by `net-workload`.
pub fn measure(tally: &Path, workload: &Path, progress: &mut Progress) -> Result<Vec<Measured>> {
    let scenario = Scenario::with_all_counters(script())
        .named("figures net")
        .file(tally, "tally")
        .file(workload, "net-workload")
        .guest(Suite::default(), progress)?;
    let text = super::output::run(&passt::add(scenario, progress)?, progress)?;
    let measured: Option<Vec<_>> = text.lines().map(measured).collect();
    measured.filter(|all| !all.is_empty()).ok_or_else(|| super::output::unreadable(&text))
}

/// What runs in each guest: a web server, and a reader of what is sent to it. In the peer's guest nobody has set up the
/// network before.
fn served(begin: &str) -> String {
    format!(
        "{begin}mkdir /w; echo hello >/w/index.html; dd if=/dev/zero of=/w/large bs=1M count={MIB} 2>/dev/null; \
         httpd -p 80 -h /w; mkfifo silence; while nc -l -p 99 <>silence >/dev/null; do :; done"
    )
}

/// Returns the script. For each guest it prints a name, and seconds and exits of the requests and of both transfers.
fn script() -> String {
    let mut script = format!(
        "{install}
tunctl -t tap0 >/dev/null
ip address add 10.0.0.1/24 dev tap0
ip link set tap0 up
# passt looks for a way to other hosts.
ip route add default via 10.0.0.254 dev tap0
cat >udhcpd.conf <<CONFIGURATION
start 10.0.0.20
end 10.0.0.20
interface tap0
lease_file leases
pidfile udhcpd.pid
option router 10.0.0.1
CONFIGURATION
exits() {{ cat /sys/kernel/debug/kvm/exits; }}
cost() {{
    before=$(exits)
    seconds=$(./net-workload \"$@\") || exit
    costs=\"$costs $seconds $(($(exits) - before))\"
}}
measure() {{
    name=$1 web=$2 sink=$3; shift 3
    # The address is for another guest.
    killall udhcpd 2>/dev/null
    echo >leases
    udhcpd $PWD/udhcpd.conf
    \"$@\" </dev/null >said 2>&1 & vm=$!
    until ./net-workload requests $web 1 >/dev/null 2>&1; do kill -0 $vm || {{ cat said >&2; exit 1; }}; sleep 0.05; done
    costs=
    cost requests $web {REQUESTS}
    cost receive $web
    cost send $sink {bytes}
    echo $name$costs
    kill $vm
    wait $vm
}}
",
        install = passt::INSTALL,
        bytes = u64::from(MIB) << 20,
    );
    let served_by_tally = served("");
    let served_by_peer =
        served("modprobe virtio_mmio; modprobe virtio_net; /lib/tally/network 52:54:00:12:34:56; ");
    let (user, tap) = ("127.0.0.1:8080 127.0.0.1:8099", "10.0.0.20:80 10.0.0.20:99");
    let mut line = |name: &str, at: &str, command: &str| {
        writeln!(script, "measure {name} {at} {command}").expect("writing to a string cannot fail");
    };
    let tally = |options: &str| format!("./tally run --boot {options} -- sh -c '{served_by_tally}'");
    line("tally,user", user, &tally("--net user --publish 8080:80 --publish 8099:99"));
    line("tally,tap", tap, &tally("--net tap=tap0"));
    for (net, at) in [(Net::User, user), (Net::Tap, tap)] {
        let command = peer::linux_with_network(MachineType::Microvm, net, &["sh", "-c", &*served_by_peer]);
        line(
            &format!("microvm,{}", net.name()),
            at,
            &format!("sh -c \"exec {}\"", command.replace('"', "\\\"")),
        );
    }
    script
}

fn measured(line: &str) -> Option<Measured> {
    let (name, numbers) = line.split_once(' ')?;
    let numbers: Vec<f64> = numbers.split(' ').map(str::parse).collect::<std::result::Result<_, _>>().ok()?;
    let [seconds, exits, from, from_exits, to, to_exits] = numbers[..] else { return None };
    let transfer = |seconds: f64, exits: f64| Transfer {
        megabytes_per_second: f64::from(MIB) * 1.048_576 / seconds,
        exits_per_mib: exits / f64::from(MIB),
    };
    Some(Measured {
        name: name.to_owned(),
        requests_per_second: f64::from(REQUESTS) / seconds,
        exits_per_request: exits / f64::from(REQUESTS),
        transfers: [transfer(from, from_exits), transfer(to, to_exits)],
    })
}
