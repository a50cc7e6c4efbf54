//! Guests with a network, by passt and by a tap device. One host for all of them, with another host behind it in a
//! network namespace: four templates, and a dozen guests that start from them: forty seconds of a core.

use std::sync::LazyLock;

use guest_images::Progress;
use guest_tests::lab::{Results, Steps};
use guest_tests::suite::Test;
use guest_tests::{program, tests};
use tally_lab::passt;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        a_guest_has_the_hosts_address_and_reaches_other_hosts,
        below_a_root_the_guest_has_its_own_name_server,
        names_are_asked_of_the_hosts_name_server,
        large_transfers_arrive_whole,
        the_hosts_loopback_is_reachable_only_if_asked_for,
        a_guest_that_sends_to_the_hosts_loopback_address_itself_reaches_nothing,
        without_the_host_its_other_addresses_are_closed_too,
        a_published_port_is_the_guests_on_this_host_alone,
        a_tap_device_needs_a_dhcp_server_or_nothing,
        a_guest_has_as_many_queues_as_vcpus_if_the_tap_device_has_several,
        a_restored_guest_has_a_network_and_its_connections_are_reset,
        when_passt_ends_a_line_says_so_and_the_guest_goes_on,
        passt_ends_with_its_guest,
        what_cannot_be_is_one_line,
    ]
}

