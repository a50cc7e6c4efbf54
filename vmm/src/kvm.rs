//! The host's KVM: opening it, and what it must be able to do.

use std::io;

use kvm_ioctls::{Cap, Kvm};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::arch;
use crate::lab;
use crate::pmu::Choice;

/// KVM's interface has had this version since 2007.
pub const API_VERSION: i32 = 12;
const DEVICE: &std::ffi::CStr = c"/dev/kvm";
const LAB_NEEDS_NONE: &str = if lab::IS_HERE { "; `tally lab run` needs none" } else { "" };

/// Something that a KVM must be able to do.
pub struct Need {
    /// KVM's name for it.
    pub cap: Cap,
    /// The same in its documentation.
    pub name: &'static str,
    /// What it is for.
    pub purpose: &'static str,
}

impl Need {
    /// A need.
    pub const fn new(cap: Cap, name: &'static str, purpose: &'static str) -> Self {
        Self { cap, name, purpose }
    }
}

/// What KVM refused.
#[derive(Debug, thiserror::Error)]
pub enum KvmError {
    /// There is no KVM.
    #[error(
        "no /dev/kvm: this host has no KVM, or its module is not loaded ({}){LAB_NEEDS_NONE}",
        loading("")
    )]
    Absent,
    /// Nor can there be any.
    #[error("{0}")]
    Impossible(&'static str),
    /// It is not for this user.
    #[error(
        "/dev/kvm: permission denied: join the group that owns it (`sudo usermod -aG kvm $USER`, then log in again)"
    )]
    Forbidden,
    /// It cannot be opened for another reason.
    #[error("/dev/kvm: {0}")]
    Open(io::Error),
    /// Not the interface that we know.
    #[error("/dev/kvm speaks version {0} of its interface, not {API_VERSION}")]
    Version(i32),
    /// It lacks something.
    #[error("this host's KVM lacks {0}")]
    Lacks(String),
    /// More CPUs than it can give.
    #[error("--cpus {asked}: this host's KVM allows 1 to {most}")]
    Cpus {
        /// What was asked for.
        asked: u32,
        /// The most there can be.
        most: u32,
    },
    /// An operation failed.
    #[error("KVM cannot {what}: {source}")]
    Operation {
        /// What was tried.
        what: &'static str,
        /// What KVM said.
        source: kvm_ioctls::Error,
    },
}

/// Gives a failed KVM operation its name.
pub trait Doing<T> {
    /// `what` completes the sentence "KVM cannot ...".
    fn doing(self, what: &'static str) -> Result<T, KvmError>;
}

impl<T> Doing<T> for Result<T, kvm_ioctls::Error> {
    fn doing(self, what: &'static str) -> Result<T, KvmError> {
        self.map_err(|source| KvmError::Operation { what, source })
    }
}

/// Opens KVM and checks that a machine with this PMU can run on it.
pub fn open(pmu: Choice) -> Result<Kvm, KvmError> {
    let kvm = open_any()?;
    let version = kvm.get_api_version();
    if version != API_VERSION {
        return Err(KvmError::Version(version));
    }
    let lacking = lacking(pmu, |cap| kvm.check_extension(cap));
    if lacking.is_empty() { Ok(kvm) } else { Err(KvmError::Lacks(lacking.join(", "))) }
}

/// Opens KVM, whatever it can do.
pub fn open_any() -> Result<Kvm, KvmError> {
    Kvm::new_with_path(DEVICE).map_err(|e| match (arch::kvm::impossible(), io::Error::from(e)) {
        // That its module could be loaded would be wrong advice.
        (Some(why), _) => KvmError::Impossible(why),
        (None, e) if e.kind() == io::ErrorKind::NotFound => KvmError::Absent,
        (None, e) if e.kind() == io::ErrorKind::PermissionDenied => KvmError::Forbidden,
        (None, e) => KvmError::Open(e),
    })
}

/// What a machine with this PMU needs of it.
pub fn needed(pmu: Choice) -> impl Iterator<Item = &'static Need> {
    arch::kvm::NEEDS.iter().chain(arch::kvm::needs(pmu))
}

/// The commands that load KVM's module, with this in front of each.
pub fn loading(by: &str) -> String {
    arch::kvm::LOADING.map(|command| format!("`{by}{command}`")).join(" or ")
}

fn lacking(pmu: Choice, has: impl Fn(Cap) -> bool) -> Vec<&'static str> {
    needed(pmu).filter(|need| !has(need.cap)).map(|need| need.name).collect()
}

/// Lets this process have as many open files as it may: a vCPU has one, and one more for each of its counters.
pub fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // Should it be refused, the old limit stays.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// Checks a number of CPUs against KVM's limit and ours: an APIC id has 8 bits, and 255 means "all".
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
    fn what_a_kvm_lacks_is_named() {
        let names = lacking(Choice::None, |cap| !matches!(cap, Cap::Irqchip | Cap::ImmediateExit));
        assert_eq!(names, ["KVM_CAP_IRQCHIP", "KVM_CAP_IMMEDIATE_EXIT"]);
    }
}
