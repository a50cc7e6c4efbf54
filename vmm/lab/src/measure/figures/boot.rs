//! The cost of a boot from the first `KVM_RUN` to the guest's init, with Tally and with the peer. Kernel, initrd,
//! command line, console and simulated host are the same. Also how many of a guest's instructions KVM completes by
//! itself, which no counter of the guest's sees.

use std::path::Path;

use crate::error::Result;
use crate::scenario::Scenario;
use crate::scenario::peer::{self, MachineType};
use guest_images::payloads::BARE_METAL;
use guest_images::{Progress, Suite};

/// Cost of a boot with one monitor.
pub struct Boot {
    /// Name of the monitor.
    pub monitor: String,
    /// Number of exits to user space.
    pub exits: u64,
    /// Virtual time.
    pub seconds: f64,
}

/// All measurements.
pub struct Figures {
    /// Boots with each monitor, Tally first.
    pub boots: Vec<Boot>,
    /// Resident memory of Tally without the guest's memory.
    pub resident_kib: u64,
    /// Instructions on the host for a guest that ends at once, without Tally's sandbox and with it.
    pub starts: [u64; 2],
    /// What KVM completes by itself in a boot, and in `perf stat true`.
    pub completed: [Completed; 2],
}

/// Instructions of a guest that exit and that KVM completes without user space.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Completed {
    /// CPUID.
    pub cpuid: u64,
    /// HLT.
    pub halts: u64,
    /// RDMSR and WRMSR.
    pub msrs: u64,
    /// IN and OUT.
    pub ports: u64,
}

impl Completed {
    /// Reads the numbers of [`completed`]: CPUID, HLT, all MSR and port exits, and those that reached user space.
    fn read(line: &str) -> Option<Self> {
        let numbers: Vec<u64> = line.split(' ').map(|word| word.parse().ok()).collect::<Option<_>>()?;
        let [cpuid, halts, msrs, ports, user_reads, user_writes, user_ports] = *numbers else { return None };
        Some(Self {
            cpuid,
            halts,
            msrs: msrs.checked_sub(user_reads + user_writes)?,
            ports: ports.checked_sub(user_ports)?,
        })
    }

    fn since(self, before: Self) -> Option<Self> {
        Some(Self {
            cpuid: self.cpuid.checked_sub(before.cpuid)?,
            halts: self.halts.checked_sub(before.halts)?,
            msrs: self.msrs.checked_sub(before.msrs)?,
            ports: self.ports.checked_sub(before.ports)?,
        })
    }
}

/// Returns a command that runs another, and then prints `completed` and how often KVM's tracepoints were hit
/// meanwhile: CPUID; the exits of AMD's processors for HLT, MSRs and ports; and the exits to user space for MSRs and
/// ports.
fn completed(command: &str) -> String {
    let exits = [0x78, 0x7c, 0x7b].map(|reason| ("kvm_exit", "exit_reason", reason));
    // `KVM_EXIT_X86_RDMSR`, `KVM_EXIT_X86_WRMSR`, `KVM_EXIT_IO`.
    let user_exits = [29, 30, 2].map(|reason| ("kvm_userspace_exit", "reason", reason));
    let event = |(event, field, reason)| format!(" -e kvm:{event} --filter '{field} == {reason}'");
    let events = exits.into_iter().chain(user_exits).map(event).collect::<Vec<_>>().concat();
    format!(
        "perf stat -x, -o counted -e kvm:kvm_cpuid{events} {command} >console </dev/null\n\
         awk -F, '$3 ~ /^kvm:/ {{ line = line \" \" $1 }} END {{ print \"completed\" line }}' counted\n"
    )
}

/// Kernel arguments with which the init only writes to the debug-exit port, which ends the machine.
const INIT: &str = "rdinit=/lib/tally/outb -- 0xf4 0";

/// Returns a run of a command in the default guest.
fn run(command: &str) -> String {
    format!("./tally run -- {command}")
}

