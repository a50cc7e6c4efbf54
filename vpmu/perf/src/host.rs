//! Which PMU of the host counts, and what its kernel calls events there. A processor with cores of two kinds has two, and each
//! counts on its own cores only.

use std::fs;
use std::io;
use std::path::Path;

use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_BRANCH_INSTRUCTIONS, PERF_COUNT_HW_BRANCH_MISSES, PERF_COUNT_HW_BUS_CYCLES,
    PERF_COUNT_HW_CACHE_MISSES, PERF_COUNT_HW_CACHE_REFERENCES, PERF_COUNT_HW_CPU_CYCLES,
    PERF_COUNT_HW_INSTRUCTIONS, PERF_COUNT_HW_REF_CPU_CYCLES, PERF_COUNT_HW_STALLED_CYCLES_BACKEND,
    PERF_COUNT_HW_STALLED_CYCLES_FRONTEND, PERF_TYPE_HARDWARE, PERF_TYPE_HW_CACHE, PERF_TYPE_RAW,
};

use vpmu::event::{Event, Meaning};

/// Where the kernel lists its PMUs.
pub const DEVICES: &str = "/sys/bus/event_source/devices";
/// The switch of the watchdog that holds a counter of every CPU, on processors that have one. On others CPUs look after each
/// other by their clocks, and the switch is for that (Linux, `kernel/watchdog_buddy.c`).
pub const WATCHDOG: Option<&str> =
    if cfg!(target_arch = "x86_64") { Some("/proc/sys/kernel/nmi_watchdog") } else { None };
/// The PMU of a processor with one kind of cores.
const ONLY: &str = "cpu";
/// The PMUs of the kinds of cores, the better ones first.
const KINDS: [&str; 3] = ["cpu_core", "cpu_atom", "cpu_lowpower"];

/// The PMU that counts, of those that the host has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPmu(Which);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    /// There is one for all cores.
    Only,
    /// That of one kind of cores, with its type.
    Kind(u32),
}

/// The PMU of one kind of cores.
struct Kind {
    name: &'static str,
    pmu: u32,
    cpus: Vec<usize>,
}

impl HostPmu {
    /// Finds it, and keeps this thread, with those that it starts from now on, to the cores on which it counts. Returns
    /// also how the user can be told of that.
    pub fn settle() -> io::Result<(Self, Option<String>)> {
        let allowed = affinity()?;
        let Some(mut kind) = kinds(Path::new(DEVICES)).into_iter().find(|kind| kind.has_one_of(&allowed))
        else {
            return Ok((Self(Which::Only), None));
        };
        kind.cpus.retain(|cpu| allowed.contains(cpu));
        set_affinity(&kind.cpus)?;
        let remark = format!(
            "this processor has cores of several kinds, each with a PMU of its own: the guest stays on those of {}, CPUs {}",
            kind.name,
            listed(&kind.cpus)
        );
        Ok((Self(Which::Kind(kind.pmu)), Some(remark)))
    }

    /// Whether the processor has cores of several kinds.
    pub fn is_hybrid(self) -> bool {
        matches!(self.0, Which::Kind(_))
    }

    /// An event's type and number in the kernel's interface.
    pub fn encode(self, event: Event) -> io::Result<(u32, u64)> {
        match (event, self.0) {
            (Event::Raw(code), Which::Only) => Ok((PERF_TYPE_RAW, code)),
            (Event::Raw(code), Which::Kind(pmu)) => Ok((pmu, code)),
            (Event::Meaning(meaning), _) => {
                let (kind, number) = numbered(meaning);
                Ok((kind, self.extended(number)))
            }
            (Event::Absent { .. }, _) => Err(io::Error::other("its processor has no event of this meaning")),
            (Event::Denied { .. }, _) => Err(io::Error::other("the policy denies it")),
        }
    }

    /// The type and number of one of the kernel's generic events.
    pub fn generic(self, number: u64) -> (u32, u64) {
        (PERF_TYPE_HARDWARE, self.extended(number))
    }

    /// The number of an event of the kernel's, with the PMU that is to count it.
    fn extended(self, number: u64) -> u64 {
        match self.0 {
            Which::Only => number,
            // "Extended hardware type": the PMU is in the upper half.
            Which::Kind(pmu) => u64::from(pmu) << 32 | number,
        }
    }
}

/// Whether the kernel has a PMU of processors at all.
pub fn has_pmu(devices: &Path) -> bool {
    KINDS.into_iter().chain([ONLY]).any(|name| devices.join(name).exists())
}

/// What Linux calls it: type and number.
fn numbered(meaning: Meaning) -> (u32, u64) {
    let number = match meaning {
        Meaning::Cycles => PERF_COUNT_HW_CPU_CYCLES,
        Meaning::ReferenceCycles => PERF_COUNT_HW_REF_CPU_CYCLES,
        Meaning::Instructions => PERF_COUNT_HW_INSTRUCTIONS,
        Meaning::Branches => PERF_COUNT_HW_BRANCH_INSTRUCTIONS,
        Meaning::BranchMisses => PERF_COUNT_HW_BRANCH_MISSES,
        Meaning::BusCycles => PERF_COUNT_HW_BUS_CYCLES,
        Meaning::CacheReferences => PERF_COUNT_HW_CACHE_REFERENCES,
        Meaning::CacheMisses => PERF_COUNT_HW_CACHE_MISSES,
        Meaning::StalledFrontend => PERF_COUNT_HW_STALLED_CYCLES_FRONTEND,
        Meaning::StalledBackend => PERF_COUNT_HW_STALLED_CYCLES_BACKEND,
        Meaning::Cache(cache) => {
            let [unit, operation, result] = cache.numbers();
            return (PERF_TYPE_HW_CACHE, unit | operation << 8 | result << 16);
        }
    };
    (PERF_TYPE_HARDWARE, number.into())
}

