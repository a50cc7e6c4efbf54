//! What is shown of a VM whose counts are known.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use vpmu::report::{CounterReport, State, Statistics};
use vpmu_perf::{Attributed, Reading, Work};

use super::text;
use crate::protocol::status::{Summary, VmStatus};
use crate::run::clients::hardware::CpuCounters;
use crate::run::clients::measurement::{VcpuMeasurement, VmMeasurement};
use tally_machine::{Exits, Share, VcpuReport};

fn counters() -> Vec<CounterReport> {
    let counter = |counter, event: Option<&str>, value, state| CounterReport {
        counter,
        event: event.map(str::to_owned),
        value,
        state,
        refusal: None,
        hardware: None,
        overflows: 0,
        enabled: None,
        running: None,
        starvations: 0,
        starved: 0.0,
        estimated: 0,
    };
    vec![
        CounterReport {
            hardware: Some(3),
            overflows: 12,
            enabled: Some(2.0),
            running: Some(2.0),
            ..counter(0, Some("instructions:u"), 1_234_567, State::Counting)
        },
        CounterReport {
            enabled: Some(2.0),
            running: Some(1.0),
            starvations: 2,
            starved: 1.0,
            estimated: 5,
            ..counter(1, Some("cycles"), 7, State::Starved)
        },
        CounterReport {
            refusal: Some("not supported".into()),
            ..counter(2, Some("r1cd:k"), 0, State::Refused)
        },
        counter(3, None, 0, State::Unused),
        counter(4, None, 0, State::Unused),
    ]
}

/// Measures a VM after this many seconds. All its counts are multiples of that time.
fn measurement(seconds: u64) -> VmMeasurement {
    let counted = |value: u64, running: u64| {
        Some(Reading { value: value * seconds, enabled: 100 * seconds, running: running * seconds })
    };
    let work = Attributed {
        guest: Work { instructions: counted(3_000, 100), cycles: counted(2_000, 100) },
        host: Work { instructions: counted(500, 100), cycles: counted(999, 25) },
    };
    let statistics = Statistics {
        overflows: 12,
        interrupts: 11,
        withheld: 3,
        alarms: 14,
        ignored_alarms: 2,
        starvations: 2,
        clamps: 0,
        system_calls: 1_400,
    };
    let report = VcpuReport {
        vcpu: 0,
        thread: 415,
        exits: Exits {
            pmu_reads: 1_000 * seconds,
            pmu_writes: 2_000 * seconds,
            signals: seconds,
            ..Exits::default()
        },
        share: Share { all: 10_000 * seconds, pmu: 25 * seconds },
        counters: counters(),
        statistics: Some(statistics),
        cpu: 1,
    };
    let kvm = ["exits", "io_exits", "halt_exits", "hypercalls"].into_iter().zip([5_000, 40, 0, 3]);
    VmMeasurement {
        about: Summary {
            pid: 412,
            name: "perf".into(),
            runs: "perf stat \x1b[2J".into(),
            pmu: "AMD's PMU with PerfMonV2, 5 counters".into(),
            leaves_out_entries: false,
            cpus: 1,
            memory: 1 << 30,
            started: 1_700_000_000,
            age: 3_725.5,
        },
        at: Duration::from_secs(seconds),
        paused_by: Vec::new(),
        vcpus: vec![VcpuMeasurement {
            report,
            kvm: Some(
                kvm.map(|(name, count)| (name.to_owned(), count * seconds)).collect::<BTreeMap<_, _>>(),
            ),
            work: Some(work),
            entry_adds: 0,
            hardware: Some(CpuCounters { cpu: 1, counters: 6, available: 5 }),
        }],
    }
}

fn status() -> VmStatus {
    let mut status = measurement(4).since(&measurement(2));
    let hardware = status.vcpus[0].hardware.as_mut().unwrap();
    hardware.holders = vec!["the NMI watchdog".into()];
    status
}

#[test]
fn a_vm_whose_entries_are_left_out_says_so() {
    let mut status = status();
    status.about.leaves_out_entries = true;
    let said = "5 counters, without the entries into the guest, which this host counts; vCPUs: 1";
    let about = &text::lines(&status)[1];
    assert!(about.contains(said), "{about}");
}

#[test]
fn entries_are_no_instructions_of_the_guest() {
    let [mut now, mut before] = [measurement(4), measurement(2)];
    for (measurement, exits) in [(&mut now, 25), (&mut before, 10)] {
        measurement.vcpus[0].kvm = Some(BTreeMap::from([("exits".to_owned(), exits)]));
    }
    let counted = now.since(&before).vcpus[0].interval.guest.instructions.unwrap();
    now.vcpus[0].entry_adds = 2;
    assert_eq!(now.since(&before).vcpus[0].interval.guest.instructions, Some(counted - 2 * 15));
}

