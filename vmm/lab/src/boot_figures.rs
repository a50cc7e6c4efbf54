//! The cost of a boot from the first `KVM_RUN` to the guest's init, with Tally and with the peer. Kernel, initrd,
//! command line, console and simulated host are the same.

use guest_images::{Progress, Suite};
use tally_lab::peer::{self, Machine};
use tally_lab::{Error, Result, Scenario};

use crate::beside;

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
}

/// Kernel arguments with which the init only writes to the debug-exit port, which ends the machine.
const INIT: &str = "rdinit=/lib/tally/outb -- 0xf4 0";

/// Returns the script that counts `KVM_RUN` (0xae80). It prints `boot NAME COUNT BEGIN END` for each monitor, then
/// `resident KIB`.
fn script() -> String {
    let line = format!("console=ttyS0 panic=-1 {INIT}");
    let peers: String = [Machine::Microvm, Machine::Default]
        .map(|machine| format!("boot {} {}\n", machine.name(), peer::to_debug_exit(machine, &line)))
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
true
"
    )
}

/// Runs the measurements on one simulated host.
pub fn measure(progress: &mut Progress) -> Result<Figures> {
    let scenario = Scenario::new(script())
        .file(beside::program("tally", progress)?, "tally")
        .guest(Suite::default(), progress)?;
    let outcome = scenario.run(progress)?;
    if outcome.status != 0 {
        return Err(Error::Command(String::from_utf8_lossy(&outcome.stderr).trim().to_owned()));
    }
    let text = outcome.text();
    let boots: Option<Vec<Boot>> =
        text.lines().filter_map(|line| line.strip_prefix("boot ")).map(boot).collect();
    let resident = text.lines().find_map(|line| line.strip_prefix("resident "));
    let unreadable = || Error::Command(format!("the measuring script printed\n{text}"));
    Ok(Figures {
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
