//! Renders a VM's status as text: aligned, and all of a VM with few vCPUs on one screen.

use std::fmt::Write;

use serde::Serialize;
use tally_machine::{Exits, VcpuReport};
use vpmu::report::{CounterReport, State};

use crate::protocol::printable::short;
use crate::protocol::status::{Hardware, Summary, VcpuStatus, VmStatus, Work};

/// Width of the lines' names.
const NAME: usize = 12;

/// Returns the lines that show a VM.
pub fn lines(vm: &VmStatus) -> Vec<String> {
    let mut lines = vec![headline(vm), about(vm)];
    for vcpu in &vm.vcpus {
        lines.push(String::new());
        lines.extend(vcpu_lines(vcpu, vm.interval));
    }
    lines.into_iter().map(|line| short(&line)).collect()
}

/// Renders a value as JSON. Strings have all control characters as escapes, so that another user's VM cannot draw on
/// the terminal. JSON itself asks for that below U+0020 only.
pub fn json(value: &impl Serialize) -> serde_json::Result<String> {
    let mut text = String::new();
    for c in serde_json::to_string(value)?.chars() {
        if c.is_control() {
            write!(text, "\\u{:04x}", u32::from(c)).expect("writing to a string cannot fail");
        } else {
            text.push(c);
        }
    }
    Ok(text)
}

fn headline(vm: &VmStatus) -> String {
    let state = match &vm.paused_by[..] {
        [] => "running".to_owned(),
        vcpus => format!("standing still until vCPU {} has its counters back", listed(vcpus)),
    };
    let Summary { pid, name, runs, .. } = &vm.about;
    format!("{name} (process {pid}): {state}, started {} ago: {runs}", age(vm.about.age))
}

fn about(vm: &VmStatus) -> String {
    let Summary { pmu, leaves_out_entries, cpus, memory, .. } = &vm.about;
    let left_out =
        if *leaves_out_entries { ", without the entries into the guest, which this host counts" } else { "" };
    format!("PMU: {pmu}{left_out}; vCPUs: {cpus}; memory: {}", size(*memory))
}

