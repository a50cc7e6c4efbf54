//! Many guests on one simulated host: what each takes of its memory, and what it costs to look at all of them.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use guest_images::{Progress, Suite};

use crate::error::Result;
use crate::scenario::Scenario;

pub const GUESTS: usize = 100;
/// Guests that work while `tally top` runs.
pub const BUSY: usize = 2;
/// Blocks of `tally top`, and seconds between two of them.
const BLOCKS: u64 = 3;
const INTERVAL: u32 = 1;
pub const CPUS: u32 = 16;
pub const GUEST_MIB: u32 = 256;
const HOST_MIB: u32 = 8 << 10;

/// What was measured with [`GUESTS`] guests that start from one template, and sleep.
#[derive(Debug, Default)]
pub struct Figures {
    /// Names of the VMs that `tally list` shows.
    pub names: BTreeSet<String>,
    pub processes: BTreeSet<u32>,
    /// Memory that the host has less with all of them, for each, in KiB.
    pub kib_each: u64,
    /// What a VM's two processes have to themselves, and their part of what they share, on average, in KiB.
    pub proportional_kib: u64,
    /// Costs of looking at all of them.
    pub looks: Vec<Look>,
    /// VMs that did not answer when their metrics were asked for.
    pub silent: Option<u64>,
    /// VMs whose metrics there were.
    pub with_metrics: usize,
    /// Costs of `tally top` while some of the guests work.
    pub top: Top,
}

/// Cost of `tally top` over all guests, [`BUSY`] of which work.
#[derive(Debug, Default)]
pub struct Top {
    /// Number of VMs that a block is about, by each run.
    pub vms: Vec<usize>,
    /// Lines that name a function of a guest's kernel.
    pub named: usize,
    /// Instructions that it executes until its first block, and for each later one, in the kernel too.
    pub first: u64,
    pub later: u64,
    /// Virtual time from its start to its first block.
    pub seconds: f64,
    /// Instructions that a VM which sleeps executes on the host for it, until the first block and for each later one.
    pub of_vm: [u64; 2],
}

/// Cost of looking at all guests.
#[derive(Debug)]
pub struct Look {
    pub command: String,
    /// Instructions that it executes, in the kernel too.
    pub instructions: u64,
    /// Virtual time from its start to its end.
    pub seconds: f64,
}

/// Measures the program at `tally`.
pub fn measure(tally: &Path, progress: &mut Progress) -> Result<Figures> {
    let scenario = Scenario::with_all_counters(script())
        .named("figures fleet")
        .processors(CPUS)
        .memory_mib(HOST_MIB)
        .limit(Duration::from_mins(20))
        .file(tally, "tally")
        .guest(Suite::default(), progress)?;
    let text = super::output::run(&scenario, progress)?;
    read(&text).ok_or_else(|| super::output::unreadable(&text))
}

