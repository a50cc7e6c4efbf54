//! Renders the status of a VM ([`crate::protocol::status`]) in OpenMetrics' text format: [`METRICS`] lists the metrics.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use vpmu::report::{CounterReport, State, Statistics};

use tally_machine::{Exits, VcpuReport};

use crate::protocol::status::Report;

/// Media type of the format.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Labels with their values.
pub type Labels = Vec<(&'static str, String)>;

/// State of a machine.
#[derive(Debug)]
pub struct VmMetrics {
    /// Labels of all of its metrics, which tell it from other machines.
    pub labels: Labels,
    /// What never changes: the labels of `tally_machine_info`.
    pub facts: Labels,
    /// Its counters and exits.
    pub report: Report,
}

impl VmMetrics {
    /// Returns a size that the machine's text does not exceed.
    pub fn size(&self) -> usize {
        /// The longest line without the machine's labels, and its share of the line's end.
        const LINE: usize = 160;
        /// Lines of a machine, of a vCPU, and of a counter.
        const LINES: [usize; 3] = [2, 16, 5];
        // Each character may need an escape.
        let labels = |labels: &Labels| -> usize {
            labels.iter().map(|(label, value)| label.len() + 2 * value.len() + "=\"\",".len()).sum()
        };
        let counters: usize = self.report.vcpus.iter().map(|vcpu| vcpu.counters.len()).sum();
        let lines = LINES[0] + LINES[1] * self.report.vcpus.len() + LINES[2] * counters;
        lines * (LINE + labels(&self.labels)) + labels(&self.facts)
    }
}

/// Machines whose metrics are rendered together.
#[derive(Debug)]
pub struct AllMetrics {
    /// Those that have answered.
    pub answering: Vec<VmMetrics>,
    /// Number of those that have not, where several are asked.
    pub silent: Option<usize>,
}

impl AllMetrics {
    /// Renders their state.
    pub fn write(self) -> Result<String, fmt::Error> {
        let mut registry = Registry::with_prefix("tally");
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        text::encode(&mut text, &registry)?;
        Ok(text)
    }
}

/// Where a metric's values come from.
enum Source {
    /// Each vCPU; the second label tells kinds of exits apart.
    Exits(&'static str, fn(&Exits) -> Vec<(&'static str, u64)>),
    /// Each vCPU's PMU.
    Pmu(fn(&Statistics) -> u64),
    /// Each counter.
    Counter(fn(&CounterReport) -> u64),
    /// Each counter, in seconds.
    Seconds(fn(&CounterReport) -> f64),
    /// Each counter, which is in a state or is not.
    State(fn(&CounterReport) -> bool),
}

/// Names, help texts and values of the metrics.
const METRICS: [(&str, &str, Source); 13] = [
    ("exits", "Times that a vCPU came out of the guest", Source::Exits("reason", exits)),
    ("pmu_traps", "Accesses of the guest's to the registers of its PMU", Source::Exits("access", traps)),
    ("pmu_interrupts", "Interrupts of the guest's PMU", Source::Pmu(|pmu| pmu.interrupts)),
    (
        "pmu_withheld_interrupts",
        "Interrupts of the guest's PMU that a policy has delayed",
        Source::Pmu(|pmu| pmu.withheld),
    ),
    ("pmu_alarms", "Signals of the host's counters", Source::Pmu(|pmu| pmu.alarms)),
    (
        "pmu_ignored_alarms",
        "Signals of the host's counters at which no counter of the guest's had overflowed",
        Source::Pmu(|pmu| pmu.ignored_alarms),
    ),
    (
        "pmu_period_clamps",
        "Overflows that were put off because they would have come too soon after the last",
        Source::Pmu(|pmu| pmu.clamps),
    ),
    ("pmu_system_calls", "System calls for the guest's counters", Source::Pmu(|pmu| pmu.system_calls)),
    ("pmu_overflows", "Overflows of a counter", Source::Counter(|counter| counter.overflows)),
    (
        "pmu_starvations",
        "Times that a counter had no hardware",
        Source::Counter(|counter| counter.starvations),
    ),
    (
        "pmu_starved",
        "For how long a counter had no hardware, at most",
        Source::Seconds(|counter| counter.starved),
    ),
    (
        "pmu_estimated",
        "Counts that are an estimate of what a counter missed, since it was last configured",
        Source::Counter(|counter| counter.estimated),
    ),
    (
        "pmu_is_starved",
        "Whether a counter has no hardware now",
        Source::State(|counter| counter.state == State::Starved),
    ),
];