#[test]
fn a_vm_is_shown_on_a_page() {
    let expected = "\
perf (process 412): running, started 1:02:05 ago: perf stat ?[2J
PMU: AMD's PMU with PerfMonV2, 5 counters; vCPUs: 1; memory: 1,024 MiB

vCPU 0, thread 415, on CPU 1
  counter  event               value  overflows   backed   of it       starved  state
        0  instructions:u  1,234,567         12  2.000 s   100 %             -  counting on 3
        1  cycles             7 (~5)          0  2.000 s  50.0 %  1.000 s in 2  starved
        2  r1cd:k                  0          0        -       -             -  refused: not supported
  unused      3, 4
  in guest    6,000 instructions, 4,000 cycles, 1.50 per cycle
  on host     1,000 instructions, - cycles (counted 25 % of the time)
  exits       3,001 a second: 2,000 PMU writes, 1,000 PMU reads, 1 signals
  KVM exits   5,000 a second: 40 io
  PMU time    0.25 %
  since start 12 overflows, 11 interrupts, 3 withheld, 14 alarms, 2 ignored, 2 starvations, 0 clamps, 1,400 system calls
  hardware    6 counters: 1 held by this vCPU (3), 4 free, 1 held by others: the NMI watchdog";
    assert_eq!(text::lines(&status()).join("\n"), expected);
}

#[test]
fn the_document_has_the_same_figures_as_the_text() {
    let document = serde_json::to_value(status()).unwrap();
    let top = |name: &str| document[name].clone();
    assert_eq!(
        [top("pid"), top("name"), top("age"), top("interval")],
        [json!(412), json!("perf"), json!(3725.5), json!(2.0)]
    );
    let vcpu = &document["vcpus"][0];
    let first = json!({
        "counter": 0, "event": "instructions:u", "value": 1_234_567, "state": "counting", "refusal": null, "hardware": 3,
        "overflows": 12, "enabled": 2.0, "running": 2.0, "starvations": 0, "starved": 0.0, "estimated": 0
    });
    assert_eq!(vcpu["counters"][0], first);
    assert_eq!(vcpu["counters"][2]["refusal"], "not supported");
    let work =
        json!({ "instructions": 1000, "instructions_counted": 1.0, "cycles": null, "cycles_counted": 0.25 });
    assert_eq!(vcpu["interval"]["host"], work);
    assert_eq!((&vcpu["kvm"]["exits"], &vcpu["interval"]["kvm"]["exits"]), (&json!(20_000), &json!(10_000)));
    assert_eq!(vcpu["interval"]["pmu_share"], 0.0025);
    let hardware = json!({ "cpu": 1, "counters": 6, "held": [3], "free": 4, "others": 1, "holders": ["the NMI watchdog"] });
    assert_eq!(vcpu["hardware"], hardware);
}

#[test]
fn figures_survive_the_socket_to_the_last_bit() {
    let mut measurement = measurement(4);
    measurement.vcpus[0].report.share.pmu = 3_333;
    let status = measurement.since(&self::measurement(3));
    let said = serde_json::to_string(&status).unwrap();
    let heard: VmStatus = serde_json::from_str(&said).unwrap();
    assert_eq!(serde_json::to_string(&heard).unwrap(), said);
}

#[test]
fn what_cannot_be_known_is_null_and_not_shown() {
    let bare = |seconds| {
        let mut measurement = measurement(seconds);
        let vcpu = &mut measurement.vcpus[0];
        (vcpu.kvm, vcpu.work, vcpu.hardware) = (None, None, None);
        (vcpu.report.counters, vcpu.report.statistics) = (Vec::new(), None);
        measurement
    };
    let status = bare(4).since(&bare(2));
    let lines = text::lines(&status);
    assert!(lines.contains(&"vCPU 0, thread 415".to_owned()), "{lines:#?}");
    for unknown in ["KVM", "hardware", "in guest", "on host", "counted"] {
        assert!(!lines.iter().any(|line| line.contains(unknown)), "{unknown}: {lines:#?}");
    }
    let vcpu = &serde_json::to_value(status).unwrap()["vcpus"][0];
    for name in ["kvm", "hardware", "statistics"] {
        assert_eq!(vcpu[name], Value::Null, "{name}");
    }
    assert_eq!((&vcpu["counters"], &vcpu["interval"]["guest"]["cycles"]), (&json!([]), &Value::Null));
}

#[test]
fn another_users_vm_cannot_draw_on_the_terminal_by_its_json() {
    let mut measurement = measurement(4);
    measurement.vcpus[0].report.counters[2].refusal = Some("no\u{9b}2J\u{7f}\x1b".into());
    let document = text::json(&measurement.since(&measurement)).unwrap();
    assert!(!document.contains(char::is_control), "{document}");
    let heard: VmStatus = serde_json::from_str(&document).unwrap();
    assert_eq!(heard.vcpus[0].report.counters[2].refusal.as_deref(), Some("no\u{9b}2J\u{7f}\x1b"));
}