/// Returns the script. It prints a word and values in each line. Everything that is read from the cache is in the
/// host's memory before the first guest starts.
fn script() -> String {
    format!(
        "export TALLY_CACHE=$PWD/cache TALLY_BOOT=
guest() {{ ./tally run --memory {GUEST_MIB}M \"$@\" </dev/null >/dev/null; }}
guest -- true || exit
guest -- true || exit
available() {{ awk '/^MemAvailable/ {{ print $2 }}' /proc/meminfo; }}
before=$(available)
for number in $(seq {GUESTS}); do
    guest --name guest$number -- sleep 100000 &
done
until [ $(./tally list --json | grep -o '\"pid\"' | wc -l) = {GUESTS} ]; do
    sleep 0.2
    tries=$((tries + 1))
    [ $tries -lt 500 ] || {{ ./tally list >&2; exit 1; }}
done
sleep 1
echo each $((($(available) - before) / -{GUESTS}))
cat $(ls /proc/[0-9]*/comm | while read -r file; do
    case $(cat $file) in tally*) echo ${{file%comm}}smaps_rollup ;; esac
done) | awk '/^Pss:/ {{ sum += $2 }} END {{ printf \"proportional %d\\n\", sum / {GUESTS} }}'
./tally list | awk 'NR > 1 {{ print \"vm\", $1, $2 }}'
look() {{
    perf stat -x, -o counts -e instructions,duration_time \"$@\" >said || exit 1
    awk -F, -v command=\"${{*#./}}\" '
        /instructions/ {{ instructions = $1 }}
        /duration_time/ {{ printf \"look %d %.6f %s\\n\", instructions, $1 / 1000000000, command }}' counts
}}
look ./tally list
look ./tally stat --json
./tally stat --metrics 9177 & server=$!
until wget -q -O metrics http://127.0.0.1:9177/metrics; do sleep 0.1; done 2>/dev/null
# Not the answer that is kept.
sleep 1
perf stat -x, -o counts -e instructions,duration_time -p $server -- wget -q -O metrics http://127.0.0.1:9177/metrics
awk -F, '
    /instructions/ {{ instructions = $1 }}
    /duration_time/ {{ printf \"look %d %.6f tally stat --metrics\\n\", instructions, $1 / 1000000000 }}' counts
echo silent $(awk '/^tally_silent_machines/ {{ print $2 }}' metrics)
echo metrics $(grep -c '^tally_machine_info' metrics)
kill $server
for number in $(seq {BUSY}); do
    kill $(./tally list | awk -v name=guest$number '$2 == name {{ print $1 }}')
    guest --name busy$number -- sh -c 'while :; do ls / >/dev/null; done' &
done
until [ $(./tally list | grep -c busy) = {BUSY} ]; do sleep 0.2; done
sleeps=$(./tally list | awk '$2 == \"guest{GUESTS}\" {{ print $1 }}')
sleep 1
top() {{
    perf stat -x, -o of_vm -e instructions:H -p $sleeps -- \
        perf stat -x, -o counts -e instructions,duration_time ./tally top --interval {INTERVAL} --count $1 >said || exit 1
    echo top $(awk -F, '/instructions/ {{ print $1 }}' counts of_vm) $(awk -F, '/duration_time/ {{ print $1 }}' counts) \
        $(awk '/ VMs: / {{ print $1; exit }}' said) $(grep -c '\\[k\\] [a-z]' said)
}}
top 1
top {BLOCKS}
exit 0
"
    )
}

fn read(text: &str) -> Option<Figures> {
    let mut figures = Figures::default();
    let mut runs = Vec::new();
    for line in text.lines() {
        let (word, rest) = line.split_once(' ')?;
        match word {
            "each" => figures.kib_each = rest.parse().ok()?,
            "proportional" => figures.proportional_kib = rest.parse().ok()?,
            "vm" => {
                let (process, name) = rest.split_once(' ')?;
                figures.processes.insert(process.parse().ok()?);
                figures.names.insert(name.to_owned());
            }
            "look" => {
                let mut words = rest.splitn(3, ' ');
                figures.looks.push(Look {
                    instructions: words.next()?.parse().ok()?,
                    seconds: words.next()?.parse().ok()?,
                    command: words.next()?.to_owned(),
                });
            }
            "silent" => figures.silent = rest.parse().ok(),
            "metrics" => figures.with_metrics = rest.parse().ok()?,
            "top" => {
                let numbers: Vec<u64> =
                    rest.split(' ').map(|word| word.parse().ok()).collect::<Option<_>>()?;
                runs.push(<[u64; 5]>::try_from(numbers).ok()?);
            }
            _ => return None,
        }
    }
    let [one, more] = runs[..] else { return None };
    let later = |number: usize| more[number].saturating_sub(one[number]) / (BLOCKS - 1);
    figures.top = Top {
        vms: [one, more].map(|run| usize::try_from(run[3]).unwrap_or(0)).to_vec(),
        named: usize::try_from(more[4]).unwrap_or(0),
        first: one[0],
        later: later(0),
        seconds: Duration::from_nanos(one[2]).as_secs_f64(),
        of_vm: [one[1], later(1)],
    };
    Some(figures)
}
