//! The host's PMU that counts, and the encoding of events for it. A hybrid processor has one PMU for each type of core,
//! and each PMU counts on its own cores only.

use std::fs;
use std::io;
use std::path::Path;

use perf_event_open_sys::bindings::{
    PERF_COUNT_HW_BRANCH_INSTRUCTIONS, PERF_COUNT_HW_BRANCH_MISSES, PERF_COUNT_HW_BUS_CYCLES,
    PERF_COUNT_HW_CACHE_MISSES, PERF_COUNT_HW_CACHE_REFERENCES, PERF_COUNT_HW_CPU_CYCLES,
    PERF_COUNT_HW_INSTRUCTIONS, PERF_COUNT_HW_REF_CPU_CYCLES, PERF_COUNT_HW_STALLED_CYCLES_BACKEND,
    PERF_COUNT_HW_STALLED_CYCLES_FRONTEND, PERF_TYPE_HARDWARE, PERF_TYPE_HW_CACHE, PERF_TYPE_RAW,
};

use crate::instruction;
use vpmu::event::{Event, GenericEvent};

/// Directory in which Linux lists its PMUs.
pub const DEVICES: &str = "/sys/bus/event_source/devices";
/// The sysctl file of the NMI watchdog, where that holds a hardware counter of every CPU. Elsewhere the same file
/// switches the buddy watchdog, which needs no counter (`kernel/watchdog_buddy.c` in Linux).
pub const WATCHDOG: Option<&str> =
    if cfg!(target_arch = "x86_64") { Some("/proc/sys/kernel/nmi_watchdog") } else { None };
/// The PMU of a processor with one type of core.
const UNIFORM: &str = "cpu";
/// The PMUs of a hybrid processor, in order of preference.
const HYBRID: [&str; 3] = ["cpu_core", "cpu_atom", "cpu_lowpower"];

/// Returns how to free the counter that the NMI watchdog holds, in parentheses after a space. The text is empty if it
/// holds none.
pub fn watchdog_hint() -> &'static str {
    let is_on = |path| fs::read_to_string(path).is_ok_and(|on| on.trim() == "1");
    if WATCHDOG.is_some_and(is_on) {
        " (`sudo sysctl kernel.nmi_watchdog=0` frees the one of the NMI watchdog)"
    } else {
        ""
    }
}

/// The host's PMU that counts for the guest.
///
/// Most hosts have one PMU. A hybrid processor has one for each type of core, and an event of one PMU counts nothing
/// while its thread runs on a core of another type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPmu(Cores);

/// The cores that a PMU counts on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cores {
    /// All cores: the processor has one PMU.
    All,
    /// The cores of one type. The number is the PMU's type in the kernel's interface.
    OfPmu(u32),
}

/// A PMU of a hybrid processor.
struct CorePmu {
    name: &'static str,
    /// Its type in the kernel's interface.
    pmu_type: u32,
    cpus: Vec<usize>,
}

impl HostPmu {
    /// Chooses the PMU, and on a hybrid processor binds the current thread to the cores that this PMU counts on.
    /// Threads that the current thread creates later inherit the binding. Also returns a sentence that tells the user
    /// about the binding, if there is one.
    pub fn bind_thread() -> io::Result<(Self, Option<String>)> {
        instruction::prepare();
        let allowed = affinity()?;
        let Some(mut pmu) = CorePmu::with_one_of(&allowed) else { return Ok((Self(Cores::All), None)) };
        pmu.cpus.retain(|cpu| allowed.contains(cpu));
        set_affinity(&pmu.cpus)?;
        let remark = format!(
            "this processor has cores of several kinds, each with a PMU of its own: the guest stays on those of {}, CPUs {}",
            pmu.name,
            format_cpu_list(&pmu.cpus)
        );
        Ok((Self(Cores::OfPmu(pmu.pmu_type)), Some(remark)))
    }

    /// Returns the PMU that [`Self::bind_thread`] would choose, and binds nothing.
    pub fn of_thread() -> io::Result<Self> {
        let pmu = CorePmu::with_one_of(&affinity()?);
        Ok(Self(pmu.map_or(Cores::All, |pmu| Cores::OfPmu(pmu.pmu_type))))
    }

