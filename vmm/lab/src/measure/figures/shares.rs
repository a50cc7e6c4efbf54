//! What work in a folder of the host costs that is shared with a guest. Tally and its peers run on the same simulated
//! host: QEMU with its own 9p server, and QEMU with virtiofsd, which serves virtio-fs as Tally does.
//!
//! The host has one CPU, so the times include all work, also that of the devices' threads and of the peers' servers.

use std::fmt::Write;
use std::panic::resume_unwind;
use std::path::Path;
use std::thread;
use std::time::Duration;

use guest_images::cache::Cache;
use guest_images::payloads::outb;
use guest_images::{Error, Progress, Suite, kernel_needs, modules, small_kernel};

use super::commands::Cost;
use crate::error::Result;
use crate::scenario::peer::{self, Folder, MachineType, Sharing};
use crate::scenario::{Scenario, packed};
use crate::simulator::tools;

/// Size of the file that is read.
const MIB: u32 = 100;
/// The small files: so many folders, each with so many.
const FOLDERS: u32 = 50;
const FILES: u32 = 100;
/// Number of reads at random places.
const READS: u32 = 2_000;
/// What is written, in large and in small pieces.
const WRITTEN_MIB: u32 = 50;
const WRITES: u32 = 1_000;

/// Some work in the folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// What the table calls it.
    pub name: &'static str,
    command: &'static str,
    /// It changes the folder.
    writes: bool,
}

/// All work, in the order in which a guest does it, each time with nothing of the folder in its memory. What is in
/// capitals are variables of the guest's script.
pub const WORKS: [Work; 10] = [
    Work::reading("100 MiB by 1 MiB", "$BUSYBOX dd if=file of=/dev/null bs=1M"),
    Work::reading("100 MiB by 64 KiB", "$BUSYBOX dd if=file of=/dev/null bs=64k"),
    Work::reading("2,000 x 4 KiB at random", "/tmp/share-workload random file $READS"),
    Work::writing("write 50 MiB by 1 MiB", "$BUSYBOX dd if=/dev/zero of=new bs=1M count=$WRITTEN_MIB"),
    Work::writing("write 1,000 x 4 KiB", "$BUSYBOX dd if=/dev/zero of=new bs=4k count=$WRITES"),
    Work::reading("`find`, 5,000 files", "$BUSYBOX find many"),
    Work::reading("`stat`, 5,000 files", "/tmp/share-workload stat many $FOLDERS $FILES"),
    // Of the folders whose numbers begin with a one.
    Work::reading("`tar`, 1,100 files", "$BUSYBOX tar -c -f - many/1*"),
    Work::reading("`python3 -c pass`", "$BUSYBOX chroot debian /usr/bin/python3.11 -c pass"),
    Work::reading("`perf --version`", "$BUSYBOX chroot debian /usr/bin/perf --version"),
];

impl Work {
    const fn reading(name: &'static str, command: &'static str) -> Self {
        Self { name, command, writes: false }
    }

    const fn writing(name: &'static str, command: &'static str) -> Self {
        Self { name, command, writes: true }
    }

    /// Returns the throughput in millions of bytes a second, if it is of one file.
    pub fn megabytes_per_second(self, seconds: f64) -> Option<f64> {
        let mib = match self.name {
            name if name.starts_with("100 MiB") => MIB,
            name if name.starts_with("write 50 MiB") => WRITTEN_MIB,
            _ => return None,
        };
        Some(f64::from(mib) * 1.048_576 / seconds)
    }
}

/// A monitor, and how it shares the folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Monitor {
    /// `tally run --share`, with the small kernel.
    Tally,
    /// `tally run --root /`, which needs the default guest's kernel for its overlay.
    TallyRoot,
    /// QEMU's own server with the small kernel, and with `cache=loose`, its best setting. Without a cache, a guest
    /// keeps nothing of what it reads, and is many times as slow.
    NineP,
    /// virtiofsd with the default guest's kernel on `pc`. On `microvm` each interrupt would be QEMU's main loop's work.
    Virtiofsd,
}

/// All of them, Tally's first.
pub const MONITORS: [Monitor; 4] = [Monitor::Tally, Monitor::TallyRoot, Monitor::NineP, Monitor::Virtiofsd];

impl Monitor {
    /// Returns the name, without spaces.
    pub fn name(self) -> String {
        match self {
            Self::Tally => "tally".to_owned(),
            Self::TallyRoot => "tally,root".to_owned(),
            Self::NineP => format!("{},9p", MachineType::Microvm.name()),
            Self::Virtiofsd => format!("{},virtiofsd", MachineType::Default.name()),
        }
    }

    /// Returns true if what is written in its guest reaches the host.
    pub fn writes(self) -> bool {
        self != Self::TallyRoot
    }

    /// Returns the arguments of the script.
    fn arguments(self) -> [String; 3] {
        let numbers = WORKS.iter().enumerate().filter(|(_, work)| self.writes() || !work.writes);
        let numbers: Vec<String> = numbers.map(|(number, _)| number.to_string()).collect();
        [self.preparation(), numbers.join(" "), self.command()]
    }