fn listed(numbers: &[impl ToString]) -> String {
    numbers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

fn vcpu_lines(vcpu: &VcpuStatus, seconds: f64) -> Vec<String> {
    let place =
        vcpu.hardware.as_ref().map_or_else(String::new, |hardware| format!(", on CPU {}", hardware.cpu));
    let VcpuReport { vcpu: id, thread, counters, statistics, .. } = &vcpu.report;
    let mut lines = vec![format!("vCPU {id}, thread {thread}{place}")];
    lines.extend(table(counters));
    let mut line = |name: &str, text: String| lines.push(format!("  {name:NAME$}{text}"));
    for (name, work) in [("in guest", work(vcpu.interval.guest)), ("on host", work(vcpu.interval.host))] {
        if let Some(work) = work {
            line(name, work);
        }
    }
    let exits = by_reason(&vcpu.interval.exits);
    let total = exits.iter().fold(0_u64, |sum, (_, count)| sum.saturating_add(*count));
    line("exits", rates(total, exits, seconds));
    if let Some(kvm) = &vcpu.interval.kvm {
        let reasons = kvm.iter().filter_map(|(name, count)| Some((name.strip_suffix("_exits")?, *count)));
        let reasons: Vec<_> = reasons.map(|(name, count)| (name.replace('_', " "), count)).collect();
        line("KVM exits", rates(kvm.get("exits").copied().unwrap_or(0), reasons, seconds));
    }
    if let Some(share) = vcpu.interval.pmu_share {
        line("PMU time", format!("{:.2} %", share * 100.0));
    }
    if let Some(done) = statistics {
        let done = [
            (done.overflows, "overflows"),
            (done.interrupts, "interrupts"),
            (done.withheld, "withheld"),
            (done.alarms, "alarms"),
            (done.ignored_alarms, "ignored"),
            (done.starvations, "starvations"),
            (done.clamps, "clamps"),
            (done.system_calls, "system calls"),
        ];
        let done: Vec<String> =
            done.iter().map(|(count, what)| format!("{} {what}", number(*count))).collect();
        line("since start", done.join(", "));
    }
    if let Some(hardware) = &vcpu.hardware {
        line("hardware", holders(hardware));
    }
    lines
}

fn by_reason(exits: &Exits) -> [(&'static str, u64); 8] {
    [
        ("PMU reads", exits.pmu_reads),
        ("PMU writes", exits.pmu_writes),
        ("port reads", exits.port_reads),
        ("port writes", exits.port_writes),
        ("memory reads", exits.memory_reads),
        ("memory writes", exits.memory_writes),
        ("signals", exits.signals),
        ("others", exits.others),
    ]
}

/// Renders the counters that the guest uses as a table, and lists the numbers of the others. The column of starvation
/// is there only if a counter was starved.
fn table(counters: &[CounterReport]) -> Vec<String> {
    let (idle, used): (Vec<_>, Vec<_>) =
        counters.iter().partition(|counter| counter.event.is_none() && counter.overflows == 0);
    let was_starved = used.iter().any(|counter| counter.starvations > 0);
    let mut lines = Vec::new();
    if !used.is_empty() {
        let mut rows = vec![title().to_vec()];
        rows.extend(used.iter().map(|counter| row(counter).to_vec()));
        if !was_starved {
            for row in &mut rows {
                row.remove(STARVED);
            }
        }
        lines = aligned(&rows, &[EVENT, if was_starved { STATE } else { STATE - 1 }]);
    }
    let (disabled, unused): (Vec<_>, Vec<_>) =
        idle.into_iter().partition(|counter| counter.state == State::Disabled);
    for (name, counters) in [("unused", unused), ("disabled", disabled)] {
        if !counters.is_empty() {
            let numbers: Vec<usize> = counters.iter().map(|counter| counter.counter).collect();
            lines.push(format!("  {name:NAME$}{}", listed(&numbers)));
        }
    }
    lines
}

/// Indices of the table's columns.
const EVENT: usize = 2;
const STARVED: usize = 7;
const STATE: usize = 8;

fn title() -> [String; 9] {
    ["", "counter", "event", "value", "overflows", "backed", "of it", "starved", "state"].map(str::to_owned)
}

fn row(counter: &CounterReport) -> [String; 9] {
    let none = || "-".to_owned();
    let running = match (counter.enabled, counter.running) {
        (Some(enabled), Some(running)) if enabled > 0.0 && running >= enabled => "100 %".to_owned(),
        (Some(enabled), Some(running)) if enabled > 0.0 => format!("{:.1} %", running / enabled * 100.0),
        _ => none(),
    };
    let starved = match counter.starvations {
        0 => none(),
        times => format!("{:.3} s in {}", counter.starved, number(times)),
    };
    let state = match (&counter.refusal, counter.hardware) {
        (Some(why), _) => format!("refused: {why}"),
        (None, Some(hardware)) => format!("{} on {hardware}", word(counter.state)),
        (None, None) => word(counter.state).to_owned(),
    };
    let estimated =
        if counter.estimated > 0 { format!(" (~{})", number(counter.estimated)) } else { String::new() };
    [
        String::new(),
        counter.counter.to_string(),
        counter.event.clone().unwrap_or_else(none),
        format!("{}{estimated}", number(counter.value)),
        number(counter.overflows),
        counter.enabled.map_or_else(none, |enabled| format!("{enabled:.3} s")),
        running,
        starved,
        state,
    ]
}

fn word(state: State) -> &'static str {
    match state {
        State::Unused => "unused",
        State::Stopped => "stopped",
        State::Counting => "counting",
        State::Starved => "starved",
        State::Disabled => "disabled",
        State::Refused => "refused",
    }
}

/// Aligns rows: columns of `words` to the left, all others to the right. Columns are at most 1,000 wide; longer
/// cells, which another process may send, stick out.
pub fn aligned(rows: &[Vec<String>], words: &[usize]) -> Vec<String> {
    /// The formatter panics beyond `u16::MAX`.
    const MAX_WIDTH: usize = 1000;
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| {
        let widths = rows.iter().map(|row| row[column].chars().count());
        widths.max().unwrap_or(0).min(MAX_WIDTH)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let mut line = String::new();
        for (column, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let separator = if column == 0 { "" } else { "  " };
            let written = if words.contains(&column) {
                write!(line, "{separator}{cell:width$}")
            } else {
                write!(line, "{separator}{cell:>width$}")
            };
            written.expect("writing to a string cannot fail");
        }
        line.trim_end().to_owned()
    };
    rows.iter().map(line).collect()
}

/// Renders what a thread did in the guest or in the host. Returns none if nothing could be counted.
fn work(work: Work) -> Option<String> {
    let one = |count: Option<u64>, counted: f64, what: &str| match count {
        Some(count) => format!("{} {what}", number(count)),
        None if counted > 0.0 => format!("- {what} (counted {:.0} % of the time)", counted * 100.0),
        None => format!("- {what} (not counted)"),
    };
    let is_known = work.instructions.or(work.cycles).is_some();
    if !is_known && work.instructions_counted + work.cycles_counted <= 0.0 {
        return None;
    }
    let mut text = format!(
        "{}, {}",
        one(work.instructions, work.instructions_counted, "instructions"),
        one(work.cycles, work.cycles_counted, "cycles")
    );
    if let (Some(instructions), Some(cycles @ 1..)) = (work.instructions, work.cycles) {
        #[expect(clippy::cast_precision_loss, reason = "two digits are shown")]
        let rate = instructions as f64 / cycles as f64;
        write!(text, ", {rate:.2} per cycle").expect("writing to a string cannot fail");
    }
    Some(text)
}

/// Renders a rate per second and its reasons, the most frequent first.
fn rates<N: AsRef<str>>(total: u64, reasons: impl IntoIterator<Item = (N, u64)>, seconds: f64) -> String {
    let mut reasons: Vec<(N, u64)> = reasons.into_iter().filter(|(_, count)| *count > 0).collect();
    reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let listed: Vec<String> = reasons
        .iter()
        .map(|(name, count)| format!("{} {}", number(per_second(*count, seconds)), name.as_ref()))
        .collect();
    let of_these = if listed.is_empty() { String::new() } else { format!(": {}", listed.join(", ")) };
    format!("{} a second{of_these}", number(per_second(total, seconds)))
}

fn per_second(count: u64, seconds: f64) -> u64 {
    if seconds <= 0.0 {
        return 0;
    }
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate is no exact number"
    )]
    let rate = (count as f64 / seconds).round() as u64;
    rate
}

fn holders(hardware: &Hardware) -> String {
    let held = match &hardware.held[..] {
        [] => "none held by this vCPU".to_owned(),
        held => format!("{} held by this vCPU ({})", held.len(), listed(held)),
    };
    let others = match (hardware.others, &hardware.holders[..]) {
        (0, _) => "none held by others".to_owned(),
        (count, []) => format!("{count} held by others"),
        (count, holders) => format!("{count} held by others: {}", holders.join(", ")),
    };
    format!("{} counters: {held}, {} free, {others}", hardware.counters, hardware.free)
}

/// Renders a number with a separator between thousands.
pub fn number(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Renders a time as hours, minutes and seconds.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole seconds are shown")]
pub fn age(seconds: f64) -> String {
    let seconds = seconds as u64;
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

/// Renders a size of memory.
pub fn size(bytes: u64) -> String {
    format!("{} MiB", number(bytes >> 20))
}