fn exits(exits: &Exits) -> Vec<(&'static str, u64)> {
    vec![
        ("port-read", exits.port_reads),
        ("port-write", exits.port_writes),
        ("memory-read", exits.memory_reads),
        ("memory-write", exits.memory_writes),
        ("pmu-read", exits.pmu_reads),
        ("pmu-write", exits.pmu_writes),
        ("signal", exits.signals),
        ("other", exits.others),
    ]
}

fn traps(exits: &Exits) -> Vec<(&'static str, u64)> {
    vec![("read", exits.pmu_reads), ("write", exits.pmu_writes)]
}

impl AllMetrics {
    /// Writes a metric's value of each machine.
    fn encode_each<V: EncodeMetric>(
        &self,
        mut metric: MetricEncoder<'_>,
        value: impl Fn(&VmMetrics) -> V,
    ) -> fmt::Result {
        match &self.answering[..] {
            // A family without labels would be written with empty braces.
            [machine] if machine.labels.is_empty() => value(machine).encode(metric),
            machines => machines
                .iter()
                .try_for_each(|machine| value(machine).encode(metric.encode_family(&machine.labels)?)),
        }
    }
}

impl Collector for AllMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        let metric = encoder.encode_descriptor("machine", "What runs", None, MetricType::Info)?;
        self.encode_each(metric, |machine| Info::new(machine.facts.clone()))?;
        for (name, help, source) in &METRICS {
            let (unit, kind) = match source {
                Source::Exits(..) | Source::Pmu(_) | Source::Counter(_) => (None, MetricType::Counter),
                Source::Seconds(_) => (Some(&Unit::Seconds), MetricType::Counter),
                Source::State(_) => (None, MetricType::Gauge),
            };
            let mut metric = encoder.encode_descriptor(name, help, unit, kind)?;
            for VmMetrics { labels, report, .. } in &self.answering {
                report.vcpus.iter().try_for_each(|vcpu| encode(source, labels, vcpu, &mut metric))?;
            }
        }
        let help = "Whether the machine stands still until its counters have hardware";
        let metric = encoder.encode_descriptor("stands_still", help, None, MetricType::Gauge)?;
        self.encode_each(metric, |machine| ConstGauge::new(i64::from(machine.report.stands_still)))?;
        let Some(silent) = self.silent else { return Ok(()) };
        let help = "Machines that do not answer";
        let metric = encoder.encode_descriptor("silent_machines", help, None, MetricType::Gauge)?;
        ConstGauge::new(i64::try_from(silent).unwrap_or(i64::MAX)).encode(metric)
    }
}

