//! Checks that this machine can run the default guest.

use std::fs::{self, File};

use crate::release::Arch;

/// Message for a RISC-V machine without the hypervisor extension.
pub const NO_HYPERVISOR_EXTENSION: &str =
    "this machine's processor has no hypervisor extension (H) and cannot run guests";

/// Returns the reason why this machine's KVM cannot run a distribution's kernel, or `None` if it can.
pub fn obstacle() -> Option<String> {
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let kvm =
        File::options().read(true).write(true).open("/dev/kvm").map(drop).map_err(|error| error.to_string());
    obstacle_of(Arch::default(), &processor, kvm)
}

/// Implements [`obstacle`] for the content of `/proc/cpuinfo` and the result of opening `/dev/kvm`.
fn obstacle_of(arch: Arch, processor: &str, kvm: Result<(), String>) -> Option<String> {
    let kvm = kvm.err().map(|error| format!("/dev/kvm cannot be used here ({error})"));
    match arch {
        // Without VMX and SVM, this is a KVM that emulates instructions in software. Its emulator lacks instructions
        // that kernels need, and they hang in their first milliseconds.
        Arch::X86_64 => kvm.or_else(|| {
            let hardware = processor.split_whitespace().any(|flag| flag == "svm" || flag == "vmx");
            (!hardware)
                .then(|| "this machine's KVM has no hardware virtualisation and cannot run Linux".to_owned())
        }),
        // Without the extension there is no /dev/kvm either, but an error about that would be misleading.
        Arch::Riscv64 if !has_hypervisor_extension(processor) => Some(NO_HYPERVISOR_EXTENSION.to_owned()),
        Arch::Riscv64 => kvm,
    }
}

/// Returns true if the `isa` line of a RISC-V machine's `/proc/cpuinfo` contains the hypervisor extension.
/// Single-letter extensions follow the width, before the first multi-letter one (Linux,
/// `Documentation/arch/riscv/uabi.rst`).
pub fn has_hypervisor_extension(processor: &str) -> bool {
    processor.lines().filter_map(|line| line.split_once(':')).any(|(key, isa)| {
        let letters = isa.trim().split('_').next().unwrap_or_default();
        key.trim() == "isa" && letters.strip_prefix("rv64").is_some_and(|letters| letters.contains('h'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NO_KVM: &str = "No such file or directory (os error 2)";

    #[test]
    fn an_x86_machine_needs_kvm_and_hardware_virtualisation() {
        let of = |processor, kvm| obstacle_of(Arch::X86_64, processor, kvm);
        assert_eq!(of("flags\t\t: fpu svm sse", Ok(())), None);
        assert_eq!(of("flags\t\t: vmx", Ok(())), None);
        assert!(of("flags\t\t: fpu svm_lock", Ok(())).unwrap().contains("no hardware virtualisation"));
        let expected = "/dev/kvm cannot be used here (No such file or directory (os error 2))";
        assert_eq!(of("flags\t\t: fpu", Err(NO_KVM.to_owned())).unwrap(), expected);
    }

    #[test]
    fn a_riscv_machine_needs_the_hypervisor_extension_and_kvm() {
        let of = |processor, kvm| obstacle_of(Arch::Riscv64, processor, kvm);
        let with = "processor\t: 0\nhart\t\t: 0\nisa\t\t: rv64imafdch_zicbom_sstc\nmmu\t\t: sv57\n";
        let without = "processor\t: 0\nisa\t\t: rv64imafdc_zihpm_shcounterenw\nuarch\t\t: rv64h\n";
        assert_eq!(of(with, Ok(())), None);
        assert!(
            of(with, Err(NO_KVM.to_owned())).unwrap().starts_with("/dev/kvm cannot be used here (No such")
        );
        for kvm in [Ok(()), Err(NO_KVM.to_owned())] {
            assert!(of(without, kvm).unwrap().contains("no hypervisor extension (H)"));
        }
    }
}
