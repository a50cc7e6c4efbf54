//! Opens the host's KVM and checks its capabilities.

mod stats;

use std::io;

use kvm_ioctls::{Cap, Kvm};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::arch::Arch;
use crate::architecture::Architecture;
use crate::pmu::Choice;

pub use self::stats::KvmStats;
pub use crate::kvm_error::{API_VERSION, KvmError, Need};

const DEVICE: &std::ffi::CStr = c"/dev/kvm";

/// KVM capabilities that are used if KVM has them.
pub const WANTED: &[Need] = Arch::WANTED;
/// KVM's kernel modules, each with a phrase for the user that says on what its KVM runs.
pub const MODULES: &[(&str, &str)] = Arch::MODULES;

/// Returns a sentence for the user about the state of KVM's own PMU.
pub fn of_its_own_pmu(kvm: &Kvm) -> &'static str {
    Arch::of_kvms_pmu(kvm)
}

/// Opens KVM, and checks that it has what a machine with this PMU needs.
pub fn open(pmu: Choice) -> Result<Kvm, KvmError> {
    let kvm = open_any()?;
    let version = kvm.get_api_version();
    if version != API_VERSION {
        return Err(KvmError::Version(version));
    }
    let lacking = lacking(pmu, |cap| kvm.check_extension(cap));
    if lacking.is_empty() { Ok(kvm) } else { Err(KvmError::Lacks(lacking.join(", "))) }
}

/// Opens KVM without checking its version and capabilities.
pub fn open_any() -> Result<Kvm, KvmError> {
    Kvm::new_with_path(DEVICE).map_err(|error| match io::Error::from(error) {
        error if error.kind() == io::ErrorKind::NotFound => KvmError::Absent { loading: loading("") },
        error if error.kind() == io::ErrorKind::PermissionDenied => KvmError::Forbidden,
        error => KvmError::Open(error),
    })
}

/// Returns the KVM capabilities that a machine with this PMU needs.
pub fn needed(pmu: Choice) -> impl Iterator<Item = &'static Need> {
    Arch::NEEDS.iter().chain(Arch::needs(pmu))
}

/// Returns the commands that load a KVM module, each with the prefix `by` (such as `sudo `).
pub fn loading(by: &str) -> String {
    let commands: Vec<String> = Arch::LOADING.iter().map(|command| format!("`{by}{command}`")).collect();
    commands.join(" or ")
}

fn lacking(pmu: Choice, has: impl Fn(Cap) -> bool) -> Vec<&'static str> {
    needed(pmu).filter(|need| !has(need.cap)).map(|need| need.name).collect()
}

/// Raises the limit of open files to the hard limit. Each vCPU needs a file descriptor, and one more for each of its
/// counters.
pub fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If this fails, the old limit stays.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Checks a number of vCPUs against KVM's limit and Tally's. Tally's is 254, because an xAPIC id has 8 bits and 255
/// is the broadcast id.
pub fn check_cpus(kvm: &Kvm, asked: u32) -> Result<u8, KvmError> {
    let most = u32::try_from(kvm.get_max_vcpus()).unwrap_or(u32::MAX).min(254);
    match u8::try_from(asked) {
        Ok(cpus) if (1..=most).contains(&asked) => Ok(cpus),
        _ => Err(KvmError::Cpus { asked, most }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_capabilities_are_named() {
        let names = lacking(Choice::None, |cap| !matches!(cap, Cap::Irqchip | Cap::ImmediateExit));
        assert_eq!(names, ["KVM_CAP_IRQCHIP", "KVM_CAP_IMMEDIATE_EXIT"]);
    }
}
