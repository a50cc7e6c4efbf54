//! What to know of the host, for who reads a report of somebody else's.

use std::fs;

/// A line for each thing.
pub fn facts() -> Vec<String> {
    let read = |path: &str| fs::read_to_string(path).ok().map(|text| text.trim().to_owned());
    let processor = read("/proc/cpuinfo").map(|text| processor(&text));
    let kernel = read("/proc/sys/kernel/osrelease").map(|release| format!("Linux {release}"));
    let watchdog = read("/proc/sys/kernel/nmi_watchdog").map(|on| format!("kernel.nmi_watchdog {on}"));
    let paranoid = read("/proc/sys/kernel/perf_event_paranoid")
        .map(|level| format!("kernel.perf_event_paranoid {level}"));
    [processor, kernel, watchdog, paranoid].into_iter().flatten().collect()
}

/// The first processor: its name, and the numbers by which it is known.
fn processor(cpuinfo: &str) -> String {
    let value = |key: &str| {
        let line = cpuinfo.lines().find(|line| line.split(':').next().is_some_and(|name| name.trim() == key));
        line.and_then(|line| line.split_once(':')).map_or("?", |(_, value)| value.trim())
    };
    format!(
        "{} (family {}, model {}, stepping {}, microcode {})",
        value("model name"),
        value("cpu family"),
        value("model"),
        value("stepping"),
        value("microcode")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_processor_is_named_with_its_numbers() {
        let cpuinfo =
            "processor\t: 0\ncpu family\t: 6\nmodel\t\t: 151\nmodel name\t: A core\nstepping\t: 2\n";
        assert_eq!(processor(cpuinfo), "A core (family 6, model 151, stepping 2, microcode ?)");
    }
}
