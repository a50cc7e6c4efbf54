//! The times that a user of `tally run` waits: for a command's output, for the prompt after it, and for reads from a
//! shared directory. Tally and the peer run on the same simulated host, with the same kernels and initrd.
//!
//! The host has one CPU, so the times include all work, also that of the devices' threads.

use std::collections::HashMap;
use std::fmt::Write;
use std::fs;
use std::path::Path;

use guest_images::cache::Cache;
use guest_images::{Progress, Suite, small_kernel, small_kernel_needs};

use crate::error::{Error, Result};
use crate::scenario::Scenario;
use crate::scenario::peer::{self, Folder, MachineType};
use crate::simulator::tools;

/// Size of the file that is read from a shared directory.
pub const MIB: u32 = 100;
/// Block sizes of the reads, as `dd` takes them.
const BLOCKS: [&str; 2] = ["1M", "64k"];

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

/// Cost of reading a file of [`MIB`] in a shared directory with one monitor.
#[derive(Debug)]
pub struct Reading {
    /// Name of the monitor, and how the directory is shared.
    pub monitor: String,
    /// Block size.
    pub block: String,
    /// The cost.
    pub cost: Cost,
}

/// Cost of some work.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// Number of exits to user space.
    pub exits: u64,
    /// Virtual time.
    pub seconds: f64,
}

impl Reading {
    /// Returns the throughput in millions of bytes per second.
    pub fn megabytes_per_second(&self) -> f64 {
        f64::from(MIB) * 1.048_576 / self.cost.seconds
    }
}

/// All measurements, Tally's first.
#[derive(Debug)]
pub struct Figures {
    /// The command with each monitor.
    pub hellos: Vec<Hello>,
    /// The snapshot that one of them was restored from.
    pub saving: SnapshotCost,
    /// The reads with each monitor.
    pub readings: Vec<Reading>,
    /// Size of the program `tally`.
    pub program_bytes: u64,
}

/// Measures the program at `tally` and the peer.
pub fn measure(tally: &Path, progress: &mut Progress) -> Result<Figures> {
    let program_bytes = fs::metadata(tally).map_err(Error::file("read", tally))?.len();
    tools::ensure(&small_kernel_needs(), progress)?;
    let small = small_kernel(&Cache::open()?, progress)?;
    let scenario = Scenario::with_all_counters(script())
        .named("figures use")
        .file(tally, "tally")
        .file(small.image, "small")
        .guest(Suite::default(), progress)?;
    let text = super::output::run(&scenario, progress)?;
    let unreadable = || super::output::unreadable(&text);
    let of =
        |kind: &'static str| text.lines().filter_map(move |line| line.strip_prefix(kind)?.strip_prefix(' '));
    let totals: HashMap<&str, Total> = of("total").filter_map(total).collect();
    let hellos: Option<Vec<_>> = of("hello").map(|line| hello(line, &totals)).collect();
    let readings: Option<Vec<_>> = of("reading").map(reading).collect();
    Ok(Figures {
        hellos: hellos.filter(|hellos| !hellos.is_empty()).ok_or_else(unreadable)?,
        saving: of("saving").next().and_then(saving).ok_or_else(unreadable)?,
        readings: readings.filter(|readings| !readings.is_empty()).ok_or_else(unreadable)?,
        program_bytes,
    })
}