/// Writes a metric's values of one vCPU of the machine with these labels.
fn encode(source: &Source, of: &Labels, vcpu: &VcpuReport, metric: &mut MetricEncoder<'_>) -> fmt::Result {
    let label = || ("vcpu", vcpu.vcpu.to_string());
    let mut counters =
        vcpu.counters.iter().map(|of| (vec![label(), ("counter", of.counter.to_string())], of));
    let mut encode = |labels: Labels, value: &dyn EncodeMetric| {
        value.encode(metric.encode_family(&[of.clone(), labels].concat())?)
    };
    match source {
        Source::Exits(kind, values) => values(&vcpu.exits).into_iter().try_for_each(|(name, value)| {
            encode(vec![label(), (kind, name.to_owned())], &ConstCounter::new(value))
        }),
        Source::Pmu(value) => vcpu
            .statistics
            .iter()
            .try_for_each(|statistics| encode(vec![label()], &ConstCounter::new(value(statistics)))),
        Source::Counter(value) => {
            counters.try_for_each(|(labels, of)| encode(labels, &ConstCounter::new(value(of))))
        }
        Source::Seconds(value) => {
            counters.try_for_each(|(labels, of)| encode(labels, &ConstCounter::new(value(of))))
        }
        Source::State(value) => {
            counters.try_for_each(|(labels, of)| encode(labels, &ConstGauge::new(i64::from(value(of)))))
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use tally_machine::Share;

    fn report() -> Report {
        let counter = CounterReport {
            counter: 0,
            event: Some("cycles:u".to_owned()),
            value: 5,
            state: State::Starved,
            refusal: None,
            hardware: None,
            overflows: 7,
            enabled: None,
            running: None,
            starvations: 1,
            starved: 1.5,
            estimated: 0,
        };
        let vcpu = VcpuReport {
            vcpu: 3,
            thread: 1,
            counters: vec![counter],
            statistics: Some(Statistics { interrupts: 6, ..Statistics::default() }),
            exits: Exits { pmu_reads: 12, ..Exits::default() },
            share: Share::default(),
            cpu: 0,
        };
        Report { stands_still: false, vcpus: vec![vcpu] }
    }

    #[test]
    fn a_machine_is_rendered_in_the_format() {
        let facts = vec![("name", "a \"b\"\n".to_owned())];
        let machine = |labels| VmMetrics { labels, facts: facts.clone(), report: report() };
        let text = AllMetrics { answering: vec![machine(vec![])], silent: None }.write().unwrap();
        for line in [
            "# TYPE tally_exits counter",
            "tally_exits_total{vcpu=\"3\",reason=\"pmu-read\"} 12",
            "tally_pmu_traps_total{vcpu=\"3\",access=\"read\"} 12",
            "tally_pmu_interrupts_total{vcpu=\"3\"} 6",
            "tally_pmu_overflows_total{vcpu=\"3\",counter=\"0\"} 7",
            "# UNIT tally_pmu_starved_seconds seconds",
            "tally_pmu_starved_seconds_total{vcpu=\"3\",counter=\"0\"} 1.5",
            "tally_pmu_is_starved{vcpu=\"3\",counter=\"0\"} 1",
            "tally_stands_still 0",
            "tally_machine_info{name=\"a \\\"b\\\"\\n\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}:\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));

        let two = ["web", "db"].map(|name| machine(vec![("vm", name.to_owned())]));
        let text = AllMetrics { answering: two.into(), silent: Some(1) }.write().unwrap();
        for line in [
            "tally_machine_info{name=\"a \\\"b\\\"\\n\",vm=\"db\"} 1",
            "tally_pmu_overflows_total{vm=\"web\",vcpu=\"3\",counter=\"0\"} 7",
            "tally_pmu_overflows_total{vm=\"db\",vcpu=\"3\",counter=\"0\"} 7",
            "tally_stands_still{vm=\"db\"} 0",
            "tally_silent_machines 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}:\n{text}");
        }
        assert_eq!(text.matches("# TYPE tally_pmu_overflows counter").count(), 1, "{text}");
    }

    #[test]
    fn the_text_of_a_machine_does_not_exceed_its_size() {
        let head = AllMetrics { answering: vec![], silent: None }.write().unwrap().len();
        for name in ["", "web", &"\"\\\n".repeat(100), &"\u{10ffff}".repeat(100)] {
            for vcpus in [0, 1, 254] {
                let mut report = report();
                let vcpu = report.vcpus.remove(0);
                report.vcpus = vec![VcpuReport { vcpu: 255, ..vcpu }; vcpus];
                for vcpu in &mut report.vcpus {
                    let counter =
                        CounterReport { counter: usize::MAX, starved: -f64::MAX, ..vcpu.counters[0].clone() };
                    let most = CounterReport { overflows: u64::MAX, estimated: u64::MAX, ..counter };
                    vcpu.counters = vec![most; 64];
                    vcpu.exits.port_reads = u64::MAX;
                }
                let labels = vec![("user", name.to_owned()), ("name", name.to_owned()), ("pid", "7".into())];
                let machine = VmMetrics { labels, facts: vec![("pmu", name.to_owned())], report };
                let size = machine.size();
                let text = AllMetrics { answering: vec![machine], silent: None }.write().unwrap();
                assert!(text.len() - head <= size, "{}: {size}", text.len() - head);
            }
        }
    }

    #[test]
    fn the_dashboard_asks_for_metrics_and_labels_that_exist() {
        let labels = ["user", "name", "pid"].map(|label| (label, "7".to_owned())).to_vec();
        let machine = VmMetrics { labels, facts: Vec::new(), report: report() };
        let text = AllMetrics { answering: vec![machine], silent: Some(0) }.write().unwrap();
        let names = |text: &str| -> BTreeSet<String> {
            let words = text.split(|c: char| !c.is_ascii_lowercase() && c != '_');
            words.filter(|word| word.starts_with("tally_")).map(str::to_owned).collect()
        };
        let samples: String = text.lines().filter(|line| !line.starts_with('#')).collect();
        let dashboard = include_str!("../../../packaging/grafana/tally.json");
        serde_json::from_str::<serde_json::Value>(dashboard).expect("it is JSON");
        let asked = names(dashboard);
        assert!(asked.len() > 10, "{asked:?}");
        assert_eq!(asked.difference(&names(&samples)).collect::<Vec<_>>(), [""; 0]);
        let labels = dashboard.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
        for label in labels.flat_map(|labels| labels.split(", ")) {
            assert!(samples.contains(&format!("{label}=\"")), "{label}");
        }
    }
}