/// Returns the script that counts `KVM_RUN` (0xae80). It prints `boot NAME COUNT BEGIN END` for each monitor, then
/// `resident KIB`, and `start INSTRUCTIONS` without the sandbox and with it.
fn script() -> String {
    let line = format!("console=ttyS0 cryptomgr.notests panic=-1 {INIT}");
    let peers: String = [MachineType::Microvm, MachineType::Default]
        .map(|machine| format!("boot {} {}\n", machine.name(), peer::to_debug_exit(machine, &line)))
        .concat();
    let completed: String = [format!("./tally run --append '{INIT}'"), run("true"), run("perf stat true")]
        .map(|command| completed(&command))
        .concat();
    format!(
        "T=/sys/kernel/tracing
echo 65536 >$T/buffer_size_kb
echo 'cmd == 0xae80' >$T/events/syscalls/sys_enter_ioctl/filter
echo 1 >$T/events/syscalls/sys_enter_ioctl/enable
boot() {{
    name=$1; shift
    echo >$T/trace
    \"$@\" >console </dev/null
    status=$?
    grep -q 'as init process' console && [ $status = 1 ] || {{ echo \"$name ended with $status\" >&2; exit 1; }}
    awk -v name=$name '/sys_ioctl/ {{
        sub(\":\", \"\", $4); end = $4; if (!count++) begin = $4
    }} END {{ print \"boot\", name, count, begin, end }}' $T/trace
}}
boot tally ./tally run --append '{INIT}'
{peers}echo 0 >$T/events/syscalls/sys_enter_ioctl/enable
./tally run -- sleep 1000 &
sleep 5
awk -v size=$((512 * 1024)) '/^Size:/ {{ guest = $2 == size }} /^Rss:/ && !guest {{ sum += $2 }}
    END {{ print \"resident\", sum }}' /proc/$!/smaps
kill $!
wait $!
for mode in off on; do
    perf stat -x, -o counted -e instructions:H ./tally run --kernel payload --append exit=0 --sandbox $mode >console
    awk -F, '$3 ~ /^instructions/ {{ print \"start\", $1 }}' counted
done
{completed}true
"
    )
}

/// Measures the program at `tally` and the peer, on one simulated host.
pub fn measure(tally: &Path, progress: &mut Progress) -> Result<Figures> {
    let scenario = Scenario::with_all_counters(script())
        .file(tally, "tally")
        .program(BARE_METAL, "payload")
        .guest(Suite::default(), progress)?;
    let text = super::output::run(&scenario, progress)?;
    let boots: Option<Vec<Boot>> =
        text.lines().filter_map(|line| line.strip_prefix("boot ")).map(boot).collect();
    let resident = text.lines().find_map(|line| line.strip_prefix("resident "));
    let unreadable = || super::output::unreadable(&text);
    let completed: Option<Vec<Completed>> =
        text.lines().filter_map(|line| line.strip_prefix("completed ")).map(Completed::read).collect();
    let completed = match completed.as_deref() {
        Some([boot, without, with]) => with.since(*without).map(|perf| [*boot, perf]),
        _ => None,
    };
    let starts = text.lines().filter_map(|line| line.strip_prefix("start ")?.parse().ok());
    let starts = <[u64; 2]>::try_from(starts.collect::<Vec<_>>()).map_err(|_| unreadable())?;
    Ok(Figures {
        starts,
        completed: completed.ok_or_else(unreadable)?,
        boots: boots.ok_or_else(unreadable)?,
        resident_kib: resident.and_then(|kib| kib.parse().ok()).ok_or_else(unreadable)?,
    })
}

fn boot(line: &str) -> Option<Boot> {
    let mut words = line.split(' ');
    let (monitor, exits) = (words.next()?.to_owned(), words.next()?.parse().ok()?);
    let (begin, end): (f64, f64) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    Some(Boot { monitor, exits, seconds: end - begin })
}