/// Returns the script, which prints `hello NAME EXITS SECONDS EXITS SECONDS` and `total NAME INSTRUCTIONS BYTES` for
/// each monitor, `saving SECONDS KIB`, and `reading NAME BLOCK EXITS SECONDS` for each monitor and block size. A guest
/// marks the start and the end of a read by writes to an unused I/O port. Instructions are counted by the task clock,
/// which holds no counter: with others free, a guest would need another template.
fn script() -> String {
    let mut script = format!(
        "T=/sys/kernel/tracing
echo 65536 >$T/buffer_size_kb
echo 'cmd == 0xae80' >$T/events/syscalls/sys_enter_ioctl/filter
echo 1 >$T/events/syscalls/sys_enter_ioctl/enable
echo 'port == {MARKED_PORT} && val == {MARK}' >$T/events/kvm/kvm_pio/filter
cost='function at() {{ match($0, /[0-9]+\\.[0-9]+: /); return substr($0, RSTART, RLENGTH - 2) }}
    /sys_ioctl/ {{ exits++ }}'
hello() {{
    name=$1; shift
    echo >$T/trace
    echo begin >$T/trace_marker
    \"$@\" </dev/null | while read -r line; do
        case $line in hello*) echo first >$T/trace_marker ;; esac
    done
    echo end >$T/trace_marker
    awk -v name=$name \"$cost\"'
        /: begin$/ {{ begin = at(); exits = 0 }}
        /: (first|end)$/ {{ costs = costs \" \" exits + 0 \" \" at() - begin }}
        END {{ print \"hello\", name costs }}' $T/trace
    total $name \"$@\"
}}
echo +memory >/sys/fs/cgroup/cgroup.subtree_control
total() {{
    name=$1 group=/sys/fs/cgroup/$1; shift
    mkdir $group
    perf stat -x, -o counts -e task-clock \\
        sh -c 'echo $$ >$0/cgroup.procs; exec \"$@\"' $group \"$@\" </dev/null >/dev/null || exit
    awk -F, -v name=$name -v bytes=$(cat $group/memory.peak) '
        /task-clock/ {{ printf \"total %s %.0f %d\\n\", name, $1 * 1000000, bytes }}' counts
}}
reading() {{
    name=$1; shift
    echo >$T/trace
    echo 1 >$T/events/kvm/kvm_pio/enable
    \"$@\" </dev/null >said 2>&1 || {{ cat said >&2; exit 1; }}
    echo 0 >$T/events/kvm/kvm_pio/enable
    awk -v name=$name -v blocks='{blocks}' \"$cost\"'
        /kvm_pio/ {{
            if (marks++ % 2) print \"reading\", name, block[marks / 2], exits, at() - begin
            else {{ begin = at(); exits = 0; split(blocks, block, \" \") }}
        }}' $T/trace
}}
export TALLY_CACHE=/scenario/cache
TALLY_BOOT= ./tally run -- true </dev/null || exit 1
cp guest/kernel vmlinuz
./tally run --kernel vmlinuz --initrd guest/initrd -- true </dev/null || exit 1
mkdir shared
dd if=/dev/zero of=shared/file bs=1M count={MIB} 2>/dev/null
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
awk -v kib=$(ls -sk saved.dir | awk 'NR == 1 {{ print $2 }}') \"$cost\"'
    /: begin$/ {{ begin = at() }}
    /: end$/ {{ print \"saving\", at() - begin, kib }}' $T/trace
hello tally,restored ./tally run --restore saved.dir
hello tally,boot ./tally run --boot -- echo hello
hello tally,kernel ./tally run --kernel vmlinuz --initrd guest/initrd -- echo hello
",
        blocks = BLOCKS.join(" "),
    );
    let mut line = |text: std::fmt::Arguments| {
        writeln!(script, "{text}").expect("writing to a string cannot fail");
    };
    for machine in [MachineType::Microvm, MachineType::Default] {
        line(format_args!("hello {} {}", machine.name(), peer::linux(machine, &["echo", "hello"])));
    }
    let folder = "/scenario/shared";
    let here = read(&format!("cd {folder}"));
    line(format_args!("reading tally ./tally run --kernel small --share {folder} -- sh -c '{here}'"));
    for cache in ["none", "loose"] {
        let options = format!("trans=virtio,version=9p2000.L,msize=524288,ro,cache={cache}");
        let mount = format!("mkdir /shared && mount -t 9p -o {options} shared /shared && cd /shared");
        let folder = Folder { kernel: "small", path: folder, tag: "shared" };
        let command = peer::linux_with_folder(MachineType::Microvm, &folder, &["sh", "-c", &read(&mount)]);
        line(format_args!("reading microvm,9p,cache={cache} {command}"));
    }
    script
}

/// Port and value of the marks, as `outb` and the tracepoint take them. Firmware writes other values to this port.
const MARKED_PORT: &str = "0x80";
const MARK: &str = "0x7a";

/// Returns the guest's command. The guest touches most of its memory first, so that the host has allocated the memory
/// before the reads.
fn read(begin: &str) -> String {
    let mark = format!("/lib/tally/outb {MARKED_PORT} {MARK}");
    let blocks = BLOCKS.map(|block| {
        format!(
            " && echo 3 >/proc/sys/vm/drop_caches && {mark} && dd if=file of=/dev/null bs={block} 2>/dev/null && {mark}"
        )
    });
    format!("{begin} && dd if=/dev/zero of=/dev/null bs=300M count=1{}", blocks.concat())
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

fn reading(line: &str) -> Option<Reading> {
    let mut words = line.split(' ');
    let (monitor, block) = (words.next()?.to_owned(), words.next()?.to_owned());
    Some(Reading { monitor, block, cost: cost(&mut words)? })
}

fn cost<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<Cost> {
    Some(Cost { exits: words.next()?.parse().ok()?, seconds: words.next()?.parse().ok()? })
}
