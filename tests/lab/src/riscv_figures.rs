//! What counters cost on the RISC-V host: in guests of Tally's PMU and of KVM's own, and on the host itself.
//!
//! Of samples that are not taken nobody can tell what each costs, so `perf` says first how many are.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_images::payloads::riscv64::LOOP;
use guest_images::{Arch, Progress, Release};
use tally_lab::pmu_figures::{self, Figures, HOST, Programs, Work};
use tally_lab::{Error, Result, Scenario, cross, default_host};

const PERIOD: u64 = 19_998;
/// Who has not ended after so many seconds never does.
const PATIENCE: u64 = 20;

/// Where it is measured, as `tally run --pmu` has it but for the host itself.
const PLACES: [&str; 3] = [HOST, "auto", "kvm"];
/// How many events are sampled at a time.
const EVENTS: [u8; 2] = [1, 6];

/// How many samples were taken, by place and number of events.
type Taken = BTreeMap<(String, u8), u64>;

/// Samples a loop by so many events, and prints how many samples of it there are.
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

/// Prints `PLACE EVENTS SAMPLES` in a line for each.
fn script() -> String {
    format!(
        "mkdir share
        cp workload share/
        for place in {}; do
            if [ $place = {HOST} ]; then
                sh ./workload ./loop >out
            else
                timeout {PATIENCE} ./tally run --pmu $place --share $PWD/share -- sh $PWD/share/workload /lib/tally/loop >out
            fi
            sed \"s/^/$place /\" out
        done",
        PLACES.join(" ")
    )
}

/// Measures, and gives tables.
pub fn measure(progress: &mut Progress) -> Result<String> {
    let tally = cross::program("tally", progress)?;
    let scenario = Scenario::new(script())
        .host(default_host(Arch::Riscv64))
        .limit(Duration::from_mins(15))
        .program(LOOP, "loop")
        .program(workload(), "workload")
        .file(&tally, "tally")
        .guest(Release::of(Arch::Riscv64), progress)?;
    progress.step("sampling on a RISC-V host and in its guests");
    let outcome = scenario.run(progress)?;
    let taken = parsed(&outcome.text()).filter(|_| outcome.status == 0);
    let taken = taken.ok_or_else(|| Error::Command(String::from_utf8_lossy(&outcome.stderr).into_owned()))?;
    let programs = Programs { tally, workload: cross::own_program("pmu-workload", progress)? };
    progress.step("using counters on a RISC-V host and in its guests");
    let figures = pmu_figures::measure(Arch::Riscv64, &PLACES, &programs, progress)?;
    let done = |of: &Figures, work, events| work != Work::Overflow || most_are_taken(&taken, of.pmu, events);
    Ok(samples(&taken) + "\n" + &pmu_figures::costs(&figures, done))
}

fn parsed(text: &str) -> Option<Taken> {
    let line = |line: &str| {
        let [place, events, samples] = line.split_whitespace().collect::<Vec<_>>()[..] else { return None };
        Some(((place.to_owned(), events.parse().ok()?), samples.parse().ok()?))
    };
    text.lines().map(line).collect()
}

fn implied(events: u8) -> u64 {
    u64::from(events) * (LOOP_INSTRUCTIONS / PERIOD)
}

fn most_are_taken(taken: &Taken, place: &str, events: u8) -> bool {
    taken.get(&(place.to_owned(), events)).is_some_and(|taken| *taken > implied(events) / 2)
}

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
    fn who_takes_few_samples_has_no_cost_of_one() {
        let taken = parsed("host 1 1000\nhost 6 6000\nauto 1 999\nkvm 1 3\n").unwrap();
        assert!(most_are_taken(&taken, "host", 6) && most_are_taken(&taken, "auto", 1));
        assert!(!most_are_taken(&taken, "kvm", 1) && !most_are_taken(&taken, "kvm", 6));
        assert!(samples(&taken).ends_with("| events: 6 | 6000 of 6000 | ? of 6000 | ? of 6000 |\n"));
        assert!(parsed("tally: a failure").is_none());
    }
}
