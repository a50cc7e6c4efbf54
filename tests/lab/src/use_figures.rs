//! What a user of `tally run` waits for: a command's output, the prompt after it, and what it reads from a shared folder.
//! Tally beside the peer on the same simulated host, with the same kernels and initrd.
//!
//! The host has one processor, so the time is that of everything that is done, the devices' threads included.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use guest_images::cache::Cache;
use guest_images::{Progress, Suite, small_kernel};

use crate::peer::{self, Folder, Machine};
use crate::{Error, Result, Scenario};

/// How much is read from a shared folder.
pub const MIB: u32 = 100;
/// In how large pieces, as `dd` has it.
const BLOCKS: [&str; 2] = ["1M", "64k"];

/// From Enter to a command's end, with one monitor.
#[derive(Debug)]
pub struct Hello {
    /// Which one.
    pub monitor: String,
    /// Until the command's first output.
    pub first: Cost,
    /// Until the prompt.
    pub end: Cost,
}

/// Reading a file of [`MIB`] in a shared folder, with one monitor.
#[derive(Debug)]
pub struct Reading {
    /// Which one, and how.
    pub monitor: String,
    /// In pieces of this size.
    pub block: String,
    /// What it took.
    pub cost: Cost,
}

/// What something took.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// How often the guest left KVM for user space.
    pub exits: u64,
    /// In virtual time.
    pub seconds: f64,
}

impl Reading {
    /// How many millions of bytes come in a second.
    pub fn megabytes_per_second(&self) -> f64 {
        f64::from(MIB) * 1.048_576 / self.cost.seconds
    }
}

/// What was measured: Tally's first.
#[derive(Debug)]
pub struct Figures {
    /// A command that says hello.
    pub hellos: Vec<Hello>,
    /// Files that are read.
    pub readings: Vec<Reading>,
    /// The size of `tally`.
    pub program_bytes: u64,
}

/// Measures this `tally`.
pub fn measure(tally: &Path, progress: &mut Progress) -> Result<Figures> {
    let program_bytes = fs::metadata(tally).map_err(Error::file("read", tally))?.len();
    let small = small_kernel(&Cache::open()?, progress)?;
    let outcome = Scenario::new(script())
        .named("figures use")
        .file(tally, "tally")
        .file(small.image, "small")
        .guest(Suite::default(), progress)?
        .run(progress)?;
    if outcome.status != 0 {
        return Err(Error::Command(String::from_utf8_lossy(&outcome.stderr).trim().to_owned()));
    }
    let text = outcome.text();
    let unreadable = || Error::Command(format!("the measuring script printed\n{text}"));
    let of =
        |kind: &'static str| text.lines().filter_map(move |line| line.strip_prefix(kind)?.strip_prefix(' '));
    let hellos: Option<Vec<_>> = of("hello").map(hello).collect();
    let readings: Option<Vec<_>> = of("reading").map(reading).collect();
    Ok(Figures {
        hellos: hellos.filter(|hellos| !hellos.is_empty()).ok_or_else(unreadable)?,
        readings: readings.filter(|readings| !readings.is_empty()).ok_or_else(unreadable)?,
        program_bytes,
    })
}

/// Prints `hello NAME EXITS SECONDS EXITS SECONDS` for each monitor, and `reading NAME BLOCK EXITS SECONDS` for each and each
/// size. A guest marks what it does by writes to a port that nothing is at.
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
mkdir shared
dd if=/dev/zero of=shared/file bs=1M count={MIB} 2>/dev/null
hello tally ./tally run -- echo hello
",
        blocks = BLOCKS.join(" "),
    );
    let mut line = |text: std::fmt::Arguments| {
        writeln!(script, "{text}").expect("writing to a string cannot fail");
    };
    for machine in [Machine::Microvm, Machine::Default] {
        line(format_args!("hello {} {}", machine.name(), peer::linux(machine, &["echo", "hello"])));
    }
    let folder = "/scenario/shared";
    let here = read(&format!("cd {folder}"));
    line(format_args!("reading tally ./tally run --kernel small --share {folder} -- sh -c '{here}'"));
    for cache in ["none", "loose"] {
        let options = format!("trans=virtio,version=9p2000.L,msize=524288,ro,cache={cache}");
        let mount = format!("mkdir /shared && mount -t 9p -o {options} shared /shared && cd /shared");
        let folder = Folder { kernel: "small", path: folder, tag: "shared" };
        let command = peer::linux_with_folder(Machine::Microvm, &folder, &["sh", "-c", &read(&mount)]);
        line(format_args!("reading microvm,9p,cache={cache} {command}"));
    }
    script
}

/// As `outb` and the tracepoint have it. Firmware tells this port other things.
const MARKED_PORT: &str = "0x80";
const MARK: &str = "0x7a";

/// What a guest does. Before that it touches most of its memory, so that the host has found it.
fn read(begin: &str) -> String {
    let mark = format!("/lib/tally/outb {MARKED_PORT} {MARK}");
    let blocks = BLOCKS.map(|block| {
        format!(
            " && echo 3 >/proc/sys/vm/drop_caches && {mark} && dd if=file of=/dev/null bs={block} 2>/dev/null && {mark}"
        )
    });
    format!("{begin} && dd if=/dev/zero of=/dev/null bs=300M count=1{}", blocks.concat())
}

fn hello(line: &str) -> Option<Hello> {
    let mut words = line.split(' ');
    Some(Hello { monitor: words.next()?.to_owned(), first: cost(&mut words)?, end: cost(&mut words)? })
}

fn reading(line: &str) -> Option<Reading> {
    let mut words = line.split(' ');
    let (monitor, block) = (words.next()?.to_owned(), words.next()?.to_owned());
    Some(Reading { monitor, block, cost: cost(&mut words)? })
}

fn cost<'a>(words: &mut impl Iterator<Item = &'a str>) -> Option<Cost> {
    Some(Cost { exits: words.next()?.parse().ok()?, seconds: words.next()?.parse().ok()? })
}
