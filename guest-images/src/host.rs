//! Whether this machine can run the default guest.

use std::fs::{self, File};

/// Why a distribution's kernel cannot run under this machine's KVM, if it cannot.
///
/// A KVM without hardware virtualisation (the processor's flags show neither vendor's) interprets what is not made
/// for it, and its interpreter lacks instructions that kernels need: they hang in their first milliseconds.
pub fn obstacle() -> Option<String> {
    if let Err(error) = File::options().read(true).write(true).open("/dev/kvm") {
        return Some(format!("/dev/kvm cannot be used here ({error})"));
    }
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let hardware = flags.split_whitespace().any(|flag| flag == "svm" || flag == "vmx");
    (!hardware).then(|| "this machine's KVM has no hardware virtualisation and cannot run Linux".to_owned())
}
