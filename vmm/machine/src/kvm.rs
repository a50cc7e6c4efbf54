//! Opens the host's KVM and checks its capabilities.

use std::io;

use kvm_ioctls::{Cap, Kvm};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::arch::{Model, REQUIREMENTS};
use crate::pmu::Choice;

pub use crate::kvm_error::{API_VERSION, Capability, KvmError};
pub use crate::kvm_stats::KvmStats;

const DEVICE: &std::ffi::CStr = c"/dev/kvm";

/// KVM capabilities that are used if KVM has them.
pub const OPTIONAL: &[Capability] = REQUIREMENTS.optional;
/// KVM's kernel modules, each with the kind of virtualisation that it uses, for messages.
pub const MODULES: &[(&str, &str)] = REQUIREMENTS.modules;

/// Returns a sentence for the user about the state of KVM's own PMU.
pub fn own_pmu_state(kvm: &Kvm) -> &'static str {
    Model::kvm_pmu_state(kvm)
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
        error if error.kind() == io::ErrorKind::NotFound => {
            KvmError::Absent { modprobe: modprobe_commands("") }
        }
        error if error.kind() == io::ErrorKind::PermissionDenied => KvmError::Forbidden,
        error => KvmError::Open(error),
    })
}

/// Returns the KVM capabilities that a machine with this PMU needs.
pub fn required_capabilities(pmu: Choice) -> impl Iterator<Item = &'static Capability> {
    REQUIREMENTS.required.iter().chain(Model::required_capabilities(pmu))
}

/// Returns the commands that load a KVM module, each with a prefix (such as `sudo `).
pub fn modprobe_commands(prefix: &str) -> String {
    let commands: Vec<String> =
        REQUIREMENTS.modprobe.iter().map(|command| format!("`{prefix}{command}`")).collect();
    commands.join(" or ")
}

fn lacking(pmu: Choice, has: impl Fn(Cap) -> bool) -> Vec<&'static str> {
    required_capabilities(pmu).filter(|required| !has(required.cap)).map(|required| required.name).collect()
}

/// Raises the limit of open files to the hard limit. Each vCPU needs a file descriptor, and one more for each of its
/// counters.
pub fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If this fails, the old limit stays.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Maximum number of vCPUs of a machine.
pub const MAX_CPUS: u32 = 254;

/// Checks a number of vCPUs against KVM's limit and Tally's. Tally's is 254, because an xAPIC id has 8 bits and 255
/// is the broadcast id.
pub fn check_cpus(kvm: &Kvm, requested: u32) -> Result<u8, KvmError> {
    let max = u32::try_from(kvm.get_max_vcpus()).unwrap_or(u32::MAX).min(MAX_CPUS);
    match u8::try_from(requested) {
        Ok(cpus) if (1..=max).contains(&requested) => Ok(cpus),
        _ => Err(KvmError::Cpus { requested, max }),
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
