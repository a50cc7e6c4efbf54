//! Opens the host's KVM, and explains what a user without KVM can do.

use std::fmt;
use std::fs;
use std::path::Path;

use guest_images::Arch;
use guest_images::host::{NO_HYPERVISOR_EXTENSION, has_hypervisor_extension};
use kvm_ioctls::Kvm;
use tally_machine::kvm::{self, KvmError, MODULES};
use tally_machine::pmu::Choice;

use crate::host::lab;

/// Why there is no KVM to use.
#[derive(Debug, thiserror::Error)]
pub enum NoKvm {
    /// This host's processor cannot have KVM: advice to load a module would be wrong.
    #[error("{0}")]
    Impossible(&'static str),
    /// There is no `/dev/kvm`.
    #[error("{0}{LAB_NEEDS_NONE}")]
    Absent(KvmError),
    /// KVM cannot be used.
    #[error(transparent)]
    Refused(KvmError),
}

const LAB_NEEDS_NONE: &str = if lab::LAB_AVAILABLE { "; `tally lab run` needs none" } else { "" };

/// Opens KVM and checks that a machine with this PMU can run on it.
pub fn open(pmu: Choice) -> Result<Kvm, NoKvm> {
    kvm::open(pmu).map_err(NoKvm::from)
}

/// Folder of the kernel's modules, with their parameters.
pub const SYS_MODULE: &str = "/sys/module";

/// The parameter by which KVM's module of this processor gives guests the processor's own counters (Linux 7.0 and
/// later).
pub struct MediatedPmu {
    /// The module that has the parameter.
    pub module: &'static str,
    value: String,
}

impl MediatedPmu {
    pub const NAME: &str = "enable_mediated_pmu";

    /// Finds the parameter among those of the modules in a folder.
    pub fn find(modules: &Path) -> Option<Self> {
        MODULES.iter().find_map(|&(module, _)| {
            let value = fs::read_to_string(modules.join(module).join("parameters").join(Self::NAME)).ok()?;
            Some(Self { module, value: value.trim().to_owned() })
        })
    }

    /// Whether KVM was loaded with it.
    pub fn is_on(&self) -> bool {
        matches!(self.value.as_str(), "Y" | "1")
    }
}

impl fmt::Display for MediatedPmu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}'s {} is {}", self.module, Self::NAME, self.value)
    }
}

/// Opens KVM without checking what it can do.
pub fn open_any() -> Result<Kvm, NoKvm> {
    kvm::open_any().map_err(NoKvm::from)
}

impl From<KvmError> for NoKvm {
    fn from(error: KvmError) -> Self {
        let is_open = |error: &KvmError| {
            !matches!(error, KvmError::Absent { .. } | KvmError::Forbidden | KvmError::Open(_))
        };
        match (error, impossible()) {
            (error, _) if is_open(&error) => Self::Refused(error),
            (_, Some(why)) => Self::Impossible(why),
            (error @ KvmError::Absent { .. }, None) => Self::Absent(error),
            (error, None) => Self::Refused(error),
        }
    }
}

/// Returns why this host can have no KVM, if that is so. On x86-64, `/dev/kvm` may exist without hardware
/// virtualisation.
fn impossible() -> Option<&'static str> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let lacks = Arch::default() == Arch::Riscv64 && !has_hypervisor_extension(&cpuinfo);
    lacks.then_some(NO_HYPERVISOR_EXTENSION)
}
