//! Whose a host CPU's counters are, as far as the host lets one know: how many there are is known, and how many of them a
//! guest could have is tried. A CPU that a real-time thread has to itself may never let anybody try: then nothing is known.

use std::arch::x86_64::__cpuid;
use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::thread::CpuSet;
use vpmu::source::perf::{HostPmu, Obstacle, free_counters};
use vpmu::x86::{Leaf, Vendor};

use super::message::Hardware;
use crate::doctor;

/// So long a look is waited for; it takes some milliseconds. Even as many in a row as there may be do not keep a client waiting
/// for longer than it waits.
const PATIENCE: Duration = Duration::from_millis(250);
/// So many looks there may be that have not come to an end.
const MOST_LOOKS: usize = 32;

/// How many there are.
static LOOKS: AtomicUsize = AtomicUsize::new(0);

/// Looks at a CPU, from a thread of its own that goes there.
pub fn examine(cpu: usize, pmu: HostPmu) -> Option<Hardware> {
    let look = move || {
        let mut there = CpuSet::new();
        (cpu < CpuSet::MAX_CPU).then(|| there.set(cpu))?;
        rustix::thread::sched_setaffinity(None, &there).ok()?;
        let counters = counters(leaf)?;
        let available = match free_counters(pmu, counters, &[], counters) {
            Ok(free) => free.general,
            Err(Obstacle::NoneFree) => 0,
            Err(_) => return None,
        };
        Some((counters, available))
    };
    let (counters, available) = in_time(look, PATIENCE)?;
    let holders = if available < counters { holders() } else { Vec::new() };
    Some(Hardware { cpu, counters, available, holders })
}

/// What a look has found on a thread of its own, which is left behind if it takes longer than that.
fn in_time<T: Send + 'static>(
    look: impl FnOnce() -> Option<T> + Send + 'static,
    patience: Duration,
) -> Option<T> {
    let counted = Look::begin()?;
    let (sender, found) = mpsc::channel();
    let look = move || {
        let _counted = counted;
        // Perhaps nobody waits any more.
        let _ = sender.send(look());
    };
    thread::Builder::new().name("control".into()).spawn(look).ok()?;
    found.recv_timeout(patience).ok()?
}

/// One of the looks that there may be.
struct Look(());

impl Look {
    fn begin() -> Option<Self> {
        let look = Self(());
        // One too many is over at once, when this is dropped.
        (LOOKS.fetch_add(1, Ordering::Relaxed) < MOST_LOOKS).then_some(look)
    }
}

impl Drop for Look {
    fn drop(&mut self) {
        LOOKS.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Who may keep counters to themselves.
fn holders() -> Vec<String> {
    let watchdog = fs::read_to_string("/proc/sys/kernel/nmi_watchdog").is_ok_and(|is_on| is_on.trim() == "1");
    watchdog.then(|| "the NMI watchdog".to_owned()).into_iter().chain(doctor::holders()).collect()
}

fn leaf(function: u32) -> Leaf {
    let said = __cpuid(function);
    Leaf { eax: said.eax, ebx: said.ebx, ecx: said.ecx, edx: said.edx }
}

/// How many counters for any events this processor has (APM volume 3, E.4; SDM volume 2, CPUID).
fn counters(leaf: impl Fn(u32) -> Leaf) -> Option<usize> {
    const EXTENDED: u32 = 0x8000_0000;
    const PERFMON_V2: u32 = 0x8000_0022;
    const SIX: u32 = 1 << 23;
    let counters = match Vendor::of(leaf(0))? {
        Vendor::Intel => leaf(0xa).eax >> 8 & 0xff,
        Vendor::Amd if leaf(EXTENDED).eax >= PERFMON_V2 && leaf(PERFMON_V2).eax & 1 != 0 => {
            leaf(PERFMON_V2).ebx & 0xf
        }
        Vendor::Amd if leaf(EXTENDED + 1).ecx & SIX != 0 => 6,
        Vendor::Amd => 4,
    };
    (counters > 0).then_some(counters as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    /// A processor of this maker, with these leaves.
    fn processor(maker: &[u8; 12], leaves: &[(u32, Leaf)]) -> impl Fn(u32) -> Leaf {
        let word = |at: usize| u32::from_le_bytes(maker[at..at + 4].try_into().unwrap());
        let name = Leaf { ebx: word(0), edx: word(4), ecx: word(8), ..Leaf::default() };
        move |function| {
            let said = leaves.iter().find(|(known, _)| *known == function).map(|(_, leaf)| *leaf);
            if function == 0 { name } else { said.unwrap_or_default() }
        }
    }

    const fn eax(eax: u32) -> Leaf {
        Leaf { eax, ebx: 0, ecx: 0, edx: 0 }
    }

    #[test]
    fn each_maker_says_in_its_own_way_how_many_counters_there_are() {
        const SIX: Leaf = Leaf { eax: 0, ebx: 0, ecx: 1 << 23, edx: 0 };
        const V2: Leaf = Leaf { eax: 1, ebx: 5, ecx: 0, edx: 0 };
        let counters = |maker: &[u8; 12], leaves: &[(u32, Leaf)]| counters(processor(maker, leaves));
        assert_eq!(counters(b"GenuineIntel", &[(0xa, eax(0x0730_0804))]), Some(8));
        assert_eq!(counters(b"GenuineIntel", &[]), None, "as in a virtual machine without a PMU");
        assert_eq!(counters(b"AuthenticAMD", &[(0x8000_0000, eax(0x8000_001f))]), Some(4));
        assert_eq!(counters(b"AuthenticAMD", &[(0x8000_0001, SIX)]), Some(6));
        let zen4 = &[(0x8000_0000, eax(0x8000_0028)), (0x8000_0001, SIX), (0x8000_0022, V2)];
        assert_eq!(counters(b"AuthenticAMD", zen4), Some(5));
        assert_eq!(counters(b"CentaurHauls", &[]), None);
    }

    #[test]
    fn a_cpu_that_lets_nobody_look_is_not_waited_for_and_does_not_gather_threads() {
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let stuck = || {
            let released = Arc::clone(&released);
            let look = move || {
                let _ = released.lock().unwrap().recv();
                Some(())
            };
            in_time(look, Duration::ZERO)
        };
        for _ in 0..2 * MOST_LOOKS {
            assert_eq!(stuck(), None);
        }
        assert_eq!(LOOKS.load(Ordering::Relaxed), MOST_LOOKS);
        drop(release);
        // The threads that are left behind have to notice first.
        let again = (0..).find_map(|_| in_time(|| Some(7), Duration::from_mins(1)));
        assert_eq!(again, Some(7));
    }
}