    /// Returns whether the processor has cores of several types, each with its own PMU.
    pub fn is_hybrid(self) -> bool {
        matches!(self.0, Cores::OfPmu(_))
    }

    /// Returns `type` and `config` of the `perf_event_attr` for an event.
    pub fn encode(self, event: Event) -> io::Result<(u32, u64)> {
        match (event, self.0) {
            (Event::Raw(code), Cores::All) => Ok((PERF_TYPE_RAW, code)),
            (Event::Raw(code), Cores::OfPmu(pmu_type)) => Ok((pmu_type, code)),
            (Event::Generic(generic), _) => {
                let (event_type, config) = type_and_config(generic);
                Ok((event_type, self.with_pmu(config)))
            }
            (Event::Absent { .. }, _) => Err(io::Error::other("its processor has no event of this meaning")),
            (Event::Denied { .. }, _) => Err(io::Error::other("the policy denies it")),
        }
    }

    /// Returns `type` and `config` of the `perf_event_attr` for a generic event, by its number (`enum perf_hw_id`).
    pub fn generic(self, number: u64) -> (u32, u64) {
        (PERF_TYPE_HARDWARE, self.with_pmu(number))
    }

    /// Adds the PMU to the `config` of a generic event.
    fn with_pmu(self, config: u64) -> u64 {
        match self.0 {
            Cores::All => config,
            // PERF_PMU_TYPE_SHIFT: the upper half of `config` is the PMU's type.
            Cores::OfPmu(pmu_type) => u64::from(pmu_type) << 32 | config,
        }
    }
}

/// Returns whether the kernel lists a PMU of the processor.
pub fn has_pmu(devices: &Path) -> bool {
    HYBRID.into_iter().chain([UNIFORM]).any(|name| devices.join(name).exists())
}

/// Returns the values of `type` that events of the processor's PMUs have.
pub fn event_types(devices: &Path) -> Vec<u32> {
    let of_cores = hybrid_pmus(devices).into_iter().map(|pmu| pmu.pmu_type);
    [PERF_TYPE_HARDWARE, PERF_TYPE_HW_CACHE, PERF_TYPE_RAW].into_iter().chain(of_cores).collect()
}

/// Returns whether `config` of this `type` is the number of a generic event, with a PMU's type in its upper half.
pub fn is_generic(event_type: u32) -> bool {
    [PERF_TYPE_HARDWARE, PERF_TYPE_HW_CACHE].contains(&event_type)
}

/// Returns Linux' `type` and `config` for a generic event.
fn type_and_config(generic: GenericEvent) -> (u32, u64) {
    let number = match generic {
        GenericEvent::Cycles => PERF_COUNT_HW_CPU_CYCLES,
        GenericEvent::ReferenceCycles => PERF_COUNT_HW_REF_CPU_CYCLES,
        GenericEvent::Instructions => PERF_COUNT_HW_INSTRUCTIONS,
        GenericEvent::Branches => PERF_COUNT_HW_BRANCH_INSTRUCTIONS,
        GenericEvent::BranchMisses => PERF_COUNT_HW_BRANCH_MISSES,
        GenericEvent::BusCycles => PERF_COUNT_HW_BUS_CYCLES,
        GenericEvent::CacheReferences => PERF_COUNT_HW_CACHE_REFERENCES,
        GenericEvent::CacheMisses => PERF_COUNT_HW_CACHE_MISSES,
        GenericEvent::StalledFrontend => PERF_COUNT_HW_STALLED_CYCLES_FRONTEND,
        GenericEvent::StalledBackend => PERF_COUNT_HW_STALLED_CYCLES_BACKEND,
        GenericEvent::Cache(cache) => {
            let [unit, operation, result] = cache.numbers();
            return (PERF_TYPE_HW_CACHE, unit | operation << 8 | result << 16);
        }
    };
    (PERF_TYPE_HARDWARE, number.into())
}

/// Returns the PMUs of a hybrid processor, in order of preference. Returns none for a processor with one type of core.
fn hybrid_pmus(devices: &Path) -> Vec<CorePmu> {
    let pmu = |name: &'static str| {
        let read = |file| fs::read_to_string(devices.join(name).join(file)).ok();
        let pmu_type = read("type")?.trim().parse().ok()?;
        Some(CorePmu { name, pmu_type, cpus: parse_cpu_list(read("cpus")?.trim())? })
    };
    HYBRID.into_iter().filter_map(pmu).collect()
}

