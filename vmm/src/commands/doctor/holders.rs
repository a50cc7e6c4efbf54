//! Who may hold the host's counters: other processes that have perf events, and the NMI watchdog.

use std::fs;
use std::path::Path;
use std::process;

use vpmu_perf::WATCHDOG;

use crate::host::fact::Fact;
use crate::protocol::printable::short;

/// Target of the link of a perf event's file descriptor in `/proc/PID/fd`.
const EVENT: &str = "anon_inode:[perf_event]";
/// Maximum number of processes that are named.
const MAX_NAMED: usize = 5;

/// Returns a fact that names the holders that this user can see, if there are any.
pub fn fact() -> Option<Fact> {
    let holders = processes(&[process::id()]);
    (!holders.is_empty())
        .then(|| Fact::note("holders", format!("others have perf events open: {}", holders.join(", "))))
}

/// Returns who may hold counters beside this process and a VM's, as far as this user can see.
pub fn beside(vm: u32) -> Vec<String> {
    let is_on = |switch| fs::read_to_string(switch).is_ok_and(|value| value.trim() == "1");
    let watchdog = WATCHDOG.is_some_and(is_on).then(|| "the NMI watchdog".to_owned());
    watchdog.into_iter().chain(processes(&[process::id(), vm])).collect()
}

/// Returns the processes other than these that have perf events, with the number of these.
fn processes(except: &[u32]) -> Vec<String> {
    let processes = fs::read_dir("/proc").into_iter().flatten().filter_map(Result::ok);
    let is_other = |name: &str| name.parse().is_ok_and(|number| !except.contains(&number));
    let mut holders: Vec<String> = processes
        .filter(|process| process.file_name().to_str().is_some_and(is_other))
        .filter_map(|process| holder(&process.path()))
        .collect();
    let more = holders.len().saturating_sub(MAX_NAMED);
    holders.truncate(MAX_NAMED);
    if more > 0 {
        holders.push(format!("{more} more"));
    }
    holders
}

fn holder(process: &Path) -> Option<String> {
    // Another user's file descriptors cannot be read.
    let descriptors = fs::read_dir(process.join("fd")).ok()?.filter_map(Result::ok);
    let links = descriptors.filter_map(|descriptor| fs::read_link(descriptor.path()).ok());
    let events = links.filter(|link| link.as_os_str() == EVENT).count();
    let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
    (events > 0).then(|| {
        format!(
            "{} (process {}) {events}",
            short(name.trim()),
            process.file_name().unwrap_or_default().to_string_lossy()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_process_is_named_with_the_number_of_its_events() {
        let folder = tempfile::tempdir().unwrap();
        let process = folder.path().join("71");
        fs::create_dir_all(process.join("fd")).unwrap();
        fs::write(process.join("comm"), "perf\n").unwrap();
        symlink("/dev/null", process.join("fd/0")).unwrap();
        assert_eq!(holder(&process), None);
        for number in ["3", "4"] {
            symlink(EVENT, process.join("fd").join(number)).unwrap();
        }
        assert_eq!(holder(&process).unwrap(), "perf (process 71) 2");
        fs::write(process.join("comm"), "\x1b[2J\n\u{9b}\n").unwrap();
        assert_eq!(holder(&process).unwrap(), "?[2J?? (process 71) 2", "it cannot draw on the terminal");
    }
}