#[test]
fn more_exits_than_a_number_can_say_are_shown_all_the_same() {
    let many = |seconds| {
        let mut measurement = measurement(seconds);
        (measurement.vcpus[0].report.exits.signals, measurement.vcpus[0].report.exits.others) =
            (u64::MAX, u64::MAX);
        measurement
    };
    let mut status = many(4).since(&many(2));
    status.vcpus[0].interval.exits = many(4).vcpus[0].report.exits;
    assert!(text::lines(&status).iter().any(|line| line.starts_with("  exits ")));
}

#[test]
fn an_event_without_a_counter_is_shown_as_not_counted() {
    let without_cycles = |seconds| {
        let mut measurement = measurement(seconds);
        let work = measurement.vcpus[0].work.as_mut().unwrap();
        (work.guest.cycles, work.host) = (None, Work::default());
        measurement
    };
    let lines = text::lines(&without_cycles(4).since(&without_cycles(2)));
    let line = "  in guest    6,000 instructions, - cycles (not counted)";
    assert!(lines.contains(&line.to_owned()), "{lines:#?}");
    assert!(!lines.iter().any(|line| line.contains("on host")), "{lines:#?}");
}

#[test]
fn a_disabled_counter_is_shown_apart_from_unused_ones() {
    let mut measurement = measurement(4);
    measurement.vcpus[0].report.counters[4].state = State::Disabled;
    let lines = text::lines(&measurement.since(&measurement));
    for line in ["  unused      3", "  disabled    4"] {
        assert!(lines.contains(&line.to_owned()), "{line}: {lines:#?}");
    }
}

#[test]
fn a_vm_that_stands_still_names_the_vcpus_that_wait() {
    let paused = VmMeasurement { paused_by: vec![0, 2], ..measurement(4) };
    let headline = text::lines(&paused.since(&measurement(2)))[0].clone();
    assert!(
        headline.contains(": standing still until vCPU 0, 2 has its counters back, started"),
        "{headline}"
    );
}

#[test]
fn vms_are_listed_in_columns() {
    let about = |pid| Summary { pid, ..measurement(1).about };
    let expected = "\
process  name  vCPUs     memory      age  PMU                                   runs
    412  perf      1  1,024 MiB  1:02:05  AMD's PMU with PerfMonV2, 5 counters  perf stat ?[2J
  31999  perf      1  1,024 MiB  1:02:05  AMD's PMU with PerfMonV2, 5 counters  perf stat ?[2J";
    assert_eq!(super::listed(&[about(412), about(31_999)]).join("\n"), expected);
}

#[test]
fn numbers_have_separators_between_thousands() {
    assert_eq!([0, 999, 1_000, 1_234_567].map(text::number), ["0", "999", "1,000", "1,234,567"]);
}

#[test]
fn a_cell_that_another_process_made_endless_is_printed_all_the_same() {
    let rows = [vec!["a".repeat(70_000), "1".to_owned()], vec!["b".to_owned(), "2".to_owned()]];
    let lines = text::aligned(&rows, &[0]);
    assert_eq!((lines[0].len(), lines[1].len()), (70_003, 1003));
}

/// Returns the largest number for each number of a document. Numbers that are too large for their type make it no
/// status, so those of narrow types are left alone.
fn largest(value: &mut Value, name: &str) {
    match value {
        Value::Array(values) => values.iter_mut().for_each(|value| largest(value, name)),
        Value::Object(fields) => fields.iter_mut().for_each(|(name, value)| largest(value, name)),
        Value::Number(number) if number.is_f64() => *value = json!(f64::MAX),
        Value::Number(_) => {
            *value = match name {
                "cpus" | "vcpu" | "paused_by" => json!(u8::MAX),
                "thread" => json!(i32::MAX),
                "pid" | "held" | "hardware" => json!(u32::MAX),
                _ => json!(u64::MAX),
            };
        }
        _ => {}
    }
}

#[test]
fn a_vm_may_say_any_numbers() {
    let honest = measurement(3).since(&measurement(1));
    for interval in [f64::MAX, f64::MIN_POSITIVE, 0.0, -0.0, -1.0] {
        let mut document = serde_json::to_value(&honest).unwrap();
        largest(&mut document, "");
        document["interval"] = json!(interval);
        let status: VmStatus = serde_json::from_value(document).unwrap();
        assert_eq!(status.vcpus[0].interval.exits.others, u64::MAX);
        let lines = text::lines(&status);
        assert!(lines.len() > 5 && lines.iter().any(|line| line.contains(" a second: ")), "{lines:?}");
    }
}
