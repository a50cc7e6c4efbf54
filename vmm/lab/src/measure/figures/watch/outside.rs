//! The cost of sampling a guest from outside: `tally record`, with and without callers, and the host's own `perf kvm`.
//!
//! It is measured as run time of the vCPU's thread, in the guest and in the host on its behalf, for the same work with
//! and without samples. The clients, which would have a processor of their own, do not belong to it.

use std::fmt::Write;
use std::path::Path;

use guest_images::{Progress, Suite};

use crate::error::Result;
use crate::scenario::Scenario;
use crate::scenario::programs::LOOP;

/// Instructions between two samples.
const PERIOD: u64 = 100_003;
/// Samples in a second for which the slowdown is computed: those that `tally record` takes.
const PER_SECOND: u64 = 1000;

/// Work of a guest.
struct Work {
    name: &'static str,
    command: &'static str,
}

const WORKS: [Work; 2] = [
    Work { name: "a program", command: "./loop" },
    Work { name: "its kernel", command: "dd if=/dev/zero of=/dev/null bs=1 count=100000 2>/dev/null" },
];

/// A way to sample.
struct Sampler {
    name: &'static str,
    /// Its command, to which the thread is added; empty for none.
    command: &'static str,
}

/// The others are compared with the first one.
const SAMPLERS: [Sampler; 4] = [
    Sampler { name: "nothing", command: "" },
    Sampler { name: "`tally record`", command: "tally --call-graph no" },
    Sampler { name: "`tally record`, callers", command: "tally --call-graph fp" },
    Sampler { name: "`perf kvm record`", command: "perf kvm --guest record -q -o data -e instructions:G" },
];

/// What a way to sample costs.
#[derive(Debug)]
pub struct Figure {
    pub sampler: &'static str,
    pub work: &'static str,
    /// Nanoseconds, which are instructions, that the vCPU's thread runs longer for each sample.
    pub per_sample: u64,
}

/// Measures all of it on one simulated host.
pub fn measure(tally: &Path, progress: &mut Progress) -> Result<Vec<Figure>> {
    let scenario = Scenario::with_all_counters(script())
        .named("figures outside")
        .file(tally, "tally")
        .guest_with(Suite::default(), &[("loop", LOOP)], progress)?;
    let text = super::super::output::run(&scenario, progress)?;
    figures(&text).ok_or_else(|| super::super::output::unreadable(&text))
}

/// Returns the script. It prints `ran NANOSECONDS SAMPLES` for each work and each way to sample it.
fn script() -> String {
    let mut script = format!(
        "sysctl -q kernel.perf_event_max_sample_rate=100000 kernel.perf_cpu_time_max_percent=0
said() {{ until grep -qs $1 said; do sleep 0.05; done; }}
tally() {{ exec ./tally record sampled -o data -e instructions -c {PERIOD} \"$1\" \"$2\"; }}
perf() {{ exec perf \"$@\" -c {PERIOD} -t $thread; }}
ran() {{
    work=$1 thread= sampler=
    shift
    rm -f said data
    ./tally run --name sampled -- sh -c \"echo ready; sleep 2; $work; echo done; sleep 99\" >said </dev/null & vm=$!
    said ready
    vcpu=$(grep -l vcpu0 /proc/$vm/task/*/comm); thread=${{vcpu%/comm}}; thread=${{thread##*/}}
    if [ \"$*\" ]; then (\"$@\") >&2 & sampler=$!; fi
    sleep 1
    begun=$(cut -d' ' -f1 /proc/$vm/task/$thread/schedstat)
    said done
    ended=$(cut -d' ' -f1 /proc/$vm/task/$thread/schedstat)
    if [ $sampler ]; then kill -TERM $sampler; wait $sampler; fi
    kill $vm; wait $vm
    samples=0
    if [ $sampler ]; then samples=$(command perf report -D -i data 2>/dev/null | grep -c 'PERF_RECORD_SAMPLE('); fi
    echo ran $((ended - begun)) $samples
}}
"
    );
    for Work { command: work, .. } in WORKS {
        for Sampler { command, .. } in SAMPLERS {
            writeln!(script, "ran '{work}' {command}").expect("writing to a string cannot fail");
        }
    }
    script
}

/// Computes the costs. `None` if a sampler has not taken a sample for each period of the loop.
fn figures(text: &str) -> Option<Vec<Figure>> {
    const FEWEST: u64 = 1000;
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("ran "));
    let mut ran = || {
        let (time, samples) = lines.next()?.split_once(' ')?;
        Some((time.parse::<u64>().ok()?, samples.parse::<u64>().ok()?))
    };
    let mut figures = Vec::new();
    for work in &WORKS {
        let (without, _) = ran()?;
        for sampler in &SAMPLERS[1..] {
            let (time, samples) = ran().filter(|(_, samples)| *samples >= FEWEST)?;
            let per_sample = time.saturating_sub(without) / samples;
            figures.push(Figure { sampler: sampler.name, work: work.name, per_sample });
        }
    }
    Some(figures)
}

pub fn table(figures: &[Figure]) -> String {
    let mut table =
        String::from("| sampled with | what runs | instructions a sample | at 1,000 samples a second |\n");
    table += "|---|---|---:|---:|\n";
    for Figure { sampler, work, per_sample } in figures {
        // A second has 1,000,000,000 instructions.
        let hundredths = per_sample * PER_SECOND / 100_000;
        let (percent, rest) = (hundredths / 100, hundredths % 100);
        writeln!(table, "| {sampler} | {work} | {per_sample} | {percent}.{rest:02} % |")
            .expect("writing to a string cannot fail");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_costs_what_the_same_work_takes_longer() {
        let of_work = "ran 200000000 0\nran 210000000 2000\nran 230000000 2000\nran 206000000 2000\n";
        let found = figures(&of_work.repeat(2)).expect("all have samples");
        assert_eq!(found.len(), 6);
        assert_eq!(
            table(&found).lines().nth(3),
            Some("| `tally record`, callers | a program | 15000 | 1.50 % |")
        );
        assert!(figures(&of_work.replace("2000\n", "9\n").repeat(2)).is_none());
    }
}