impl CorePmu {
    /// Returns the preferred PMU of a hybrid processor that counts on one of these CPUs.
    fn with_one_of(cpus: &[usize]) -> Option<Self> {
        hybrid_pmus(Path::new(DEVICES)).into_iter().find(|pmu| pmu.has_one_of(cpus))
    }

    fn has_one_of(&self, cpus: &[usize]) -> bool {
        self.cpus.iter().any(|cpu| cpus.contains(cpu))
    }
}

/// Parses a list of CPUs in the kernel's format, such as `0-3,8`.
fn parse_cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

/// Formats a list of CPUs as the kernel does.
fn format_cpu_list(cpus: &[usize]) -> String {
    let ranges = cpus.chunk_by(|before, after| before + 1 == *after);
    let formatted = ranges.map(|range| match range {
        [first, .., last] => format!("{first}-{last}"),
        _ => range.iter().map(usize::to_string).collect(),
    });
    formatted.collect::<Vec<_>>().join(",")
}

/// Maximum number of CPUs that Linux can be configured for.
const CPUS: usize = 8192;
const THIS_THREAD: libc::pid_t = 0;

type Mask = [u64; CPUS / 64];

/// Returns the CPUs that this thread may run on.
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
    fn a_hybrid_processor_has_one_pmu_for_each_type_of_core() {
        let devices = tempfile::tempdir().unwrap();
        for (name, pmu, cpus) in [("cpu_core", "4\n", "0-7\n"), ("cpu_atom", "10\n", "8-11,14\n")] {
            let device = devices.path().join(name);
            fs::create_dir(&device).unwrap();
            fs::write(device.join("type"), pmu).unwrap();
            fs::write(device.join("cpus"), cpus).unwrap();
        }
        let pmus = hybrid_pmus(devices.path());
        let found: Vec<_> = pmus.iter().map(|pmu| (pmu.pmu_type, pmu.cpus.len())).collect();
        assert_eq!(found, [(4, 8), (10, 5)]);
        assert!(!pmus[0].has_one_of(&[8, 14]) && pmus[1].has_one_of(&[8, 14]));
        assert!(has_pmu(devices.path()));
    }

    #[test]
    fn an_ordinary_processor_has_one_pmu() {
        let devices = tempfile::tempdir().unwrap();
        assert!(!has_pmu(devices.path()));
        fs::create_dir(devices.path().join("cpu")).unwrap();
        assert!(hybrid_pmus(devices.path()).is_empty() && has_pmu(devices.path()));
    }

    #[test]
    fn events_are_encoded_for_the_pmu_that_counts() {
        let (uniform, atom) = (HostPmu(Cores::All), HostPmu(Cores::OfPmu(10)));
        assert_eq!(uniform.encode(Event::Raw(0x1c0)).unwrap(), (4, 0x1c0));
        assert_eq!(atom.encode(Event::Raw(0x1c0)).unwrap(), (10, 0x1c0));
        assert_eq!(uniform.encode(Event::Generic(GenericEvent::Branches)).unwrap(), (0, 4));
        assert_eq!(atom.encode(Event::Generic(GenericEvent::Branches)).unwrap(), (0, 10 << 32 | 4));
        let cache = Event::Generic(GenericEvent::Cache(Cache::numbered(3, 0, 1).unwrap()));
        assert_eq!(uniform.encode(cache).unwrap(), (3, 0x1_0003));
        assert_eq!(atom.encode(cache).unwrap(), (3, 10 << 32 | 0x1_0003));
        assert!(uniform.encode(Event::Absent { code: 0, name: "" }).is_err());
    }

    #[test]
    fn cpu_lists_have_the_kernels_format() {
        let cpus = [0, 1, 2, 3, 8, 10, 11];
        assert_eq!(format_cpu_list(&cpus), "0-3,8,10-11");
        assert_eq!(parse_cpu_list("0-3,8,10-11").unwrap(), cpus);
        assert_eq!(parse_cpu_list("0-"), None);
    }
}