/// The kinds of cores, if there are several.
fn kinds(devices: &Path) -> Vec<Kind> {
    let kind = |name: &'static str| {
        let read = |file| fs::read_to_string(devices.join(name).join(file)).ok();
        Some(Kind { name, pmu: read("type")?.trim().parse().ok()?, cpus: parsed(read("cpus")?.trim())? })
    };
    KINDS.into_iter().filter_map(kind).collect()
}

impl Kind {
    fn has_one_of(&self, cpus: &[usize]) -> bool {
        self.cpus.iter().any(|cpu| cpus.contains(cpu))
    }
}

/// A list of CPUs as the kernel writes it: `0-3,8`.
fn parsed(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

/// The same, written.
fn listed(cpus: &[usize]) -> String {
    let ranges = cpus.chunk_by(|before, after| before + 1 == *after);
    let written = ranges.map(|range| match range {
        [first, .., last] => format!("{first}-{last}"),
        _ => range.iter().map(usize::to_string).collect(),
    });
    written.collect::<Vec<_>>().join(",")
}

/// Room for as many CPUs as Linux can have.
const CPUS: usize = 8192;
const THIS_THREAD: libc::pid_t = 0;

type Mask = [u64; CPUS / 64];

/// The CPUs on which this thread may run.
fn affinity() -> io::Result<Vec<usize>> {
    let mut mask: Mask = [0; CPUS / 64];
    // SAFETY: the mask is valid for its size.
    if unsafe { libc::sched_getaffinity(THIS_THREAD, size_of::<Mask>(), mask.as_mut_ptr().cast()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((0..CPUS).filter(|cpu| mask[cpu / 64] & 1 << (cpu % 64) != 0).collect())
}

fn set_affinity(cpus: &[usize]) -> io::Result<()> {
    let mut mask: Mask = [0; CPUS / 64];
    for cpu in cpus.iter().filter(|cpu| **cpu < CPUS) {
        mask[cpu / 64] |= 1 << (cpu % 64);
    }
    // SAFETY: the mask is valid for its size, and only read.
    if unsafe { libc::sched_setaffinity(THIS_THREAD, size_of::<Mask>(), mask.as_ptr().cast()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use vpmu::event::Cache;

    #[test]
    fn a_hybrid_processor_counts_on_the_pmu_of_one_kind_of_cores() {
        let devices = tempfile::tempdir().unwrap();
        for (name, pmu, cpus) in [("cpu_core", "4\n", "0-7\n"), ("cpu_atom", "10\n", "8-11,14\n")] {
            let device = devices.path().join(name);
            fs::create_dir(&device).unwrap();
            fs::write(device.join("type"), pmu).unwrap();
            fs::write(device.join("cpus"), cpus).unwrap();
        }
        let kinds = kinds(devices.path());
        let found: Vec<_> = kinds.iter().map(|kind| (kind.pmu, kind.cpus.len())).collect();
        assert_eq!(found, [(4, 8), (10, 5)]);
        assert!(!kinds[0].has_one_of(&[8, 14]) && kinds[1].has_one_of(&[8, 14]));
        assert!(has_pmu(devices.path()));
    }

    #[test]
    fn an_ordinary_processor_has_one_pmu() {
        let devices = tempfile::tempdir().unwrap();
        assert!(!has_pmu(devices.path()));
        fs::create_dir(devices.path().join("cpu")).unwrap();
        assert!(kinds(devices.path()).is_empty() && has_pmu(devices.path()));
    }

    #[test]
    fn events_are_those_of_the_pmu_that_counts() {
        let (only, atom) = (HostPmu(Which::Only), HostPmu(Which::Kind(10)));
        assert_eq!(only.encode(Event::Raw(0x1c0)).unwrap(), (4, 0x1c0));
        assert_eq!(atom.encode(Event::Raw(0x1c0)).unwrap(), (10, 0x1c0));
        assert_eq!(only.encode(Event::Meaning(Meaning::Branches)).unwrap(), (0, 4));
        assert_eq!(atom.encode(Event::Meaning(Meaning::Branches)).unwrap(), (0, 10 << 32 | 4));
        let cache = Event::Meaning(Meaning::Cache(Cache::numbered(3, 0, 1).unwrap()));
        assert_eq!(only.encode(cache).unwrap(), (3, 0x1_0003));
        assert_eq!(atom.encode(cache).unwrap(), (3, 10 << 32 | 0x1_0003));
        assert!(only.encode(Event::Absent { code: 0, name: "" }).is_err());
    }

    #[test]
    fn lists_of_cpus_are_read_and_written_as_the_kernel_does() {
        let cpus = [0, 1, 2, 3, 8, 10, 11];
        assert_eq!(listed(&cpus), "0-3,8,10-11");
        assert_eq!(parsed("0-3,8,10-11").unwrap(), cpus);
        assert_eq!(parsed("0-"), None);
    }
}