/// Sets up another host that the host reaches by its default route, web servers on both and on the loopback address,
/// and tap devices.
const SET_UP: &str = "\
unshare -n sleep 100000 </dev/null >/dev/null 2>&1 & echo $! >other
sleep 0.1
ip link add near type veth
ip link set veth0 netns $(cat other)
ip address add 192.0.2.2/24 dev near; ip link set near up
there() { nsenter -t $(cat other) -n \"$@\"; }
there ip link set lo up; there ip address add 192.0.2.1/24 dev veth0; there ip link set veth0 up
ip route add default via 192.0.2.1 dev near
echo nameserver 192.0.2.1 >/etc/resolv.conf
mkdir there here
echo from the other host >there/index.html; echo from the loopback address >here/index.html
head -c 20000000 tally >there/large; head -c 2000000 tally >there/smaller
there httpd -p 192.0.2.1:80 -h $PWD/there
there ./name_server 192.0.2.1:53 192.0.2.53 </dev/null >/dev/null 2>&1 &
httpd -p 127.0.0.1:9000 -h $PWD/here
httpd -p 192.0.2.2:9001 -h $PWD/here
for tap in tap0 tap1; do tunctl -t $tap >/dev/null; done
./multi_queue_tap tap2
ip link set tap1 up
for number in 0 2; do
ip address add 10.0.$number.1/24 dev tap$number; ip link set tap$number up
httpd -p 10.0.$number.1:80 -h $PWD/there
cat >udhcpd$number.conf <<CONFIGURATION
start 10.0.$number.20
end 10.0.$number.30
interface tap$number
lease_file leases$number
pidfile udhcpd$number.pid
option router 10.0.$number.1
option dns 10.0.$number.1
CONFIGURATION
touch leases$number; udhcpd $PWD/udhcpd$number.conf
done
";

/// Shell functions: `there COMMAND...` runs a command on the other host.
const PRELUDE: &str = "\
export TALLY_CACHE=$PWD/cache TALLY_BOOT=
there() { nsenter -t $(cat other) -n \"$@\"; }
until_said() { until grep -q \"$1\" $2; do kill -0 $vm || exit; sleep 0.02; done; }
until_answered() { until wget -q -O - http://127.0.0.1:8080/ 2>/dev/null; do kill -0 $vm || exit; sleep 0.05; done; }
";

/// Reaches nobody in one second.
const TRY: &str = "try() { nc -w 1 $1 $2 </dev/null && echo reached; }";

/// Lets the guest send what is for its own loopback addresses, or for the address that it shares with the host.
const SHARE_NO_ADDRESS: &str = "ip address flush dev lo; \
for of in all eth0; do echo 1 >/proc/sys/net/ipv4/conf/$of/route_localnet; done; \
ip address flush dev eth0; ip address add 192.0.2.9/24 dev eth0; ip route add default via 192.0.2.1; \
for to in 127.0.0.1 127.1.2.3 192.0.2.2; do ip route add $to via 192.0.2.1; done";

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let steps = Steps::new("network")
        .configure_host(|host| {
            passt::add(host.memory_mib(4 << 10), &mut Progress::stderr("lab")).expect("passt is found")
        })
        .file(program("name_server"), "name_server")
        .file(program("multi_queue_tap"), "multi_queue_tap");
    let step = |steps: Steps, name: &str, commands: &str| steps.step(name, &format!("{PRELUDE}{commands}"));
    let steps = steps.step("set-up", &format!("{}{SET_UP}", passt::INSTALL));
    let guest = |options: &str, script: &str| format!("./tally run {options} -- sh -c '{script}' </dev/null");
    let fetch = "wget -q -O -";
    [
        ("user", guest("--net user", &format!(
            "ip -4 -o address show eth0; ip route; cat /etc/resolv.conf; {fetch} http://192.0.2.1/"
        ))),
        ("root", guest("--net user --root /", &format!("cat /etc/resolv.conf; {fetch} http://192.0.2.1/"))),
        ("names", guest("--net user", "nslookup www.example.org")),
        ("large", format!(
            "md5sum <there/large; {}; {}",
            guest("--net user", &format!("{fetch} http://192.0.2.1/large | md5sum")),
            guest("--net tap=tap0", &format!("{fetch} http://10.0.0.1/large | md5sum")),
        )),
        ("loopback", format!(
            "{}; {}",
            guest("--net user", &format!("{TRY}; try 192.0.2.1 9000; try 169.254.1.1 9000; echo nothing")),
            guest("--net user,host-loopback", &format!("{fetch} http://192.0.2.1:9000/")),
        )),
        ("itself", format!(
            "{}; {}",
            guest("--net user", &format!(
                "{TRY}; {SHARE_NO_ADDRESS}; try 127.0.0.1 9000; try 127.1.2.3 9000; try 0.0.0.0 9000; echo nothing"
            )),
            guest("--net user,host-loopback", &format!("{SHARE_NO_ADDRESS}; {fetch} http://127.0.0.1:9000/")),
        )),
        ("host", {
            let script = format!("{TRY}; {SHARE_NO_ADDRESS}; try 192.0.2.2 9001; try 127.0.0.1 9000; {fetch} http://192.0.2.1/");
            format!("{}; {}", guest("--net user", &script), guest("--net user,host=no", &script))
        }),
        ("publish", format!(
            "{TRY}; {} & vm=$!; until_answered; \
             there nc -w 1 192.0.2.2 8080 </dev/null && echo reached from the other host; \
             there {fetch} http://192.0.2.2:8081/; kill $vm; wait $vm; echo $?",
            guest(
                "--net user --publish 8080:80 --publish 192.0.2.2:8081:80",
                "mkdir /w; echo from the guest >/w/index.html; exec httpd -f -p 80 -h /w"
            )
        )),
        ("tap", format!(
            "{}; {}",
            guest("--net tap=tap0", &format!(
                "ip -4 -o address show eth0; ip route; cat /etc/resolv.conf /sys/class/net/eth0/mtu; {fetch} http://10.0.0.1/"
            )),
            guest("--net tap=tap1", "ip -4 -o address show eth0; cat /sys/class/net/eth0/operstate"),
        )),
        // Both vCPUs fetch at the same time, before the guest is saved and after it.
        ("queues", format!(
            ": >wide; md5sum <there/smaller; ./tally run --name wide --cpus 2 --net tap=tap2 -- sh -c '\
             fetch() {{ taskset $1 {fetch} http://10.0.2.1/smaller | md5sum; }}; \
             both() {{ fetch 1 & fetch 2; wait; ls /sys/class/net/eth0/queues | xargs; }}; boot() {{ cat /proc/sys/kernel/random/boot_id; }}; \
             both; first=$(boot); echo fetched; while [ $first = $(boot) ]; do sleep 0.1; done; sleep 0.3; both' >wide </dev/null & vm=$!; \
             until_said fetched wide; ls /sys/class/net/tap2/queues | xargs; ./tally snapshot wide wide.saved --stop; wait $vm; \
             cat wide; ./tally run --restore wide.saved"
        )),
        ("restored", "mkfifo fifo; (while there nc -l -p 81 <>fifo; do :; done) & \
             ./tally run --name saved --net user --publish 8080:80 -- sh -c '\
             mkdir /w; echo from the guest >/w/index.html; httpd -p 80 -h /w; mkfifo f; \
             nc 192.0.2.1 81 <>f; echo ended $?; sleep 0.3; ip -4 -o address show eth0; echo all; sleep 100' >said </dev/null & vm=$!; \
             until_answered; sleep 0.3; cat said; \
             ./tally snapshot saved guest.saved --stop; wait $vm; \
             ip address del 192.0.2.2/24 dev near; ip address add 192.0.2.7/24 dev near; \
             ip route add default via 192.0.2.1 dev near; \
             ./tally run --restore guest.saved >said & vm=$!; until_said all said; cat said; \
             until_answered; kill $vm; wait $vm; killall nc".to_owned()),
        ("gone", format!(
            "{} & vm=$!; until_said up said; killall passt-itself; wait $vm; echo $?; cat said",
            guest("--net user", "cat /sys/class/net/eth0/carrier; echo up; sleep 1; cat /sys/class/net/eth0/carrier; exit 3").replace("</dev/null", "</dev/null >said")
        )),
        ("ended", "sleep 1; ps | grep -c [p]asst-itself || true".to_owned()),
        ("refused", "\
            run() { ./tally run \"$@\" -- true </dev/null; echo \"status $?\" >&2; }; \
            run --net none; run --net tap=tap9; run --net tap=near; run --net tap=tap0 --publish 1:2; run --publish 1:2; \
            run --net user --publish 80; run --net user --publish 9000:80; \
            ./tally run --net tap=tap0 -- sleep 2 </dev/null & sleep 0.2; run --net tap=tap0; wait; \
            mv /usr/bin/passt passt; run --net user; mv passt /usr/bin/passt"
            .to_owned()),
    ]
    .into_iter()
    .fold(steps, |steps, (name, commands)| step(steps, name, &commands))
    .run()
});

/// Returns the lines that a step printed. It has said nothing else.
fn lines(step: &str) -> Vec<String> {
    let done = RESULTS.of(step);
    assert_eq!(done.err, "", "{}", done.text());
    done.text().lines().map(str::to_owned).collect()
}

fn a_guest_has_the_hosts_address_and_reaches_other_hosts() {
    let lines = lines("user");
    assert!(lines[0].contains("inet 192.0.2.2/24 "), "{lines:?}");
    assert_eq!(lines[1].trim(), "default via 192.0.2.1 dev eth0");
    assert_eq!(lines[lines.len() - 2..], ["nameserver 169.254.1.1", "from the other host"]);
}

fn below_a_root_the_guest_has_its_own_name_server() {
    assert_eq!(lines("root"), ["nameserver 169.254.1.1", "from the other host"]);
}

fn names_are_asked_of_the_hosts_name_server() {
    let lines = lines("names");
    assert!(lines.contains(&"Address: 192.0.2.53".to_owned()), "{lines:?}");
}

fn large_transfers_arrive_whole() {
    let lines = lines("large");
    assert_eq!(lines, [&*lines[0], &*lines[0], &*lines[0]]);
}

fn the_hosts_loopback_is_reachable_only_if_asked_for() {
    let done = RESULTS.of("loopback");
    assert_eq!(done.text(), "nothing\nfrom the loopback address\n", "{}", done.err);
}

fn a_guest_that_sends_to_the_hosts_loopback_address_itself_reaches_nothing() {
    let done = RESULTS.of("itself");
    assert_eq!(done.text(), "nothing\nfrom the loopback address\n", "{}", done.err);
}

fn without_the_host_its_other_addresses_are_closed_too() {
    let done = RESULTS.of("host");
    assert_eq!(done.text(), "reached\nfrom the other host\nfrom the other host\n", "{}", done.err);
}

fn a_published_port_is_the_guests_on_this_host_alone() {
    let done = RESULTS.of("publish");
    assert_eq!(done.text(), "from the guest\nfrom the guest\n143\n", "{}", done.err);
}

fn a_tap_device_needs_a_dhcp_server_or_nothing() {
    let lines = lines("tap");
    assert!(lines[0].contains("inet 10.0.0."), "{lines:?}");
    assert_eq!(lines[1].trim(), "default via 10.0.0.1 dev eth0");
    assert_eq!(lines[3..], ["nameserver 10.0.0.1", "1500", "from the other host", "up"]);
}

fn a_guest_has_as_many_queues_as_vcpus_if_the_tap_device_has_several() {
    let queues = "rx-0 rx-1 tx-0 tx-1";
    let done = RESULTS.of("queues");
    let text = done.text();
    let lines: Vec<&str> = text.lines().collect();
    let sum = *lines.first().unwrap_or(&"");
    assert_eq!(lines, [sum, queues, sum, sum, queues, "fetched", sum, sum, queues], "{}", done.err);
}

fn a_restored_guest_has_a_network_and_its_connections_are_reset() {
    let done = RESULTS.of("restored");
    let lines: Vec<String> = done.text().lines().map(str::to_owned).collect();
    let [before, ended, address, _, after] = &lines[..] else { panic!("{lines:?}\n{}", done.err) };
    assert_eq!([before, after], ["from the guest"; 2]);
    assert!(ended.starts_with("ended"), "{ended}");
    assert!(address.contains("inet 192.0.2.7/24 "), "{address}");
}

fn when_passt_ends_a_line_says_so_and_the_guest_goes_on() {
    let done = RESULTS.of("gone");
    assert_eq!(done.text(), "3\n1\nup\n0\n");
    assert_eq!(done.err, "tally: net: the guest's network is gone: the process that carried it has ended\n");
}

fn passt_ends_with_its_guest() {
    assert_eq!(lines("ended"), ["0"]);
}

fn what_cannot_be_is_one_line() {
    let refused = RESULTS.of("refused");
    let said: Vec<&str> = refused.err.lines().collect();
    let expected = [
        "invalid value 'none' for '--net <HOW>': user, user,host-loopback, user,host=no or tap=NAME \
         (`tally --help` tells more)",
        "--net tap=tap9: there is no such tap device (`sudo ip tuntap add tap9 mode tap user $USER` makes one)",
        "--net tap=near: it is no tap device",
        "--publish is for --net user, not for --net tap=tap0",
        "the following required arguments were not provided: --net <HOW> (`tally --help` tells more)",
        "invalid value '80' for '--publish <PORTS>': [ADDRESS:]HOST:GUEST[/udp], with ports from 1 to 65535 (`tally --help` \
         tells more)",
        "--net user: passt: Failed to bind any port for '-t 127.0.0.1/9000:80'",
        "--net tap=tap0: in use by another program",
        "--net user needs passt, which is not installed: install passt",
    ];
    let expected: Vec<String> =
        expected.iter().flat_map(|line| [format!("tally: {line}"), "status 125".to_owned()]).collect();
    assert_eq!(said, expected);
}
