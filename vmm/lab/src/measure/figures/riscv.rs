//! The cost of counters on the RISC-V host: in guests with Tally's PMU and with KVM's own, and on the host itself.
//!
//! The cost of a sample can be computed only if samples are taken, so perf first counts how many are.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_images::payloads::riscv64::LOOP;
use guest_images::{Arch, Progress, Release};

use super::pmu::{self, Figures, HOST, Programs, Work};
use crate::error::Result;
use crate::scenario::Scenario;
use crate::scenario::cross;
use crate::simulator::board::Processor;
use crate::simulator::image::default_host;

const PERIOD: u64 = 19_998;
/// Timeout of a guest in seconds, after which it has hung.
const TIMEOUT_SECONDS: u64 = 20;

/// The places that are measured: the host itself, and guests with these values of `tally run --pmu`.
const PLACES: [&str; 3] = [HOST, "auto", "kvm"];
/// Numbers of events that are sampled at a time.
const EVENTS: [u8; 2] = [1, 6];

/// Number of samples that were taken, by place and number of events.
type Taken = BTreeMap<(String, u8), u64>;

/// Returns the script that samples a loop with each number of events, and prints `EVENTS SAMPLES`.
fn workload() -> String {
    format!(
        "echo 0 >/proc/sys/kernel/perf_cpu_time_max_percent
        for events in {}; do
            list=$(for event in $(seq $events); do echo cycles:u; done)
            perf record -q -e $(echo $list | tr ' ' ,) -c {PERIOD} -o /tmp/data $1 || exit
            echo $events $(perf script -i /tmp/data -F comm | grep -c loop)
        done",
        EVENTS.map(|events| events.to_string()).join(" ")
    )
}

/// Returns the script that runs the workload in all places, and prints lines `PLACE EVENTS SAMPLES`.
fn script() -> String {
    format!(
        "mkdir share
        cp workload share/
        for place in {}; do
            if [ $place = {HOST} ]; then
                sh ./workload ./loop >out
            else
                timeout {TIMEOUT_SECONDS} ./tally run --pmu $place --share $PWD/share -- sh $PWD/share/workload /lib/tally/loop >out
            fi
            sed \"s/^/$place /\" out
        done",
        PLACES.join(" ")
    )
}

/// Measures, and returns the tables.
pub fn measure(progress: &mut Progress) -> Result<String> {
    let tally = cross::released("tally", "", progress)?;
    let scenario = Scenario::with_all_counters(script())
        .host(default_host(Arch::Riscv64))
        .limit(Duration::from_mins(15))
        .program(LOOP, "loop")
        .program(workload(), "workload")
        .file(&tally, "tally")
        .guest(Release::of(Arch::Riscv64), progress)?;
    progress.step("sampling on a RISC-V host and in its guests");
    let text = super::output::run(&scenario, progress)?;
    let taken = parse(&text).ok_or_else(|| super::output::unreadable(&text))?;
    let programs = Programs { tally, workload: cross::own_program("pmu-workload", progress)? };
    progress.step("using counters on a RISC-V host and in its guests");
    let figures = pmu::measure(Processor::Riscv64, &PLACES, &programs, progress)?;
    let is_valid =
        |of: &Figures, work, events| work != Work::Overflow || most_are_taken(&taken, of.pmu, events);
    Ok(samples(&taken) + "\n" + &pmu::costs(&figures, is_valid))
}

fn parse(text: &str) -> Option<Taken> {
    let line = |line: &str| {
        let [place, events, samples] = line.split_whitespace().collect::<Vec<_>>()[..] else { return None };
        Some(((place.to_owned(), events.parse().ok()?), samples.parse().ok()?))
    };
    text.lines().map(line).collect()
}

/// Returns the number of samples that follows from the loop's length.
fn implied(events: u8) -> u64 {
    u64::from(events) * (LOOP_INSTRUCTIONS / PERIOD)
}

/// Returns true if more than half of the implied samples were taken.
fn most_are_taken(taken: &Taken, place: &str, events: u8) -> bool {
    taken.get(&(place.to_owned(), events)).is_some_and(|taken| *taken > implied(events) / 2)
}

/// Returns the table of samples.
fn samples(taken: &Taken) -> String {
    let mut table =
        format!("| samples taken, of those implied | `{}` |\n|---|---:|---:|---:|\n", PLACES.join("` | `"));
    for events in EVENTS {
        write!(table, "| events: {events} |").expect("writing to a string cannot fail");
        for place in PLACES {
            let number = taken.get(&(place.to_owned(), events));
            let number = number.map_or_else(|| "?".to_owned(), u64::to_string);
            write!(table, " {number} of {} |", implied(events)).expect("writing to a string cannot fail");
        }
        table.push('\n');
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_takes_few_samples_has_no_cost_of_a_sample() {
        let taken = parse("host 1 1000\nhost 6 6000\nauto 1 999\nkvm 1 3\n").unwrap();
        assert!(most_are_taken(&taken, "host", 6) && most_are_taken(&taken, "auto", 1));
        assert!(!most_are_taken(&taken, "kvm", 1) && !most_are_taken(&taken, "kvm", 6));
        assert!(samples(&taken).ends_with("| events: 6 | 6000 of 6000 | ? of 6000 | ? of 6000 |\n"));
        assert!(parse("tally: a failure").is_none());
    }
}