    /// Returns the command before it, which makes the template of Tally's guest.
    fn preparation(self) -> String {
        match self {
            Self::Tally => {
                format!("./tally run --kernel small --share {FOLDER}:rw -- true </dev/null || exit")
            }
            Self::TallyRoot => "./tally run --root / -- true </dev/null || exit".to_owned(),
            Self::NineP => String::new(),
            Self::Virtiofsd => "virtiofsd".to_owned(),
        }
    }

    /// Returns the command that does the work in its guest.
    fn command(self) -> String {
        let work = format!("sh {FOLDER}/work.sh");
        let mounted =
            |options: &str| format!("mkdir -p {FOLDER} && mount {options} shared {FOLDER} && {work} all");
        match self {
            Self::Tally => format!("./tally run --kernel small --share {FOLDER}:rw -- {work} all"),
            Self::TallyRoot => format!("./tally run --root / -- {work}"),
            Self::NineP => {
                let options = "-t 9p -o trans=virtio,version=9p2000.L,msize=524288,cache=loose";
                let folder = Folder { kernel: "small", path: FOLDER, tag: "shared", by: Sharing::NineP };
                peer::linux_with_folder(MachineType::Microvm, &folder, &["sh", "-c", &mounted(options)])
            }
            Self::Virtiofsd => {
                let (kernel, path, by) = ("guest/kernel", "virtiofsd.socket", Sharing::Virtiofsd);
                let folder = Folder { kernel, path, tag: "shared", by };
                let work = format!("{DRIVERS}{}", mounted("-t virtiofs"));
                peer::linux_with_folder(MachineType::Default, &folder, &["sh", "-c", &work])
            }
        }
    }
}

/// Cost of some work with one monitor.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    pub monitor: Monitor,
    pub work: Work,
    pub cost: Cost,
}

/// Measures these monitors, each on a host of its own: as many at a time as this machine has cores.
pub fn measure(
    tally: &Path,
    workload: &Path,
    monitors: &[Monitor],
    progress: &mut Progress,
) -> Result<Vec<Measured>> {
    let scenario = scenario(tally, workload, progress)?;
    progress.long_step("working in shared folders");
    thread::scope(|scope| {
        let begin = |monitor: &Monitor| {
            let (monitor, scenario) = (*monitor, scenario.clone().arguments(monitor.arguments()));
            scope.spawn(move || work_with(monitor, &scenario))
        };
        let threads: Vec<_> = monitors.iter().map(begin).collect();
        let ended =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        Ok(ended.collect::<Result<Vec<_>>>()?.concat())
    })
}

/// Does all work with a monitor.
fn work_with(monitor: Monitor, scenario: &Scenario) -> Result<Vec<Measured>> {
    let text = super::output::run(scenario, &mut Progress::silent())?;
    let measured: Option<Vec<_>> = text.lines().map(|line| measured(line, monitor)).collect();
    measured.filter(|all| !all.is_empty()).ok_or_else(|| super::output::unreadable(&text))
}

/// Returns what measures the monitor that arguments name.
fn scenario(tally: &Path, workload: &Path, progress: &mut Progress) -> Result<Scenario> {
    tools::ensure(&kernel_needs(), progress)?;
    let small = small_kernel(&Cache::open()?, progress)?;
    let python = packed::archive_of(
        "python3.11-minimal",
        &["libpython3.11-minimal", "libpython3.11-stdlib"],
        Suite::default(),
        progress,
    )?;
    let server = packed::archive_of("virtiofsd", &[], Suite::Trixie, progress)?;
    let drivers = pci_drivers(progress)?;
    let drivers: Vec<_> = drivers.iter().map(|(name, content)| (name.as_str(), content.as_slice())).collect();
    Scenario::with_all_counters(script())
        .named("figures shares")
        .limit(Duration::from_mins(30))
        .memory_mib(3 << 10)
        .file(tally, "tally")
        .file(workload, "shared/share-workload")
        .program(outb().unwrap_or_default(), "shared/outb")
        .file(python, "python.tar")
        .file(server, "virtiofsd.tar")
        .file(small.image, "small")
        .guest_with(Suite::default(), &drivers, progress)
}

/// Where the folder is on the host, and in all guests.
const FOLDER: &str = "/scenario/shared";

/// The modules of virtio on PCI, which Tally's default guest does not have, and a command that loads them.
const PCI: [&str; 3] = ["virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci"];
const DRIVERS: &str = "modprobe virtiofs && cd /root && insmod virtio_pci_modern_dev.ko && \
                       insmod virtio_pci_legacy_dev.ko && insmod virtio_pci.ko && ";

/// Returns them as files.
fn pci_drivers(progress: &mut Progress) -> Result<Vec<(String, Vec<u8>)>> {
    let suite = Suite::default();
    let drivers = modules::all(&guest_images::kernel(&Cache::open()?, suite, progress)?.modules)?;
    let driver = |name: &str| {
        let missing = || Error::NotInPackages { suite: suite.name(), what: format!("driver {name}") };
        Ok((format!("{name}.ko"), modules::content(drivers.get(name).ok_or_else(missing)?)?))
    };
    PCI.into_iter().map(driver).collect()
}

