//! The times that a user of `tally run` waits for a command's output, and for the prompt after it. Tally and the peer
//! run on the same simulated host, with the same kernels and initrd.
//!
//! The host has one CPU, so the times include all work, also that of the devices' threads.

use std::collections::HashMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use guest_images::{Progress, Suite};

use crate::error::{Error, Result};
use crate::scenario::Scenario;
use crate::scenario::peer::{self, MachineType};

/// Cost of the command `echo hello` with one monitor.
#[derive(Debug)]
pub struct Hello {
    /// Name of the monitor.
    pub monitor: String,
    /// Cost until the command's first output.
    pub first: Cost,
    /// Cost until the monitor's end.
    pub end: Cost,
    /// What another run of it took.
    pub total: Total,
}

/// What a monitor takes until its end.
#[derive(Debug, Clone, Copy)]
pub struct Total {
    /// Instructions of the monitor's threads, in the host's kernel and in the guest, too.
    pub instructions: u64,
    /// Pages of memory that the host had to find for it, the kernel's own for it as well. Pages of files that it shares
    /// with others are not among them.
    pub pages: u64,
}

/// Cost of saving a running guest of 512 MiB.
#[derive(Debug)]
pub struct SnapshotCost {
    /// Virtual time of `tally snapshot`.
    pub seconds: f64,
    /// Space that the folder takes on the disk.
    pub kib: u64,
}

/// Cost of some work.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// Number of exits to user space.
    pub exits: u64,
    /// Virtual time.
    pub seconds: f64,
}

/// All measurements, Tally's first.
#[derive(Debug)]
pub struct Figures {
    /// The command with each monitor.
    pub hellos: Vec<Hello>,
    /// The snapshot that one of them was restored from.
    pub saving: SnapshotCost,
    /// Size of the program `tally`.
    pub program_bytes: u64,
}

/// Measures the program at `tally` and the peer.
pub fn measure(tally: &Path, progress: &mut Progress) -> Result<Figures> {
    let program_bytes = fs::metadata(tally).map_err(Error::file("read", tally))?.len();
    let scenario = Scenario::with_all_counters(script())
        .named("figures use")
        .file(tally, "tally")
        .guest(Suite::default(), progress)?;
    let text = super::output::run(&scenario, progress)?;
    let unreadable = || super::output::unreadable(&text);
    let of =
        |kind: &'static str| text.lines().filter_map(move |line| line.strip_prefix(kind)?.strip_prefix(' '));
    let totals: HashMap<&str, Total> = of("total").filter_map(total).collect();
    let hellos: Option<Vec<_>> = of("hello").map(|line| hello(line, &totals)).collect();
    Ok(Figures {
        hellos: hellos.filter(|hellos| !hellos.is_empty()).ok_or_else(unreadable)?,
        saving: of("saving").next().and_then(saving).ok_or_else(unreadable)?,
        program_bytes,
    })
}

/// Returns the script, which prints `hello NAME EXITS SECONDS EXITS SECONDS` and `total NAME INSTRUCTIONS BYTES` for
/// each monitor, and `saving SECONDS KIB`. Instructions are counted by the task clock, which holds no counter: with
/// others free, a guest would need another template.
fn script() -> String {
    let mut script = String::from(
        "T=/sys/kernel/tracing
echo 65536 >$T/buffer_size_kb
echo 'cmd == 0xae80' >$T/events/syscalls/sys_enter_ioctl/filter
echo 1 >$T/events/syscalls/sys_enter_ioctl/enable
cost='function at() { match($0, /[0-9]+\\.[0-9]+: /); return substr($0, RSTART, RLENGTH - 2) }
    /sys_ioctl/ { exits++ }'
hello() {
    name=$1; shift
    echo >$T/trace
    echo begin >$T/trace_marker
    \"$@\" </dev/null | while read -r line; do
        case $line in hello*) echo first >$T/trace_marker ;; esac
    done
    echo end >$T/trace_marker
    awk -v name=$name \"$cost\"'
        /: begin$/ { begin = at(); exits = 0 }
        /: (first|end)$/ { costs = costs \" \" exits + 0 \" \" at() - begin }
        END { print \"hello\", name costs }' $T/trace
    total $name \"$@\"
}
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
total() {
    name=$1 group=/sys/fs/cgroup/$1; shift
    mkdir $group
    perf stat -x, -o counts -e task-clock \\
        sh -c 'echo $$ >$0/cgroup.procs; exec \"$@\"' $group \"$@\" </dev/null >/dev/null || exit
    awk -F, -v name=$name -v bytes=$(cat $group/memory.peak) '
        /task-clock/ { printf \"total %s %.0f %d\\n\", name, $1 * 1000000, bytes }' counts
}
export TALLY_CACHE=/scenario/cache
TALLY_BOOT= ./tally run -- true </dev/null || exit 1
cp guest/kernel vmlinuz
./tally run --kernel vmlinuz --initrd guest/initrd -- true </dev/null || exit 1
hello tally env TALLY_BOOT= ./tally run -- echo hello
mkfifo input
./tally run --name saved -- sh -c 'echo ready; read line; echo hello' <input >said & saved=$!
exec 3>input
until grep -qs ready said; do sleep 0.05; done
echo >$T/trace
echo begin >$T/trace_marker
./tally snapshot saved saved.dir --stop || exit 1
echo end >$T/trace_marker
exec 3>&-
wait $saved
awk -v kib=$(ls -sk saved.dir | awk 'NR == 1 { print $2 }') \"$cost\"'
    /: begin$/ { begin = at() }
    /: end$/ { print \"saving\", at() - begin, kib }' $T/trace
hello tally,restored ./tally run --restore saved.dir
hello tally,boot ./tally run --boot -- echo hello
hello tally,kernel ./tally run --kernel vmlinuz --initrd guest/initrd -- echo hello
",
    );
    let mut line = |text: std::fmt::Arguments| {
        writeln!(script, "{text}").expect("writing to a string cannot fail");
    };
    for machine in [MachineType::Microvm, MachineType::Default] {
        line(format_args!("hello {} {}", machine.name(), peer::linux(machine, &["echo", "hello"])));
    }
    script
}

fn hello(line: &str, totals: &HashMap<&str, Total>) -> Option<Hello> {
    let mut words = line.split(' ');
    let monitor = words.next()?;
    Some(Hello {
        monitor: monitor.to_owned(),
        first: cost(&mut words)?,
        end: cost(&mut words)?,
        total: *totals.get(monitor)?,
    })
}

fn total(line: &str) -> Option<(&str, Total)> {
    const PAGE: u64 = 4 << 10;
    let [monitor, instructions, bytes] = line.split(' ').collect::<Vec<_>>()[..] else { return None };
    let pages = bytes.parse::<u64>().ok()? / PAGE;
    Some((monitor, Total { instructions: instructions.parse().ok()?, pages }))
}

fn saving(line: &str) -> Option<SnapshotCost> {
    let (seconds, kib) = line.split_once(' ')?;
    Some(SnapshotCost { seconds: seconds.parse().ok()?, kib: kib.parse().ok()? })
}

fn cost<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<Cost> {
    Some(Cost { exits: words.next()?.parse().ok()?, seconds: words.next()?.parse().ok()? })
}
