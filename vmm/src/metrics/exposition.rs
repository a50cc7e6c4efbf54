//! What is told of a machine in OpenMetrics' text format: [`COUNTS`] has all that is counted.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use vpmu::report::{CounterReport, Report, State};

use tally_machine::VcpuReport;

/// The format's name.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// A machine as it is.
#[derive(Debug)]
pub struct Machine {
    /// What never changes: labels and their values.
    pub facts: Vec<(&'static str, String)>,
    /// Whether it stands still until its counters have hardware.
    pub stands_still: bool,
    /// Its vCPUs.
    pub vcpus: Vec<VcpuReport>,
}

/// A machine in the format.
pub fn write(machine: Machine) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("tally");
    registry.register("machine", "What runs", Info::new(machine.facts.clone()));
    registry.register_collector(Box::new(machine));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

/// Something that is counted.
struct Counted {
    name: &'static str,
    help: &'static str,
    of: Of,
}

/// Of what it is counted.
enum Of {
    /// Of a vCPU, with a label for each kind.
    Exits(&'static str, fn(&VcpuReport) -> Vec<(&'static str, u64)>),
    /// Of a vCPU's PMU.
    Pmu(fn(&Report) -> u64),
    /// Of each counter.
    Counter(fn(&CounterReport) -> u64),
    /// Nanoseconds of each counter.
    Time(fn(&CounterReport) -> u64),
}

const COUNTS: [Counted; 11] = [
    Counted {
        name: "exits",
        help: "Times that a vCPU came out of the guest",
        of: Of::Exits("reason", exits),
    },
    Counted {
        name: "pmu_traps",
        help: "Accesses of the guest's to the registers of its PMU",
        of: Of::Exits("access", traps),
    },
    Counted {
        name: "pmu_interrupts",
        help: "Interrupts of the guest's PMU",
        of: Of::Pmu(|pmu| pmu.statistics.interrupts),
    },
    Counted {
        name: "pmu_alarms",
        help: "Signals of the host's counters",
        of: Of::Pmu(|pmu| pmu.statistics.alarms),
    },
    Counted {
        name: "pmu_ignored_alarms",
        help: "Signals of the host's counters at which no counter of the guest's had overflowed",
        of: Of::Pmu(|pmu| pmu.statistics.ignored_alarms),
    },
    Counted {
        name: "pmu_period_clamps",
        help: "Overflows that were put off because they would have come too soon after the last",
        of: Of::Pmu(|pmu| pmu.statistics.clamps),
    },
    Counted {
        name: "pmu_system_calls",
        help: "System calls for the guest's counters",
        of: Of::Pmu(|pmu| pmu.statistics.system_calls),
    },
    Counted {
        name: "pmu_overflows",
        help: "Overflows of a counter",
        of: Of::Counter(|counter| counter.overflows),
    },
    Counted {
        name: "pmu_starvations",
        help: "Times that a counter had no hardware",
        of: Of::Counter(|counter| counter.starvations),
    },
    Counted {
        name: "pmu_starved",
        help: "For how long a counter had no hardware, at most",
        of: Of::Time(|counter| counter.starved_ns),
    },
    Counted {
        name: "pmu_estimated",
        help: "Counts that are an estimate of what a counter missed, since it was last configured",
        of: Of::Counter(|counter| counter.estimated),
    },
];

fn exits(vcpu: &VcpuReport) -> Vec<(&'static str, u64)> {
    let exits = vcpu.exits;
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

fn traps(vcpu: &VcpuReport) -> Vec<(&'static str, u64)> {
    vec![("read", vcpu.exits.pmu_reads), ("write", vcpu.exits.pmu_writes)]
}

impl Collector for Machine {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        for counted in &COUNTS {
            let unit = matches!(counted.of, Of::Time(_)).then_some(&Unit::Seconds);
            let mut metric =
                encoder.encode_descriptor(counted.name, counted.help, unit, MetricType::Counter)?;
            for (labels, value) in self.values(&counted.of) {
                match counted.of {
                    #[expect(
                        clippy::cast_precision_loss,
                        reason = "nanoseconds of hundreds of days are exact"
                    )]
                    Of::Time(_) => {
                        ConstCounter::new(value as f64 / 1e9).encode(metric.encode_family(&labels)?)?;
                    }
                    _ => ConstCounter::new(value).encode(metric.encode_family(&labels)?)?,
                }
            }
        }
        let help = "Whether a counter has no hardware now";
        let mut metric = encoder.encode_descriptor("pmu_is_starved", help, None, MetricType::Gauge)?;
        for (labels, starved) in
            self.values(&Of::Counter(|counter| u64::from(counter.state == State::Starved)))
        {
            ConstGauge::new(i64::from(starved != 0)).encode(metric.encode_family(&labels)?)?;
        }
        let help = "Whether the machine stands still until its counters have hardware";
        let metric = encoder.encode_descriptor("stands_still", help, None, MetricType::Gauge)?;
        ConstGauge::new(i64::from(self.stands_still)).encode(metric)
    }
}

type Labels = Vec<(&'static str, String)>;

impl Machine {
    fn values(&self, of: &Of) -> Vec<(Labels, u64)> {
        self.vcpus.iter().flat_map(|vcpu| values(of, vcpu)).collect()
    }
}

/// What there is of it, for one vCPU.
fn values(of: &Of, vcpu: &VcpuReport) -> Vec<(Labels, u64)> {
    let label = || ("vcpu", vcpu.vcpu.to_string());
    let counters = |value: fn(&CounterReport) -> u64| {
        let counters = vcpu.pmu.iter().flat_map(|pmu| &pmu.counters);
        let labelled = (0..).zip(counters);
        labelled
            .map(|(number, counter): (usize, _)| {
                (vec![label(), ("counter", number.to_string())], value(counter))
            })
            .collect()
    };
    match of {
        Of::Exits(kind, values) => values(vcpu)
            .into_iter()
            .map(|(name, value)| (vec![label(), (*kind, name.to_owned())], value))
            .collect(),
        Of::Pmu(value) => vcpu.pmu.iter().map(|pmu| (vec![label()], value(pmu))).collect(),
        Of::Counter(value) | Of::Time(value) => counters(*value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tally_machine::{Exits, Share};
    use vpmu::report::Statistics;

    #[test]
    fn a_machine_is_told_in_the_format() {
        let counter = CounterReport {
            event: Some("cycles:u".to_owned()),
            value: 5,
            state: State::Starved,
            backing: None,
            overflows: 7,
            starvations: 1,
            starved_ns: 1_500_000_000,
            estimated: 0,
        };
        let statistics = Statistics { interrupts: 6, ..Statistics::default() };
        let vcpu = VcpuReport {
            vcpu: 3,
            thread: 1,
            exits: Exits { pmu_reads: 12, ..Exits::default() },
            share: Share::default(),
            pmu: Some(Report { counters: vec![counter], statistics }),
        };
        let facts = vec![("name", "a \"b\"\n".to_owned())];
        let text = write(Machine { facts, stands_still: false, vcpus: vec![vcpu] }).unwrap();
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
    }
}