/// Port and value of the marks, as `outb` and the tracepoint take them. Firmware writes other values to this port.
const MARKED_PORT: &str = "0x80";
const MARK: &str = "0x7a";

/// Returns the guest's script. The guest touches most of its memory first, so that the host has allocated the memory
/// before the work; and has the programs that do the work in its memory. Before each work it pauses, so that the host
/// has freed what was removed.
fn work() -> String {
    let mut works = String::new();
    for work in WORKS {
        // The script has an argument where what it writes reaches the host.
        let only = if work.writes { "[ -z \"$1\" ] || " } else { "" };
        writeln!(works, "{only}work {}", work.command).expect("writing to a string cannot fail");
    }
    format!(
        "cd {FOLDER} || exit
READS={READS} WRITTEN_MIB={WRITTEN_MIB} WRITES={WRITES} FOLDERS={FOLDERS} FILES={FILES} BUSYBOX=/tmp/busybox
cp busybox outb share-workload /tmp || exit
# There are no device nodes below the shared folder, so Python does without random numbers.
export PYTHONHASHSEED=0
dd if=/dev/zero of=/dev/null bs=300M count=1 2>/dev/null
work() {{
    rm -f new
    echo 3 >/proc/sys/vm/drop_caches
    sleep 0.1
    /tmp/outb {MARKED_PORT} {MARK}
    \"$@\" >/dev/null 2>/tmp/said || {{ echo \"$@\"; cat /tmp/said; exit 1; }}
    /tmp/outb {MARKED_PORT} {MARK}
}}
{works}exit 0
"
    )
}

/// Returns the script. Its arguments are what prepares a monitor, the numbers of the work that it does, and its
/// command. It prints `WORK EXITS SECONDS` for each. The guest marks the start and the end of each by writes to an
/// unused I/O port. Only these and the exits to user space are traced: tracing takes time, too.
fn script() -> String {
    format!(
        "export TALLY_CACHE=/scenario/cache TALLY_BOOT=
T=/sys/kernel/tracing
echo 65536 >$T/buffer_size_kb
echo 'port == {MARKED_PORT} && val == {MARK}' >$T/events/kvm/kvm_pio/filter
mkdir -p shared/debian virtiofsd
cd shared
cat >work.sh <<'WORK'
{work}WORK
dd if=/dev/zero of=file bs=1M count={MIB} 2>/dev/null
for folder in $(seq {FOLDERS}); do
    mkdir -p many/$folder
    for file in $(seq {FILES}); do echo \"file $file of folder $folder\" >many/$folder/$file; done
done
cp /bin/busybox .
tar -C debian -x -f ../python.tar
cp /usr/bin/perf debian/usr/bin/
cp -n /lib/x86_64-linux-gnu/* debian/lib/x86_64-linux-gnu/
mkdir -p debian/lib64; cp -n /lib64/* debian/lib64/
# What Python compiles is there the next time.
chroot debian /usr/bin/python3.11 -c pass || exit
chroot debian /usr/bin/perf --version >/dev/null || exit
cd ..
tar -C virtiofsd -x -f virtiofsd.tar || exit
virtiofsd() {{
    rm -f virtiofsd.socket
    libraries=virtiofsd/usr/lib/x86_64-linux-gnu
    $(find virtiofsd -name 'ld-linux-x86-64.so.2' | head -n 1) --library-path $libraries virtiofsd/usr/libexec/virtiofsd \\
        --socket-path virtiofsd.socket --shared-dir {FOLDER} --sandbox none --seccomp none >served 2>&1 &
    until [ -S virtiofsd.socket ]; do kill -0 $! || {{ cat served >&2; exit 1; }}; sleep 0.01; done
}}
eval \"$1\"
trace() {{ for event in kvm_pio kvm_userspace_exit; do echo $1 >$T/events/kvm/$event/enable; done; }}
trace 1
sh -c \"$3\" </dev/null >said 2>&1 && ! grep -q '^tally: status [1-9]' said || {{ cat said served; exit 1; }} >&2
trace 0
awk -v works=\"$2\" '
    function at() {{ match($0, /[0-9]+\\.[0-9]+: /); return substr($0, RSTART, RLENGTH - 2) }}
    /kvm_userspace_exit/ {{ exits++ }}
    /kvm_pio/ {{
        if (marks++ % 2) print work[marks / 2], exits, at() - begin
        else {{ begin = at(); exits = 0; split(works, work, \" \") }}
    }}' $T/trace
",
        work = work(),
    )
}

fn measured(line: &str, monitor: Monitor) -> Option<Measured> {
    let [work, exits, seconds] = line.split(' ').collect::<Vec<_>>()[..] else { return None };
    Some(Measured {
        monitor,
        work: *WORKS.get(work.parse::<usize>().ok()?)?,
        cost: Cost { exits: exits.parse().ok()?, seconds: seconds.parse().ok()? },
    })
}
