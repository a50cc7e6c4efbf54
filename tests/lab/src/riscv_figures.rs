//! What samples cost on the RISC-V host: in guests of Tally's PMU and of KVM's own, and on the host itself.
//!
//! A program measures its time, which is instructions here, whoever executes them, with counters and without. The difference is
//! what they cost.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use guest_images::payloads::LOOP_INSTRUCTIONS;
use guest_images::payloads::riscv64::LOOP;
use guest_images::{Arch, Progress, Release};
use tally_lab::{Error, Result, Scenario, cross, default_host};

const PERIOD: u64 = 19_998;
/// Who has not ended after so many seconds never does.
const PATIENCE: u64 = 12;

/// Where it is measured, as `tally run` has it but for the host itself.
const PLACES: [&str; 3] = ["host", "auto", "kvm"];

/// What is measured: prints its nanoseconds, and how many samples there are.
fn workload() -> String {
    format!(
        "ns() {{ perf stat -x, -e duration_time -o /tmp/ns \"$@\" >/tmp/said; grep duration /tmp/ns | cut -d, -f1; }}
        case $1 in
        plain) ns $2; echo 0;;
        sampled)
            perf record -q -e cycles:u -c {PERIOD} -o /tmp/data perf stat -x, -e duration_time -o /tmp/ns $2
            grep duration /tmp/ns | cut -d, -f1
            perf script -i /tmp/data -F comm | grep -c loop;;
        esac"
    )
}

/// Prints `PLACE WHAT EXITS` and the workload's numbers in a line for each. `KVM_RUN` is 0xae80.
fn script() -> String {
    format!(
        "T=/sys/kernel/tracing
        mount -t tracefs none $T 2>/dev/null
        echo 65536 >$T/buffer_size_kb
        echo 'cmd == 0xae80' >$T/events/syscalls/sys_enter_ioctl/filter
        mkdir share
        cp workload share/
        for place in {}; do for what in plain sampled; do
            echo >$T/trace
            echo 1 >$T/events/syscalls/sys_enter_ioctl/enable
            if [ $place = host ]; then
                sh ./workload $what ./loop >out
            else
                timeout {PATIENCE} ./tally run --pmu $place --share $PWD/share -- sh $PWD/share/workload $what /lib/tally/loop >out
            fi || continue
            echo 0 >$T/events/syscalls/sys_enter_ioctl/enable
            echo $place $what $(grep -c sys_ioctl $T/trace) $(cat out)
        done; done",
        PLACES.join(" ")
    )
}

/// What a workload did in a place.
#[derive(Debug, Clone, Copy)]
struct Did {
    exits: u64,
    nanoseconds: u64,
    samples: u64,
}

/// Measures, and gives a table.
pub fn measure(progress: &mut Progress) -> Result<String> {
    let scenario = Scenario::new(script())
        .host(default_host(Arch::Riscv64))
        .limit(Duration::from_mins(15))
        .program(LOOP, "loop")
        .program(workload(), "workload")
        .file(cross::program("tally", progress)?, "tally")
        .guest(Release::of(Arch::Riscv64), progress)?;
    let outcome = scenario.run(progress)?;
    let text = outcome.text();
    let did = parsed(&text).filter(|_| outcome.status == 0);
    let did = did.ok_or_else(|| Error::Command(String::from_utf8_lossy(&outcome.stderr).into_owned()))?;
    Ok(table(&did))
}

fn parsed(text: &str) -> Option<BTreeMap<(&str, &str), Did>> {
    text.lines().map(parsed_line).collect()
}

fn parsed_line(line: &str) -> Option<((&str, &str), Did)> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [place, what, exits, nanoseconds, samples] = words[..] else { return None };
    let number = |text: &str| text.parse().ok();
    let did = Did { exits: number(exits)?, nanoseconds: number(nanoseconds)?, samples: number(samples)? };
    Some(((place, what), did))
}

fn table(did: &BTreeMap<(&str, &str), Did>) -> String {
    let implied = LOOP_INSTRUCTIONS / PERIOD;
    let mut table =
        format!("| | samples taken, of {implied} implied | a sample | exits |\n|---|---|---|---|\n");
    for place in PLACES {
        let of = |what| did.get(&(place, what)).copied();
        let taken = of("sampled").map_or(0, |sampled| sampled.samples);
        // Of few samples nobody can tell what each costs.
        let cost = match of("sampled").zip(of("plain")) {
            Some((with, without)) if taken > implied / 2 => {
                let nanoseconds = with.nanoseconds.saturating_sub(without.nanoseconds) / taken;
                // Whole tenths are enough: boots differ by some exits.
                let tenths = with.exits.saturating_sub(without.exits) * 10 / taken;
                format!("{nanoseconds} | {}.{}", tenths / 10, tenths % 10)
            }
            _ => " | ".to_owned(),
        };
        let name = match place {
            "host" => "the host itself",
            "auto" => "Tally",
            _ => "KVM's own",
        };
        writeln!(table, "| {name} | {taken} | {cost} |").expect("writing to a string cannot fail");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_what_is_added() {
        let did = |place: &str, samples: u64| {
            format!("{place} plain 100 20000000 0\n{place} sampled 2100 30000000 {samples}\n")
        };
        let text = [did("host", 1000), did("auto", 1000), did("kvm", 3)].concat();
        let table = table(&parsed(&text).unwrap());
        assert!(table.ends_with("| Tally | 1000 | 10000 | 2.0 |\n| KVM's own | 3 |  |  |\n"), "{table}");
        assert!(parsed("tally: a failure").is_none());
    }
}
