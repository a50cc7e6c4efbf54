//! Tests of `--metrics` with Prometheus and with wget, on the lab's simulated host.

use std::sync::LazyLock;

use guest_images::Progress;
use guest_tests::lab::{Results, Steps};
use guest_tests::prometheus;
use guest_tests::suite::Test;
use guest_tests::tests;
use serde_json::Value;

/// The tests of this module.
pub fn tests() -> Vec<Test> {
    tests![
        prometheus_collects_the_guests_overflows_and_interrupts,
        metrics_are_exact,
        a_unix_socket_exists_while_the_guest_runs,
        an_unavailable_address_is_refused_in_one_line_before_the_boot,
    ]
}

/// Prometheus' configuration: it scrapes Tally every second.
const CONFIGURATION: &str = "global: {scrape_interval: 1s}\nscrape_configs: [{job_name: tally, static_configs: [{targets: [\"127.0.0.1:9100\"]}]}]\n";
/// URL of Prometheus' query interface.
const PROMETHEUS: &str = "http://127.0.0.1:9090/api/v1/query?query=";

/// Command of the guest: takes 20 samples of a loop of 20,000,004 instructions, and waits for a line on its standard
/// input.
const GUEST: &str =
    "perf record -q -o /tmp/data -e instructions:u -c 1000000 /lib/tally/loop; echo ready; read end";

static RESULTS: LazyLock<Results> = LazyLock::new(|| {
    let mut progress = Progress::stderr("lab");
    let prometheus = prometheus::program(&mut progress).unwrap_or_else(|error| panic!("{error}"));
    let begin = |options: &str| {
        format!(
            "rm -f end said; mkfifo end; ./tally run {options} -- sh -c '{GUEST}' <end >said & \
             tally=$!; exec 3>end; until grep -qs ready said; do sleep 0.1; done"
        )
    };
    let query = |query: &str| format!("wget -qO- '{PROMETHEUS}{query}'; echo");
    Steps::new("metrics")
        .from_template()
        .configure_host(move |scenario| scenario.file(prometheus, "prometheus"))
        .step("loopback", "ip link set lo up")
        .step(
            "prometheus",
            &format!(
                "{}; echo '{CONFIGURATION}' >prometheus.yml; \
                 ./prometheus --config.file=prometheus.yml --storage.tsdb.path=data --web.listen-address=127.0.0.1:9090 2>log & \
                 prometheus=$!; until ({}) | grep -q '\"value\"'; do sleep 0.5; done; \
                 {}; {}; {}; wget -qO- http://127.0.0.1:9100/metrics; kill $prometheus; echo >&3; wait $tally",
                begin("--metrics 9100"),
                query("tally_pmu_overflows_total"),
                query("up"),
                query("sum(tally_pmu_overflows_total)"),
                query("tally_pmu_interrupts_total"),
            ),
        )
        .step(
            "unix",
            &format!(
                "{}; ls -F; echo >&3; wait $tally; status=$?; ls -F; exit $status",
                begin("--metrics unix:socket")
            ),
        )
        .step("taken", "nc -l -p 9100 127.0.0.1 & sleep 0.5; ./tally run --metrics 9100 -- true; status=$?; kill $!; exit $status")
        .step("nowhere", "./tally run --metrics unix:no/such/folder -- true")
        .run()
});

fn prometheus_collects_the_guests_overflows_and_interrupts() {
    let done = RESULTS.of("prometheus");
    assert_eq!(done.status, 0, "{}", done.err);
    let text = done.text();
    let mut lines = text.lines();
    let mut value = || {
        let answer: Value = serde_json::from_str(lines.next().unwrap_or_default()).unwrap_or_default();
        answer["data"]["result"][0]["value"][1].as_str().unwrap_or("nothing").to_owned()
    };
    assert_eq!(value(), "1", "Tally is asked without an error: {text}");
    assert_eq!(value(), "20", "overflows: {text}");
    assert_eq!(value(), "20", "interrupts: {text}");
}

fn metrics_are_exact() {
    let text = RESULTS.of("prometheus").text();
    let value = |name: &str| {
        let line =
            text.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_else(|| panic!("{name}: {text}"));
        line.trim().parse::<u64>().unwrap_or_else(|error| panic!("{line}: {error}"))
    };
    assert_eq!(value("tally_pmu_interrupts_total{vcpu=\"0\"}"), 20);
    let of_writes = value("tally_exits_total{vcpu=\"0\",reason=\"pmu-write\"}");
    assert_eq!(of_writes, value("tally_pmu_traps_total{vcpu=\"0\",access=\"write\"}"));
    assert!(of_writes >= 2, "the counters are set going, and stopped in the end: {of_writes}");
    assert_eq!(value("tally_pmu_is_starved{vcpu=\"0\",counter=\"0\"}"), 0);
    assert!(text.contains("tally_machine_info{version="), "{text}");
}

fn a_unix_socket_exists_while_the_guest_runs() {
    let done = RESULTS.of("unix");
    assert_eq!((done.status, done.text().matches("socket=").count()), (0, 1), "{}{}", done.text(), done.err);
}

fn an_unavailable_address_is_refused_in_one_line_before_the_boot() {
    for (step, words) in [
        ("taken", "tally: --metrics 127.0.0.1:9100: Address already in use"),
        ("nowhere", "tally: --metrics unix:no/such/folder: No such file or directory"),
    ] {
        let done = RESULTS.of(step);
        assert_eq!(done.status, 125);
        assert!(done.err.starts_with(words) && done.err.lines().count() == 1, "{}", done.err);
    }
}
